"""One buffer per rank and forward that holds every captured layer's hidden rows and each row's own address.

Row of the buffer, in elements of the hidden dtype:

    [ layer 0: H | layer 1: H | ... | layer A-1: H | (fill to 8 bytes) | position: int64 | cache_loc: int64 ]

The two int64 words are the row's address. They travel with the row, so that what arrives can prove its order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ADDRESS_WORDS = 2
ADDRESS_BYTES = ADDRESS_WORDS * 8
NO_ADDRESS = -1
"""Written in place of position and location where a row's address is unknown; never equals a real one."""


@dataclass(frozen=True)
class RowFormat:
    """Widths of a packed row.

    Attributes:
        layers: A.
        hidden: H, elements per captured layer.
        dtype: dtype of the hidden rows.
        addressed: whether rows carry their address (off only when the alignment proof is off or shape-only).
    """

    layers: int
    hidden: int
    dtype: torch.dtype
    addressed: bool = True

    @property
    def payload(self) -> int:
        """A * H, elements of hidden state per row."""
        return self.layers * self.hidden

    @property
    def address_start(self) -> int:
        """First element of the address; a multiple of 8 bytes."""
        per_word = 8 // self.dtype.itemsize
        return -(-self.payload // per_word) * per_word

    @property
    def width(self) -> int:
        """Elements per packed row."""
        if not self.addressed:
            return self.payload
        return self.address_start + ADDRESS_BYTES // self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes per packed row on the wire."""
        return self.width * self.dtype.itemsize


class PackedRows:
    """The rows of one rank: buffer [P, width]. Each captured layer is written in place, nothing is concatenated."""

    def __init__(self, row_format: RowFormat, rows: int, device: torch.device) -> None:
        self.format = row_format
        self.buffer = torch.empty(rows, row_format.width, dtype=row_format.dtype, device=device)

    @property
    def rows(self) -> int:
        """P."""
        return self.buffer.shape[0]

    def slot(self, index: int) -> torch.Tensor:
        """View [P, H] of the slot of captured layer `index`."""
        start = index * self.format.hidden
        return self.buffer[:, start : start + self.format.hidden]

    def address(self) -> torch.Tensor:
        """View [P, 2] int64 of position and cache location."""
        return address_of(self.buffer, self.format)

    def write_address(self, positions: torch.Tensor, cache_loc: torch.Tensor) -> None:
        """Store the address of each row: positions [P] and cache_loc [P], any integer dtype."""
        words = self.address()
        words[:, 0] = positions
        words[:, 1] = cache_loc

    def forget_address(self) -> None:
        """Mark every row as having no provable address."""
        self.address().fill_(NO_ADDRESS)


def address_of(rows: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """View [..., 2] int64 of the addresses inside packed rows [..., width]."""
    return rows[..., row_format.address_start :].view(torch.int64)


def payload_of(rows: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """View [..., A * H] of the hidden states inside packed rows [..., width]."""
    return rows[..., : row_format.payload]
