"""One prefill rank: SGLang's scheduler methods, worker, injector, queue and Mooncake manager around a small model."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ..core.draft_prune import parameter_bytes
from . import geometry as g
from . import native
from .arguments import fired_hooks
from .processes import RankConfig
from .ranks import Memory, make_pool, prefill_tag
from .release import installed
from .weights import draft_checkpoint
from .workload import Prompt

REQUEST_SLOTS = 64
MAX_BATCH = 8


@dataclass
class RequestReport:
    """One request as this prefill rank saw it."""

    room: int
    name: str
    tokens: int
    cached: int = 0
    chunks: int = 0
    rows_computed: int = 0
    rows_injected: int = 0
    failure: str = ""


@dataclass(frozen=True)
class Collective:
    """One device collective of the attention-CP group: which forward of the rank, rows and bytes that it gave."""

    forward: int
    rows: int
    nbytes: int


@dataclass
class PrefillReport:
    """One prefill rank after a run."""

    cp_rank: int
    counters: dict[str, int]
    hooks: list[dict[str, Any]]
    errors: list[str]
    requests: list[RequestReport]
    writes: dict[str, int]
    write_failures: int
    forward_tokens: list[int]
    model_collectives: list[Collective]
    leaked_pages: int
    draft_bytes: int
    draft_bytes_stock: int
    """Parameters of the whole draft; counted on rank 0 only."""
    mode: str = ""
    stock_error: str = ""


class PrefillRank:
    """The `prefill` rank."""

    def __init__(self, config: RankConfig, report: Callable[[Any], None]) -> None:
        self.config, self.report = config, report
        options = config.options
        self.cp_size, self.chunk, self.overlap = options["cp_size"], options["chunk"], options["overlap"]
        self.sglang = installed()
        native.load(options["stand_in"])
        from sglang.srt.plugins import load_plugins

        load_plugins()
        self.server_args = pickle.loads(options["server_args"])
        self.sglang.without_gpu()
        self.sglang.publish_prefill(self.server_args, config.rank)
        self.sglang.join_groups(self.cp_size, config.rank, options["dist_port"], dp_size=1, cp_size=self.cp_size)
        self._build_worker(options["fused"])
        self._build_scheduler(options["radix"])

    # -------------------------------------------------------------------------------------------------- bring-up

    def _build_worker(self, fused: bool) -> None:
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        sglang, self.algorithm = self.sglang, SpeculativeAlgorithm.DSPARK
        # Before the hooks are there: what stock would hold. One rank is enough to know.
        self.draft_bytes_stock = parameter_bytes(sglang.build_draft(self.server_args)) if self.config.rank == 0 else 0
        worker_class = self.algorithm.create_worker(self.server_args)
        requests = ReqToTokenPool(REQUEST_SLOTS, g.CONTEXT, "cpu", enable_memory_saver=False)
        model = sglang.build_model(self.cp_size, fused)
        self.target = sglang.target_worker(model, self.server_args, self.cp_size, requests)
        self.draft = sglang.build_draft(self.server_args)
        self.draft.load_weights(iter(draft_checkpoint().items()))
        self.draft_bytes = parameter_bytes(self.draft)  # before modules of the target are attached
        sglang.attach(self.draft, self.target, self.cp_size)
        sglang.use_reference_writer()
        self.target_pool = make_pool(g.TARGET_RATIOS, REQUEST_SLOTS)
        self.draft_pool = make_pool((0,) * g.STAGES, REQUEST_SLOTS, draft=True)
        self.worker = sglang.make_worker(worker_class, self.target, self.draft, self.draft_pool)

    def _build_scheduler(self, radix: bool) -> None:
        from sglang.srt.distributed import parallel_state
        from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import init_mooncake_transfer_engine

        self.engine = init_mooncake_transfer_engine(hostname="127.0.0.1", gpu_id=0, ib_device=None)
        self.scheduler = self.sglang.make_scheduler(self, radix)
        self.memory = Memory(self.scheduler.disagg_prefill_bootstrap_queue.kv_manager.kv_args)
        names = [name for name, *_ in self.memory.components()]
        self.memory.fill(prefill_tag(self.config.rank), ("kv", names[1]))
        self.memory.watch(self.engine)
        self.reports: dict[str, RequestReport] = {}
        self.forward_tokens: list[int] = []
        self.model_collectives: list[Collective] = []
        self.pending: tuple[Any, Any] | None = None
        """Batch and result that the overlapped loop processes in its next turn."""
        self._watch_collectives(parallel_state.get_attn_cp_group())

    def _watch_collectives(self, group: Any) -> None:
        """Count device collectives of the attention-CP group. Observation only."""
        original = group.all_gather_into_tensor

        def counted(output: torch.Tensor, rows: torch.Tensor) -> None:
            given = Collective(len(self.forward_tokens) - 1, rows.shape[0], rows.numel() * rows.element_size())
            self.model_collectives.append(given)
            original(output, rows)

        group.all_gather_into_tensor = counted

    # ------------------------------------------------------------------------------------------------------- run

    def run(self, prompts: list[Prompt], timeout: float) -> PrefillReport:
        """Serve all prompts, wave after wave, as the prefill scheduler's loop does."""
        deadline = time.monotonic() + timeout
        stock_error = ""
        try:
            for wave in sorted({prompt.wave for prompt in prompts}):
                self._serve([prompt for prompt in prompts if prompt.wave == wave], deadline)
        except (NotImplementedError, ValueError) as error:
            stock_error = f"{type(error).__name__}: {error}"
            if not self.config.options["stock"]:
                raise
        return self._report(stock_error)

    def _serve(self, prompts: list[Prompt], deadline: float) -> None:
        s, queue = self.scheduler, self.scheduler.disagg_prefill_bootstrap_queue
        for prompt in prompts:
            req = self.sglang.make_request(prompt, self.server_args)
            self.reports[req.rid] = RequestReport(prompt.room, prompt.name, len(prompt.tokens))
            queue.add(req, num_kv_heads=1)
        while True:
            busy = self.step()
            if not (busy or queue.queue or s.waiting_queue or s.disagg_prefill_inflight_queue):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{len(queue.queue)} requests bootstrapping, {len(s.waiting_queue)} waiting,"
                    f" {len(s.disagg_prefill_inflight_queue)} in transfer when the time was up"
                )
            if not busy:
                time.sleep(0.002)

    def step(self) -> bool:
        """One turn of the prefill scheduler's loop.

        Returns:
            Whether a batch ran, waits for its result to be processed, or has to go on with a further chunk.
        """
        s = self.scheduler
        s.waiting_queue.extend(s.disagg_prefill_bootstrap_queue.pop_bootstrapped())
        s.process_pending_chunked_abort()
        s.resolve_waiting_queue_bootstrap()
        s.process_prefill_chunk(last_batch=None, running_batch=SimpleNamespace(batch_is_full=False))
        batch = self._next_batch()
        before, self.pending = self.pending, None
        if batch is not None:
            self.forward_tokens.append(sum(batch.extend_lens))
            result = self.sglang.run_batch(self.worker, batch)
            if self.overlap:
                self.pending = (batch, result)
            else:
                before = (batch, result)
        if before is not None:
            s.process_batch_result_disagg_prefill(*before)
        s.process_disagg_prefill_inflight_queue()
        s.last_batch = batch
        return batch is not None or self.pending is not None or s.chunked_req is not None

    def _next_batch(self) -> Any:
        """The next extend batch: the chunked request first, then waiting ones, `chunk` tokens in all."""
        s = self.scheduler
        budget, reqs = self.chunk, []
        chunked, s.chunked_req = s.chunked_req, None
        if chunked is not None:
            budget -= self._admit(chunked, budget, first=False)
            reqs.append(chunked)
        while budget > 0 and s.waiting_queue and len(reqs) < MAX_BATCH and s.chunked_req is None:
            req = s.waiting_queue.pop(0)
            budget -= self._admit(req, budget, first=True)
            reqs.append(req)
        return self.sglang.make_batch(s, reqs) if reqs else None

    def _admit(self, req: Any, budget: int, *, first: bool) -> int:
        start = self.sglang.begin(self.scheduler, req, first=first)
        total = len(req.full_untruncated_fill_ids)
        end = min(start + budget, total)
        self.sglang.admit(req, end)
        if end < total:
            req.inflight_middle_chunks += 1
            self.scheduler.chunked_req = req
        report = self.reports[req.rid]
        if first:
            report.cached = start
        report.chunks += 1
        report.rows_computed += end - start
        return end - start

    def _finished(self, reqs: list[Any], *_: Any) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        for req in reqs:
            report = self.reports[req.rid]
            if isinstance(req.finished_reason, FINISH_ABORT):
                report.failure = req.finished_reason.message
            else:
                report.rows_injected = report.rows_computed
            self.report(("prefilled", report.room))

    def _aborted(self, answer: Any, req: Any) -> None:
        """A request that ended by its client's abort before it was computed whole."""
        self.reports[req.rid].failure = "Aborted"
        self.report(("prefilled", self.reports[req.rid].room))

    def _leaked_pages(self) -> int:
        """KV pages that are neither free nor in the prefix cache although no request is left."""
        allocator, cache = self.scheduler.token_to_kv_pool_allocator, self.scheduler.tree_cache
        held = 0 if cache.disable else cache.full_evictable_size()
        return int(allocator.size - allocator.full_available_size() - held) // g.PAGE

    def _report(self, stock_error: str) -> PrefillReport:
        from ..adapters import runtime as state

        ledger = state._runtime.ledger if state._runtime is not None else None
        writes: dict[str, int] = {}
        for write in self.memory.writes:
            writes[write.component] = writes.get(write.component, 0) + write.nbytes
        return PrefillReport(
            cp_rank=self.config.rank,
            counters=asdict(ledger.counters) if ledger else {},
            hooks=fired_hooks(),
            errors=list(ledger.errors) if ledger else [],
            requests=list(self.reports.values()),
            writes=writes,
            write_failures=sum(write.status != 0 for write in self.memory.writes),
            forward_tokens=self.forward_tokens,
            model_collectives=self.model_collectives,
            leaked_pages=self._leaked_pages(),
            draft_bytes=self.draft_bytes,
            draft_bytes_stock=self.draft_bytes_stock,
            mode="" if state._runtime is None else state._runtime.mode.value,
            stock_error=stock_error,
        )
