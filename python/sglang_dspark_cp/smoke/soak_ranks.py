"""The ranks of a soak: those of `prefill` and `decode`, until told to stop.

Client aborts go through SGLang's own `Scheduler.abort_request` on prefill (taken in by rank 0 and handed to all CP
ranks, as SGLang does) and `MooncakeKVReceiver.abort` on decode.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from . import geometry as g
from .decode import REQUEST_SLOTS, Asked, DecodeRank, Received
from .prefill import PrefillRank, PrefillReport, RequestReport
from .processes import RankConfig
from .ranks import EMPTY, prefill_tag
from .workload import Prompt

IDLE_S = 0.004


class _Tally(list[Any]):
    """In place of a list that would grow for as long as the run lasts: keeps what a report needs."""

    def __init__(self) -> None:
        super().__init__()
        self.noted = self.failed = 0
        self.components: Counter[str] = Counter()

    def append(self, item: Any) -> None:
        self.noted += 1
        if hasattr(item, "component"):
            self.components[item.component] += item.nbytes
            self.failed += item.status != 0


@dataclass
class SoakPrefillReport:
    """One prefill rank after a soak.

    Attributes:
        tables: entries left in SGLang's and this package's tables although no request is left.
        held: slots and buffers that no request can hold any more: request slots, metadata buffers, open requests.
    """

    cp_rank: int
    ended: int
    counters: dict[str, int]
    errors: list[str]
    leaked_pages: int
    held: dict[str, int]
    tables: dict[str, int]
    writes: dict[str, int]
    write_failures: int


class SoakPrefillRank(PrefillRank):
    """The `prefill` rank until it is told to stop. Rank 0 takes commands; options: `commands`."""

    def __init__(self, config: RankConfig, report: Callable[[Any], None]) -> None:
        super().__init__(config, report)
        self.memory.fill(prefill_tag(config.rank))  # all pages are there from the start: memory can be judged
        self.memory.writes, self.model_collectives, self.forward_tokens = _Tally(), _Tally(), _Tally()
        self.commands: Connection | None = config.options["commands"] if config.rank == 0 else None
        self.plans: dict[str, str] = {}
        self.ended = 0
        self.stopping = False

    def soak(self) -> SoakPrefillReport:
        """Serve until the command `stop`."""
        queue = self.scheduler.disagg_prefill_bootstrap_queue
        while not self.stopping:
            for command, value in self._next_commands():
                if command == "request":
                    req = self.sglang.make_request(value, self.server_args)
                    self.reports[req.rid] = RequestReport(value.room, value.name, len(value.tokens))
                    queue.add(req, num_kv_heads=1)
                elif command == "abort":
                    self._abort(value)
                else:
                    self.stopping = True
            if not self.step():
                time.sleep(IDLE_S)
        return self._soak_report()

    def _next_commands(self) -> list[tuple[str, Any]]:
        """What rank 0 received and what its clients' plans ask for now, the same on every rank."""
        group = self.scheduler.attn_cp_cpu_group
        commands: list[tuple[str, Any]] = []
        if self.commands is not None:
            while self.commands.poll(0):
                command, value, plan = self.commands.recv()
                if plan:
                    self.plans[f"room-{value.room}"] = plan
                commands.append((command, value))
            commands += [("abort", rid) for rid in self._due()]
        data = pickle.dumps(commands) if commands else b""
        size = torch.tensor([len(data)])
        dist.broadcast(size, src=0, group=group)
        if not int(size):
            return []
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(size)).byte()
        dist.broadcast(payload, src=0, group=group)
        found: list[tuple[str, Any]] = pickle.loads(payload.numpy().tobytes())
        return found

    def _due(self) -> Iterator[str]:
        """Requests that are now where their client aborts them."""
        if not self.plans:
            return
        s = self.scheduler
        places = {
            "bootstrapping": s.disagg_prefill_bootstrap_queue.queue,
            "waiting": s.waiting_queue,
            "chunks": [s.chunked_req] if s.chunked_req is not None else [],
            "transfer": s.disagg_prefill_inflight_queue,
        }
        for place, reqs in places.items():
            for req in reqs:
                if self.plans.get(req.rid) == place:
                    del self.plans[req.rid]
                    self.report(("aborting", req.bootstrap_room, place))
                    yield req.rid

    def _abort(self, rid: str) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        if rid in self.reports:
            # SGLang takes every id that begins with the given one; rooms have a fixed number of digits here.
            self.scheduler.abort_request(AbortReq(rid=rid))

    def _finished(self, reqs: list[Any], *_: Any) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        for req in reqs:
            reason = req.finished_reason
            self._end(req, reason.message if isinstance(reason, FINISH_ABORT) else "")

    def _aborted(self, answer: Any, req: Any) -> None:
        self._end(req, "Aborted")

    def _end(self, req: Any, failure: str) -> None:
        known = self.reports.pop(req.rid)  # KeyError: a request ended twice
        self.plans.pop(req.rid, None)
        self.ended += 1
        if self.config.rank == 0:
            self.report(("prefill-end", known.room, failure))

    def _next_batch(self) -> Any:
        """As many waiting requests as surely find pages; the others wait, as in SGLang."""
        s = self.scheduler
        room = self._pages_left() - self._still_needed(s.chunked_req)
        fits = 0
        for req in s.waiting_queue:
            room -= -(-len(req.origin_input_ids) // g.PAGE) + 1
            if room < 0:
                break
            fits += 1
        s.waiting_queue, kept = s.waiting_queue[:fits], s.waiting_queue[fits:]
        batch = super()._next_batch()
        s.waiting_queue += kept
        return batch

    def _pages_left(self) -> int:
        allocator, cache = self.scheduler.token_to_kv_pool_allocator, self.scheduler.tree_cache
        full = swa = 0
        if not cache.disable:
            full, swa = cache.full_evictable_size(), cache.swa_evictable_size()
        return int(min(allocator.full_available_size() + full, allocator.swa_available_size() + swa)) // g.PAGE

    def _still_needed(self, req: Any) -> int:
        return 0 if req is None else -(-(len(req.origin_input_ids) - self.sglang.end_of(req)) // g.PAGE) + 1

    def _soak_report(self) -> SoakPrefillReport:
        from ..adapters import runtime as state

        s, full = self.scheduler, self._report("")
        assert isinstance(full, PrefillReport)
        assert isinstance(self.memory.writes, _Tally)
        manager = s.disagg_prefill_bootstrap_queue.kv_manager
        ledger = state._runtime.ledger if state._runtime is not None else None
        tables = {name: len(getattr(manager, name)) for name in ("request_status", "transfer_infos", "failure_records")}
        if ledger is not None:
            tables |= {"ledger_progress": len(ledger._progress), "ledger_failed": len(ledger._failed)}
        buffers = s.req_to_metadata_buffer_idx_allocator
        return SoakPrefillReport(
            cp_rank=self.config.rank,
            ended=self.ended,
            counters=full.counters,
            errors=full.errors,
            leaked_pages=full.leaked_pages,
            held={
                "request_slots": s.req_to_token_pool.size - s.req_to_token_pool.available_size(),
                "metadata_buffers": buffers.size - buffers.available_size(),
                "open_requests": len(self.reports),
            },
            tables=tables,
            writes=dict(self.memory.writes.components),
            write_failures=self.memory.writes.failed,
        )


@dataclass
class SoakDecodeReport:
    """One decode rank after a soak: pages and slots that nobody holds and that are not free, and SGLang's tables."""

    rank: int
    leaked_pages: int
    leaked_slots: int
    tables: dict[str, int] = field(default_factory=dict)


class SoakDecodeRank(DecodeRank):
    """The `decode` rank until it is told to stop. Pages and slots are given out oldest first, as by SGLang's allocator.

    Options: `commands`.
    """

    def __init__(self, config: RankConfig, report: Callable[[Any], None]) -> None:
        super().__init__(config, report)
        self.commands: Connection = config.options["commands"]
        self.pages = deque(range(1, g.POOL_PAGES))
        self.slots = deque(range(REQUEST_SLOTS - 1))
        self.waiting: deque[tuple[Prompt, float | None]] = deque()
        self.open: dict[int, Asked] = {}
        self.abort_at: dict[int, float] = {}
        self.stopping = False

    def _join(self, options: dict[str, Any]) -> None:
        """Alone in its process group, so that it can be replaced; for SGLang it is rank r of `dp_size`."""
        self.sglang.join_alone(options["dist_port"], dp_rank=self.config.rank, dp_size=options["dp_size"])

    def soak(self) -> SoakDecodeReport:
        """Ask for KV until the command `stop`."""
        while not self.stopping:
            while self.commands.poll(0):
                command, value, delay = self.commands.recv()
                if command == "request":
                    self.waiting.append((value, delay))
                elif command == "abort":
                    self._abort(value)
                else:
                    self.stopping = True
            self._begin()
            now = time.monotonic()
            for room in [room for room, due in self.abort_at.items() if now >= due]:
                self.report(("aborting", room, "decode"))
                self._abort(room)
            if not self._poll():
                time.sleep(IDLE_S)
        tables = {
            name: len(getattr(self.manager, name))
            for name in ("request_status", "failure_records", "prefill_response_tracker")
        }
        held = g.POOL_PAGES - 1 - len(self.pages), REQUEST_SLOTS - 1 - len(self.slots)
        return SoakDecodeReport(self.config.rank, *held, tables)

    def _begin(self) -> None:
        while self.waiting and self.slots:
            prompt, delay = self.waiting[0]
            count = -(-len(prompt.tokens) // g.PAGE)
            if count > len(self.pages):
                return
            self.waiting.popleft()
            if not self.manager.try_ensure_parallel_info(self.address):
                self.report(("decode-end", Received(prompt.room, self.config.rank, False, "prefill does not answer")))
                continue
            pages = [self.pages.popleft() for _ in range(count)]
            self._empty(pages)
            asked = self.ask(prompt, self.slots.popleft(), pages)
            self.open[prompt.room] = asked
            if delay is not None:
                self.abort_at[prompt.room] = time.monotonic() + delay

    def _empty(self, pages: list[int]) -> None:
        """What a page held before must not pass for what should arrive."""
        for name, pointers, _, _ in self.memory.components():
            if not name.startswith(("c128_state", "request_row")):  # those are not by page
                for buffer in range(len(pointers)):
                    for page in pages:
                        self.memory.page(name, buffer, page).fill_(EMPTY)

    def _abort(self, room: int) -> None:
        self.abort_at.pop(room, None)
        if room in self.open:
            self.open[room].receiver.abort()
            return
        for entry in [entry for entry in self.waiting if entry[0].room == room]:
            self.waiting.remove(entry)
            self.report(("decode-end", Received(room, self.config.rank, False, "Aborted before it was asked for")))

    def _poll(self) -> bool:
        from sglang.srt.disaggregation.base.conn import KVPoll

        ended = False
        for room, asked in list(self.open.items()):
            poll = asked.receiver.poll()
            if poll not in (KVPoll.Success, KVPoll.Failed):
                continue
            received = self.read(asked) if poll == KVPoll.Success else self.failed(asked)
            if received.ok:
                asked.receiver.clear()
            del self.open[room]
            self.abort_at.pop(room, None)
            self.pages.extend(asked.pages)
            self.slots.append(asked.slot)
            self.report(("decode-end", received))
            ended = True
        return ended
