"""Debug only: write draft-KV rows, draft proposals and counters to SGLANG_DSPARK_CP_DUMP_DIR.

| file | written by | holds |
|---|---|---|
| `rows-prefill-<room>.npz` | prefill, TP rank 0 | rows of the final window, before the last chunk is sent |
| `rows-decode-<room>.npz` | decode, attention-TP rank 0 | the same rows once they arrived, before any decode step |
| `proposals-decode-<rank>.jsonl` | decode, attention-TP rank 0 | each proposed block, before it is verified |
| `counters-<rank>.json` | CP prefill, every rank | counters of the ledger, and how often each hook ran |

Everything here waits for the GPU on purpose. None of it is installed unless the variable is set. On a CP prefill worker
`send_kv_chunk` already carries the adapter's own hook, which calls `dump_prefill_rows` itself. Each release's module
has its `Reader` and its table of hooks.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.inject import Ledger
from ..core.reference import read_rows
from ..errors import ActivationError
from ..hooks.check import problems, sglang_root
from ..hooks.install import fired, install
from ..hooks.spec import Hook
from .runtime import runtime


@dataclasses.dataclass(frozen=True)
class Reader:
    """How one release's schedulers and requests are read.

    Attributes:
        end_of: position after the last token that a prefill request's newest chunk computes.
        pool_row: a request's row in the request pool.
        tp_rank, attn_tp_rank: of a scheduler.
    """

    end_of: Callable[[Any], int]
    pool_row: Callable[[Any], int]
    tp_rank: Callable[[Any], int]
    attn_tp_rank: Callable[[Any], int]


def install_checked(hooks: Sequence[Hook]) -> None:
    """Install debug hooks.

    Raises:
        ActivationError: a target is not the reviewed one, or cannot be patched.
    """
    found = problems(hooks, sglang_root())
    if found:
        lines = "\n".join(f"  {problem}" for problem in found)
        raise ActivationError(f"the debug hooks do not fit this SGLang:\n{lines}\n Unset SGLANG_DSPARK_CP_DUMP_DIR.")
    install(hooks)


def dump_prefill_rows(reader: Reader, scheduler: Any, req: Any) -> None:
    """Write the rows that are about to be sent, and the counters. Call before the last chunk leaves; any rank may."""
    if reader.tp_rank(scheduler) != 0:
        return
    pool = scheduler.disagg_prefill_bootstrap_queue.draft_token_to_kv_pool
    _dump_rows(reader, "prefill", scheduler, pool, req, min(reader.end_of(req), len(req.origin_input_ids)))
    ledger = runtime().ledger
    if ledger is not None:
        dump_counters(ledger)


def dump_counters(ledger: Ledger) -> None:
    """Write what this CP prefill rank did so far; the file always holds the newest state."""
    report = {
        "counters": dataclasses.asdict(ledger.counters),
        "mode": runtime().mode.value,
        "errors": len(ledger.errors),
        "hooks": dict(fired),
    }
    _write(_folder() / f"counters-{ledger.cp_rank}.json", json.dumps(report).encode())


def send_kv_chunk(
    reader: Reader,
    original: Callable[..., None],
    scheduler: Any,
    req: Any,
    last_chunk: bool = False,
    end_idx: int | None = None,
) -> None:
    """Prefill without CP: dump, then send."""
    if last_chunk:
        dump_prefill_rows(reader, scheduler, req)
    return original(scheduler, req, last_chunk=last_chunk, end_idx=end_idx)


def pop_transferred(
    reader: Reader, original: Callable[..., list[Any]], queue: Any, *args: Any, **kwargs: Any
) -> list[Any]:
    """Decode: dump the rows of every request that just arrived."""
    arrived = original(queue, *args, **kwargs)
    scheduler = queue.scheduler
    if reader.attn_tp_rank(scheduler) == 0:
        pool = scheduler.disagg_decode_prealloc_queue.draft_token_to_kv_pool
        for req in arrived:
            _dump_rows(reader, "decode", scheduler, pool, req, len(req.origin_input_ids))
    return arrived


def propose(original: Callable[..., Any], proposer: Any, *, batch: Any, **rest: Any) -> Any:
    """Record each request's block: where its anchor stands, the anchor, and the tokens that follow it."""
    from sglang.srt.runtime_context import get_parallel

    proposal = original(proposer, batch=batch, **rest)
    parallel = get_parallel()
    if parallel.attn_tp_rank != 0:
        return proposal
    anchors = batch.seq_lens.tolist()
    anchor_tokens = proposal.draft_block_ids[:, 0].tolist()
    blocks = proposal.draft_block.draft_tokens.tolist()
    with (_folder() / f"proposals-decode-{parallel.tp_rank}.jsonl").open("a") as log:
        for req, anchor, token, tokens in zip(batch.reqs, anchors, anchor_tokens, blocks, strict=True):
            record = {
                "room": req.bootstrap_room,
                "rid": req.rid,
                "prompt": len(req.origin_input_ids),
                "anchor": anchor,
                "anchor_token": token,
                "tokens": tokens,
            }
            log.write(json.dumps(record) + "\n")
    return proposal


def rows_of(
    reader: Reader, scheduler: Any, pool: Any, req: Any, length: int
) -> tuple[range, torch.Tensor, torch.Tensor]:
    """Rows of a request's final window in the draft pool, the one whose pages PD registers for transfer.

    Returns:
        window: positions [max(0, length - W), length);
        positions: [N] int64, those with a slot in the sliding-window pool;
        data: [S, N, 583] uint8 on the CPU: 448 e4m3, 64 bf16, 7 scales of each row.
    """
    window = range(max(0, length - scheduler.sliding_window_size), length)
    loc = scheduler.req_to_token_pool.req_to_token[reader.pool_row(req), window.start : window.stop]
    slots = pool.translate_loc_from_full_to_swa(loc.long())
    held = slots > 0
    positions = torch.arange(window.start, window.stop, device=slots.device)[held]
    stages = []
    for buffer in pool.swa_kv_pool.kv_buffer:
        rows = read_rows(buffer, pool.swa_kv_pool.page_size, slots[held])
        stages.append(torch.cat([rows.nope, rows.rope.view(torch.uint8), rows.scale], dim=1))
    return window, positions.cpu(), torch.stack(stages).cpu()


def _dump_rows(reader: Reader, role: str, scheduler: Any, pool: Any, req: Any, length: int) -> None:
    window, positions, data = rows_of(reader, scheduler, pool, req, length)
    target = _folder() / f"rows-{role}-{req.bootstrap_room}.npz"
    part = target.with_suffix(f".{os.getpid()}.part")
    with part.open("wb") as file:
        np.savez(file, window=(window.start, window.stop), positions=positions.numpy(), data=data.numpy())
    part.replace(target)


def _folder() -> Path:
    folder = runtime().config.dump_dir
    if folder is None:
        raise RuntimeError("a debug hook ran without SGLANG_DSPARK_CP_DUMP_DIR")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write(path: Path, content: bytes) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(path)
