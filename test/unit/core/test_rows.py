"""Passes over rows: the torch form against plain Python, the kernels against the torch form in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_dspark_cp.core.rows import NOWHERE, digest, mean_streams, place, write_addresses

torch.set_num_threads(1)


# ------------------------------------------------------------------------------------------------------------- place

rows_of_a_batch = st.lists(
    st.tuples(st.integers(0, 2**20), st.integers(1, 2**20), st.sampled_from([0, -1, 7, 9, 300])),
    min_size=1,
    max_size=40,
)


@given(rows_of_a_batch, st.data())
def test_place_row_by_row(batch: list[tuple[int, int, int]], data: st.DataObject) -> None:
    order = data.draw(st.lists(st.sampled_from([-1, *range(len(batch))]), min_size=1, max_size=60))
    came = [list(batch[row][:2]) if row >= 0 else [77, 88] for row in order]
    for index in data.draw(st.lists(st.integers(0, len(order) - 1), max_size=4)):
        came[index][data.draw(st.integers(0, 1))] += data.draw(st.integers(0, 1))
    positions, locations, slots = torch.tensor(batch).unbind(1)
    made = place(positions.to(torch.int32), locations, slots, order=torch.tensor(order), address=torch.tensor(came))
    counts, first = [0, 0, 0], []
    for index, row in enumerate(order):
        if row < 0:
            wanted = (0, NOWHERE, NOWHERE)
        else:
            position, location, slot = batch[row]
            wrong = [came[index][0] != position, came[index][1] != location]
            counts = [counts[0] + wrong[0], counts[1] + wrong[1], counts[2] + (slot <= 0)]
            first += [row] if any(wrong) else []
            fails = any(wrong) or slot <= 0
            wanted = (position, NOWHERE if fails else location, NOWHERE if fails else slot)
        assert (int(made.positions[index]), int(made.locations[index]), int(made.slots[index])) == wanted
    assert made.found is not None
    raw = len(batch) - min(first) if first else 0
    assert made.found.read() == [counts[0], counts[1], raw, counts[2], int(digest(positions, locations))]
    assert (made.locations.dtype, made.slots.dtype, made.positions.dtype) == (torch.int64, torch.int32, torch.int64)


def test_without_a_check_rows_are_only_brought_into_order() -> None:
    batch = torch.tensor([[5, 50, 1], [6, 60, 0], [7, 70, 3]]).unbind(1)
    made = place(*batch, order=torch.tensor([2, -1, 1]), address=torch.zeros(3, 2, dtype=torch.int64), check=False)
    assert made.found is None
    assert made.locations.tolist() == [70, NOWHERE, 60]
    assert made.slots.tolist() == [3, NOWHERE, 0]
    assert made.positions.tolist() == [7, 0, 6]


def test_rows_in_global_order_without_addresses() -> None:
    made = place(torch.tensor([5, 6]), torch.tensor([50, 60]), torch.tensor([2, 0]))
    assert made.locations.tolist() == [50, NOWHERE]
    assert made.found is not None
    words = made.found.read()
    assert words is not None
    assert words[:4] == [0, 0, 0, 1]


def test_counts_that_differ_are_refused() -> None:
    three, two = torch.arange(3), torch.arange(2)
    with pytest.raises(ValueError, match="3 positions, 2 cache locations and 3 pool slots"):
        place(three, two, three)


# ----------------------------------------------------------------------------------------------- means and addresses


def test_means_of_selected_rows_do_not_read_beyond_the_end() -> None:
    streams = torch.randn(3, 4, 8)
    slots = [torch.zeros(rows, 20)[:, 4:12] for rows in (3, 1)]
    mean_streams(streams, slots, torch.tensor([0, 2, 5, 1]))
    assert torch.equal(torch.cat(slots), streams.mean(dim=1)[[0, 2, 2, 1]])


@pytest.mark.parametrize("widths", [(), (8, 9), (8, 8, 8)], ids=str)
def test_slots_of_another_number_or_stride_are_refused(widths: tuple[int, ...]) -> None:
    slots = [torch.zeros(1, width)[:, :8] for width in widths]
    with pytest.raises(ValueError, match=f"one slot, or two of one row stride.*got {len(widths)} of row strides"):
        mean_streams(torch.randn(3, 4, 8), slots)


def test_addresses_of_selected_rows() -> None:
    words = torch.zeros(2, 2, dtype=torch.int64)
    write_addresses(words, torch.arange(5, dtype=torch.int32), torch.arange(50, 60)[::2], torch.tensor([4, 1]))
    assert words.tolist() == [[4, 58], [1, 52]]


# ----------------------------------------------------------------------------------------------------------- kernels


def test_kernels_in_the_interpreter() -> None:
    """Every case of `triton_rows_cases.py`; a process of its own, since Triton reads the variable when imported."""
    cases = Path(__file__).parent / "triton_rows_cases.py"
    done = subprocess.run(
        [sys.executable, str(cases)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "0 different" in done.stdout


# ------------------------------------------------------------------------------------------------------------ digest

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
