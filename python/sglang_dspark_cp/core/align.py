"""Proof that hidden rows, positions and cache locations of one prefill batch describe the same tokens.

What is checked, where, and at what cost:

On the host, before the pool write (levels shape and rows, no cost):
  - rows captured on this rank == P;
  - hidden rows == positions == locations == sum of extend lengths, and the row width is the draft's;
  - the hidden rows are the tensor that this forward's capture produced.
On the device, before the pool write (level rows, a few small kernels over [T] integers):
  - each arrived row's own position and location == the ones it is injected with;
  - every location has a slot in the sliding-window pool.
  A row that fails is not written.
On the host, when the scheduler processes the batch's result (levels shape and rows):
  - every CP rank's verdict, and at level rows a digest of its positions and locations, are exchanged with one
    all-gather of `WORDS` int64 on the CPU group.

The device results reach the host with an asynchronous copy that the scheduler's own wait for the batch's tokens
covers, so no host sync is added. Because every rank gets every rank's words before anything is decided, all ranks
fail the same requests with the same text and none waits alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_MASK = (1 << 63) - 1
_PHI = 0x9E3779B97F4A7C15 & _MASK
_MIX = 0xC2B2AE3D27D4EB4F & _MASK

DEVICE_WORDS = 5
"""bad positions, bad locations, first bad row (or -1), unmapped locations, digest."""
HOST_WORDS = 9
WORDS = HOST_WORDS + DEVICE_WORDS


@dataclass(frozen=True)
class HostCounts:
    """Counts that are known without looking at device memory; all are about one rank's view of one batch."""

    expected_rows: int
    """T, the sum of the extend lengths."""
    hidden_rows: int
    positions: int
    locations: int
    width: int
    expected_width: int
    missing_rows: int
    """Rows that capture failed to deliver on this rank (negative: surplus)."""
    foreign_hidden: int
    """1 if the injected hidden rows are not the tensor that this forward's capture produced."""
    injected: int
    """1 once injection was reached; 0 means that the batch left without draft KV."""

    def consistent(self) -> bool:
        """Whether the pool write may be attempted at all."""
        same = self.hidden_rows == self.positions == self.locations == self.expected_rows
        return same and self.width == self.expected_width and not self.foreign_hidden and bool(self.injected)

    def words(self) -> list[int]:
        """As `HOST_WORDS` integers, in the order of the fields."""
        return [
            self.expected_rows,
            self.hidden_rows,
            self.positions,
            self.locations,
            self.width,
            self.expected_width,
            self.missing_rows,
            self.foreign_hidden,
            self.injected,
        ]


def digest(positions: torch.Tensor, cache_loc: torch.Tensor) -> torch.Tensor:
    """Order-sensitive 63-bit digest of positions [T] and locations [T]; scalar int64 on their device.

    A multiplicative hash with wrap-around int64 arithmetic: it tells accidents apart, it is not cryptographic.
    """
    rows = positions.shape[0]
    weight, other = _weights(1 << max(rows - 1, 0).bit_length(), positions.device)
    mixed = positions.to(torch.int64) * weight[:rows] + cache_loc.to(torch.int64) * other[:rows]
    return (mixed ^ (mixed >> 29)).sum()


@functools.lru_cache(maxsize=32)
def _weights(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of the digest for rows 0 .. size - 1; they depend on the row's number only."""
    index = torch.arange(size, dtype=torch.int64, device=device)
    weight = (index * 2 + 1) * _PHI
    return weight, weight ^ _MIX


def mismatches(address: torch.Tensor, positions: torch.Tensor, cache_loc: torch.Tensor) -> torch.Tensor:
    """Which rows arrived with another address than the one they are to be injected with.

    Args:
        address: [N, 2] int64, (position, location) carried by the rows.
        positions, cache_loc: [N], what injection is going to use.

    Returns:
        [N, 2] bool.
    """
    wanted = torch.stack((positions.to(torch.int64), cache_loc.to(torch.int64)), dim=1)
    return address != wanted


def device_words(
    bad: torch.Tensor | None, unmapped: torch.Tensor, batch_digest: torch.Tensor, order: torch.Tensor | None = None
) -> torch.Tensor:
    """The `DEVICE_WORDS` int64 of a verdict.

    Args:
        bad: [N, 2] bool from `mismatches`, or None when the rows carried no address (no gather took place).
        unmapped: [N] bool, locations without a slot in the sliding-window pool.
        batch_digest: scalar from `digest`.
        order: [N] int64, global row of each row; None: row n is global row n.
    """
    rows = unmapped.shape[0]
    if bad is None:
        bad = torch.zeros(rows, 2, dtype=torch.bool, device=unmapped.device)
    counts = bad.sum(dim=0)
    row = torch.arange(rows, dtype=torch.int64, device=bad.device) if order is None else order
    none = torch.iinfo(torch.int64).max
    first = torch.where(bad.any(dim=1), row, none).amin()
    first = torch.where(first == none, -1, first)
    return torch.stack((counts[0], counts[1], first, unmapped.sum(), batch_digest))


def explain(words_by_rank: Sequence[Sequence[int]]) -> str | None:
    """Turn every rank's words into one text, or None if all agree that the batch is aligned.

    Args:
        words_by_rank: [C][WORDS], the same list on every rank.
    """
    reasons: list[str] = []
    for cp_rank, words in enumerate(words_by_rank):
        counts = HostCounts(*words[:HOST_WORDS])
        bad_positions, bad_locations, first_bad, unmapped, _ = words[HOST_WORDS:]
        where = f"attn_cp_rank {cp_rank}: "
        if counts.missing_rows:
            reasons.append(
                f"{where}a captured layer delivered {abs(counts.missing_rows)} row(s) too"
                f" {'few' if counts.missing_rows > 0 else 'many'}"
            )
        if not counts.injected:
            reasons.append(f"{where}the batch left without draft KV (injection was not reached)")
        elif not counts.consistent():
            reasons.append(
                f"{where}{counts.hidden_rows} hidden rows, {counts.positions} positions,"
                f" {counts.locations} cache locations for {counts.expected_rows} tokens;"
                f" row width {counts.width}, the draft takes {counts.expected_width}"
                + ("; the hidden rows are not those of this forward's capture" if counts.foreign_hidden else "")
            )
        if bad_positions or bad_locations:
            reasons.append(
                f"{where}{bad_positions} row(s) arrived with another position and {bad_locations} with another"
                f" cache location than they are injected with, the first is global row {first_bad}"
            )
        if unmapped:
            reasons.append(f"{where}{unmapped} cache location(s) have no slot in the sliding-window pool")
    digests = [words[-1] for words in words_by_rank]
    if len(set(digests)) > 1:
        common = max(set(digests), key=digests.count)
        majority = 2 * digests.count(common) > len(digests)
        odd = [str(rank) for rank, value in enumerate(digests) if value != common or not majority]
        reasons.append(f"attn_cp_rank {', '.join(odd)}: other positions or cache locations than the other ranks")
    return "; ".join(reasons) or None
