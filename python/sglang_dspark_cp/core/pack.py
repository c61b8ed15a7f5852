"""One buffer per rank and forward: what of each token is sent, and each row's own address.

Row of the buffer, in elements of the hidden dtype:

    [ slot 0 | slot 1 | ... | (fill to 8 bytes) | position: int64 | cache_loc: int64 ]

Slots are the captured layers (A of width H), the draft's context (1 of width H) or its KV rows before norm and rotation
(S of width D), depending on the gather mode. The two int64 words are the row's address. They travel with the row, so
that what arrives can prove its order. Behind the rows a buffer may carry a tail: hidden states of the tokens that meet
the LM head, in as many rows as they fill.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .rows import fill_rows, write_addresses

ADDRESS_WORDS = 2
ADDRESS_BYTES = ADDRESS_WORDS * 8
NO_ADDRESS = -1
"""Written in place of position and location where a row's address is unknown; never equals a real one."""


@dataclass(frozen=True)
class RowFormat:
    """Widths of a packed row.

    Attributes:
        layers: number of slots.
        hidden: elements per slot.
        dtype: dtype of the rows.
        addressed: whether rows carry their address (off only when the alignment proof is off or shape-only).
    """

    layers: int
    hidden: int
    dtype: torch.dtype
    addressed: bool = True

    @property
    def payload(self) -> int:
        """Elements per row without the address."""
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


@dataclass(frozen=True)
class Address:
    """Where a rank's rows belong.

    Attributes:
        positions, cache_loc: [P], any integer dtype.
        select: [rows] int64, which of the P are those of the rows; None: all of them.
    """

    positions: torch.Tensor
    cache_loc: torch.Tensor
    select: torch.Tensor | None = None

    def part(self, start: int, stop: int) -> Address:
        """Of the rows from `start` to `stop`."""
        if self.select is not None:
            return Address(self.positions, self.cache_loc, self.select[start:stop])
        return Address(self.positions[start:stop], self.cache_loc[start:stop])


class PackedRows:
    """The rows of one rank: buffer [rows + tail rows, width]. Each slot is written in place, nothing is concatenated.

    Args:
        row_format: of the rows.
        rows: rows of tokens.
        device: where the buffer lies.
        tail: elements behind the rows.
    """

    def __init__(self, row_format: RowFormat, rows: int, device: torch.device, tail: int = 0) -> None:
        self.format = row_format
        self.rows = rows
        self.tail_rows = -(-tail // row_format.width)
        self.buffer = torch.empty(rows + self.tail_rows, row_format.width, dtype=row_format.dtype, device=device)

    @classmethod
    def around(cls, rows: torch.Tensor) -> PackedRows:
        """Rows [N, width] that are there already, as one slot without address and tail; nothing is copied."""
        packed = cls.__new__(cls)
        packed.format = RowFormat(1, rows.shape[1], rows.dtype, addressed=False)
        packed.rows, packed.tail_rows, packed.buffer = rows.shape[0], 0, rows
        return packed

    def payload(self) -> torch.Tensor:
        """View [rows, payload] of the rows without their addresses."""
        return payload_of(self.buffer[: self.rows], self.format)

    def slot(self, index: int) -> torch.Tensor:
        """View [rows, slot width] of slot `index`."""
        start = index * self.format.hidden
        return self.buffer[: self.rows, start : start + self.format.hidden]

    def write_tail(self, values: torch.Tensor) -> None:
        """Put `values` (at most as many elements as were asked for) behind the rows."""
        self.buffer[self.rows :].view(-1)[: values.numel()] = values.reshape(-1)

    def address(self) -> torch.Tensor:
        """View [rows, 2] int64 of position and cache location."""
        return address_of(self.buffer[: self.rows], self.format)

    def write_address(
        self, positions: torch.Tensor, cache_loc: torch.Tensor, select: torch.Tensor | None = None
    ) -> None:
        """Store the address of each row; arguments as in `Address`."""
        write_addresses(self.address(), positions, cache_loc, select)

    def fill(self, rows: torch.Tensor, address: Address | None, start: int = 0) -> None:
        """Store rows [n, payload] from row `start` on, and their address if it is given, in one pass."""
        stop = start + rows.shape[0]
        payload = self.payload()[start:stop]
        if address is None:
            payload.copy_(rows)
        else:
            where = address.part(start, stop)
            fill_rows(payload, self.address()[start:stop], rows, where.positions, where.cache_loc, where.select)

    def forget_address(self) -> None:
        """Mark every row as having no provable address."""
        self.address().fill_(NO_ADDRESS)


def address_of(rows: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """View [..., 2] int64 of the addresses inside packed rows [..., width]."""
    return rows[..., row_format.address_start :].view(torch.int64)


def payload_of(rows: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """View [..., payload] of what packed rows [..., width] carry beside their address."""
    return rows[..., : row_format.payload]
