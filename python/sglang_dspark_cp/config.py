"""The only reader of this package's environment variables. Standard library only.

| variable | values (default first) | meaning |
|---|---|---|
| `SGLANG_DSPARK_CP` | `1`, `0` | `0` leaves SGLang untouched: no hook at all is registered |
| `SGLANG_DSPARK_CP_ALIGN` | `rows`, `shape`, `off` | how much of the alignment proof runs |
| `SGLANG_DSPARK_CP_GATHER` | `auto`, `window`, `kv`, `context`, `packed` | what of each row is gathered |
| `SGLANG_DSPARK_CP_DRAFT` | `context`, `full` | what of the draft a prefill worker holds |
| `SGLANG_DSPARK_CP_FAULT` | empty, `KIND[@RANK][#N]` | test only: spoil draft rows (of the first N CP forwards) |
| `SGLANG_DSPARK_CP_DUMP_DIR` | empty, a folder | debug only: write draft-KV rows and proposals there |
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError

ENABLED = "SGLANG_DSPARK_CP"
ALIGN = "SGLANG_DSPARK_CP_ALIGN"
GATHER = "SGLANG_DSPARK_CP_GATHER"
DRAFT = "SGLANG_DSPARK_CP_DRAFT"
FAULT = "SGLANG_DSPARK_CP_FAULT"
DUMP_DIR = "SGLANG_DSPARK_CP_DUMP_DIR"

NAMES = (ENABLED, ALIGN, GATHER, DRAFT, FAULT, DUMP_DIR)
"""Every environment variable that this package reads."""


class AlignLevel(enum.Enum):
    """How much of the alignment proof runs (see `core.align`)."""

    OFF = "off"
    SHAPE = "shape"
    ROWS = "rows"


class GatherMode(enum.Enum):
    """What of each row travels between the CP ranks, the cheapest first; `core.costs` has the bytes."""

    AUTO = "auto"
    """The cheapest that is proved safe for the running configuration."""
    WINDOW = "window"
    """As `kv`, and only rows that a later read can reach."""
    KV = "kv"
    """The draft's KV rows before norm and rotation."""
    CONTEXT = "context"
    """The draft's context."""
    PACKED = "packed"
    """The captured hidden states themselves."""


class DraftParts(enum.Enum):
    """What of the draft a prefill worker builds and loads (see `core.draft_prune`)."""

    CONTEXT = "context"
    FULL = "full"


class FaultKind(enum.Enum):
    """Ways to spoil draft rows on purpose. The first three are caught by level `rows` on one rank alone."""

    DROP_ROW = "drop-row"
    SWAP_ROWS = "swap-rows"
    WRONG_LOC = "wrong-loc"
    ZERO_ROWS = "zero-rows"
    SWAP_REQUESTS = "swap-requests"
    SKIP_RESTORE = "skip-restore"
    SHIFT_POSITIONS = "shift-positions"


@dataclass(frozen=True)
class Fault:
    """One fault: what, on which attention-CP rank (None: on all), in how many first CP forwards (None: in all)."""

    kind: FaultKind
    cp_rank: int | None = None
    forwards: int | None = None

    def hits(self, cp_rank: int) -> bool:
        """Whether this fault is to be made on `cp_rank`."""
        return self.cp_rank is None or self.cp_rank == cp_rank


@dataclass(frozen=True)
class Config:
    """All switches of this package, read once per process."""

    enabled: bool = True
    align: AlignLevel = AlignLevel.ROWS
    gather: GatherMode = GatherMode.AUTO
    draft: DraftParts = DraftParts.CONTEXT
    fault: Fault | None = None
    dump_dir: Path | None = None


def _choice(environ: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    value = environ.get(name, "").strip() or allowed[0]
    if value not in allowed:
        raise ConfigError(
            f"{name}={environ[name]!r} is not a value of {name}; allowed are {', '.join(allowed)}"
            f" (unset means {allowed[0]})."
        )
    return value


_FAULT_FORM = re.compile(r"(?P<kind>[a-z-]+)(@(?P<rank>\d+))?(#(?P<forwards>[1-9]\d*))?")


def _fault(environ: Mapping[str, str]) -> Fault | None:
    value = environ.get(FAULT, "").strip()
    if not value:
        return None
    kinds = {kind.value: kind for kind in FaultKind}
    form = _FAULT_FORM.fullmatch(value)
    if form is None or form["kind"] not in kinds:
        raise ConfigError(
            f"{FAULT}={value!r} is not a fault; allowed is KIND, KIND@CP_RANK, KIND#FIRST_FORWARDS or both, with KIND"
            f" one of {', '.join(kinds)}. Unset it to serve."
        )
    rank, forwards = form["rank"], form["forwards"]
    return Fault(kinds[form["kind"]], int(rank) if rank else None, int(forwards) if forwards else None)


def from_environment(environ: Mapping[str, str] = os.environ) -> Config:
    """Read the configuration.

    Raises:
        ConfigError: a variable holds a value that is not allowed; the text names the allowed ones.
    """
    dump_dir = environ.get(DUMP_DIR, "").strip()
    return Config(
        enabled=_choice(environ, ENABLED, ("1", "0")) == "1",
        align=AlignLevel(_choice(environ, ALIGN, ("rows", "shape", "off"))),
        gather=GatherMode(_choice(environ, GATHER, tuple(mode.value for mode in GatherMode))),
        draft=DraftParts(_choice(environ, DRAFT, ("context", "full"))),
        fault=_fault(environ),
        dump_dir=Path(dump_dir) if dump_dir else None,
    )
