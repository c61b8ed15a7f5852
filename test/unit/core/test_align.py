"""The proof: what is noticed, and what the texts say."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_dspark_cp.core.align import (
    DEVICE_WORDS,
    HOST_WORDS,
    WORDS,
    HostCounts,
    device_words,
    digest,
    explain,
    mismatches,
)

GOOD = HostCounts(13, 13, 13, 13, 24, 24, 0, 0, 1)
FITTING = [0, 0, -1, 0, 42]


def words(counts: HostCounts = GOOD, device: list[int] | None = None) -> list[int]:
    return counts.words() + (FITTING if device is None else device)


def one_odd_rank(odd: list[int], cp_rank: int, cp_size: int = 4) -> list[list[int]]:
    return [odd if rank == cp_rank else words() for rank in range(cp_size)]


# ----------------------------------------------------------------------------------------------------- on the device


def test_mismatches_are_told_apart_by_row_and_by_kind() -> None:
    positions, locations = torch.tensor([5, 6, 7, 8], dtype=torch.int32), torch.tensor([50, 60, 70, 80])
    address = torch.tensor([[5, 50], [9, 60], [7, 71], [-1, -1]])
    assert mismatches(address, positions, locations).tolist() == [
        [False, False],
        [True, False],
        [False, True],
        [True, True],
    ]


def test_device_words_count_and_name_the_first_bad_row() -> None:
    bad = torch.tensor([[False, False], [True, False], [True, True]])
    unmapped = torch.tensor([True, False, True])
    assert device_words(bad, unmapped, torch.tensor(99)).tolist() == [2, 1, 1, 2, 99]


def test_device_words_of_a_good_batch() -> None:
    clean = torch.zeros(4, 2, dtype=torch.bool)
    for bad in (clean, None):
        made = device_words(bad, torch.zeros(4, dtype=torch.bool), torch.tensor(7))
        assert made.tolist() == [0, 0, -1, 0, 7]
        assert made.dtype == torch.int64
        assert made.shape == (DEVICE_WORDS,)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_device_words_of_any_flags(rows: list[tuple[bool, bool, bool]]) -> None:
    table = torch.tensor(rows)
    first = next((row for row, (position, location, _) in enumerate(rows) if position or location), -1)
    counts = [sum(row[column] for row in rows) for column in range(3)]
    made = device_words(table[:, :2], table[:, 2], torch.tensor(1)).tolist()
    assert made == [counts[0], counts[1], first, counts[2], 1]


def test_device_words_without_addresses_still_count_unmapped_rows() -> None:
    assert device_words(None, torch.tensor([False, True, True]), torch.tensor(5)).tolist() == [0, 0, -1, 2, 5]


@given(st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 2**20)), max_size=40), st.data())
def test_mismatches_are_exactly_the_rows_that_moved(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    wanted = torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)
    bad = mismatches(wanted[list(order)], wanted[:, 0], wanted[:, 1])
    expected = [[rows[source][word] != rows[row][word] for word in (0, 1)] for row, source in enumerate(order)]
    assert bad.reshape(-1, 2).tolist() == expected


@pytest.mark.parametrize("row", [0, 1, 2])
def test_first_bad_row_is_found_wherever_it_is(row: int) -> None:
    bad = torch.zeros(3, 2, dtype=torch.bool)
    bad[row, 1] = True
    assert device_words(bad, torch.zeros(3, dtype=torch.bool), torch.tensor(0)).tolist() == [0, 1, row, 0, 0]


batches = st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 2**24)), min_size=2, max_size=200, unique=True)


@given(batches, st.data())
def test_digest_sees_every_swap_of_two_rows(batch: list[tuple[int, int]], data: st.DataObject) -> None:
    first, second = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=2, max_size=2, unique=True))
    swapped = list(batch)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    assert digest_of(batch) != digest_of(swapped)


@given(batches, st.data())
def test_digest_sees_every_one_off(batch: list[tuple[int, int]], data: st.DataObject) -> None:
    row, column = data.draw(st.integers(0, len(batch) - 1)), data.draw(st.integers(0, 1))
    changed = [list(pair) for pair in batch]
    changed[row][column] += 1
    assert digest_of(batch) != digest_of([(pair[0], pair[1]) for pair in changed])


@given(batches)
def test_digest_sees_a_shift_and_a_lost_row(batch: list[tuple[int, int]]) -> None:
    assert digest_of(batch) != digest_of([(position + 1, location) for position, location in batch])
    assert digest_of(batch) != digest_of([*batch[1:], batch[0]])
    lost = [*batch[:-1], (batch[-1][0], batch[-2][1])]
    assert digest_of(batch) != digest_of(lost) or lost == batch


@given(batches, st.data())
def test_digest_sees_a_swap_of_locations_alone(batch: list[tuple[int, int]], data: st.DataObject) -> None:
    first, second = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=2, max_size=2, unique=True))
    assume(batch[first][1] != batch[second][1])
    swapped = list(batch)
    swapped[first] = (batch[first][0], batch[second][1])
    swapped[second] = (batch[second][0], batch[first][1])
    assert digest_of(batch) != digest_of(swapped)


def test_digest_of_a_usual_batch_tells_every_swap_and_every_rotation() -> None:
    rows = [(256 + index, 4096 + index) for index in range(48)]
    seen = {digest_of(rows)}
    for first in range(48):
        for second in range(first + 1, 48):
            swapped = list(rows)
            swapped[first], swapped[second] = rows[second], rows[first]
            seen.add(digest_of(swapped))
    seen |= {digest_of(rows[by:] + rows[:by]) for by in range(1, 48)}
    assert len(seen) == 1 + 48 * 47 // 2 + 47


def test_digest_tells_positions_from_locations() -> None:
    assert digest_of([(3, 5), (4, 6)]) != digest_of([(5, 3), (6, 4)])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_digest_does_not_depend_on_the_integer_type(dtype: torch.dtype) -> None:
    positions, locations = torch.arange(1, 300), torch.arange(300, 599)
    assert digest(positions.to(dtype), locations.to(dtype)) == digest(positions, locations)
    assert digest(positions, locations).dtype == torch.int64
    assert digest(positions, locations).ndim == 0


def digest_of(batch: list[tuple[int, int]]) -> int:
    positions, locations = torch.tensor(batch).unbind(1)
    return int(digest(positions, locations))


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


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=WORDS, max_size=WORDS), min_size=1, max_size=8))
def test_any_words_give_a_text_or_nothing(table: list[list[int]]) -> None:
    reason = explain(table)
    assert reason is None or reason.startswith("attn_cp_rank ")
