"""Capture -> pack -> gather -> admit -> settle on real gloo groups of 2, 4 and 8 ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from gloo_ranks import Batch, GlooFailed, Launcher, Outcome

pytestmark = pytest.mark.timeout(60)

CP_SIZES = (2, 4, 8)
AT_ONCE_S = 5.0
"""A refused batch must be over by then on every rank; a hang would take until the launcher's time-out."""


@pytest.fixture(scope="module")
def gloo() -> Iterator[Launcher]:
    with Launcher() as launcher:
        yield launcher


def one(gloo: Launcher, cp_size: int, batch: Batch) -> list[Outcome]:
    """Outcomes of one batch by rank, which must be over quickly."""
    gloo.run(cp_size, [Batch((cp_size,))])  # the group exists before the clock starts
    begun = time.monotonic()
    (by_rank,) = gloo.run(cp_size, [batch])
    assert time.monotonic() - begun < AT_ONCE_S
    return by_rank


def assert_right(batch: Batch, cp_size: int, by_rank: list[Outcome]) -> None:
    assert len(by_rank) == cp_size
    for outcome in by_rank:
        assert outcome.error is None
        assert outcome.hidden.shape == (batch.tokens, 3 * batch.hidden)
        assert torch.equal(outcome.hidden, outcome.expected)
        assert not outcome.hidden.isnan().any()
        assert torch.equal(outcome.locations, outcome.cache_loc)
        assert outcome.aux_collectives == (0 if batch.tokens < cp_size else 1)
        assert outcome.word_collectives == (0 if batch.level == "off" else 1)
        assert outcome.complete == [None] * len(batch.extend)
        assert not outcome.sglang_imported


def one_text(by_rank: list[Outcome]) -> str:
    """The error, which must be the same on every rank and end every request of the batch."""
    for rank, outcome in enumerate(by_rank):
        assert outcome.error is not None, f"rank {rank} saw nothing"
        assert all(text and text.endswith(outcome.error) for text in outcome.complete), "a request may still be sent"
    texts = {outcome.error for outcome in by_rank}
    assert len(texts) == 1, texts
    return str(texts.pop())


@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_hidden_rows_equal_those_without_cp(gloo: Launcher, cp_size: int) -> None:
    batches = [
        Batch((5,)),
        Batch((8,)),
        Batch((13,)),
        Batch((3, 4, 9)),
        Batch((1,) * 9),
        Batch((257, 31), hidden=64),
        Batch((3670,), prefix=(1,)),
        Batch((1,), prefix=(512,)),
        Batch((1, 9, 2), prefix=(255, 0, 128), hidden=8),
    ]
    for batch, by_rank in zip(batches, gloo.run(cp_size, batches), strict=True):
        assert_right(batch, cp_size, by_rank)


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("level", ["rows", "shape", "off"])
def test_every_residue(gloo: Launcher, cp_size: int, level: str) -> None:
    batches = [Batch((tokens,), level=level, seed=tokens) for tokens in range(1, 3 * cp_size + 1)]
    batches += [
        Batch((2, tokens - 3, 1), prefix=(0, 7, 300), level=level, seed=tokens)
        for tokens in range(4 * cp_size, 5 * cp_size)
    ]
    assert {batch.tokens % cp_size for batch in batches} == set(range(cp_size))
    for batch, by_rank in zip(batches, gloo.run(cp_size, batches), strict=True):
        assert_right(batch, cp_size, by_rank)


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("drop-row", "attn_cp_rank {rank}: a captured layer delivered 1 row(s) too few"),
        ("swap-rows", "{own} row(s) arrived with another position and {own} with another cache location"),
        ("wrong-loc", "attn_cp_rank {rank}: 0 row(s) arrived with another position and 1 with another cache location"),
        ("shift-positions", "attn_cp_rank {rank}: 52 row(s) arrived with another position and 0 with another cache"),
    ],
    ids=["drop-row", "swap-rows", "wrong-loc", "shift-positions"],
)
def test_a_fault_on_one_rank_is_an_error_on_all(gloo: Launcher, cp_size: int, kind: str, text: str) -> None:
    for rank in {0, cp_size - 1}:
        found = one_text(one(gloo, cp_size, Batch((11, 1, 40), prefix=(0, 64, 3), fault=f"{kind}@{rank}")))
        assert text.format(rank=rank, own=len(range(rank, 52, cp_size))) in found
        injected_elsewhere = kind in ("wrong-loc", "shift-positions")
        assert ("other positions or cache locations than the other ranks" in found) is injected_elsewhere
        if injected_elsewhere:  # of two ranks that differ neither is the odd one
            odd = "0, 1" if cp_size == 2 else str(rank)
            assert f"; attn_cp_rank {odd}: other positions" in found


@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_spoilt_rows_are_not_written(gloo: Launcher, cp_size: int) -> None:
    swapped = one(gloo, cp_size, Batch((4 * cp_size,), fault="swap-rows@1"))
    for outcome in swapped:
        # Every row of rank 1 moved, so each of them and none else has lost its place.
        assert (outcome.locations == -1).nonzero().flatten().tolist() == list(range(1, 4 * cp_size, cp_size))
    shifted = one(gloo, cp_size, Batch((4 * cp_size,), fault="shift-positions@1"))
    assert (shifted[1].locations == -1).all()
    assert torch.equal(shifted[0].locations, shifted[0].cache_loc)
    wrong = one(gloo, cp_size, Batch((4 * cp_size,), fault="wrong-loc@1"))
    assert (wrong[1].locations == -1).nonzero().flatten().tolist() == [4 * cp_size - 1]


@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_a_dropped_row_is_found_without_addresses(gloo: Launcher, cp_size: int) -> None:
    text = one_text(one(gloo, cp_size, Batch((29,), level="shape", fault="drop-row@0")))
    assert "attn_cp_rank 0: a captured layer delivered 1 row(s) too few" in text


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("level", ["rows", "shape"])
def test_whole_hidden_rows_with_local_positions(gloo: Launcher, cp_size: int, level: str) -> None:
    by_rank = one(gloo, cp_size, Batch((5 * cp_size,), level=level, local_positions_on=1))
    tokens = 5 * cp_size
    assert f"attn_cp_rank 1: {tokens} hidden rows, 5 positions, {tokens} cache locations" in one_text(by_rank)
    assert by_rank[1].locations is None, "nothing may be written, not even what fits"


def test_a_location_outside_the_window_pool(gloo: Launcher) -> None:
    by_rank = one(gloo, 4, Batch((18,), unmapped=(3, 17)))
    assert "2 cache location(s) have no slot in the sliding-window pool" in one_text(by_rank)
    for outcome in by_rank:
        assert (outcome.locations == -1).nonzero().flatten().tolist() == [3, 17]


def test_the_group_serves_on_after_a_refusal(gloo: Launcher) -> None:
    good = Batch((21, 3))
    batches = [Batch((21, 3), fault="drop-row@3"), good, Batch((21, 3), fault="swap-rows@0"), good]
    refused, right, refused_again, right_again = gloo.run(4, batches)
    assert one_text(refused) != one_text(refused_again)
    assert_right(good, 4, right)
    assert_right(good, 4, right_again)


def test_the_first_traceback_of_a_failing_rank_is_shown(gloo: Launcher) -> None:
    with pytest.raises(GlooFailed, match=r"rank \d of 2:(.|\n)*ConfigError: SGLANG_DSPARK_CP_FAULT='nonsense'"):
        gloo.run(2, [Batch((4,), fault="nonsense")])
