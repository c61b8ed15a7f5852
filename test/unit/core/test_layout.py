"""The round-robin layout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark_cp.core.layout import (
    NO_ROW,
    global_row,
    owned_rows,
    rows_per_rank,
    send_all,
    send_last,
    send_some,
    shard,
)
from sglang_dspark_cp.core.window import kept_rows, send_kept

tokens_and_ranks = st.tuples(st.integers(0, 400), st.integers(1, 16))


def gathered_rows(rows: torch.Tensor, cp_size: int) -> torch.Tensor:
    """What an all-gather of all ranks' shards brings: [C * P, ...], missing rows are NaN."""
    per_rank = rows_per_rank(rows.shape[0], cp_size)
    parts = []
    for rank in range(cp_size):
        part = torch.full((per_rank, *rows.shape[1:]), math.nan)
        own = shard(rows, cp_size, rank)
        part[: own.shape[0]] = own
        parts.append(part)
    return torch.cat(parts)


@given(tokens_and_ranks)
def test_the_order_names_the_global_row_of_each_gathered_row(shape: tuple[int, int]) -> None:
    tokens, cp_size = shape
    gathered = gathered_rows(torch.arange(tokens, dtype=torch.float32).unsqueeze(1), cp_size).squeeze(1)
    plan = send_all(tokens, cp_size)
    assert plan.rows == rows_per_rank(tokens, cp_size)
    assert plan.sent == tokens
    assert torch.equal(gathered.nan_to_num(NO_ROW).long(), plan.order)


@given(tokens_and_ranks, st.data())
def test_ranks_that_send_some_rows_agree_on_them(shape: tuple[int, int], data: st.DataObject) -> None:
    tokens, cp_size = shape
    kept = sorted(data.draw(st.sets(st.integers(0, max(0, tokens - 1)), max_size=tokens)))
    plans = [send_some(torch.tensor(kept, dtype=torch.int64), tokens, cp_size, rank) for rank in range(cp_size)]
    assert all(torch.equal(plan.order, plans[0].order) and plan.rows == plans[0].rows for plan in plans)
    assert sorted(row for row in plans[0].order.tolist() if row != NO_ROW) == kept
    for rank, plan in enumerate(plans):
        assert plan.local is not None
        mine = plan.order.view(cp_size, plan.rows)[rank]
        real = mine != NO_ROW
        assert torch.equal(plan.local[real] * cp_size + rank, mine[real])
        assert all(0 <= row < max(1, rows_per_rank(tokens, cp_size)) for row in plan.local.tolist())


def test_a_tail_stands_behind_each_ranks_rows_and_is_no_row() -> None:
    assert send_all(3, 2).gathered_order(2).tolist() == [0, 2, -1, -1, 1, -1, -1, -1]
    assert send_all(3, 2).gathered_order() is send_all(3, 2).order


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_the_last_row_of_each_request(cp_size: int) -> None:
    plans = [send_last((3, 1, 4), cp_size, rank) for rank in range(cp_size)]
    for rank, plan in enumerate(plans):
        assert plan.local is not None
        mine = [row for row in (2, 3, 7) if row % cp_size == rank]
        assert [local * cp_size + rank for local in plan.local.tolist()[: len(mine)]] == mine
        arrival = plan.arrival_on(torch.device("cpu"))
        assert plan.order.view(cp_size, plan.rows)[arrival].tolist() == [2, 3, 7]


@pytest.mark.parametrize("extend_lens", [(1,), (2,), (11,), (3, 1, 4), (16, 1), (1, 1)])
@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_head_rows_meet_their_requests(extend_lens: tuple[int, ...], cp_size: int) -> None:
    tokens = sum(extend_lens)
    batch = torch.arange(tokens * 3).view(tokens, 3)
    shards = [batch[rank::cp_size] for rank in range(cp_size)]
    # A rank without a row of its own has a row of padding.
    shards = [rows if len(rows) else torch.full((1, 3), -7) for rows in shards]
    plans = [send_last(extend_lens, cp_size, rank) for rank in range(cp_size)]
    sent = torch.stack([plan.pick_local(rows) for plan, rows in zip(plans, shards, strict=True)])
    last = torch.tensor(extend_lens).cumsum(0) - 1
    for plan in plans:
        found = plan.pick_arrived(sent)
        assert torch.equal(found, batch[last])
        alone = len(extend_lens) == 1
        assert (found.untyped_storage().data_ptr() == sent.untyped_storage().data_ptr()) == alone
    alone = plans[0].rows == 1
    for plan, rows in zip(plans, shards, strict=True):
        assert (plan.pick_local(rows).untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()) == alone


