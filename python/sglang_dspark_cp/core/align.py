"""Proof that hidden rows, positions and cache locations of one prefill batch describe the same tokens.

What is checked, where, and at what cost:

On the host, before the pool write (levels shape and rows, no cost):
  - rows captured on this rank == P;
  - hidden rows == positions == locations == sum of extend lengths, and the row width is the draft's;
  - the hidden rows are the tensor that this forward's capture produced.
On the device, before the pool write (level rows, one pass over [N] integers, `core.rows.place`):
  - each arrived row's own position and location == the ones it is injected with;
  - every location has a slot in the sliding-window pool.
  A row that fails is not written.
On the host, when the scheduler processes the batch's result (levels shape and rows):
  - every CP rank's verdict, and at level rows a digest of its positions and locations, are exchanged with one
    all-gather of `WORDS` int64 on the CPU group.

The device stores its results in pinned host memory, which the scheduler's own wait for the batch's tokens covers, so no
host sync is added; a number of the batch behind them tells that they are there and are this batch's. Because every rank
gets every rank's words before anything is decided, all ranks fail the same requests with the same text and none waits
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DEVICE_WORDS = 5
"""bad positions, bad locations, first bad row (or -1), unmapped locations, digest."""
HOST_WORDS = 10
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
    unread: int = 0
    """1 if what the device found did not reach the host."""

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
            self.unread,
        ]


def explain(words_by_rank: Sequence[Sequence[int]]) -> str | None:
    """Turn every rank's words into one text, or None if all agree that the batch is aligned.

    Args:
        words_by_rank: [C][WORDS], the same list on every rank.
    """
    reasons: list[str] = []
    digests: dict[int, int] = {}
    for cp_rank, words in enumerate(words_by_rank):
        counts = HostCounts(*words[:HOST_WORDS])
        bad_positions, bad_locations, first_bad, unmapped, digest = words[HOST_WORDS:]
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
        if counts.unread:
            reasons.append(f"{where}what the device found when it compared the rows did not reach the host")
        else:
            digests[cp_rank] = digest
        if bad_positions or bad_locations:
            reasons.append(
                f"{where}{bad_positions} row(s) arrived with another position and {bad_locations} with another"
                f" cache location than they are injected with, the first is global row {first_bad}"
            )
        if unmapped:
            reasons.append(f"{where}{unmapped} cache location(s) have no slot in the sliding-window pool")
    seen = list(digests.values())
    if len(set(seen)) > 1:
        common = max(set(seen), key=seen.count)
        majority = 2 * seen.count(common) > len(seen)
        odd = [str(cp_rank) for cp_rank, value in digests.items() if value != common or not majority]
        reasons.append(f"attn_cp_rank {', '.join(odd)}: other positions or cache locations than the other ranks")
    return "; ".join(reasons) or None
