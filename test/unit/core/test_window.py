"""Rows that can be read again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark_cp.core.window import kept_rows

W, PAGE = 128, 256


def kept(spans: list[tuple[int, int]], page: int | None = PAGE, window: int = W) -> list[int]:
    found: list[int] = kept_rows(spans, window, page).tolist()
    return found


def test_without_a_prefix_cache_the_last_rows_of_each_chunk() -> None:
    assert kept([(0, 1000)], None) == list(range(872, 1000))
    assert kept([(0, 5), (300, 500)], None) == [*range(5), *range(5 + 72, 5 + 200)]
    assert kept([], None) == []


def test_with_a_prefix_cache_the_second_half_of_each_page_too() -> None:
    assert kept([(0, 600)]) == [*range(128, 256), *range(384, 600)]
    assert kept([(256, 300)]) == list(range(44))
    assert kept([(200, 512)]) == [*range(56), *range(184, 312)]


@pytest.mark.parametrize("page", [1, 64, 128])
def test_pages_no_larger_than_the_window_need_every_row(page: int) -> None:
    assert kept([(7, 700)], page) == list(range(693))


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 900)), min_size=1, max_size=5),
    st.sampled_from([None, 32, 128, 256, 512]),
    st.integers(1, 200),
)
def test_the_rule_row_by_row(requests: list[tuple[int, int]], page: int | None, window: int) -> None:
    spans = [(start, start + length) for start, length in requests]
    wanted, row = [], 0
    for start, end in spans:
        for position in range(start, end):
            boundary = None if page is None else (position // page + 1) * page
            if position >= end - window or (boundary is not None and position >= boundary - window):
                wanted.append(row)
            row += 1
    assert kept(spans, page, window) == wanted


def test_rows_are_on_the_cpu_and_ascending() -> None:
    found = kept_rows([(0, 700), (5, 300)], W, PAGE)
    assert found.dtype == torch.int64
    assert found.device.type == "cpu"
    assert torch.equal(found, found.sort().values)
