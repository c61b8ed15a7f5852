"""The one collective, with C ranks played in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark_cp.core.gather import ArrivedRows, gather_rows
from sglang_dspark_cp.core.layout import rows_per_rank, send_all, send_some, shard
from sglang_dspark_cp.core.pack import PackedRows, RowFormat

torch.set_num_threads(1)

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Group:
    """An all-gather over the buffers of all ranks; counts its calls."""

    def __init__(self, ranks: list[PackedRows]) -> None:
        self.ranks = ranks
        self.calls = 0

    def member(self, rank: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
        def all_gather(output: torch.Tensor, local: torch.Tensor) -> None:
            assert local.data_ptr() == self.ranks[rank].buffer.data_ptr()
            assert output.is_contiguous()
            self.calls += 1
            torch.cat([packed.buffer for packed in self.ranks], out=output)

        return all_gather


def ranks_of(tokens: int, cp_size: int, row_format: RowFormat) -> list[PackedRows]:
    """Row g holds its number in every element (exact below 256 in bf16); padding is NaN with address -7."""
    rows = torch.arange(tokens)
    out = []
    for rank in range(cp_size):
        packed = PackedRows(row_format, rows_per_rank(tokens, cp_size), CPU)
        packed.buffer.fill_(float("nan"))
        mine = shard(rows, cp_size, rank)
        for layer in range(row_format.layers):
            packed.slot(layer)[: mine.shape[0]] = (mine * (layer + 1) % 256).to(row_format.dtype).unsqueeze(1)
        if row_format.addressed:
            packed.address().fill_(-7)
            packed.address()[: mine.shape[0]] = torch.stack((mine + 1000, mine * 3 + 5), dim=1)
        out.append(packed)
    return out


def gather_all(tokens: int, cp_size: int, row_format: RowFormat) -> list[ArrivedRows]:
    group, plan = Group(ranks_of(tokens, cp_size, row_format)), send_all(tokens, cp_size)
    arrived = [gather_rows(group.ranks[rank], plan, group.member(rank)) for rank in range(cp_size)]
    assert group.calls == cp_size  # one collective per rank
    return arrived


def by_global_row(arrived: ArrivedRows, values: torch.Tensor) -> torch.Tensor:
    """Values [N, ...] of the gathered rows, those of tokens only, in global order."""
    assert arrived.order is not None
    real = arrived.order >= 0
    return values[real][arrived.order[real].argsort()]


@given(st.integers(0, 300), st.integers(1, 8), st.sampled_from(DTYPES), st.integers(1, 9), st.booleans())
def test_every_rank_gets_all_rows_and_knows_which_they_are(
    tokens: int, cp_size: int, dtype: torch.dtype, hidden: int, addressed: bool
) -> None:
    row_format = RowFormat(3, hidden, dtype, addressed)
    rows = torch.arange(tokens)
    wanted = torch.cat(
        [(rows * (layer + 1) % 256).to(dtype).unsqueeze(1).expand(tokens, hidden) for layer in range(3)], dim=1
    )
    for arrived in gather_all(tokens, cp_size, row_format):
        assert torch.equal(by_global_row(arrived, arrived.hidden), wanted)  # NaN never equals: padding has no row
        if addressed:
            assert arrived.address is not None
            address = torch.stack((rows + 1000, rows * 3 + 5), dim=1)
            assert torch.equal(by_global_row(arrived, arrived.address), address)
        else:
            assert arrived.address is None
        assert arrived.tail is None
        assert arrived.wire_bytes == (cp_size - 1) * rows_per_rank(tokens, cp_size) * row_format.row_bytes


def test_thirteen_tokens_on_eight_ranks() -> None:
    arrived = gather_all(13, 8, RowFormat(1, 1, torch.bfloat16))[5]
    assert arrived.order is not None
    assert arrived.order.tolist() == [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, -1, 6, -1, 7, -1]
    assert arrived.hidden.squeeze(1)[arrived.order >= 0].tolist() == [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 6, 7]
    assert arrived.address is not None
    assert arrived.address[:4, 0].tolist() == [1000, 1008, 1001, 1009]
    # 7 other ranks x 2 rows x (1 element filled to 4, then 16 bytes of address)
    assert arrived.wire_bytes == 7 * 2 * 24


@given(st.integers(1, 120), st.integers(1, 8), st.integers(1, 40), st.data())
def test_some_rows_and_a_tail(tokens: int, cp_size: int, tail: int, data: st.DataObject) -> None:
    """Only kept rows travel; what stands behind them comes back by rank and is no row."""
    kept = torch.tensor(sorted(data.draw(st.sets(st.integers(0, tokens - 1), min_size=1))))
    row_format = RowFormat(1, 5, torch.float32)
    plans = [send_some(kept, tokens, cp_size, rank) for rank in range(cp_size)]
    ranks = []
    for rank, plan in enumerate(plans):
        assert plan.local is not None
        packed = PackedRows(row_format, plan.rows, CPU, tail)
        packed.buffer.fill_(float("nan"))
        rows = plan.local * cp_size + rank
        packed.slot(0).copy_(rows.unsqueeze(1))
        packed.write_address(rows, rows)
        packed.write_tail(torch.arange(tail) + 1000.0 * rank)
        ranks.append(packed)
    group = Group(ranks)
    for rank, plan in enumerate(plans):
        arrived = gather_rows(ranks[rank], plan, group.member(rank))
        assert torch.equal(by_global_row(arrived, arrived.hidden)[:, 0].long(), kept)
        assert arrived.address is not None
        assert torch.equal(by_global_row(arrived, arrived.address)[:, 1], kept)
        assert plan.sent == len(kept)
        assert arrived.tail is not None
        wanted = torch.stack([torch.arange(tail) + 1000.0 * each for each in range(cp_size)])
        assert torch.equal(arrived.tail[:, :tail], wanted)
        assert arrived.wire_bytes == (cp_size - 1) * (plan.rows + ranks[0].tail_rows) * row_format.row_bytes


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_wrong_buffer_size(rows: int) -> None:
    packed = PackedRows(RowFormat(1, 4, torch.float32), rows, CPU)

    def never(output: torch.Tensor, local: torch.Tensor) -> None:
        raise AssertionError("no collective with a wrong size")

    with pytest.raises(ValueError, match=f"sends 2 rows of this batch of 13 tokens at CP 8, got {rows}"):
        gather_rows(packed, send_all(13, 8), never)


def test_an_address_that_was_forgotten_arrives_as_such() -> None:
    group = Group(ranks_of(5, 2, RowFormat(1, 4, torch.float16)))
    group.ranks[1].forget_address()
    arrived = gather_rows(group.ranks[0], send_all(5, 2), group.member(0))
    assert arrived.address is not None
    assert by_global_row(arrived, arrived.address)[:, 0].tolist() == [1000, -1, 1002, -1, 1004]
