"""What a CP prefill costs real servers: NCCL calls of one chunk from NCCL's own log, memory of the draft from SGLang's.

NCCL writes one line per call with `NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=COLL`:

    ... NCCL INFO AllGather: opCount 5 sendbuff 0x.. recvbuff 0x.. count 2048 datatype 9 op 0 ... [nranks=2] ...

`count` is in elements of one rank, `datatype` an ncclDataType_t (nccl.h).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

DTYPE_BYTES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 1, 11: 1}
"""ncclDataType_t -> bytes of an element."""
_CALL = re.compile(
    r"NCCL INFO (?P<call>[A-Z]\w+): .*?count (?P<count>\d+) datatype (?P<dtype>\d+).*?nranks=(?P<ranks>\d+)"
)
_LOADED = re.compile(r"Load weight end\. .*?type=(?P<type>\w+),.*?mem usage=(?P<memory>-?[\d.]+) GB")


def nccl_environment(folder: Path, server: str) -> dict[str, str]:
    """Makes each rank of a server log its NCCL calls to a file of its own."""
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "COLL",
        "NCCL_DEBUG_FILE": str(folder / f"nccl-{server}.%h.%p"),
    }


def nccl_files(folder: Path, server: str) -> dict[Path, int]:
    """The files that a server's ranks have written so far, with their sizes."""
    return {path: path.stat().st_size for path in sorted(folder.glob(f"nccl-{server}.*"))}


def calls_since(before: Mapping[Path, int], after: Iterable[Path]) -> list[list[dict[str, Any]]]:
    """NCCL calls of each rank since `before`, in order; ranks without any are left out."""
    found = []
    for path in after:
        with path.open("rb") as log:
            log.seek(before.get(path, 0))
            text = log.read().decode(errors="replace")
        calls = [
            {
                "call": match["call"],
                "bytes": int(match["count"]) * DTYPE_BYTES.get(int(match["dtype"]), 0),
                "ranks": int(match["ranks"]),
            }
            for match in _CALL.finditer(text)
            if int(match["ranks"]) > 1
        ]
        if calls:
            found.append(calls)
    return found


def summary(ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Figures of one rank (the first; all ranks make the same calls), and whether they do.

    `gather_received_bytes` is what AllGather calls bring from other ranks; `largest_gathers` the biggest of them.
    """
    if not ranks:
        return {"ranks": 0}
    first = ranks[0]
    gathers = [call["bytes"] * (call["ranks"] - 1) for call in first if call["call"] == "AllGather"]
    return {
        "ranks": len(ranks),
        "same_on_all_ranks": len({len(calls) for calls in ranks}) == 1,
        "calls": dict(Counter(call["call"] for call in first)),
        "gather_received_bytes": sum(gathers),
        "largest_gathers": sorted(gathers, reverse=True)[:4],
    }


def loaded_gb(log: str) -> dict[str, list[float]]:
    """GB that a GPU's free memory fell while a model was loaded, by model class, per rank (SGLang's own line)."""
    found: dict[str, list[float]] = {}
    for match in _LOADED.finditer(log):
        found.setdefault(match["type"], []).append(float(match["memory"]))
    return found
