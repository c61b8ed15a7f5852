"""Triton kernels of `core.rows`; see there for arguments. Imported only where rows are on a GPU.

Counts of a batch are not specialised on: one compilation serves every batch of a model. Row strides of the wire are
known at compile time: a row with its address is a multiple of 16 bytes, not of 32, and all that Triton can tell of a
number at run time is whether 16 divides it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .rows import MIX, NOWHERE, PHI, RAW_WORDS, SHIFT, Found, Placed

COLUMNS = 1024
ROWS = 256
_PHI, _MIX, _SHIFT, _NOWHERE = tl.constexpr(PHI), tl.constexpr(MIX), tl.constexpr(SHIFT), tl.constexpr(NOWHERE)


@triton.jit(do_not_specialize=["delivered", "first"])  # type: ignore[untyped-decorator]
def _mean_streams(  # type: ignore[no-untyped-def]
    streams,
    row_stride,
    stream_stride,
    select,
    slot,
    rest,
    first,
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
    target = slot + row * SLOT_STRIDE
    if row >= first:
        target = rest + (row - first) * SLOT_STRIDE
    tl.store(target + column, mean, mask=inside)


def mean_streams(streams: torch.Tensor, slots: Sequence[torch.Tensor], select: torch.Tensor | None = None) -> None:
    """See `rows.mean_streams`."""
    rows, hidden = sum(slot.shape[0] for slot in slots), slots[0].shape[1]
    if not rows:
        return
    _mean_streams[(rows, triton.cdiv(hidden, COLUMNS))](
        streams,
        streams.stride(0),
        streams.stride(1),
        streams if select is None else select,
        slots[0],
        slots[-1],
        slots[0].shape[0],
        streams.shape[0],
        SLOT_STRIDE=slots[0].stride(0),
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


@triton.jit(do_not_specialize=["rows", "tokens", "number"])  # type: ignore[untyped-decorator]
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
    memory,
    number,
    rows,
    tokens,
    ORDER: tl.constexpr,
    ADDRESS: tl.constexpr,
    CHECK: tl.constexpr,
    BLOCK: tl.constexpr,
    RAW: tl.constexpr,
    LANES: tl.constexpr,
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
        # The program that comes last hands the words to the host and leaves zeros to the next batch.
        if tl.atomic_add(words + RAW, 1) == tl.num_programs(0) - 1:
            lane = tl.arange(0, LANES)
            last = tl.atomic_xchg(words + lane, tl.zeros([LANES], tl.int64))
            last = tl.where(lane == RAW, number, last)
            tl.store(memory + lane, last, mask=lane <= RAW)
    tl.store(out_locations + index, location, mask=inside)
    tl.store(out_slots + index, slot, mask=inside)
    tl.store(out_positions + index, position, mask=inside)


LANES = 8
"""Integers of 64 bytes: Triton compiles a kernel again for a pointer that 16 does not divide."""
KEPT = 4096
"""Batches whose words stand in host memory at a time; a server reads them one or two batches later."""


class _Words:
    """The words of batches on one stream: counters on the device, zero between two kernels, and memory on the host.

    A kernel stores a batch's words straight into pinned memory, which saves a fill before it and a copy after it. The
    memory is never given back, so a batch that was dropped unread is written to no one else's.
    """

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(LANES, dtype=torch.int64, device=device)
        memory = torch.zeros(KEPT, LANES, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._memories = memory.unbind()
        self._number = 0

    def next(self) -> tuple[torch.Tensor, Found]:
        """[LANES] int64 for the kernel to write, and how to read it."""
        memory = self._memories[self._number % KEPT]
        self._number += 1
        return memory, Found(memory[: RAW_WORDS + 1], self._number)


_words: dict[tuple[torch.device, int], _Words] = {}


def _words_of(device: torch.device) -> _Words:
    """Of the current stream: kernels of two streams may run at the same time."""
    key = device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if key not in _words:
        _words[key] = _Words(device)
    return _words[key]


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
    programs = triton.cdiv(max(rows, tokens) if check else rows, ROWS)
    counters = memory = positions
    found = None
    if check:
        words = _words_of(positions.device)
        counters = words.counters
        memory, found = words.next()
    placed = Placed(
        positions.new_empty(rows, dtype=torch.int64),
        positions.new_empty(rows, dtype=torch.int32),
        positions.new_empty(rows, dtype=torch.int64),
        found,
    )
    if programs or check:
        _place[(max(programs, 1),)](
            positions,
            cache_loc,
            slots,
            positions if order is None else order,
            positions if address is None else address,
            0 if address is None else address.stride(0),
            placed.locations,
            placed.slots,
            placed.positions,
            counters,
            memory,
            0 if found is None else found.number,
            rows,
            tokens,
            ORDER=order is not None,
            ADDRESS=address is not None,
            CHECK=check,
            BLOCK=ROWS,
            RAW=RAW_WORDS,
            LANES=LANES,
        )
    return placed
