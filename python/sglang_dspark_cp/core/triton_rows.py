"""Triton kernels of `core.rows`; see there for arguments. Imported only where rows are on a GPU.

Counts of a batch are not specialised on: one compilation serves every batch of a model. Row strides of the wire are
known at compile time: a row with its address is a multiple of 16 bytes, not of 32, and all that Triton can tell of a
number at run time is whether 16 divides it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rows import MIX, NOWHERE, PHI, RAW_WORDS, SHIFT, Placed

COLUMNS = 1024
ROWS = 256
_PHI, _MIX, _SHIFT, _NOWHERE = tl.constexpr(PHI), tl.constexpr(MIX), tl.constexpr(SHIFT), tl.constexpr(NOWHERE)


@triton.jit(do_not_specialize=["delivered"])  # type: ignore[untyped-decorator]
def _mean_streams(  # type: ignore[no-untyped-def]
    streams,
    row_stride,
    stream_stride,
    select,
    slot,
    delivered,
    SLOT_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    STREAMS: tl.constexpr,
    SELECT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    source = row
    if SELECT:
        source = tl.minimum(tl.load(select + row), delivered - 1)
    start = streams + source * row_stride + column
    # One after the other, as torch adds up a dimension that is not the last.
    total = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    for stream in tl.static_range(1, STREAMS):
        total += tl.load(start + stream * stream_stride, mask=inside, other=0.0).to(tl.float32)
    mean = (total * (1.0 / STREAMS)).to(slot.dtype.element_ty)
    tl.store(slot + row * SLOT_STRIDE + column, mean, mask=inside)


def mean_streams(streams: torch.Tensor, slot: torch.Tensor, select: torch.Tensor | None = None) -> None:
    """See `rows.mean_streams`."""
    rows, hidden = slot.shape
    if not rows:
        return
    _mean_streams[(rows, triton.cdiv(hidden, COLUMNS))](
        streams,
        streams.stride(0),
        streams.stride(1),
        streams if select is None else select,
        slot,
        streams.shape[0],
        SLOT_STRIDE=slot.stride(0),
        HIDDEN=hidden,
        STREAMS=streams.shape[1],
        SELECT=select is not None,
        BLOCK=COLUMNS,
    )


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _write_addresses(  # type: ignore[no-untyped-def]
    words,
    stride,
    positions,
    position_stride,
    cache_loc,
    location_stride,
    select,
    rows,
    SELECT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    source = row
    if SELECT:
        source = tl.load(select + row, mask=inside, other=0)
    position = tl.load(positions + source * position_stride, mask=inside, other=0)
    location = tl.load(cache_loc + source * location_stride, mask=inside, other=0)
    tl.store(words + row * stride, position.to(tl.int64), mask=inside)
    tl.store(words + row * stride + 1, location.to(tl.int64), mask=inside)


def write_addresses(
    words: torch.Tensor, positions: torch.Tensor, cache_loc: torch.Tensor, select: torch.Tensor | None = None
) -> None:
    """See `rows.write_addresses`."""
    rows = words.shape[0]
    if not rows:
        return
    _write_addresses[(triton.cdiv(rows, ROWS),)](
        words,
        words.stride(0),
        positions,
        positions.stride(0),
        cache_loc,
        cache_loc.stride(0),
        positions if select is None else select,
        rows,
        SELECT=select is not None,
        BLOCK=ROWS,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _fill_rows(  # type: ignore[no-untyped-def]
    target,
    source,
    source_stride,
    words,
    positions,
    position_stride,
    cache_loc,
    location_stride,
    select,
    TARGET_STRIDE: tl.constexpr,
    WORD_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    SELECT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(source + row * source_stride + column, mask=inside)
    tl.store(target + row * TARGET_STRIDE + column, values, mask=inside)
    if tl.program_id(1) == 0:
        of = row
        if SELECT:
            of = tl.load(select + row)
        tl.store(words + row * WORD_STRIDE, tl.load(positions + of * position_stride).to(tl.int64))
        tl.store(words + row * WORD_STRIDE + 1, tl.load(cache_loc + of * location_stride).to(tl.int64))


def fill_rows(
    target: torch.Tensor,
    words: torch.Tensor,
    source: torch.Tensor,
    positions: torch.Tensor,
    cache_loc: torch.Tensor,
    select: torch.Tensor | None = None,
) -> None:
    """See `rows.fill_rows`."""
    rows, width = target.shape
    if not rows:
        return
    _fill_rows[(rows, triton.cdiv(width, COLUMNS))](
        target,
        source,
        source.stride(0),
        words,
        positions,
        positions.stride(0),
        cache_loc,
        cache_loc.stride(0),
        positions if select is None else select,
        TARGET_STRIDE=target.stride(0),
        WORD_STRIDE=words.stride(0),
        WIDTH=width,
        SELECT=select is not None,
        BLOCK=COLUMNS,
    )


@triton.jit(do_not_specialize=["rows", "tokens"])  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    positions,
    cache_loc,
    slots,
    order,
    address,
    address_stride,
    out_locations,
    out_slots,
    out_positions,
    words,
    rows,
    tokens,
    ORDER: tl.constexpr,
    ADDRESS: tl.constexpr,
    CHECK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < rows
    row = index
    if ORDER:
        row = tl.load(order + index, mask=inside, other=-1)
    real = inside & (row >= 0)
    position = tl.load(positions + row, mask=real, other=0).to(tl.int64)
    location = tl.load(cache_loc + row, mask=real, other=_NOWHERE).to(tl.int64)
    slot = tl.load(slots + row, mask=real, other=_NOWHERE).to(tl.int32)
    if CHECK:
        failed = real & (slot <= 0)
        unmapped = tl.sum(failed.to(tl.int64), axis=0)
        if unmapped > 0:
            tl.atomic_add(words + 3, unmapped)
        if ADDRESS:
            came = address + index * address_stride
            bad_position = real & (tl.load(came, mask=real, other=0) != position)
            bad_location = real & (tl.load(came + 1, mask=real, other=0) != location)
            bad = bad_position | bad_location
            first = tl.max(tl.where(bad, tokens - row, 0), axis=0)
            if first > 0:
                tl.atomic_add(words, tl.sum(bad_position.to(tl.int64), axis=0))
                tl.atomic_add(words + 1, tl.sum(bad_location.to(tl.int64), axis=0))
                tl.atomic_max(words + 2, first)
            failed = failed | bad
        location = tl.where(failed, _NOWHERE, location)
        slot = tl.where(failed, _NOWHERE, slot)
        counted = index < tokens
        weight = (index * 2 + 1) * _PHI
        mixed = tl.load(positions + index, mask=counted, other=0).to(tl.int64) * weight
        mixed += tl.load(cache_loc + index, mask=counted, other=0).to(tl.int64) * (weight ^ _MIX)
        mixed = tl.where(counted, mixed ^ (mixed >> _SHIFT), 0)
        tl.atomic_add(words + 4, tl.sum(mixed, axis=0))
    tl.store(out_locations + index, location, mask=inside)
    tl.store(out_slots + index, slot, mask=inside)
    tl.store(out_positions + index, position, mask=inside)


def place(
    positions: torch.Tensor,
    cache_loc: torch.Tensor,
    slots: torch.Tensor,
    *,
    order: torch.Tensor | None = None,
    address: torch.Tensor | None = None,
    check: bool = True,
) -> Placed:
    """See `rows.place`."""
    tokens = positions.shape[0]
    rows = tokens if order is None else order.shape[0]
    positions, cache_loc, slots = positions.contiguous(), cache_loc.contiguous(), slots.contiguous()
    placed = Placed(
        positions.new_empty(rows, dtype=torch.int64),
        positions.new_empty(rows, dtype=torch.int32),
        positions.new_empty(rows, dtype=torch.int64),
        positions.new_zeros(RAW_WORDS, dtype=torch.int64) if check else None,
    )
    covered = max(rows, tokens) if check else rows
    if covered:
        _place[(triton.cdiv(covered, ROWS),)](
            positions,
            cache_loc,
            slots,
            positions if order is None else order,
            positions if address is None else address,
            0 if address is None else address.stride(0),
            placed.locations,
            placed.slots,
            placed.positions,
            placed.locations if placed.words is None else placed.words,
            rows,
            tokens,
            ORDER=order is not None,
            ADDRESS=address is not None,
            CHECK=check,
            BLOCK=ROWS,
        )
    return placed
