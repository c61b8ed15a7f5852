"""One prefill rank: SGLang's scheduler methods, worker, injector, queue and Mooncake manager around a small model."""

from __future__ import annotations

import pickle
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ..core import reference
from ..core.draft_prune import parameter_bytes
from . import geometry as g
from . import native
from .arguments import fired_hooks
from .processes import RankConfig
from .ranks import Memory, allocate_on_cpu, join_groups, make_pool, prefill_tag, without_gpu
from .target import SmallTargetWorker, build_model
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
    model_collectives: list[int]
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
        native.load(options["stand_in"])
        from sglang.srt.plugins import load_plugins

        load_plugins()
        self.server_args = pickle.loads(options["server_args"])
        without_gpu()
        allocate_on_cpu()
        self._publish(options["dist_port"])
        self._build_worker(options["fused"])
        self._build_scheduler(options["radix"])

    # -------------------------------------------------------------------------------------------------- bring-up

    def _publish(self, dist_port: int) -> None:
        from sglang.srt import runtime_context
        from sglang.srt.layers.moe.utils import initialize_moe_config

        runtime_context.publish(self.server_args, role="scheduler")
        # The arguments were resolved for a GPU; from here on they are used on a CPU.
        self.server_args.__dict__["device"] = "cpu"
        runtime_context.get_context().config_bag("device")._set("device", "cpu")
        join_groups(self.cp_size, self.config.rank, dist_port, dp_size=1, cp_size=self.server_args.attn_cp_size)
        initialize_moe_config(self.server_args)

    def _build_worker(self, fused: bool) -> None:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark
        from sglang.srt.speculative.dspark_components.dspark_kv_inject import TargetHiddenKvInjector
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.algorithm = SpeculativeAlgorithm.DSPARK
        draft_config = ModelConfig.from_server_args(
            self.server_args, model_path=self.server_args.model_path, is_draft_model=True
        )

        def build_draft() -> Any:
            torch.set_default_dtype(torch.bfloat16)
            try:
                return DeepseekV4ForCausalLMDSpark(draft_config.hf_config, None, "")
            finally:
                torch.set_default_dtype(torch.float32)

        # Before the hooks are there: what stock would hold. One rank is enough to know.
        self.draft_bytes_stock = parameter_bytes(build_draft()) if self.config.rank == 0 else 0
        worker_class = self.algorithm.create_worker(self.server_args)
        self.model = build_model(self.cp_size, fused)
        target = SmallTargetWorker(self.model, self.server_args, self.cp_size)
        self.draft = build_draft()
        self.draft.load_weights(iter(draft_checkpoint().items()))
        lm_head = SimpleNamespace(
            org_vocab_size=g.VOCAB,
            tp_size=self.cp_size,
            num_embeddings_per_partition=g.VOCAB // self.cp_size,
            num_embeddings_padded=g.VOCAB,
        )
        self.draft.attach_shared_modules(embed_tokens=self.model.embed_tokens, lm_head=lm_head)
        self._use_reference_writer()
        self.target_pool = make_pool(g.TARGET_RATIOS, REQUEST_SLOTS)
        self.draft_pool = make_pool((0,) * g.STAGES, REQUEST_SLOTS)
        draft_runner = SimpleNamespace(token_to_kv_pool=self.draft_pool)
        # Without the constructor: it loads both models on a GPU. The methods under test are SGLang's.
        worker = worker_class.__new__(worker_class)
        worker._target_worker, worker.device, worker.model_runner = target, "cpu", target.model_runner
        worker.page_size = g.PAGE
        worker._kv_injector = TargetHiddenKvInjector(
            draft_model=self.draft,
            draft_model_runner=draft_runner,
            model_runner=target.model_runner,
            device="cpu",
            verify_num_draft_tokens=6,
            block_pos_offsets=torch.arange(6),
        )
        self.worker, self.target = worker, target

    @staticmethod
    def _use_reference_writer() -> None:
        """The pool's row writer is a CUDA kernel; this package's reference writer takes its place."""
        from sglang.srt.mem_cache import deepseek_v4_memory_pool

        def write(
            *, kv: Any, kv_weight: Any, eps: float, freqs_cis: Any, positions: Any, out_loc: Any, kvcache: Any,
            page_size: int,
        ) -> None:  # fmt: skip
            rows = reference.make_rows(kv, kv_weight, eps, freqs_cis, positions)
            reference.write_rows(kvcache, page_size, out_loc, rows)

        deepseek_v4_memory_pool.fused_k_norm_rope_flashmla = write

    def _build_scheduler(self, radix: bool) -> None:
        from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
        from sglang.srt.disaggregation.utils import (
            DisaggregationMode,
            MetadataBuffers,
            ReqToMetadataIdxAllocator,
            TransferBackend,
        )
        from sglang.srt.distributed import parallel_state
        from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import init_mooncake_transfer_engine
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        tokens = (g.POOL_PAGES - 1) * g.PAGE
        allocator = SWATokenToKVPoolAllocator(
            size=tokens, size_swa=tokens, page_size=g.PAGE, dtype=torch.float8_e4m3fn, device="cpu",
            kvcache=self.target_pool, need_sort=False,
        )  # fmt: skip
        self.draft_pool.register_mapping(allocator.full_to_swa_index_mapping)
        requests = ReqToTokenPool(REQUEST_SLOTS, g.CONTEXT, "cpu", enable_memory_saver=False)
        self.target.model_runner.req_to_token_pool = requests
        cache = UnifiedRadixCache(
            CacheInitParams(
                disable=not radix,
                req_to_token_pool=requests,
                token_to_kv_pool_allocator=allocator,
                page_size=g.PAGE,
                sliding_window_size=g.WINDOW,
                tree_components=(ComponentType.FULL, ComponentType.SWA),
            )
        )
        cp_group = parallel_state.get_attn_cp_group()
        self.engine = init_mooncake_transfer_engine(hostname="127.0.0.1", gpu_id=0, ib_device=None)
        self.scheduler = s = _scheduler_class()()
        s.server_args, s.spec_algorithm, s.sliding_window_size = self.server_args, self.algorithm, g.WINDOW
        s.enable_overlap, s.enable_staging, s.enable_hicache_storage = self.overlap, False, False
        s.tp_worker, s.tree_cache, s.req_to_token_pool = self.target, cache, requests
        s.token_to_kv_pool_allocator = allocator
        s.attn_cp_cpu_group = cp_group.cpu_group
        s.attn_tp_cpu_group = parallel_state.get_attn_tp_group().cpu_group
        s.ps = SimpleNamespace(dp_rank=0, gpu_id=0, tp_rank=self.config.rank, pp_rank=0, pp_size=1)
        s.model_config = SimpleNamespace(num_hidden_layers=len(g.TARGET_RATIOS))
        s.disagg_metadata_buffers = MetadataBuffers(REQUEST_SLOTS, 32, torch.float32)
        s.req_to_metadata_buffer_idx_allocator = ReqToMetadataIdxAllocator(REQUEST_SLOTS)
        s.disagg_prefill_inflight_queue, s.waiting_queue, s.chunked_req = [], [], None
        s.running_batch = s.last_batch = s._pending_chunked_abort_req = s.dllm_config = None
        s.disaggregation_mode = DisaggregationMode.PREFILL
        s.grammar_manager = SimpleNamespace(abort_requests=lambda _: None)
        s.ipc_channels = SimpleNamespace(send_to_tokenizer=SimpleNamespace(send_output=self._aborted))
        s.batch_result_processor = SimpleNamespace(move_logprobs_to_cpu=lambda **_: None)
        s.metrics_reporter = SimpleNamespace(enable_metrics=False, report_prefill_stats=lambda **_: None)
        s.output_streamer = SimpleNamespace(stream_output=self._finished)
        s.disagg_prefill_bootstrap_queue = PrefillBootstrapQueue(
            token_to_kv_pool=self.target_pool,
            draft_token_to_kv_pool=self.draft_pool,
            req_to_metadata_buffer_idx_allocator=s.req_to_metadata_buffer_idx_allocator,
            metadata_buffers=s.disagg_metadata_buffers,
            tp_rank=self.config.rank,
            tp_size=self.cp_size,
            gpu_id=0,
            bootstrap_port=self.server_args.disaggregation_bootstrap_port,
            gloo_group=cp_group.cpu_group,
            max_total_num_tokens=tokens,
            scheduler=s,
            pp_rank=0,
            pp_size=1,
            transfer_backend=TransferBackend.MOONCAKE,
        )
        self.memory = Memory(s.disagg_prefill_bootstrap_queue.kv_manager.kv_args)
        names = [name for name, *_ in self.memory.components()]
        self.memory.fill(prefill_tag(self.config.rank), ("kv", names[1]))
        self.memory.watch(self.engine)
        self.reports: dict[str, RequestReport] = {}
        self.model_collectives: list[int] = []
        self.pending: tuple[Any, Any] | None = None
        """Batch and result that the overlapped loop processes in its next turn."""
        self._watch_collectives(cp_group)

    def _watch_collectives(self, group: Any) -> None:
        """Count device collectives of the attention-CP group. Observation only."""
        original = group.all_gather_into_tensor

        def counted(output: torch.Tensor, rows: torch.Tensor) -> None:
            self.model_collectives.append(rows.numel() * rows.element_size())
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
            req = self._make_request(prompt)
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
            result = self.worker._forward_prefill(batch, None)
            batch.spec_info = result.next_draft_input
            if self.overlap:
                self.pending = (batch, result)
            else:
                before = (batch, result)
        if before is not None:
            s.process_batch_result_disagg_prefill(*before)
        s.process_disagg_prefill_inflight_queue()
        s.last_batch = batch
        return batch is not None or self.pending is not None or s.chunked_req is not None

    def _make_request(self, prompt: Prompt) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        return Req(
            rid=f"room-{prompt.room}",
            origin_input_text="",
            origin_input_ids=array("q", prompt.tokens),
            sampling_params=SamplingParams(max_new_tokens=1),
            bootstrap_host="127.0.0.1",
            bootstrap_port=self.server_args.disaggregation_bootstrap_port,
            bootstrap_room=prompt.room,
            vocab_size=g.VOCAB,
        )

    def _next_batch(self) -> Any:
        """The next extend batch: the chunked request first, then waiting ones, `chunk` tokens in all."""
        s = self.scheduler
        budget, reqs = self.chunk, []
        chunked, s.chunked_req = s.chunked_req, None
        if chunked is not None:
            chunked.init_next_round_input()
            budget -= self._admit(chunked, budget)
            reqs.append(chunked)
        while budget > 0 and s.waiting_queue and len(reqs) < MAX_BATCH and s.chunked_req is None:
            req = s.waiting_queue.pop(0)
            req.init_next_round_input(s.tree_cache)
            self.reports[req.rid].cached = len(req.prefix_indices)
            lock = s.tree_cache.inc_lock_ref(req.last_node)
            req.swa_uuid_for_lock = lock.swa_uuid_for_lock
            budget -= self._admit(req, budget)
            reqs.append(req)
        if not reqs:
            return None
        return self._allocate(reqs)

    def _admit(self, req: Any, budget: int) -> int:
        start, total = len(req.prefix_indices), len(req.full_untruncated_fill_ids)
        end = min(start + budget, total)
        req.set_extend_range(start, end)
        if end < total:
            req.inflight_middle_chunks += 1
            self.scheduler.chunked_req = req
        report = self.reports[req.rid]
        report.chunks += 1
        report.rows_computed += end - start
        return end - start

    def _allocate(self, reqs: list[Any]) -> Any:
        from sglang.srt.managers.schedule_batch import ReqKvInfo
        from sglang.srt.mem_cache.common import evict_from_tree_cache
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        s = self.scheduler
        prefix = [req.extend_range.start for req in reqs]
        ends = [req.extend_range.end for req in reqs]
        extend = [end - start for start, end in zip(prefix, ends, strict=True)]
        s.req_to_token_pool.alloc(reqs)
        evict_from_tree_cache(s.tree_cache, sum(extend) + len(reqs) * g.PAGE)
        last = [int(req.prefix_indices[-1]) if len(req.prefix_indices) else -1 for req in reqs]
        prefix_lens, seq_lens = torch.tensor(prefix), torch.tensor(ends)
        loc = s.token_to_kv_pool_allocator.alloc_extend(
            prefix_lens, prefix_lens, seq_lens, seq_lens, torch.tensor(last), sum(extend)
        )
        if loc is None:
            raise RuntimeError(f"the pool of {g.POOL_PAGES} pages is full; give fewer or shorter prompts")
        ids, start = [], 0
        for req, first, end in zip(reqs, prefix, ends, strict=True):
            row = req.req_pool_idx
            s.req_to_token_pool.write((row, slice(0, first)), req.prefix_indices.to(torch.int32))
            s.req_to_token_pool.write((row, slice(first, end)), loc[start : start + end - first].to(torch.int32))
            req.kv = req.kv or ReqKvInfo(kv_allocated_len=end, swa_evicted_seqlen=0)
            req.kv.kv_allocated_len = req.kv_committed_len = end
            ids.extend(req.full_untruncated_fill_ids[first:end])
            start += end - first
        return SimpleNamespace(
            reqs=reqs,
            forward_mode=ForwardMode.EXTEND,
            prefix_lens=prefix,
            extend_lens=extend,
            seq_lens=seq_lens,
            out_cache_loc=loc,
            input_ids=torch.tensor(ids),
            spec_info=None,
            prefill_stats=None,
            dp_cooperation_info=None,
        )

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
            model_collectives=self.model_collectives,
            leaked_pages=self._leaked_pages(),
            draft_bytes=parameter_bytes(self.draft),
            draft_bytes_stock=self.draft_bytes_stock,
            mode="" if state._runtime is None else state._runtime.mode.value,
            stock_error=stock_error,
        )


def _scheduler_class() -> type:
    from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
    from sglang.srt.managers.scheduler import Scheduler

    class SmallScheduler(SchedulerDisaggregationPrefillMixin):
        """SGLang's prefill scheduler methods on an object with just the attributes that they use."""

        abort_request = Scheduler.abort_request
        process_pending_chunked_abort = Scheduler.process_pending_chunked_abort

    return SmallScheduler
