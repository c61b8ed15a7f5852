"""The round-robin layout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark_cp.core.layout import global_row, owned_rows, rows_per_rank, shard, to_global_order

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


@given(tokens_and_ranks, st.integers(1, 5))
def test_shards_of_all_ranks_with_nan_padding_come_back_in_global_order(shape: tuple[int, int], width: int) -> None:
    tokens, cp_size = shape
    rows = torch.arange(tokens * width, dtype=torch.float32).view(tokens, width)
    back = to_global_order(gathered_rows(rows, cp_size), tokens, cp_size)
    assert torch.equal(back, rows)


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
    pad = -1
    arrived = torch.tensor([0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, pad, 6, pad, 7, pad])
    assert to_global_order(arrived, 13, 8).tolist() == list(range(13))


def test_seven_tokens_on_two_ranks() -> None:
    assert to_global_order(torch.tensor([0, 2, 4, 6, 1, 3, 5, -1]), 7, 2).tolist() == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("tokens", "cp_size"), [(13, 8), (8, 8), (5, 1), (16, 8)])
def test_global_order_is_a_copy_that_shares_no_memory_with_the_receive_buffer(tokens: int, cp_size: int) -> None:
    arrived = torch.arange(cp_size * rows_per_rank(tokens, cp_size)).unsqueeze(1).repeat(1, 2)
    back = to_global_order(arrived, tokens, cp_size)
    before = back.clone()
    arrived.zero_()
    assert torch.equal(back, before)


def test_shard_is_a_view() -> None:
    rows = torch.zeros(10)
    shard(rows, 4, 1).fill_(1)
    assert rows.nonzero().flatten().tolist() == [1, 5, 9]


@pytest.mark.parametrize("rows", [15, 17, 13])
def test_another_number_of_gathered_rows_is_refused(rows: int) -> None:
    with pytest.raises(ValueError, match=f"expected 8 x 2 gathered rows for 13 tokens, got {rows}"):
        to_global_order(torch.zeros(rows, 1), 13, 8)


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens must be >= 0"):
        rows_per_rank(-1, 8)
    with pytest.raises(ValueError, match="cp_size >= 1"):
        rows_per_rank(1, 0)
    for rank in (-1, 8):
        with pytest.raises(ValueError, match=r"cp_rank must lie in \[0, 8\)"):
            owned_rows(13, 8, rank)
