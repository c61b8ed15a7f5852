"""From arrived rows to a request whose draft KV may be sent: the bookkeeping of one prefill worker.

One `BatchProof` accompanies a prefill batch from before its forward to the processing of its result; one `Ledger`
per process knows which positions of which request were injected and proved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..errors import AlignmentError, TransferError
from .align import DEVICE_WORDS, HostCounts, explain
from .gather import ArrivedRows
from .rows import NOWHERE, Found, Placed, place

ToSwa = Callable[[torch.Tensor], torch.Tensor]
"""Full cache locations [T] -> sliding-window pool slots [T]; a slot <= 0 means that there is none."""
GatherWords = Callable[[torch.Tensor], list[list[int]]]
"""[WORDS] int64 on the CPU -> the words of every CP rank, over the CPU group; same result on every rank."""

MAX_OPEN_REQUESTS = 65536
"""Requests that never reach a send (aborted while queued) leave an entry; the oldest go beyond this number."""

NOT_WRITTEN = NOWHERE
"""A cache location that SGLang's pool maps to slot -1, which its row writers skip."""


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class GatherSpan:
    """Time of one collective, without waiting for it: two events on a GPU, the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._events = [_event() for _ in range(2)] if device.type == "cuda" else []
        self._times: list[float] = []

    def mark(self) -> None:
        """Call before and after the collective."""
        if self._events:
            self._events[len(self._times)].record()
        self._times.append(time.perf_counter())

    def seconds(self) -> float:
        """Call only after the batch's results reached the host."""
        if self._events:
            return float(self._events[0].elapsed_time(self._events[1])) / 1000
        return self._times[1] - self._times[0]


class BatchProof:
    """The proof of one prefill batch on this rank.

    Args:
        request_ids, prefix_lens, extend_lens: of the batch's requests, in batch order.
        check_shape: levels `shape` and `rows`.
        check_rows: level `rows`.
    """

    def __init__(
        self,
        request_ids: Sequence[str],
        prefix_lens: Sequence[int],
        extend_lens: Sequence[int],
        *,
        check_shape: bool = True,
        check_rows: bool = True,
    ) -> None:
        self.request_ids = tuple(request_ids)
        self.spans = tuple((start, start + length) for start, length in zip(prefix_lens, extend_lens, strict=True))
        self.tokens = sum(extend_lens)
        self.rows = self.tokens
        """Rows that are written; fewer than tokens where only reachable rows are sent."""
        self.check_shape = check_shape
        self.check_rows = check_rows
        self.used_cp = False
        self.runs: dict[str, _Progress] = {}
        """What the ledger knows of each request; a request that starts anew meanwhile has another entry there."""
        self._hidden: torch.Tensor | None = None
        self._address: torch.Tensor | None = None
        self._order: torch.Tensor | None = None
        self._ticket: torch.Tensor | None = None
        self.gather_span: GatherSpan | None = None
        """Where the time of the gather can be read once the batch's results are on the host."""
        self._missing_rows = 0
        self._counts = HostCounts(self.tokens, 0, 0, 0, 0, 0, 0, 0, 0)
        self._found: Found | None = None

    def note_local(self, hidden: torch.Tensor) -> None:
        """Hidden rows [T, A * H] that this rank computed whole (a batch with fewer tokens than CP ranks)."""
        self._hidden = self._ticket = hidden

    @property
    def payload(self) -> torch.Tensor | None:
        """The rows, [N, width], until they are admitted."""
        return self._hidden

    def note_arrived(
        self, arrived: ArrivedRows, missing_rows: int, ticket: torch.Tensor | None = None, rows: int | None = None
    ) -> None:
        """Rows that the gather brought.

        Args:
            arrived: the rows.
            missing_rows: how many rows this rank itself failed to capture.
            ticket: [T, 1], what goes through the engine in place of the rows and comes back to `admit`; None: the
                rows themselves do.
            rows: how many of them belong to tokens; None: all T.
        """
        self.used_cp = True
        self._hidden = arrived.hidden
        self._ticket = arrived.hidden if ticket is None else ticket
        self._address = arrived.address
        self._missing_rows = missing_rows
        self.rows = self.tokens if rows is None else rows
        self._order = arrived.order

    def admit(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache_loc: torch.Tensor,
        *,
        expected_width: int,
        to_swa: ToSwa,
    ) -> Placed | None:
        """Check what is about to be injected; no host sync.

        Args:
            hidden: [T, ...], the rows or their ticket as the engine hands them to injection.
            positions, cache_loc: [T], on one device.
            expected_width: elements per row as the draft takes them up.

        Returns:
            Where the rows go, in their own order, [N], with `NOT_WRITTEN` for each row that failed its proof or belongs
            to no token; None if nothing may be written at all. Never raises: the verdict is settled by all ranks
            together, see `settle`.
        """
        ours, ticket = self._hidden, self._ticket
        foreign = ours is None or ticket is None or hidden.data_ptr() != ticket.data_ptr()
        self._counts = HostCounts(
            expected_rows=self.tokens,
            hidden_rows=hidden.shape[0],
            positions=positions.shape[0],
            locations=cache_loc.shape[0],
            width=hidden.shape[1] if ours is None or ticket is ours else ours.shape[1],
            expected_width=expected_width,
            missing_rows=self._missing_rows,
            foreign_hidden=int(foreign),
            injected=1,
        )
        address, self._hidden, self._address, self._ticket = self._address, None, None, None
        unproved = self._missing_rows and not self.check_rows  # with addresses, the rows themselves fail below
        if self.check_shape and (unproved or not self._counts.consistent()):
            return None
        placed = place(
            positions,
            cache_loc,
            to_swa(cache_loc),
            order=self._order,
            address=address,
            check=self.check_rows and bool(self.tokens),
        )
        self._found = placed.found
        return placed

    def drop_hidden(self) -> None:
        """Let go of the raw hidden rows on every exit path."""
        self._hidden = self._address = self._order = self._ticket = None

    def words(self) -> torch.Tensor:
        """This rank's verdict, [WORDS] int64 on the CPU. Call only after the batch's results reached the host.

        Called too early it says that the device's words are not there; it never raises, so that no rank is left alone.
        """
        found = None if self._found is None else self._found.read()
        unread = int(self._found is not None and found is None)
        tail = [0] * DEVICE_WORDS if found is None else found
        assert len(tail) == DEVICE_WORDS
        tail[2] = self.tokens - tail[2] if tail[2] else -1
        return torch.tensor(replace(self._counts, unread=unread).words() + tail, dtype=torch.int64)


