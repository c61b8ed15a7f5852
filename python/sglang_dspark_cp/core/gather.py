"""The one collective of a forward: all ranks' packed rows, left in the order in which they arrive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .layout import SendPlan
from .pack import PackedRows, address_of, payload_of

AllGather = Callable[[torch.Tensor, torch.Tensor], None]
"""(output [C * rows, width], input [rows, width]) -> None, over the attention-CP group."""


@dataclass(frozen=True)
class ArrivedRows:
    """What one all-gather brought: N gathered rows, rank after rank.

    Attributes:
        hidden: [N, payload], a view with the wire's row stride.
        address: [N, 2] int64 (position, cache location) as the rows themselves carried it; None when not carried.
        wire_bytes: bytes that this rank received from the other ranks.
        order: [N] int64 on the rows' device, global row of each gathered row, -1 for a row of no token; None: the rows
            are those of the batch in global order.
        tail: [C, tail elements], what each rank sent behind its rows; None without a tail.
    """

    hidden: torch.Tensor
    address: torch.Tensor | None
    wire_bytes: int
    order: torch.Tensor | None = None
    tail: torch.Tensor | None = None


def gather_rows(packed: PackedRows, plan: SendPlan, all_gather: AllGather) -> ArrivedRows:
    """Gather the packed rows of all ranks.

    Every rank must pass a buffer of the plan's size, also one whose capture went wrong: the size depends on the
    batch's lengths only, so that no rank can leave the others waiting.

    Cost: one collective of C * (rows + tail rows) * width elements; no copy, no host sync.
    """
    if packed.rows != plan.rows:
        raise ValueError(
            f"a rank sends {plan.rows} rows of this batch of {plan.tokens} tokens at CP {plan.cp_size}, got"
            f" {packed.rows}"
        )
    local = packed.buffer
    gathered = local.new_empty(plan.cp_size * local.shape[0], local.shape[1])
    all_gather(gathered, local)
    tail = None
    if packed.tail_rows:
        tail = gathered.view(plan.cp_size, local.shape[0], local.shape[1])[:, packed.rows :].flatten(1)
    return ArrivedRows(
        payload_of(gathered, packed.format),
        address_of(gathered, packed.format) if packed.format.addressed else None,
        (plan.cp_size - 1) * local.shape[0] * packed.format.row_bytes,
        plan.order_on(local.device, packed.tail_rows),
        tail,
    )
