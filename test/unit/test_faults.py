"""Faults on purpose: each changes what its docstring says, on its rank only."""

from __future__ import annotations

import pytest
import torch

from sglang_dspark_cp import faults
from sglang_dspark_cp.config import Fault, FaultKind
from sglang_dspark_cp.core.layout import send_all, send_some
from sglang_dspark_cp.core.pack import PackedRows, RowFormat

RANK = 1


def packed_rows(rows: int = 3) -> PackedRows:
    packed = PackedRows(RowFormat(1, 4, torch.float32), rows, torch.device("cpu"))
    packed.slot(0).copy_(torch.arange(rows * 4).view(rows, 4))
    packed.write_address(torch.arange(rows) + 10, torch.arange(rows) + 20)
    return packed


def changed_stages(fault: Fault | None, cp_rank: int) -> set[str]:
    """Apply every stage of `faults` with `fault` on `cp_rank`; the stages that changed anything."""
    changed: set[str] = set()
    streams = torch.zeros(3, 4, 2)
    if faults.spoil_streams(fault, cp_rank, streams) is not streams:
        changed.add("streams")
    packed = packed_rows()
    before = packed.buffer.view(torch.int32).clone()
    faults.spoil_packed(fault, cp_rank, packed)
    if not torch.equal(packed.buffer.view(torch.int32), before):
        changed.add("packed")
    order = send_all(10, 4).order
    if faults.spoil_order(fault, cp_rank, [4, 6], order) is not order:
        changed.add("order")
    locations, positions = torch.arange(5), torch.arange(5)
    if faults.spoil_locations(fault, cp_rank, locations) is not locations:
        changed.add("locations")
    if faults.spoil_positions(fault, cp_rank, positions) is not positions:
        changed.add("positions")
    assert locations.tolist() == positions.tolist() == list(range(5)), "inputs of the engine are never written to"
    return changed


STAGE = {
    FaultKind.DROP_ROW: "streams",
    FaultKind.SWAP_ROWS: "packed",
    FaultKind.ZERO_ROWS: "packed",
    FaultKind.SKIP_RESTORE: "order",
    FaultKind.SWAP_REQUESTS: "order",
    FaultKind.WRONG_LOC: "locations",
    FaultKind.SHIFT_POSITIONS: "positions",
}


def test_every_kind_has_a_stage() -> None:
    assert set(STAGE) == set(FaultKind)


@pytest.mark.parametrize("kind", list(FaultKind))
def test_a_fault_changes_its_stage_on_its_rank_only(kind: FaultKind) -> None:
    assert changed_stages(Fault(kind, RANK), RANK) == {STAGE[kind]}
    assert changed_stages(Fault(kind, RANK), RANK + 1) == set()
    assert changed_stages(Fault(kind), RANK + 1) == {STAGE[kind]}


def test_without_a_fault_nothing_changes() -> None:
    assert changed_stages(None, RANK) == set()


def test_drop_row_delivers_one_row_fewer() -> None:
    streams = torch.arange(6).view(3, 2, 1)
    assert faults.spoil_streams(Fault(FaultKind.DROP_ROW), 0, streams).tolist() == [[[2], [3]], [[4], [5]]]


def test_swap_rows_moves_rows_on_by_one_with_their_address() -> None:
    packed = packed_rows()
    faults.spoil_packed(Fault(FaultKind.SWAP_ROWS), 0, packed)
    assert packed.slot(0)[:, 0].tolist() == [8, 0, 4]
    assert packed.address().tolist() == [[12, 22], [10, 20], [11, 21]]


def test_zero_rows_wipes_rows_and_address() -> None:
    packed = packed_rows()
    faults.spoil_packed(Fault(FaultKind.ZERO_ROWS), 0, packed)
    assert packed.buffer.view(torch.int32).eq(0).all()


def test_a_tail_is_never_spoilt() -> None:
    packed = PackedRows(RowFormat(1, 4, torch.float32), 2, torch.device("cpu"), tail=3)
    for kind in (FaultKind.SWAP_ROWS, FaultKind.ZERO_ROWS):
        packed.write_tail(torch.tensor([1.0, 2.0, 3.0]))
        faults.spoil_packed(Fault(kind), 0, packed)
        assert packed.buffer[2:].view(-1)[:3].tolist() == [1.0, 2.0, 3.0]


def test_skip_restore_takes_rows_as_they_come() -> None:
    order = send_all(10, 4).order
    assert order.tolist() == [0, 4, 8, 1, 5, 9, 2, 6, -1, 3, 7, -1]
    spoilt = faults.spoil_order(Fault(FaultKind.SKIP_RESTORE), 0, [10], order)
    assert spoilt is not None
    assert spoilt.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, -1, 8, 9, -1]


def test_swap_requests_moves_rows_on_by_the_first_request() -> None:
    order = send_all(10, 4).order
    spoilt = faults.spoil_order(Fault(FaultKind.SWAP_REQUESTS), 0, [4, 6], order)
    assert spoilt is not None
    assert spoilt.tolist() == [4, 8, 2, 5, 9, 3, 6, 0, -1, 7, 1, -1]
    half = faults.spoil_order(Fault(FaultKind.SWAP_REQUESTS), 0, [10], order)
    assert half is not None
    assert half.tolist() == [5, 9, 3, 6, 0, 4, 7, 1, -1, 8, 2, -1]


def test_orders_of_some_rows_are_spoilt_among_themselves() -> None:
    order = send_some(torch.tensor([3, 4, 8, 9]), 10, 2, 0).order
    assert order.tolist() == [4, 8, 3, 9]
    swapped = faults.spoil_order(Fault(FaultKind.SWAP_REQUESTS), 0, [5, 5], order)
    assert swapped is not None
    assert swapped.tolist() == [9, 3, 8, 4]
    assert faults.spoil_order(Fault(FaultKind.SWAP_REQUESTS), 0, [5, 5], None) is None


def test_wrong_loc_takes_the_neighbours_location() -> None:
    assert faults.spoil_locations(Fault(FaultKind.WRONG_LOC), 0, torch.tensor([5, 6, 7])).tolist() == [5, 6, 6]
    one = torch.tensor([5])
    assert faults.spoil_locations(Fault(FaultKind.WRONG_LOC), 0, one) is one


def test_shift_positions_is_one_later() -> None:
    assert faults.spoil_positions(Fault(FaultKind.SHIFT_POSITIONS), 0, torch.tensor([5, 6])).tolist() == [6, 7]
