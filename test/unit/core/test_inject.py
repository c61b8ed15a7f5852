"""What may be injected, and what of a request may be sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark_cp.core import inject
from sglang_dspark_cp.core.align import HOST_WORDS, WORDS, HostCounts, explain
from sglang_dspark_cp.core.gather import ArrivedRows
from sglang_dspark_cp.core.inject import NOT_WRITTEN, BatchProof, Ledger
from sglang_dspark_cp.core.rows import digest

torch.set_num_threads(1)

WIDTH = 6
WINDOW = 128


def to_swa(cache_loc: torch.Tensor) -> torch.Tensor:
    """Locations from 500 on have no slot."""
    return torch.where(cache_loc >= 500, 0, cache_loc)


class Batch:
    """Two requests of 3 and 4 tokens whose rows arrived as they should."""

    def __init__(self, *, shape: bool = True, rows: bool = True, addressed: bool = True) -> None:
        self.proof = BatchProof(["a", "b"], [0, 256], [3, 4], check_shape=shape, check_rows=rows)
        self.positions = torch.tensor([0, 1, 2, 256, 257, 258, 259])
        self.cache_loc = torch.tensor([10, 11, 12, 40, 41, 42, 43])
        self.hidden = torch.randn(7, WIDTH)
        self.address = torch.stack((self.positions, self.cache_loc), dim=1) if addressed else None

    def arrive(self, missing_rows: int = 0) -> Batch:
        self.proof.note_arrived(ArrivedRows(self.hidden, self.address, 0), missing_rows)
        return self

    def admit(self, **change: Any) -> torch.Tensor | None:
        """The locations; `placed` has the rest."""
        self.placed = self.proof.admit(
            change.get("hidden", self.hidden),
            change.get("positions", self.positions),
            change.get("cache_loc", self.cache_loc),
            expected_width=change.get("expected_width", WIDTH),
            to_swa=to_swa,
        )
        return None if self.placed is None else self.placed.locations

    def counts(self) -> HostCounts:
        return HostCounts(*self.proof.words().tolist()[:HOST_WORDS])

    def device(self) -> list[int]:
        return self.proof.words().tolist()[HOST_WORDS:]


# ---------------------------------------------------------------------------------------------------------- the proof


def test_a_fine_batch_is_written_as_it_stands() -> None:
    batch = Batch().arrive()
    locations = batch.admit()
    assert locations is not None
    assert torch.equal(locations, batch.cache_loc)
    assert batch.proof.used_cp
    assert batch.counts() == HostCounts(7, 7, 7, 7, WIDTH, WIDTH, 0, 0, 1)
    assert batch.device() == [0, 0, -1, 0, int(digest(batch.positions, batch.cache_loc))]


def test_rows_computed_whole_need_no_address() -> None:
    """A batch with fewer tokens than ranks: no gather."""
    batch = Batch()
    batch.proof.note_local(batch.hidden)
    locations = batch.admit()
    assert locations is not None
    assert torch.equal(locations, batch.cache_loc)
    assert not batch.proof.used_cp
    assert batch.counts().consistent()


def clone(batch: Batch) -> dict[str, Any]:
    return {"hidden": batch.hidden.clone()}


INCONSISTENT: dict[str, tuple[Callable[[Batch], dict[str, Any]], dict[str, int]]] = {
    "a hidden row less": (lambda b: {"hidden": b.hidden[:6]}, {"hidden_rows": 6}),
    "a position less": (lambda b: {"positions": b.positions[:6]}, {"positions": 6}),
    "a location less": (lambda b: {"cache_loc": b.cache_loc[:6]}, {"locations": 6}),
    "a location more": (lambda b: {"cache_loc": torch.cat([b.cache_loc, b.cache_loc[:1]])}, {"locations": 8}),
    "all too few": (
        lambda b: {"hidden": b.hidden[:6], "positions": b.positions[:6], "cache_loc": b.cache_loc[:6]},
        {"hidden_rows": 6, "positions": 6, "locations": 6},
    ),
    "narrow rows": (lambda b: {"hidden": b.hidden[:, :4]}, {"width": 4}),
    "the draft takes wider rows": (lambda b: {"expected_width": 9}, {"expected_width": 9}),
    "hidden rows of another forward": (clone, {"foreign_hidden": 1}),
}


@pytest.mark.parametrize("shape_only", [False, True])
@pytest.mark.parametrize("name", INCONSISTENT)
def test_nothing_of_an_inconsistent_batch_is_written(name: str, shape_only: bool) -> None:
    spoil, counts = INCONSISTENT[name]
    batch = Batch(rows=not shape_only, addressed=not shape_only).arrive()
    assert batch.admit(**spoil(batch)) is None
    assert not batch.counts().consistent()
    for field, value in counts.items():
        assert getattr(batch.counts(), field) == value
    assert batch.device() == [0, 0, -1, 0, 0]


def test_rows_that_no_capture_produced_are_foreign() -> None:
    batch = Batch()
    assert batch.admit() is None
    assert batch.counts().foreign_hidden == 1


def test_rows_cannot_be_admitted_twice_or_after_they_were_dropped() -> None:
    batch = Batch().arrive()
    assert batch.admit() is not None
    assert batch.admit() is None
    dropped = Batch().arrive()
    dropped.proof.drop_hidden()
    assert dropped.admit() is None
    assert dropped.counts().foreign_hidden == 1


def test_a_batch_that_left_without_injection() -> None:
    counts = Batch().arrive().counts()
    assert (counts.injected, counts.expected_rows) == (0, 7)
    assert not counts.consistent()


@pytest.mark.parametrize("missing", [1, -2])
def test_missing_rows_are_told_and_fail_by_their_address(missing: int) -> None:
    batch = Batch()
    assert batch.address is not None
    batch.address[::2] = -1  # a rank whose capture went wrong does not vouch for any of its rows
    locations = batch.arrive(missing).admit()
    assert locations is not None
    assert locations.tolist() == [-1, 11, -1, 40, -1, 42, -1]
    assert batch.counts().missing_rows == missing
    assert batch.device()[:4] == [4, 4, 0, 0]


def test_masked_rows_are_not_written() -> None:
    batch = Batch()
    assert batch.address is not None
    batch.address[[1, 2]] = batch.address[[2, 1]]  # swapped
    batch.address[4, 0] += 1  # another position
    batch.address[5, 1] += 1  # another location
    batch.cache_loc[6] = 500  # no slot, though the address agrees
    batch.address[6, 1] = 500
    locations = batch.arrive().admit()
    assert locations is not None
    assert NOT_WRITTEN == -1
    assert locations.tolist() == [10, NOT_WRITTEN, NOT_WRITTEN, 40, NOT_WRITTEN, NOT_WRITTEN, NOT_WRITTEN]
    assert batch.device()[:4] == [3, 3, 1, 1]
    assert locations.dtype == batch.cache_loc.dtype


def test_unmapped_rows_of_a_batch_without_addresses() -> None:
    batch = Batch()
    batch.cache_loc[2] = 501
    batch.proof.note_local(batch.hidden)
    locations = batch.admit()
    assert locations is not None
    assert locations.tolist() == [10, 11, NOT_WRITTEN, 40, 41, 42, 43]
    assert batch.device()[:4] == [0, 0, -1, 1]


@given(st.permutations(range(7)))
def test_exactly_the_rows_in_their_place_are_written(order: list[int]) -> None:
    batch = Batch()
    assert batch.address is not None
    batch.address = batch.address[order]
    locations = batch.arrive().admit()
    assert locations is not None
    wanted = batch.cache_loc.tolist()
    assert locations.tolist() == [wanted[row] if source == row else NOT_WRITTEN for row, source in enumerate(order)]


def test_level_shape_counts_only() -> None:
    batch = Batch(rows=False, addressed=False).arrive()
    batch.cache_loc[0] = 500
    locations = batch.admit()
    assert locations is not None
    assert torch.equal(locations, batch.cache_loc)
    assert batch.device() == [0, 0, -1, 0, 0]


def test_level_off_checks_nothing() -> None:
    batch = Batch(shape=False, rows=False, addressed=False).arrive()
    batch.cache_loc[0] = 500  # no slot
    locations = batch.admit(expected_width=99)
    assert locations is not None
    assert torch.equal(locations, batch.cache_loc)
    assert batch.proof.words().tolist()[HOST_WORDS:] == [0, 0, -1, 0, 0]


def test_level_off_reads_nothing_beyond_the_end() -> None:
    batch = Batch(shape=False, rows=False, addressed=False).arrive()
    with pytest.raises(ValueError, match="7 positions, 5 cache locations and 5 pool slots"):
        batch.admit(cache_loc=batch.cache_loc[:5])


def arranged_batch(order: Sequence[int], ticket: bool = True) -> tuple[Batch, torch.Tensor]:
    """The batch with its rows as a gather leaves them; what the engine hands to `admit`."""
    batch = Batch()
    rows = torch.tensor(order)
    picked = rows.clamp(min=0)
    assert batch.address is not None
    batch.hidden, batch.address = batch.hidden[picked], batch.address[picked]
    through = torch.empty(7, 1) if ticket else batch.hidden
    arrived = ArrivedRows(batch.hidden, batch.address, 0, rows)
    batch.proof.note_arrived(arrived, 0, through, int((rows >= 0).sum()))
    return batch, through


@given(st.permutations([0, 1, 2, 3, 4, 5, 6, -1, -1]))
def test_locations_and_positions_follow_the_rows(order: list[int]) -> None:
    batch, ticket = arranged_batch(order)
    assert batch.proof.payload is batch.hidden
    locations = batch.admit(hidden=ticket)
    assert locations is not None
    assert locations.tolist() == [NOT_WRITTEN if row < 0 else int(batch.cache_loc[row]) for row in order]
    assert batch.placed is not None
    assert batch.placed.positions.tolist() == [0 if row < 0 else int(batch.positions[row]) for row in order]
    assert batch.device()[:4] == [0, 0, -1, 0]
    assert batch.counts() == HostCounts(7, 7, 7, 7, WIDTH, WIDTH, 0, 0, 1)
    assert batch.proof.rows == 7


def test_only_sent_rows_are_written_and_judged() -> None:
    batch, ticket = arranged_batch([5, -1, 2])
    batch.cache_loc[0] = 500  # no slot, and not sent
    locations = batch.admit(hidden=ticket)
    assert locations is not None
    assert locations.tolist() == [42, NOT_WRITTEN, 12]
    assert batch.device()[:4] == [0, 0, -1, 0]
    assert batch.proof.rows == 2


def test_the_first_bad_row_is_named_by_its_global_number() -> None:
    batch, ticket = arranged_batch([6, 4, 2, -1, 0])
    assert batch.address is not None
    batch.address[1, 0] += 1  # global row 4
    batch.address[2, 1] += 1  # global row 2
    batch.address[3] = 77  # padding
    locations = batch.admit(hidden=ticket)
    assert locations is not None
    assert locations.tolist() == [43, NOT_WRITTEN, NOT_WRITTEN, NOT_WRITTEN, 10]
    assert batch.device()[:4] == [1, 1, 2, 0]


def test_another_ticket_is_foreign() -> None:
    batch, _ = arranged_batch([0, 1, 2, 3, 4, 5, 6])
    assert batch.admit(hidden=torch.empty(7, 1)) is None
    assert batch.counts().foreign_hidden == 1


def test_words_that_the_device_has_not_written_are_refused() -> None:
    """On a GPU the words reach the host by themselves: whoever reads too early must not take zeros for a verdict."""
    batch = Batch().arrive()
    batch.admit()
    assert batch.placed is not None
    assert batch.placed.found is not None
    found = batch.placed.found
    arrived = found.memory.clone()
    for another in (0, found.number + 4096):
        found.memory.copy_(torch.tensor([0, 0, 0, 0, 0, another]))
        reason = explain([batch.proof.words().tolist()])
        assert reason is not None
        assert reason.endswith("what the device found when it compared the rows did not reach the host")
    found.memory.copy_(arrived)
    assert explain([batch.proof.words().tolist()]) is None


def test_words_have_their_size_before_and_after() -> None:
    batch = Batch().arrive()
    before = batch.proof.words()
    batch.admit()
    for words in (before, batch.proof.words()):
        assert words.shape == (WORDS,)
        assert words.dtype == torch.int64
        assert words.device.type == "cpu"


# --------------------------------------------------------------------------------------------------------- the ledger


def run_batch(
    ledger: Ledger,
    requests: Sequence[tuple[str, int, int]],
    *,
    aligned: bool = True,
    settle: bool = True,
    check_shape: bool = True,
) -> BatchProof:
    """One batch of (id, prefix, extend) through begin, admit and settle, with this rank alone."""
    ids, prefixes, extends = zip(*requests, strict=True)
    proof = BatchProof(ids, prefixes, extends, check_shape=check_shape, check_rows=check_shape)
    ledger.begin(proof)
    positions = torch.cat([torch.arange(start, end) for start, end in proof.spans])
    cache_loc = torch.arange(1, proof.tokens + 1)
    hidden = torch.zeros(proof.tokens, WIDTH)
    address = torch.stack((positions, cache_loc + (not aligned)), dim=1)
    proof.note_arrived(ArrivedRows(hidden, address, 0), 0)
    proof.admit(hidden, positions, cache_loc, expected_width=WIDTH, to_swa=to_swa)
    if settle:
        assert (settle_alone(ledger, proof) is None) is aligned or not check_shape
    return proof


def settle_alone(ledger: Ledger, proof: BatchProof) -> Exception | None:
    return ledger.settle(proof, lambda words: [words.tolist()])


def test_a_request_of_one_chunk() -> None:
    ledger = Ledger(0)
    run_batch(ledger, [("a", 0, 300), ("b", 256, 5)])
    assert ledger.require_complete("a", 300, WINDOW) is None
    assert ledger.require_complete("b", 261, WINDOW) is None
    assert (ledger.counters.forwards, ledger.counters.rows_injected) == (1, 305)
    assert ledger.errors == []


def test_a_request_of_several_chunks() -> None:
    ledger = Ledger(0)
    for start, length in ((0, 256), (256, 256), (512, 3)):
        run_batch(ledger, [("a", start, length)])
    assert ledger.require_complete("a", 515, WINDOW) is None


def test_chunks_may_overlap_with_the_next_forward() -> None:
    """Overlap scheduling: a chunk is settled after the next one began."""
    ledger = Ledger(0)
    first = run_batch(ledger, [("a", 0, 256)], settle=False)
    second = run_batch(ledger, [("a", 256, 40)], settle=False)
    assert settle_alone(ledger, first) is None
    assert settle_alone(ledger, second) is None
    assert ledger.require_complete("a", 296, WINDOW) is None


@pytest.mark.parametrize("unsettled", [0, 1])
def test_a_chunk_that_was_not_settled(unsettled: int) -> None:
    ledger = Ledger(3)
    run_batch(ledger, [("a", 0, 256)], settle=unsettled != 0)
    run_batch(ledger, [("a", 256, 100)], settle=unsettled != 1)
    text = ledger.require_complete("a", 356, WINDOW)
    assert text is not None
    done = "[0, 256)" if unsettled else "[0, 0)"
    assert text == (
        "TransferError: draft KV of request a is not complete on attn_cp_rank 3: its final window is [228, 356),"
        f" injected positions are {done}. The request is failed, others go on."
    )
    assert ledger.failure("a") == text
    assert ledger.require_complete("a", 356, WINDOW) == text
    assert ledger.errors == [text]
    assert ledger.counters.requests_refused == 1


def test_a_request_that_never_ran() -> None:
    ledger = Ledger(1)
    text = ledger.require_complete("ghost", 5, WINDOW)
    assert text is not None
    assert "on attn_cp_rank 1: its final window is [0, 5), injected positions are none" in text


@pytest.mark.parametrize("length", [99, 101])
def test_another_length_than_was_computed(length: int) -> None:
    ledger = Ledger(0)
    run_batch(ledger, [("a", 0, 100)])
    text = ledger.require_complete("a", length, WINDOW)
    assert text is not None
    assert "injected positions are [0, 100)" in text


@pytest.mark.parametrize("start", [0, 128, 512])
def test_restart_at_another_prefix(start: int) -> None:
    """After a retraction a request is computed anew, from whatever prefix the cache then offers."""
    ledger = Ledger(0)
    run_batch(ledger, [("a", 0, 256)], settle=False)
    run_batch(ledger, [("a", start, 50)])
    assert ledger.require_complete("a", start + 50, WINDOW) is None


def test_a_late_verdict_of_an_abandoned_run_does_not_count() -> None:
    ledger = Ledger(0)
    old = run_batch(ledger, [("a", 0, 256)], settle=False)
    run_batch(ledger, [("a", 128, 50)], settle=False)
    assert settle_alone(ledger, old) is None
    text = ledger.require_complete("a", 178, WINDOW)
    assert text is not None
    assert "injected positions are [128, 128)" in text


def test_a_failed_batch_refuses_its_requests_only() -> None:
    ledger = Ledger(0)
    run_batch(ledger, [("fine", 0, 20)])
    run_batch(ledger, [("a", 0, 10), ("b", 0, 10)], aligned=False)
    for request in ("a", "b"):
        text = ledger.failure(request)
        assert text is not None
        assert text.startswith("AlignmentError: draft KV of a prefill batch of 20 tokens is not aligned")
        assert "request ids a, b" in text
        assert "attn_cp_rank 0: 0 row(s) arrived with another position and 20" in text
        assert ledger.require_complete(request, 10, WINDOW) == text
    assert ledger.failure("fine") is None
    assert ledger.require_complete("fine", 20, WINDOW) is None
    assert ledger.counters.alignment_failures == 1
    assert ledger.counters.rows_injected == 20
    assert len(ledger.errors) == 1


def test_a_failed_chunk_stays_failed_whatever_comes_later() -> None:
    ledger = Ledger(0)
    run_batch(ledger, [("a", 0, 256)], aligned=False)
    run_batch(ledger, [("a", 256, 10)])
    text = ledger.require_complete("a", 266, WINDOW)
    assert text is not None
    assert text.startswith("AlignmentError")


def test_level_off_settles_without_a_collective() -> None:
    ledger = Ledger(0)
    proof = run_batch(ledger, [("a", 0, 10)], settle=False, check_shape=False)

    def never(words: torch.Tensor) -> list[list[int]]:
        raise AssertionError("level off exchanges nothing")

    assert ledger.settle(proof, never) is None
    assert ledger.require_complete("a", 10, WINDOW) is None


def play_ranks(cp_size: int, odd: int) -> tuple[list[Ledger], list[str]]:
    """One batch on every rank, misaligned on rank `odd` alone; all ranks see the words of all."""
    ledgers = [Ledger(rank) for rank in range(cp_size)]
    proofs = [
        run_batch(ledger, [("a", 0, 10), ("b", 64, 6)], aligned=ledger.cp_rank != odd, settle=False)
        for ledger in ledgers
    ]
    shared = [proof.words().tolist() for proof in proofs]
    errors = [ledger.settle(proof, lambda _: shared) for ledger, proof in zip(ledgers, proofs, strict=True)]
    return ledgers, [str(error) for error in errors]


@pytest.mark.parametrize("cp_size", [2, 8])
def test_all_ranks_refuse_the_same_requests_for_the_same_reason(cp_size: int) -> None:
    for odd in range(cp_size):
        ledgers, texts = play_ranks(cp_size, odd)
        assert all(f"attn_cp_rank {odd}: 0 row(s) arrived" in text for text in texts)
        for ledger in ledgers:
            assert ledger.failure("a") == ledger.failure("b") is not None
            assert ledger.counters.alignment_failures == 1


@pytest.mark.parametrize("cp_size", [2, 8])
def test_all_ranks_say_the_same_text(cp_size: int) -> None:
    """`Ledger.settle`: the error is the same on every rank; `core.align`: all fail with the same text."""
    _, texts = play_ranks(cp_size, 1)
    assert len(set(texts)) == 1


def test_no_rank_alone_is_enough_for_all_to_go_on() -> None:
    ledgers, texts = play_ranks(4, -1)
    assert texts == ["None"] * 4
    assert all(ledger.require_complete("b", 70, WINDOW) is None for ledger in ledgers)


# ------------------------------------------------------------------------------------------------- tainted, forgotten


def test_refuse_tainted() -> None:
    ledger = Ledger(2)
    ledger.tainted_pages |= {4, 5}
    ledger.refuse_tainted("clean", {1, 2})
    ledger.refuse_tainted("none", set())
    assert ledger.failure("clean") is None
    assert ledger.failure("none") is None
    ledger.refuse_tainted("a", {5, 9})
    text = ledger.failure("a")
    assert text is not None
    assert text.startswith("AlignmentError: request a continues a cached prefix whose draft KV was refused")
    assert "attn_cp_rank 2" in text
    assert "send it again" in text
    ledger.refuse_tainted("a", {4})
    assert ledger.errors == [text]


def test_an_older_refusal_keeps_its_text() -> None:
    ledger = Ledger(0)
    run_batch(ledger, [("a", 0, 10)], aligned=False)
    text = ledger.failure("a")
    ledger.tainted_pages.add(1)
    ledger.refuse_tainted("a", {1})
    assert ledger.failure("a") == text


def test_forget() -> None:
    ledger = Ledger(0)
    run_batch(ledger, [("fine", 0, 10)])
    run_batch(ledger, [("a", 0, 10), ("b", 0, 10)], aligned=False)
    assert ledger.forget(["fine"]) is False
    assert ledger.forget(["a", "unknown"]) is False  # b is still refused
    assert ledger.failure("a") is None
    assert ledger.failure("b") is not None
    assert ledger.forget(["b"]) is True
    assert ledger.forget(["b"]) is False
    assert ledger.forget([]) is False


def test_a_forgotten_request_may_come_again() -> None:
    ledger = Ledger(0)
    run_batch(ledger, [("a", 0, 10)], aligned=False)
    ledger.forget(["a"])
    run_batch(ledger, [("a", 0, 10)])
    assert ledger.require_complete("a", 10, WINDOW) is None


def test_open_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert inject.MAX_OPEN_REQUESTS == 65536
    monkeypatch.setattr(inject, "MAX_OPEN_REQUESTS", 4)
    ledger = Ledger(0)
    for number in range(7):
        run_batch(ledger, [(f"r{number}", 0, 10)])
    assert list(ledger._progress) == ["r3", "r4", "r5", "r6"]
    assert ledger.require_complete("r6", 10, WINDOW) is None
    # An entry that is gone is refused rather than sent unproved.
    assert ledger.require_complete("r0", 10, WINDOW) is not None


def test_begin_sets_the_current_batch() -> None:
    ledger = Ledger(0)
    assert ledger.current is None
    assert run_batch(ledger, [("a", 0, 1)]) is ledger.current


def test_prefixes_and_lengths_must_match() -> None:
    with pytest.raises(ValueError, match="zip"):
        BatchProof(["a"], [0, 1], [1])


def test_a_late_verdict_does_not_count_for_a_request_that_started_anew() -> None:
    ledger = Ledger(0)
    old = BatchProof(["a"], [0], [256], check_shape=False)
    ledger.begin(old)
    new = BatchProof(["a"], [0], [50], check_shape=False)
    ledger.begin(new)
    ledger.settle(old, lambda words: [words.tolist()])
    assert ledger.require_complete("a", 50, 128) is not None
    ledger.forget(["a"])
    ledger.begin(new)
    ledger.settle(old, lambda words: [words.tolist()])
    ledger.settle(new, lambda words: [words.tolist()])
    assert ledger.require_complete("a", 50, 128) is None


def test_a_request_that_still_runs_chunks_is_not_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_dspark_cp.core.inject.MAX_OPEN_REQUESTS", 2)
    ledger = Ledger(0)
    for name, start in (("long", 0), ("b", 0), ("long", 8), ("c", 0)):
        proof = BatchProof([name], [start], [8], check_shape=False)
        ledger.begin(proof)
        ledger.settle(proof, lambda words: [words.tolist()])
    assert ledger.require_complete("long", 16, 128) is None
    assert ledger.require_complete("b", 8, 128) is not None


def test_rows_of_a_rank_that_missed_some_are_not_written_at_level_shape() -> None:
    proof = BatchProof(["a"], [0], [4], check_rows=False)
    hidden = torch.zeros(4, 6)
    proof.note_arrived(ArrivedRows(hidden, None, 0), 1)
    index = torch.arange(4)
    assert proof.admit(hidden, index, index, expected_width=6, to_swa=lambda loc: loc) is None
