"""Two sides of the wire compared."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_dspark_cp.core import handshake
from sglang_dspark_cp.core.handshake import DRAFT, Component, Layout, named, unnamed
from sglang_dspark_cp.errors import TransferError

PAGE = 256
ITEM = 149760
KINDS = ["swa", "c128_state", "swa"]
ITEMS = [[ITEM] * 43 + [65536] * 42, [4096] * 20, [ITEM] * 3]
PREFILL = Layout(62, 37440, 13, named(KINDS, ITEMS))
DECODE = Layout(62, 37440, 13, unnamed(ITEMS))


def decode_with(**other: Any) -> Layout:
    return dataclasses.replace(DECODE, **other)


def refused(decode: Layout) -> str:
    text = handshake.refusal("10.0.0.1:4711 (session s)", PREFILL, decode)
    assert text is not None
    assert text.startswith("decode 10.0.0.1:4711 (session s) cannot take what this prefill worker sends: ")
    return text


items = st.lists(st.lists(st.integers(1, 1 << 20), max_size=5), max_size=4)
layouts = st.builds(Layout, st.integers(0, 70), st.integers(0, 1 << 20), st.integers(0, 20), items.map(unnamed))


@given(layouts, layouts)
def test_refused_exactly_when_something_differs(prefill: Layout, decode: Layout) -> None:
    assert bool(handshake.refusal("peer", prefill, decode)) == (prefill != decode)
    assert handshake.refusal("peer", prefill, prefill) is None


@given(layouts, layouts)
def test_every_difference_names_both_sides_and_a_way_out(prefill: Layout, decode: Layout) -> None:
    assume(prefill != decode)
    for difference in handshake.differences(prefill, decode):
        assert difference.prefill
        assert difference.prefill != difference.decode
        assert difference.fix
        assert str(difference) in (handshake.refusal("peer", prefill, decode) or "")


@given(items.filter(any), st.data())
def test_one_changed_buffer_is_found(sizes: list[list[int]], data: st.DataObject) -> None:
    place = data.draw(st.sampled_from([i for i, item in enumerate(sizes) if item]))
    buffer = data.draw(st.integers(0, len(sizes[place]) - 1))
    other = [list(item) for item in sizes]
    other[place][buffer] += data.draw(st.integers(1, 100))
    (difference,) = handshake.differences(Layout(1, 1, 1, unnamed(sizes)), Layout(1, 1, 1, unnamed(other)))
    assert difference.decode.startswith(f"state component {place}: ")


def test_names_are_not_compared() -> None:
    assert handshake.refusal("peer", PREFILL, DECODE) is None


def test_only_a_second_window_component_is_the_draft() -> None:
    assert [component.name for component in PREFILL.components] == ["swa", "c128_state", DRAFT]
    assert [component.name for component in named(KINDS[:2], ITEMS[:2])] == ["swa", "c128_state"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"components": unnamed(ITEMS[:2])},
            [
                "registered 2 state components (component x 85 buffers, items 43 x 149760 + 42 x 65536;",
                "sends 3 state components (swa x 85 buffers",
                "draft swa x 3 buffers, item 149760",
                "start both with --speculative-algorithm DSPARK and the same checkpoint",
            ],
        ),
        (
            {"components": unnamed([*ITEMS[:2], [ITEM]])},
            ["component 2: component x 1 buffer, item 149760, prefill sends draft swa x 3 buffers", "same checkpoint"],
        ),
        (
            {"components": unnamed([[ITEM] * 43 + [32768] * 42, *ITEMS[1:]])},
            ["component 0: ", "42 x 32768", "42 x 65536", "--speculative-algorithm DSPARK"],
        ),
        ({"kv_item": 64}, ["62 KV buffers, first item 64", "first item 37440", "--kv-cache-dtype", "--page-size"]),
        ({"kv_buffers": 61}, ["61 KV buffers", "62 KV buffers"]),
        ({"aux_buffers": 10}, ["10 metadata buffers", "13 metadata buffers", "same SGLang release"]),
    ],
)
def test_what_a_refusal_says(other: dict[str, Any], words: list[str]) -> None:
    text = refused(decode_with(**other))
    assert [word for word in words if word not in text] == []


def test_several_differences_are_told_at_once() -> None:
    assert refused(decode_with(kv_item=1, aux_buffers=1, components=())).count("decode registered") == 3


def test_a_rank_that_sends_nothing_is_not_asked_by_a_decode_that_agrees() -> None:
    text = handshake.refusal("peer", PREFILL, DECODE, sends=False)
    assert text is not None
    assert "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER to the same value" in text


# -------------------------------------------------------------------------------------------------- rows of a request

counts = st.lists(st.integers(0, 4), min_size=3, max_size=3)


@given(counts, counts)
def test_rows_must_be_as_many_on_both_sides(ours: list[int], theirs: list[int]) -> None:
    text = handshake.index_mismatch(PREFILL.components, [range(n) for n in ours], [range(n) for n in theirs])
    assert (text is None) == (ours == theirs)
    if text is not None:
        assert f"{ours}" in text
        assert f"{theirs}" in text


@pytest.mark.parametrize("ours", [None, [], [[1], [1]], [[1], None, [1]]])
def test_a_last_chunk_without_all_of_its_state(ours: list[list[int] | None] | None) -> None:
    rows = [[1], [1], [1]]
    assert handshake.index_mismatch(PREFILL.components, rows, rows) is None
    text = handshake.index_mismatch(PREFILL.components, ours, rows)
    assert text is not None
    assert "(swa, c128_state, draft swa)" in text
    # Not even when decode reserved as little.
    assert handshake.index_mismatch(PREFILL.components, [[1]], [[1]]) is not None


# ------------------------------------------------------------------------------------------------------- own memory


@pytest.mark.parametrize(("page", "size"), [(256, 149760), (64, 37440), (128, 74880), (1, 1152)])
def test_bytes_of_a_draft_page(page: int, size: int) -> None:
    assert handshake.draft_page_bytes(page) == size


@given(st.integers(1, 4096))
def test_a_draft_page_holds_its_rows_and_is_aligned(page: int) -> None:
    size = handshake.draft_page_bytes(page)
    assert size % handshake.PAGE_ALIGNMENT == 0
    assert 0 <= size - handshake.ROW_BYTES * page < handshake.PAGE_ALIGNMENT


def test_a_worker_with_its_draft_on_the_wire() -> None:
    handshake.require_own(PREFILL, 3, PAGE)


def own(*components: Component) -> Layout:
    return dataclasses.replace(PREFILL, components=components)


def test_the_draft_component_need_not_be_the_last() -> None:
    """SGLang 0.5.23 on a GPU appends a row per request behind it."""
    handshake.require_own(own(*PREFILL.components, Component((8,), "request_row")), 3, PAGE)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (own(*PREFILL.components[:2]), "no draft component among 2 state components"),
        (own(*PREFILL.components[:2], Component((ITEM,) * 2, DRAFT)), "draft swa x 2 buffers, item 149760; expected"),
        (own(*PREFILL.components[:2], Component((64,) * 3, DRAFT)), "draft swa x 3 buffers, item 64; expected"),
        (own(*PREFILL.components, PREFILL.components[2]), "expected draft swa x 3 buffers, item 149760"),
        (own(), "no draft component among 0 state components"),
    ],
)
def test_a_worker_that_cannot_send_draft_kv_stops(layout: Layout, words: str) -> None:
    with pytest.raises(TransferError, match="cannot send draft KV") as caught:
        handshake.require_own(layout, 3, PAGE)
    assert words in str(caught.value)
    assert "--speculative-algorithm DSPARK" in str(caught.value)
