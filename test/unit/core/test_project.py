"""Projection on the shard: from captured rows to the wire, in one block or several."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark_cp.core import project
from sglang_dspark_cp.core.pack import Address, PackedRows, RowFormat
from sglang_dspark_cp.core.project import _pack, _side_by_side, capture_blocks, pack_context, pack_kv

torch.set_num_threads(1)

LAYERS, HIDDEN, WIDTH, STAGES = 3, 8, 4, 3


class Projection:
    """Row by row: integers that float32 adds up exactly. Notes which captured buffers are alive meanwhile."""

    def __init__(self, together: bool = True) -> None:
        self.together = together
        self.buffers: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[list[bool]] = []

    def context(self, hidden: torch.Tensor) -> torch.Tensor:
        gc.collect()
        self.alive.append([each() is not None for each in self.buffers])
        return hidden.view(-1, LAYERS, HIDDEN).sum(dim=1)

    def kv(self, context: torch.Tensor) -> Sequence[torch.Tensor]:
        whole = torch.cat([context[:, :WIDTH] * (stage + 1) for stage in range(STAGES)], dim=1)
        parts = whole.split(WIDTH, dim=1)
        return parts if self.together else [part.clone() for part in parts]


def captured(rows: torch.Tensor, blocks: Sequence[int], projection: Projection) -> list[PackedRows]:
    """Rows [N, A * H] in buffers of their own."""
    found = []
    for part in rows.split(list(blocks)):
        packed = PackedRows(RowFormat(LAYERS, HIDDEN, torch.float32, addressed=False), part.shape[0], part.device)
        packed.payload().copy_(part)
        projection.buffers.append(weakref.ref(packed.buffer))
        found.append(packed)
    return found


@pytest.mark.parametrize("rows", [1, 17, project.SPLIT_ROWS - 1])
def test_few_rows_are_one_block(rows: int) -> None:
    assert capture_blocks(rows) == (rows,)


@given(st.integers(project.SPLIT_ROWS, 1 << 20))
def test_two_blocks_need_less_at_a_time(rows: int) -> None:
    first, second = capture_blocks(rows)
    assert first + second == rows
    # In units of a row of H elements: captured rows, what their projection takes, the first kv rows (3 x 512 of 4096).
    peak = max(3 * rows + 2 * first, 5 * second + 0.375 * first)
    assert peak <= 3.626 * rows
    # At CP2 stock holds 11 such units of twice as many rows.
    assert peak / (2 * 11 * rows) < 1 / 6


@pytest.mark.parametrize("pack", [pack_context, pack_kv])
@pytest.mark.parametrize("blocks", [(7,), (2, 5), (1, 1, 5), (0, 7)])
@pytest.mark.parametrize("select", [None, [3, 0, 1, 1, 8, 2, 5]], ids=["all", "some"])
@pytest.mark.parametrize("together", [True, False])
def test_blocks_leave_the_wire_of_one(pack, blocks: tuple[int, ...], select: list[int] | None, together: bool) -> None:  # type: ignore[no-untyped-def]
    rows = torch.randint(-99, 99, (7, LAYERS * HIDDEN)).float()
    count = 7 if select is None else 9
    positions, cache_loc = torch.arange(count), torch.arange(count) * 10 + 5
    address = Address(positions, cache_loc, None if select is None else torch.tensor(select))
    one, several = Projection(), Projection(together)
    wanted = pack(one, captured(rows, (7,), one), addressed=True, tail=3, address=address)
    given_up = captured(rows, blocks, several)
    found = pack(several, given_up, addressed=True, tail=3, address=address)
    assert given_up == []
    assert (found.format, found.rows, found.tail_rows) == (wanted.format, wanted.rows, wanted.tail_rows)
    assert torch.equal(found.payload(), wanted.payload())
    assert torch.equal(found.address(), wanted.address())
    chosen = list(range(7)) if select is None else select
    assert found.address().tolist() == [[row, row * 10 + 5] for row in chosen]


@pytest.mark.parametrize("pack", [pack_context, pack_kv])
def test_a_block_is_gone_when_the_next_is_projected(pack) -> None:  # type: ignore[no-untyped-def]
    projection = Projection()
    given_up = captured(torch.randn(6, LAYERS * HIDDEN), (1, 2, 3), projection)
    pack(projection, given_up, addressed=False)
    assert projection.alive == [[True, True, True], [False, True, True], [False, False, True]]


@pytest.mark.parametrize("together", [True, False])
def test_projected_rows_and_their_addresses_reach_the_wire(together: bool) -> None:
    whole = torch.randn(3, 12)
    parts = whole.split(4, dim=1) if together else [part.clone() for part in whole.split(4, dim=1)]
    assert (_side_by_side(parts) is not None) == together
    packed = _pack([parts], True, 0, Address(torch.arange(5), torch.arange(50, 55), torch.tensor([4, 0, 1])))
    assert torch.equal(packed.payload(), whole)
    assert packed.address().tolist() == [[4, 54], [0, 50], [1, 51]]
    assert torch.equal(_pack([parts], False, 0, None).payload(), whole)


@pytest.mark.parametrize(
    "parts",
    [
        torch.randn(3, 8).split(4, dim=1)[::-1],
        [torch.randn(3, 4)] * 2,
        torch.randn(4, 6).T.split(2, dim=1),
    ],
)
def test_parts_that_are_no_columns_of_one_tensor(parts: list[torch.Tensor]) -> None:
    assert _side_by_side(parts) is None
