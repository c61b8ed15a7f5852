"""Round-robin ("interleave") context-parallel layout of one batch: pure integer arithmetic and views.

Global row g of the flattened batch lives on rank g % C as its local row g // C. Legend of symbols: `core`.
"""

from __future__ import annotations

import torch


def rows_per_rank(tokens: int, cp_size: int) -> int:
    """P: physical rows that every rank sends, ceil(T / C)."""
    if tokens < 0 or cp_size < 1:
        raise ValueError(f"tokens must be >= 0 and cp_size >= 1, got {tokens} and {cp_size}")
    return -(-tokens // cp_size)


def owned_rows(tokens: int, cp_size: int, cp_rank: int) -> int:
    """Rows of real tokens on `cp_rank`, ceil((T - r) / C); the rest of its P rows is padding."""
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must lie in [0, {cp_size}), got {cp_rank}")
    return max(0, -(-(tokens - cp_rank) // cp_size))


def global_row(local_row: int, cp_size: int, cp_rank: int) -> int:
    """Global row of `local_row` on `cp_rank`."""
    return local_row * cp_size + cp_rank


def shard(global_rows: torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
    """View of the rows [owned, ...] of a global tensor [T, ...] that `cp_rank` owns."""
    return global_rows[cp_rank::cp_size]


def to_global_order(gathered: torch.Tensor, tokens: int, cp_size: int) -> torch.Tensor:
    """Rows of an all-gather in global token order, without padding.

    Args:
        gathered: [C * P, ...], rank after rank as an all-gather leaves it.
        tokens: T.

    Returns:
        [T, ...], always a contiguous copy (transposing C and P moves every row).
    """
    per_rank = rows_per_rank(tokens, cp_size)
    if gathered.shape[0] != cp_size * per_rank:
        raise ValueError(f"expected {cp_size} x {per_rank} gathered rows for {tokens} tokens, got {gathered.shape[0]}")
    stacked = gathered.view(cp_size, per_rank, *gathered.shape[1:])
    ordered = stacked.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    return ordered.view(gathered.shape)[:tokens]
