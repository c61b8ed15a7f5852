"""The packed buffer: slots side by side, each row's address behind them, in any dtype and at any width."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark_cp.core.pack import (
    ADDRESS_BYTES,
    NO_ADDRESS,
    PackedRows,
    RowFormat,
    address_of,
    payload_of,
)

torch.set_num_threads(1)

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Bit patterns that are NaN or denormal in half types, and the limits of int64.
HARD_WORDS = (0, 1, 0x7FC0, 0x7F807F80, 0xFFFFFFFF, 2**62 + 12345, 2**63 - 1, -1, -(2**63))


def payload_bytes(packed: PackedRows) -> torch.Tensor:
    return payload_of(packed.buffer, packed.format).contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layers", "hidden"), [(1, 1), (1, 7), (2, 5), (3, 7), (3, 512), (5, 3)])
def test_address_survives_and_payload_is_untouched(dtype: torch.dtype, layers: int, hidden: int) -> None:
    rows = len(HARD_WORDS)
    packed = PackedRows(RowFormat(layers, hidden, dtype), rows, CPU)
    values = torch.randn(layers, rows, hidden).to(dtype)
    for index in range(layers):
        packed.slot(index).copy_(values[index])
    before = payload_bytes(packed).clone()
    positions = torch.tensor(HARD_WORDS)
    cache_loc = positions.flip(0)
    packed.write_address(positions, cache_loc)
    assert torch.equal(packed.address(), torch.stack((positions, cache_loc), dim=1))
    assert torch.equal(payload_bytes(packed), before)
    # Through a copy, as on the wire, and row by row in another order.
    wire = packed.buffer.clone()[torch.arange(rows - 1, -1, -1)]
    assert torch.equal(address_of(wire, packed.format), torch.stack((positions, cache_loc), dim=1).flip(0))
    assert torch.equal(payload_of(wire, packed.format), torch.cat(list(values), dim=1).flip(0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_are_views_in_layer_order(dtype: torch.dtype) -> None:
    packed = PackedRows(RowFormat(3, 5, dtype), 4, CPU)
    packed.buffer.zero_()
    packed.forget_address()
    for index in range(3):
        assert packed.slot(index).shape == (4, 5)
        packed.slot(index).fill_(index + 1)
    assert payload_of(packed.buffer, packed.format)[0].tolist() == [1.0] * 5 + [2.0] * 5 + [3.0] * 5
    assert packed.slot(1).data_ptr() == packed.buffer.data_ptr() + 5 * dtype.itemsize
    assert torch.equal(packed.address(), torch.full((4, 2), NO_ADDRESS))
    assert packed.rows == 4


@pytest.mark.parametrize("source", [torch.int32, torch.int64])
def test_any_integer_dtype(source: torch.dtype) -> None:
    packed = PackedRows(RowFormat(1, 3, torch.bfloat16), 2, CPU)
    packed.write_address(torch.tensor([5, 6], dtype=source), torch.tensor([700, 801], dtype=source))
    assert packed.address().tolist() == [[5, 700], [6, 801]]


def test_forget_overwrites_what_was_written() -> None:
    packed = PackedRows(RowFormat(2, 3, torch.float16), 3, CPU)
    packed.write_address(torch.arange(3), torch.arange(3) + 40)
    packed.forget_address()
    assert packed.address().tolist() == [[-1, -1]] * 3


@given(st.integers(1, 6), st.integers(1, 600), st.sampled_from(DTYPES))
def test_widths(layers: int, hidden: int, dtype: torch.dtype) -> None:
    row_format = RowFormat(layers, hidden, dtype)
    assert row_format.payload == layers * hidden
    assert 0 <= row_format.address_start - row_format.payload < 8 // dtype.itemsize
    assert row_format.address_start * dtype.itemsize % 8 == 0
    assert row_format.row_bytes == row_format.width * dtype.itemsize
    assert row_format.row_bytes == row_format.address_start * dtype.itemsize + ADDRESS_BYTES
    assert row_format.row_bytes % 8 == 0
    bare = RowFormat(layers, hidden, dtype, addressed=False)
    assert (bare.width, bare.row_bytes) == (layers * hidden, layers * hidden * dtype.itemsize)


def test_literal_widths() -> None:
    assert RowFormat(3, 7168, torch.bfloat16).row_bytes == 3 * 7168 * 2 + 16
    odd = RowFormat(3, 7, torch.bfloat16)  # 21 elements, filled to 24, then 8 elements of address
    assert (odd.payload, odd.address_start, odd.width) == (21, 24, 32)


def test_no_rows() -> None:
    packed = PackedRows(RowFormat(2, 3, torch.bfloat16), 0, CPU)
    packed.write_address(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    assert packed.address().shape == (0, 2)
    assert packed.slot(1).shape == (0, 3)
