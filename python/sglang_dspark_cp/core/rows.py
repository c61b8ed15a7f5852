"""The passes over rows of a forward, each in two forms: one Triton kernel on a GPU, plain torch elsewhere.

    mean_streams     residual streams of a captured layer -> their mean, in the packed buffer's slot
    fill_rows        projected rows -> the wire's buffer, each with its position and cache location behind it
    write_addresses  the address alone, where rows were captured in place
    place            arrived rows -> where each is written, and what the alignment proof found

The torch form is the definition; the kernels give the same bits (`test/unit/core/test_rows.py` in Triton's interpreter,
`test/gpu` on a GPU). Kernels run on the current stream and never make the host wait.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

PHI = 0x9E3779B97F4A7C15 & ((1 << 63) - 1)
MIX = 0xC2B2AE3D27D4EB4F & ((1 << 63) - 1)
SHIFT = 29
"""Of the digest: row i with position p and location l adds m ^ (m >> SHIFT), m = p * w + l * (w ^ MIX),
w = (2 * i + 1) * PHI, all in wrapping int64. It tells accidents apart, it is not cryptographic."""

NOWHERE = -1
"""A cache location, or pool slot, that is not written."""

RAW_WORDS = 5
"""bad positions, bad locations, T minus the first bad row (0: none), unmapped locations, digest."""


@dataclass(frozen=True)
class Found:
    """What the check of `place` counted, in host memory that a GPU writes by itself.

    Attributes:
        memory: [RAW_WORDS + 1] int64 on the CPU; the last one tells whose words stand there.
        number: what the last one is once the words of this `place` are there.
    """

    memory: torch.Tensor
    number: int

    def read(self) -> list[int] | None:
        """The RAW_WORDS; None if they are not there (yet). Never waits: call once the stream's work is known done."""
        *words, number = self.memory.tolist()
        return words if number == self.number else None


@dataclass(frozen=True)
class Placed:
    """Where N arrived rows go.

    Attributes:
        locations: [N] int64 full cache locations, `NOWHERE` for a row that is not written.
        slots: [N] int32 sliding-window pool slots, `NOWHERE` likewise.
        positions: [N] int64, 0 for a row of no token.
        found: what the check counted, or None if nothing was checked.
    """

    locations: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    found: Found | None


def _kernels(like: torch.Tensor) -> Any:
    """The module of kernels, or None where rows are not on a GPU. Triton is imported only there."""
    return _triton_rows() if like.is_cuda else None


@functools.cache
def _triton_rows() -> Any:
    return importlib.import_module(f"{__package__}.triton_rows")


def mean_streams(streams: torch.Tensor, slots: Sequence[torch.Tensor], select: torch.Tensor | None = None) -> None:
    """Mean over the residual streams, written into one slot or two.

    Args:
        streams: [R, hc_mult, H], any strides but 1 in the last dimension.
        slots: [n, H] each, one row stride; the rows of the second follow on those of the first. Together N, N <= R
            without `select`.
        select: [N] int64, rows to take, clamped to R - 1; None: the first N.

    Raises:
        ValueError: not one or two slots of one row stride.
    """
    strides = [slot.stride(0) for slot in slots]
    if not 1 <= len(slots) <= 2 or len(set(strides)) > 1:
        raise ValueError(
            f"one slot, or two of one row stride, take the means of a layer, got {len(slots)} of row strides {strides}"
        )
    kernels = _kernels(streams)
    (mean_streams_torch if kernels is None else kernels.mean_streams)(streams, slots, select)


def mean_streams_torch(
    streams: torch.Tensor, slots: Sequence[torch.Tensor], select: torch.Tensor | None = None
) -> None:
    """`mean_streams` in plain torch, on any device."""
    if select is not None:
        streams = streams.index_select(0, select.clamp(max=streams.shape[0] - 1))
    start = 0
    for slot in slots:
        torch.mean(streams[start : start + slot.shape[0]], dim=1, out=slot)
        start += slot.shape[0]


def write_addresses(
    words: torch.Tensor, positions: torch.Tensor, cache_loc: torch.Tensor, select: torch.Tensor | None = None
) -> None:
    """Store the address of each row.

    Args:
        words: [N, 2] int64, any row stride.
        positions, cache_loc: [P], any integer dtype and stride.
        select: [N] int64, which of the P belong to the rows; None: all, in order (N == P).
    """
    kernels = _kernels(words)
    (write_addresses_torch if kernels is None else kernels.write_addresses)(words, positions, cache_loc, select)


def write_addresses_torch(
    words: torch.Tensor, positions: torch.Tensor, cache_loc: torch.Tensor, select: torch.Tensor | None = None
) -> None:
    """`write_addresses` in plain torch, on any device."""
    words[:, 0] = positions if select is None else positions[select]
    words[:, 1] = cache_loc if select is None else cache_loc[select]