def test_all_rows_are_picked_without_a_copy() -> None:
    rows = torch.arange(6).view(3, 2)
    assert send_all(6, 2).pick_local(rows) is rows


def test_plans_of_one_shape_are_one_object() -> None:
    assert send_last((3, 4), 2, 0) is send_last((3, 4), 2, 0)
    assert send_kept([(512, 700)], 128, 256, 2, 0) is send_kept([(0, 188)], 128, 256, 2, 0)
    assert send_kept([(512, 700)], 128, 256, 2, 0) is not send_kept([(1, 189)], 128, 256, 2, 0)
    cpu = torch.device("cpu")
    assert send_all(13, 8).order_on(cpu, 2) is send_all(13, 8).order_on(cpu, 2)
    assert torch.equal(send_all(13, 8).order_on(cpu, 2), send_all(13, 8).gathered_order(2))
    assert send_all(13, 8).local_on(cpu) is None


@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 700)), min_size=1, max_size=4),
    st.sampled_from([None, 16, 256]),
    st.sampled_from([2, 8]),
)
def test_a_plan_that_is_kept_is_that_of_the_batch(
    requests: list[tuple[int, int]], page: int | None, cp_size: int
) -> None:
    spans = [(start, start + length) for start, length in requests]
    kept = kept_rows(spans, 128, page)
    for rank in range(cp_size):
        plan = send_kept(spans, 128, page, cp_size, rank)
        wanted = send_some(kept, sum(length for _, length in requests), cp_size, rank)
        assert torch.equal(plan.order, wanted.order)
        assert plan.local is not None
        assert wanted.local is not None
        assert torch.equal(plan.local, wanted.local)


@given(tokens_and_ranks)
def test_owned_rows_sum_to_all_tokens_and_fit_in_p(shape: tuple[int, int]) -> None:
    tokens, cp_size = shape
    owned = [owned_rows(tokens, cp_size, rank) for rank in range(cp_size)]
    assert sum(owned) == tokens
    assert max(owned) == rows_per_rank(tokens, cp_size)
    assert max(owned) - min(owned) <= 1


@given(tokens_and_ranks)
def test_shard_holds_the_rows_that_global_row_names(shape: tuple[int, int]) -> None:
    tokens, cp_size = shape
    for rank in range(cp_size):
        own = shard(torch.arange(tokens), cp_size, rank).tolist()
        assert own == [global_row(local, cp_size, rank) for local in range(owned_rows(tokens, cp_size, rank))]


def test_thirteen_tokens_on_eight_ranks() -> None:
    assert rows_per_rank(13, 8) == 2
    assert [owned_rows(13, 8, rank) for rank in range(8)] == [2, 2, 2, 2, 2, 1, 1, 1]
    assert shard(torch.arange(13), 8, 3).tolist() == [3, 11]
    assert shard(torch.arange(13), 8, 6).tolist() == [6]
    pad = NO_ROW
    assert send_all(13, 8).order.tolist() == [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, pad, 6, pad, 7, pad]


def test_seven_tokens_on_two_ranks() -> None:
    assert send_all(7, 2).order.tolist() == [0, 2, 4, 6, 1, 3, 5, NO_ROW]


def test_shard_is_a_view() -> None:
    rows = torch.zeros(10)
    shard(rows, 4, 1).fill_(1)
    assert rows.nonzero().flatten().tolist() == [1, 5, 9]


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens must be >= 0"):
        rows_per_rank(-1, 8)
    with pytest.raises(ValueError, match="cp_size >= 1"):
        rows_per_rank(1, 0)
    for rank in (-1, 8):
        with pytest.raises(ValueError, match=r"cp_rank must lie in \[0, 8\)"):
            owned_rows(13, 8, rank)
