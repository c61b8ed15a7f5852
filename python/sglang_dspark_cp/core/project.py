"""The draft's projection of captured rows, as far as a gather mode does it before the gather.

    hidden [N, A * H]  --context-->  [N, H]  --kv-->  S x [N, D]

Both steps work row by row, so each rank can do them on its own shard: fewer bytes travel, and no rank projects what
another one has projected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from .pack import Address, PackedRows, RowFormat


class Projection(Protocol):
    """The draft's two projections."""

    def context(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, A * H] -> [N, H]: `main_proj` and `main_norm`."""
        ...

    def kv(self, context: torch.Tensor) -> Sequence[torch.Tensor]:
        """[N, H] -> for each of the S stages [N, D]: `wkv`, before norm and rotation."""
        ...


SPLIT_ROWS = 4096
"""Fewer rows are one block: the second block's launches would cost more than the memory is worth."""


def capture_blocks(rows: int) -> tuple[int, ...]:
    """Rows of each buffer that holds captured rows until they are projected, for `AuxCapture`.

    While a block is projected there are, in units of its rows times H: its captured rows (3), `main_proj`'s result and
    the normed one (2). Two blocks need less at a time, since the first is let go of before the second is projected. The
    first is the smaller one: all captured rows are still there beside it. With 5/16 the peak is 3.6 of 5 of all rows.
    """
    if rows < SPLIT_ROWS:
        return (rows,)
    first = rows * 5 // 16
    return first, rows - first


def pack_context(
    projection: Projection,
    captured: list[PackedRows],
    *,
    addressed: bool,
    tail: int = 0,
    address: Address | None = None,
) -> PackedRows:
    """Wire rows [N, H] of captured rows, whose buffers are taken out of the list one by one.

    The address is still to be written if it is not given.
    """
    return _pack([[projection.context(rows)] for rows in _one_by_one(captured)], addressed, tail, address)


def pack_kv(
    projection: Projection,
    captured: list[PackedRows],
    *,
    addressed: bool,
    tail: int = 0,
    address: Address | None = None,
) -> PackedRows:
    """Wire rows [N, S * D] of captured rows; otherwise as `pack_context`."""
    blocks = [projection.kv(projection.context(rows)) for rows in _one_by_one(captured)]
    return _pack(blocks, addressed, tail, address)


def _one_by_one(captured: list[PackedRows]) -> Iterator[torch.Tensor]:
    """Rows [n, A * H] of each buffer, which is given up to whoever takes them."""
    while captured:
        yield captured.pop(0).payload()


def _pack(blocks: Sequence[Sequence[torch.Tensor]], addressed: bool, tail: int, address: Address | None) -> PackedRows:
    """blocks: of each block S x [n, D]."""
    first = blocks[0][0]
    row_format = RowFormat(len(blocks[0]), first.shape[1], first.dtype, addressed)
    packed = PackedRows(row_format, sum(parts[0].shape[0] for parts in blocks), first.device, tail)
    start = 0
    for parts in blocks:
        whole = _side_by_side(parts)
        packed.fill(torch.cat(tuple(parts), dim=1) if whole is None else whole, address, start)
        start += parts[0].shape[0]
    return packed


def _side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The columns [N, S * D] that the parts are views of, in this order; None where they are none of one tensor."""
    first, width = parts[0], parts[0].shape[1]
    adjacent = all(
        part.stride() == first.stride()
        and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and part.storage_offset() == first.storage_offset() + index * width
        for index, part in enumerate(parts)
    )
    if not adjacent or first.stride(1) != 1 or first.stride(0) < len(parts) * width:
        return None
    return first.as_strided((first.shape[0], len(parts) * width), first.stride())
