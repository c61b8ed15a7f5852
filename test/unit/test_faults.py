"""Faults on purpose: each changes what its docstring says, on its rank only."""

from __future__ import annotations

import pytest
import torch

from sglang_dspark_cp import faults
from sglang_dspark_cp.config import Fault, FaultKind
from sglang_dspark_cp.core.gather import ArrivedRows
from sglang_dspark_cp.core.pack import PackedRows, RowFormat

RANK = 1


def packed_rows(rows: int = 3) -> PackedRows:
    packed = PackedRows(RowFormat(1, 4, torch.float32), rows, torch.device("cpu"))
    packed.slot(0).copy_(torch.arange(rows * 4).view(rows, 4))
    packed.write_address(torch.arange(rows) + 10, torch.arange(rows) + 20)
    return packed


def arrived_rows(tokens: int = 10, addressed: bool = True) -> ArrivedRows:
    rows = torch.arange(tokens)
    address = torch.stack((rows, rows), 1) if addressed else None
    return ArrivedRows(rows.float().unsqueeze(1), address, 7)


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
    arrived = arrived_rows()
    if faults.spoil_arrived(fault, cp_rank, 4, [4, 6], arrived) is not arrived:
        changed.add("arrived")
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
    FaultKind.SKIP_RESTORE: "arrived",
    FaultKind.SWAP_REQUESTS: "arrived",
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


def test_skip_restore_leaves_rows_rank_after_rank() -> None:
    spoilt = faults.spoil_arrived(Fault(FaultKind.SKIP_RESTORE), 0, 4, [10], arrived_rows())
    assert spoilt.hidden.flatten().tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 3, 7]
    assert spoilt.address is not None
    assert spoilt.address[:, 0].tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 3, 7]
    assert spoilt.wire_bytes == 7


def test_swap_requests_moves_rows_on_by_the_first_request() -> None:
    spoilt = faults.spoil_arrived(Fault(FaultKind.SWAP_REQUESTS), 0, 4, [4, 6], arrived_rows())
    assert spoilt.hidden.flatten().tolist() == [6, 7, 8, 9, 0, 1, 2, 3, 4, 5]
    half = faults.spoil_arrived(Fault(FaultKind.SWAP_REQUESTS), 0, 4, [10], arrived_rows(addressed=False))
    assert half.hidden.flatten().tolist() == [5, 6, 7, 8, 9, 0, 1, 2, 3, 4]
    assert half.address is None


def test_wrong_loc_takes_the_neighbours_location() -> None:
    assert faults.spoil_locations(Fault(FaultKind.WRONG_LOC), 0, torch.tensor([5, 6, 7])).tolist() == [5, 6, 6]
    one = torch.tensor([5])
    assert faults.spoil_locations(Fault(FaultKind.WRONG_LOC), 0, one) is one


def test_shift_positions_is_one_later() -> None:
    assert faults.spoil_positions(Fault(FaultKind.SHIFT_POSITIONS), 0, torch.tensor([5, 6])).tolist() == [6, 7]
