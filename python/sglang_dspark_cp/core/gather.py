"""The one collective: all ranks' packed rows, back in global token order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .layout import rows_per_rank, to_global_order
from .pack import PackedRows, address_of, payload_of

AllGather = Callable[[torch.Tensor, torch.Tensor], None]
"""(output [C * P, width], input [P, width]) -> None, over the attention-CP group."""


@dataclass(frozen=True)
class ArrivedRows:
    """What one all-gather brought, in global token order.

    Attributes:
        hidden: [T, A * H], contiguous, padding gone.
        address: [T, 2] int64 (position, cache location) as the rows themselves carried it; None when not carried.
        wire_bytes: bytes that this rank received from the other ranks.
    """

    hidden: torch.Tensor
    address: torch.Tensor | None
    wire_bytes: int


def gather_rows(packed: PackedRows, tokens: int, cp_size: int, all_gather: AllGather) -> ArrivedRows:
    """Gather packed rows of all ranks and restore global order.

    Every rank must pass a buffer of exactly P rows, also one whose capture went wrong: the size depends on T and C
    only, so that no rank can leave the others waiting.

    Cost: one collective of C * P * width elements, one copy of the payload, no host sync.
    """
    per_rank = rows_per_rank(tokens, cp_size)
    if packed.rows != per_rank:
        raise ValueError(f"a rank sends {per_rank} rows for {tokens} tokens and CP {cp_size}, got {packed.rows}")
    local = packed.buffer
    gathered = local.new_empty(cp_size * per_rank, local.shape[1])
    all_gather(gathered, local)
    hidden = to_global_order(payload_of(gathered, packed.format), tokens, cp_size)
    address = None
    if packed.format.addressed:
        address = to_global_order(address_of(gathered, packed.format), tokens, cp_size)
    return ArrivedRows(hidden, address, (cp_size - 1) * per_rank * packed.format.row_bytes)
