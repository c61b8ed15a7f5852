"""The proof: what is noticed, and what the texts say."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark_cp.core.align import (
    DEVICE_WORDS,
    HOST_WORDS,
    WORDS,
    HostCounts,
    explain,
)

GOOD = HostCounts(13, 13, 13, 13, 24, 24, 0, 0, 1)
FITTING = [0, 0, -1, 0, 42]


def words(counts: HostCounts = GOOD, device: list[int] | None = None) -> list[int]:
    return counts.words() + (FITTING if device is None else device)


def one_odd_rank(odd: list[int], cp_rank: int, cp_size: int = 4) -> list[list[int]]:
    return [odd if rank == cp_rank else words() for rank in range(cp_size)]


# ------------------------------------------------------------------------------------------------------- on the host


def test_words_follow_the_fields_in_order() -> None:
    counts = HostCounts(*range(HOST_WORDS))
    assert counts.words() == list(range(HOST_WORDS))
    assert len(dataclasses.fields(HostCounts)) == HOST_WORDS
    assert WORDS == HOST_WORDS + DEVICE_WORDS


@pytest.mark.parametrize(
    "change",
    [
        {"expected_rows": 12},
        {"hidden_rows": 16},
        {"positions": 12},
        {"locations": 14},
        {"width": 16},
        {"foreign_hidden": 1},
        {"injected": 0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_inconsistency_forbids_the_pool_write(change: dict[str, int]) -> None:
    assert GOOD.consistent()
    assert not dataclasses.replace(GOOD, **change).consistent()


# ------------------------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize("cp_size", [1, 2, 8])
def test_agreement_needs_no_text(cp_size: int) -> None:
    assert explain([words()] * cp_size) is None


REASONS = {
    "rows missing": (dataclasses.replace(GOOD, missing_rows=2), None, "delivered 2 row(s) too few"),
    "rows surplus": (dataclasses.replace(GOOD, missing_rows=-3), None, "delivered 3 row(s) too many"),
    "not injected": (
        HostCounts(13, 0, 0, 0, 0, 0, 0, 0, 0),
        None,
        "left without draft KV (injection was not reached)",
    ),
    "fewer positions": (
        dataclasses.replace(GOOD, positions=2),
        None,
        "13 hidden rows, 2 positions, 13 cache locations for 13 tokens",
    ),
    "another width": (dataclasses.replace(GOOD, width=32), None, "row width 32, the draft takes 24"),
    "foreign rows": (
        dataclasses.replace(GOOD, foreign_hidden=1),
        None,
        "the hidden rows are not those of this forward's capture",
    ),
    "bad positions": (
        GOOD,
        [3, 0, 5, 0, 42],
        "3 row(s) arrived with another position and 0 with another cache location",
    ),
    "bad locations": (GOOD, [0, 1, 12, 0, 42], "the first is global row 12"),
    "unmapped": (GOOD, [0, 0, -1, 4, 42], "4 cache location(s) have no slot in the sliding-window pool"),
    "unread": (
        dataclasses.replace(GOOD, unread=1),
        [0, 0, -1, 0, 0],
        "what the device found when it compared the rows did not reach the host",
    ),
    "another digest": (GOOD, [0, 0, -1, 0, 43], "other positions or cache locations than the other ranks"),
}


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.parametrize("cp_rank", range(4))
def test_each_reason_names_its_rank_and_no_other(name: str, cp_rank: int) -> None:
    counts, device, text = REASONS[name]
    reason = explain(one_odd_rank(words(counts, device), cp_rank))
    assert reason is not None
    assert text in reason
    assert f"attn_cp_rank {cp_rank}: " in reason
    for other in set(range(4)) - {cp_rank}:
        assert f"attn_cp_rank {other}" not in reason


def test_several_ranks_and_reasons_are_all_named_in_rank_order() -> None:
    short = words(dataclasses.replace(GOOD, missing_rows=1))
    shifted = words(GOOD, [13, 0, 0, 0, 41])
    reason = explain([words(), shifted, words(), short])
    assert reason is not None
    parts = reason.split("; ")
    assert len(parts) == 3
    assert parts[0].startswith("attn_cp_rank 1: 13 row(s) arrived")
    assert parts[1].startswith("attn_cp_rank 3: a captured layer")
    assert parts[2].startswith("attn_cp_rank 1: other positions")


def test_two_ranks_that_differ_are_both_in_the_text() -> None:
    """With two ranks there is no majority: neither may be blamed alone."""
    reason = explain([words(GOOD, [0, 0, -1, 0, 1]), words(GOOD, [0, 0, -1, 0, 2])])
    assert reason is not None
    assert "0" in reason.split(":")[0]
    assert "1" in reason.split(":")[0]


def test_two_odd_ranks_against_a_majority_are_named_together() -> None:
    table = [words() for _ in range(8)]
    table[2], table[6] = words(GOOD, [0, 0, -1, 0, 1]), words(GOOD, [0, 0, -1, 0, 2])
    assert explain(table) == "attn_cp_rank 2, 6: other positions or cache locations than the other ranks"


def test_words_that_did_not_arrive_are_compared_with_no_one() -> None:
    table = [
        words(),
        words(dataclasses.replace(GOOD, unread=1), [0, 0, -1, 0, 0]),
        words(),
        words(GOOD, [0, 0, -1, 0, 7]),
    ]
    reason = explain(table)
    assert reason is not None
    assert [part.split(":")[0] for part in reason.split("; ")] == ["attn_cp_rank 1", "attn_cp_rank 3"]


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=WORDS, max_size=WORDS), min_size=1, max_size=8))
def test_any_words_give_a_text_or_nothing(table: list[list[int]]) -> None:
    reason = explain(table)
    assert reason is None or reason.startswith("attn_cp_rank ")