@dataclass
class Counters:
    """What this worker did, for reports and metrics."""

    forwards: int = 0
    cp_forwards: int = 0
    aux_collectives: int = 0
    gather_bytes: int = 0
    """Bytes that this rank received."""
    rows_on_shard: int = 0
    """Rows that this rank's share of the batches had (P per CP forward)."""
    rows_captured: int = 0
    """Rows that this rank gave to the gathers."""
    rows_gathered: int = 0
    """Rows of tokens that came out of them."""
    rows_injected: int = 0
    """Rows that were written, also of batches too small for CP."""
    rows_sent: int = 0
    """Rows of final windows, per stage, that were given to the transfer."""
    heads_sent: int = 0
    """Rows for the LM head that this rank gave to the gathers."""
    alignment_failures: int = 0
    requests_refused: int = 0


@dataclass
class _Progress:
    """One request: positions [start, computed) were run through the target, [start, injected) were also proved."""

    start: int
    computed: int
    injected: int


@dataclass
class Ledger:
    """All requests of one prefill worker. Used by the scheduler thread only."""

    cp_rank: int
    current: BatchProof | None = None
    counters: Counters = field(default_factory=Counters)
    errors: list[str] = field(default_factory=list)
    """Texts of every AlignmentError and TransferError of this worker, oldest first."""
    tainted_pages: set[int] = field(default_factory=set)
    """KV pages of refused requests that a prefix cache may still hand out; empty in normal service."""
    _progress: dict[str, _Progress] = field(default_factory=dict)
    _failed: dict[str, str] = field(default_factory=dict)

    def begin(self, proof: BatchProof) -> None:
        """Open a batch, before its forward. A request that starts anew (not at its own end) is counted anew."""
        self.current = proof
        self.counters.forwards += 1
        for request_id, (start, end) in zip(proof.request_ids, proof.spans, strict=True):
            progress = self._progress.pop(request_id, None)
            if progress is None or progress.computed != start:
                progress = _Progress(start, end, start)
            else:
                progress.computed = end
            self._progress[request_id] = progress  # last in order: the oldest entry is the longest unused
            proof.runs[request_id] = progress
        while len(self._progress) > MAX_OPEN_REQUESTS:
            self._progress.pop(next(iter(self._progress)))

    def settle(self, proof: BatchProof, gather_words: GatherWords) -> AlignmentError | None:
        """Reach one verdict about a batch together with all CP ranks.

        Call on every rank, once per batch, in the same order. Cost: `gather_words`, at level `off` nothing.

        Returns:
            The error that holds for the whole batch, the same on every rank, or None. It is returned, not raised,
            because the scheduler has to go on serving other requests: the caller fails this batch's requests with it.
        """
        reason = explain(gather_words(proof.words())) if proof.check_shape else None
        if reason is None:
            for request_id, (start, end) in zip(proof.request_ids, proof.spans, strict=True):
                progress = proof.runs.get(request_id)
                if progress is not None and progress.injected == start:
                    progress.injected = end
            self.counters.rows_injected += proof.rows
            return None
        error = AlignmentError(
            f"draft KV of a prefill batch of {proof.tokens} tokens is not aligned"
            f" (request ids {', '.join(proof.request_ids)}): {reason}. Allowed is one hidden row per"
            " token with the token's own position and cache location. The batch's requests are failed and nothing of"
            " them is sent; this is a defect of the serving stack, please report it with this text."
        )
        self.counters.alignment_failures += 1
        self.errors.append(f"AlignmentError: {error}")
        for request_id in proof.request_ids:
            self._failed.setdefault(request_id, f"AlignmentError: {error}")
        return error

    def failed_requests(self) -> tuple[str, ...]:
        """Refused requests that were not forgotten yet; empty in normal service."""
        return tuple(self._failed)

    def failure(self, request_id: str) -> str | None:
        """Why nothing more of this request may be sent, or None."""
        return self._failed.get(request_id)

    def require_complete(self, request_id: str, length: int, window: int) -> str | None:
        """Check, before a request's last chunk is sent, that its final window was injected.

        Args:
            length: L, tokens of the prompt that prefill materialised.
            window: W.

        Returns:
            None if each row in [max(0, L - W), L) that this request computed was injected and proved (rows of a
            cached prefix were injected by the request that computed them), else the text of a TransferError.
        """
        failed = self.failure(request_id)
        if failed is not None:
            return failed
        progress = self._progress.get(request_id)
        if progress is not None and progress.injected == progress.computed == length:
            return None
        done = "none" if progress is None else f"[{progress.start}, {progress.injected})"
        error = TransferError(
            f"draft KV of request {request_id} is not complete on attn_cp_rank {self.cp_rank}: its final window is"
            f" [{max(0, length - window)}, {length}), injected positions are {done}. The request is failed, others"
            " go on."
        )
        self.counters.requests_refused += 1
        text = f"TransferError: {error}"
        self.errors.append(text)
        self._failed[request_id] = text
        return text

    def refuse_tainted(self, request_id: str, prefix_pages: set[int]) -> None:
        """Fail a request whose cached prefix lies on pages of a refused one."""
        if prefix_pages & self.tainted_pages and request_id not in self._failed:
            error = AlignmentError(
                f"request {request_id} continues a cached prefix whose draft KV was refused (attn_cp_rank"
                f" {self.cp_rank}); send it again"
            )
            self.errors.append(f"AlignmentError: {error}")
            self._failed[request_id] = f"AlignmentError: {error}"

    def forget(self, request_ids: Sequence[str]) -> bool:
        """Drop finished requests.

        Returns:
            True if the last refused request is among them: no request holds tainted pages any more, so the caller
            has to empty the prefix cache and clear `tainted_pages`.
        """
        refused = [request_id for request_id in request_ids if self._failed.pop(request_id, None) is not None]
        for request_id in request_ids:
            self._progress.pop(request_id, None)
        return bool(refused) and not self._failed
