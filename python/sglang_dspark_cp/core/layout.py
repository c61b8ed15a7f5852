"""Round-robin ("interleave") context-parallel layout of one batch: pure integer arithmetic and views.

Global row g of the flattened batch lives on rank g % C as its local row g // C. Legend of symbols: `core`.

Rows are never moved back into global order: a pool write is a scatter, so it is enough to know for each gathered row
which global row it is, and to put positions and locations (integers) into that order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

NO_ROW = -1
"""Stands in an order where a gathered row is padding."""
PLANS = 64
"""Shapes of batches whose plans are kept."""


def rows_per_rank(tokens: int, cp_size: int) -> int:
    """P: physical rows that every rank sends, ceil(T / C)."""
    if tokens < 0 or cp_size < 1:
        raise ValueError(f"tokens must be >= 0 and cp_size >= 1, got {tokens} and {cp_size}")
    return -(-tokens // cp_size)


def owned_rows(tokens: int, cp_size: int, cp_rank: int) -> int:
    """Rows of real tokens on `cp_rank`, ceil((T - r) / C); the rest of its P rows is padding."""
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must lie in [0, {cp_size}), got {cp_rank}")
    return max(0, -(-(tokens - cp_rank) // cp_size))


def global_row(local_row: int, cp_size: int, cp_rank: int) -> int:
    """Global row of `local_row` on `cp_rank`."""
    return local_row * cp_size + cp_rank


def shard(global_rows: torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
    """View of the rows [owned, ...] of a global tensor [T, ...] that `cp_rank` owns."""
    return global_rows[cp_rank::cp_size]


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Integers of the host on `device`, by a copy from pinned memory that the host does not wait for."""
    if device.type == "cpu" or values.device.type != "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class SendPlan:
    """Which rows every rank puts into the gather. All ranks make the same plan from the batch's lengths alone.

    Plans of chunks of one shape are the same object, so that what they are on a device is copied there once.

    Attributes:
        tokens: T.
        cp_size: C.
        rows: rows per rank, the same on every rank.
        order: [C * rows] int64 on the CPU: global row of each gathered row, `NO_ROW` for padding.
        local: [rows] int64 on the CPU: local rows that this rank sends (padding repeats one); None: all P, in order.
    """

    tokens: int
    cp_size: int
    rows: int
    order: torch.Tensor
    local: torch.Tensor | None = None

    @property
    def sent(self) -> int:
        """Rows of real tokens that are gathered."""
        return self.tokens if self.local is None else int((self.order >= 0).sum())

    def gathered_order(self, tail_rows: int = 0) -> torch.Tensor:
        """`order` where each rank's block is followed by `tail_rows` rows that are no rows of tokens."""
        if not tail_rows:
            return self.order
        blocks = self.order.view(self.cp_size, self.rows)
        return torch.nn.functional.pad(blocks, (0, tail_rows), value=NO_ROW).flatten()

    def order_on(self, device: torch.device, tail_rows: int = 0) -> torch.Tensor:
        """`gathered_order` on a device."""
        return _order_on(self, device, tail_rows)

    def local_on(self, device: torch.device) -> torch.Tensor | None:
        """`local` on a device."""
        return None if self.local is None else _local_on(self, device)

    def arrival_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Rank and row there of each sent row, twice [sent] int64 on a device, in the order of the global rows."""
        return _arrival_on(self, device)

    def pick_local(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows to send, of its shard [P, ...]: a view where it sends all or a single one, else a copy."""
        if self.local is None:
            return rows
        if self.rows == 1:
            start = int(self.local[0])
            return rows[start : start + 1]
        return rows.index_select(0, _local_on(self, rows.device))

    def pick_arrived(self, rows: torch.Tensor) -> torch.Tensor:
        """The sent rows, of what all ranks sent [C, rows, ...], in the order of the global rows.

        A view where a single one was sent (a batch of one request sends one to the LM head), else a copy.
        """
        if self.sent == 1:
            start = int((self.order >= 0).nonzero()[0])
            return rows.flatten(0, 1)[start : start + 1]
        return rows[self.arrival_on(rows.device)]


@functools.lru_cache(maxsize=PLANS)
def _order_on(plan: SendPlan, device: torch.device, tail_rows: int) -> torch.Tensor:
    return to_device(plan.gathered_order(tail_rows), device)


@functools.lru_cache(maxsize=PLANS)
def _local_on(plan: SendPlan, device: torch.device) -> torch.Tensor:
    assert plan.local is not None
    return to_device(plan.local, device)


@functools.lru_cache(maxsize=PLANS)
def _arrival_on(plan: SendPlan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    arrived = (plan.order >= 0).nonzero().flatten()
    arrived = arrived[plan.order[arrived].argsort()]
    return to_device(arrived // plan.rows, device), to_device(arrived % plan.rows, device)


@functools.lru_cache(maxsize=PLANS)
def send_all(tokens: int, cp_size: int) -> SendPlan:
    """Every rank sends its P rows."""
    rows = rows_per_rank(tokens, cp_size)
    order = torch.arange(rows * cp_size).view(rows, cp_size).T.flatten()
    return SendPlan(tokens, cp_size, rows, torch.where(order < tokens, order, NO_ROW))


def send_some(kept: torch.Tensor, tokens: int, cp_size: int, cp_rank: int) -> SendPlan:
    """Every rank sends those of the global rows `kept` [K] (int64, CPU, ascending) that it owns."""
    mine = [kept[kept % cp_size == rank] for rank in range(cp_size)]
    rows = max((len(each) for each in mine), default=0)
    order = torch.full((cp_size, rows), NO_ROW)
    for rank, each in enumerate(mine):
        order[rank, : len(each)] = each
    local = torch.zeros(rows, dtype=torch.int64)
    local[: len(mine[cp_rank])] = mine[cp_rank] // cp_size
    return SendPlan(tokens, cp_size, rows, order.flatten(), local)


@functools.lru_cache(maxsize=PLANS)
def send_last(extend_lens: tuple[int, ...], cp_size: int, cp_rank: int) -> SendPlan:
    """Every rank sends the last row of each request that it owns: the rows that meet the LM head."""
    ends = torch.tensor(extend_lens, dtype=torch.int64).cumsum(0)
    return send_some(ends - 1, sum(extend_lens), cp_size, cp_rank)
