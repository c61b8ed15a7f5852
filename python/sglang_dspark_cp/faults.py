"""Faults that are made on purpose, to show that the proof catches them and what they cost. Test and debug only.

Every fault moves or wipes whole packed rows, hidden state and address alike, as the defect that it stands for would.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .config import Fault, FaultKind
from .core.pack import PackedRows


def _is(fault: Fault | None, kind: FaultKind, cp_rank: int) -> bool:
    return fault is not None and fault.kind is kind and fault.hits(cp_rank)


def spoil_streams(fault: Fault | None, cp_rank: int, streams: torch.Tensor) -> torch.Tensor:
    """`drop-row`: the captured layer delivers one row fewer. streams: [P, hc_mult, H]."""
    return streams[1:] if _is(fault, FaultKind.DROP_ROW, cp_rank) else streams


def spoil_packed(fault: Fault | None, cp_rank: int, packed: PackedRows) -> None:
    """`swap-rows`: this rank's rows move on by one. `zero-rows`: they are never written."""
    rows = packed.buffer[: packed.rows]
    if _is(fault, FaultKind.SWAP_ROWS, cp_rank):
        rows.copy_(rows.roll(1, dims=0))
    if _is(fault, FaultKind.ZERO_ROWS, cp_rank):
        rows.zero_()


def spoil_order(
    fault: Fault | None, cp_rank: int, extend_lens: Sequence[int], order: torch.Tensor | None
) -> torch.Tensor | None:
    """`skip-restore`: rows are taken as if they arrived in global order. `swap-requests`: rows count as those that
    stand one request, or half the batch when it holds one request only, further on.

    order: [N] int64, global row of each gathered row, -1 for none. Spoiling them makes the host wait on a GPU.
    """
    skip, swap = _is(fault, FaultKind.SKIP_RESTORE, cp_rank), _is(fault, FaultKind.SWAP_REQUESTS, cp_rank)
    if order is None or not (skip or swap):
        return order
    real = order >= 0
    rows = order[real]
    ascending = rows.sort().values
    spoilt = order.clone()
    if skip:
        spoilt[real] = ascending
    else:
        first = int((ascending < extend_lens[0]).sum())
        step = first if len(extend_lens) > 1 else len(rows) // 2
        spoilt[real] = ascending[(torch.searchsorted(ascending, rows) + step) % len(rows)]
    return spoilt


def spoil_locations(fault: Fault | None, cp_rank: int, cache_loc: torch.Tensor) -> torch.Tensor:
    """`wrong-loc`: the last token is injected at its neighbour's location. cache_loc: [T]."""
    if not _is(fault, FaultKind.WRONG_LOC, cp_rank) or cache_loc.shape[0] < 2:
        return cache_loc
    spoiled = cache_loc.clone()
    spoiled[-1] = cache_loc[-2]
    return spoiled


def spoil_positions(fault: Fault | None, cp_rank: int, positions: torch.Tensor) -> torch.Tensor:
    """`shift-positions`: every row is injected as if it stood one position later. positions: [T]."""
    return positions + 1 if _is(fault, FaultKind.SHIFT_POSITIONS, cp_rank) else positions