def fill_rows(
    target: torch.Tensor,
    words: torch.Tensor,
    source: torch.Tensor,
    positions: torch.Tensor,
    cache_loc: torch.Tensor,
    select: torch.Tensor | None = None,
) -> None:
    """Copy rows into the wire's buffer and store their addresses.

    Args:
        target: [N, width] of the buffer, any row stride.
        words, positions, cache_loc, select: see `write_addresses`.
        source: [N, width], any row stride.
    """
    kernels = _kernels(target)
    run = fill_rows_torch if kernels is None else kernels.fill_rows
    run(target, words, source, positions, cache_loc, select)


def fill_rows_torch(
    target: torch.Tensor,
    words: torch.Tensor,
    source: torch.Tensor,
    positions: torch.Tensor,
    cache_loc: torch.Tensor,
    select: torch.Tensor | None = None,
) -> None:
    """`fill_rows` in plain torch, on any device."""
    target.copy_(source)
    write_addresses_torch(words, positions, cache_loc, select)


def place(
    positions: torch.Tensor,
    cache_loc: torch.Tensor,
    slots: torch.Tensor,
    *,
    order: torch.Tensor | None = None,
    address: torch.Tensor | None = None,
    check: bool = True,
) -> Placed:
    """Bring positions and locations into the order of the rows, and prove the rows against them.

    Args:
        positions, cache_loc, slots: [T] of the batch in global order, any integer dtype; a slot <= 0 means that the
            location has none in the sliding-window pool.
        order: [N] int64, global row of each arrived row, -1 for a row of no token; None: N == T, in global order.
        address: [N, 2] int64, (position, location) that the rows carried; None: they carried none.
        check: whether a row with another address, or without a slot, is counted and not written.

    Raises:
        ValueError: positions, locations and slots are not equally many (nothing is read beyond their end).

    Cost: on a GPU one launch; no copy to the host, the kernel stores its words there.
    """
    if not positions.shape == cache_loc.shape == slots.shape:
        raise ValueError(
            f"{positions.shape[0]} positions, {cache_loc.shape[0]} cache locations and {slots.shape[0]} pool slots"
            " cannot be those of the same tokens"
        )
    kernels = _kernels(positions)
    run = place_torch if kernels is None else kernels.place
    return cast(Placed, run(positions, cache_loc, slots, order=order, address=address, check=check))


def place_torch(
    positions: torch.Tensor,
    cache_loc: torch.Tensor,
    slots: torch.Tensor,
    *,
    order: torch.Tensor | None = None,
    address: torch.Tensor | None = None,
    check: bool = True,
) -> Placed:
    """`place` in plain torch, on any device."""
    tokens, wide = positions.shape[0], torch.int64
    wanted = torch.stack((positions.to(wide), cache_loc.to(wide), slots.to(wide)))
    row = torch.arange(tokens, device=positions.device)
    real = torch.ones_like(row, dtype=torch.bool)
    if order is not None:
        row, real = order, order >= 0
        # A row of no token reads the last value, which is replaced.
        nothing = torch.tensor([[0], [NOWHERE], [NOWHERE]], device=positions.device)
        wanted = torch.where(real, wanted[:, order], nothing)
    place_of, location, slot = wanted
    if not check:
        return Placed(location, slot.to(torch.int32), place_of, None)
    unmapped = real & (slot <= 0)
    bad = torch.zeros(row.shape[0], 2, dtype=torch.bool, device=row.device)
    if address is not None:
        bad = (address != wanted[:2].T) & real.unsqueeze(1)
    failed = unmapped | bad.any(dim=1)
    first = torch.where(bad.any(dim=1), tokens - row, 0).amax() if row.shape[0] else row.new_zeros(())
    counts = bad.sum(dim=0)
    words = (counts[0], counts[1], first, unmapped.sum(), digest(positions, cache_loc), torch.ones_like(first))
    location, slot = torch.where(failed, NOWHERE, location), torch.where(failed, NOWHERE, slot)
    return Placed(location, slot.to(torch.int32), place_of, Found(torch.stack(words).cpu(), 1))


def digest(positions: torch.Tensor, cache_loc: torch.Tensor) -> torch.Tensor:
    """Order-sensitive digest of positions [T] and locations [T]; scalar int64 on their device."""
    index = torch.arange(positions.shape[0], dtype=torch.int64, device=positions.device)
    weight = (index * 2 + 1) * PHI
    mixed = positions.to(torch.int64) * weight + cache_loc.to(torch.int64) * (weight ^ MIX)
    return (mixed ^ (mixed >> SHIFT)).sum()
