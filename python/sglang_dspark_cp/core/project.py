"""The draft's projection of captured rows, as far as a gather mode does it before the gather.

    hidden [N, A * H]  --context-->  [N, H]  --kv-->  S x [N, D]

Both steps work row by row, so each rank can do them on its own shard: fewer bytes travel, and no rank projects what
another one has projected.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def pack_context(
    projection: Projection, captured: PackedRows, *, addressed: bool, tail: int = 0, address: Address | None = None
) -> PackedRows:
    """Wire rows [N, H] of captured rows; the address is still to be written if it is not given."""
    return _pack([projection.context(captured.payload())], addressed, tail, address)


def pack_kv(
    projection: Projection, captured: PackedRows, *, addressed: bool, tail: int = 0, address: Address | None = None
) -> PackedRows:
    """Wire rows [N, S * D] of captured rows; the address is still to be written if it is not given."""
    return _pack(projection.kv(projection.context(captured.payload())), addressed, tail, address)


def _pack(parts: Sequence[torch.Tensor], addressed: bool, tail: int, address: Address | None) -> PackedRows:
    first = parts[0]
    row_format = RowFormat(len(parts), first.shape[1], first.dtype, addressed)
    packed = PackedRows(row_format, first.shape[0], first.device, tail)
    whole = _side_by_side(parts)
    if whole is not None:
        packed.fill(whole, address)
        return packed
    for index, part in enumerate(parts):
        packed.slot(index).copy_(part)
    if address is not None:
        packed.write_address(address.positions, address.cache_loc, address.select)
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
