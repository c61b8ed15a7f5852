"""SGLang 0.5.17 as the CPU run drives it. Names: see `release.Release`.

The model splits a batch itself; the runner pads it before and cuts the hidden states afterwards.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from . import geometry as g
from .ranks import write_rows
from .target import SmallLayer
from .weights import target_weights

STOCK_WIDTH = len(g.CAPTURED_LAYERS) + g.STREAMS
"""What the first release that serves it gathers: each captured layer and the streams before the head."""
DRAFT_POOL: dict[str, bool] = {}
HEADS = False


# ---------------------------------------------------------------------------------------------- arguments, groups


def resolve(arguments: list[str]) -> Any:
    """Reading the command line resolves it."""
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args(arguments)


def without_gpu() -> None:
    """NCCL, the registered gather (no CPU kernel), CUDA streams and the Triton allocator."""
    import sglang.srt.distributed.device_communicators.pynccl as pynccl
    from sglang.srt.distributed import parallel_state
    from sglang.srt.mem_cache.allocator import paged

    class NoNccl:
        """In place of the NCCL communicator: disabled, so that torch.distributed (gloo) is used."""

        disabled = True
        available = False

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

    class AllocateOnCpu:
        """In place of the allocator's Triton kernel: SGLang's own torch version of it."""

        def __getitem__(self, grid: Any) -> Any:
            def launch(prefix: Any, seq: Any, last: Any, free: Any, out: Any, _: int, page_size: int) -> None:
                paged.alloc_extend_naive(prefix, seq, last, free, out, page_size, "cpu")

            return launch

    pynccl.PyNcclCommunicator = NoNccl
    parallel_state._ENABLE_CUSTOM_ALL_REDUCE = False
    # The registered custom op has no CPU kernel; its own implementation does the same on gloo.
    coordinator = parallel_state.GroupCoordinator
    coordinator.all_gather_into_tensor = coordinator._all_gather_into_tensor
    torch.cuda.current_stream = lambda *args, **kwargs: None  # type: ignore[assignment]
    paged.alloc_extend_kernel = AllocateOnCpu()


def join_groups(world_size: int, rank: int, port: int, *, dp_size: int, cp_size: int) -> None:
    """Widths are arguments in this release."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention

    parallel_state.init_distributed_environment(
        world_size=world_size,
        rank=rank,
        local_rank=rank,
        backend="gloo",
        distributed_init_method=f"tcp://127.0.0.1:{port}",
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=world_size,
        attention_data_parallel_size=dp_size,
        attention_context_model_parallel_size=cp_size,
        backend="gloo",
    )
    dp_attention._ATTN_DP_SIZE, dp_attention._ATTN_DP_RANK = dp_size, rank if dp_size > 1 else 0


def join_alone(port: int, *, dp_rank: int, dp_size: int) -> None:
    """The place in data parallelism is a pair of globals."""
    from sglang.srt.layers import dp_attention

    join_groups(1, 0, port, dp_size=1, cp_size=1)
    dp_attention._ATTN_DP_SIZE, dp_attention._ATTN_DP_RANK = dp_size, dp_rank


def publish_prefill(server_args: Any, rank: int) -> None:
    """The arguments were resolved for a GPU."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe.utils import initialize_moe_config

    runtime_context.publish(server_args, role="scheduler")
    server_args.__dict__["device"] = "cpu"
    runtime_context.get_context().config_bag("device")._set("device", "cpu")
    initialize_moe_config(server_args)


def publish(rank: int, **arguments: Any) -> Any:
    """Dummy arguments with these fields."""
    from sglang.srt.runtime_context import get_context

    return get_context().override_server_args(**arguments).install()


def request_state(pool: Any, request_slot: int, length: int) -> Any:
    """By the function that decode uses."""
    from sglang.srt.disaggregation.utils import get_dsv4_c128_state_indices, is_dsv4_c128_online_enabled

    online = is_dsv4_c128_online_enabled()
    ring = 1 if online else pool.get_ring_size(128)
    return get_dsv4_c128_state_indices(request_slot, length, online=online, ring_size=ring)


def kv_args(*, rank: int, dp_rank: int, prefill: bool, pools: tuple[Any, Any], metadata: Any) -> Any:
    """The draft has no KV buffers here, only state."""
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.utils import setup_state_kv_args

    target, draft = pools
    args = KVArgs()
    args.engine_rank, args.pp_rank, args.system_dp_rank, args.gpu_id = rank, 0, dp_rank, 0
    args.kv_cache_dtype_str, args.page_size, args.ib_device = "fp8_e4m3", g.PAGE, None
    args.prefill_start_layer, args.prefill_end_layer = 0, target.end_layer
    args.mla_compression_ratios = list(target.compression_ratios) if prefill else None
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = target.get_contiguous_buf_infos()
    args.kv_layer_ids = []
    args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = metadata.get_buf_infos()
    setup_state_kv_args(args, target, draft, len(g.TARGET_RATIOS))
    return args


def metadata_buffers(slots: int) -> Any:
    """A small hidden size: nothing of it travels under DSPARK."""
    from sglang.srt.disaggregation.utils import MetadataBuffers

    return MetadataBuffers(slots, 32, torch.float32)


def make_sender(manager: Any, address: str, room: int, rank: int) -> Any:
    """For attention TP rank `rank` of pipeline stage 0."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    return MooncakeKVSender(manager, address, room, [rank], 0)


# ---------------------------------------------------------------------------------------------------------- target


class Layer(SmallLayer):
    """The stand-in layer with this release's interface: an unfinished layer returns what its end needs."""

    def forward(
        self,
        *,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        input_ids: Any,
        input_ids_global: Any,
        prev_residual: Any,
        prev_post: Any,
        prev_comb: Any,
    ) -> tuple[Any, Any, Any, Any]:
        """[P, M, H] streams in, streams (or their unfinished form) out."""
        if prev_residual is not None:
            hidden_states = self.hc_post(hidden_states, prev_residual, prev_post, prev_comb)
        places = self.places(positions)
        if self.fused:
            return places, hidden_states, self.gain, self.bias
        return self.hc_post(places, hidden_states, self.gain, self.bias), None, None, None


def build_model(cp_size: int, fused: bool) -> Any:
    """Without the model's constructor, which allocates CUDA streams and attention."""
    import sglang.srt.models.deepseek_v4 as deepseek_v4

    weights = target_weights()
    model = deepseek_v4.DeepseekV4Model.__new__(deepseek_v4.DeepseekV4Model)
    torch.nn.Module.__init__(model)
    model.pp_group = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1)
    model.hc_mult, model.hidden_size, model.cp_size = g.STREAMS, g.HIDDEN, cp_size
    model.embed_tokens = torch.nn.Embedding.from_pretrained(weights.embedding)
    model.layers = torch.nn.ModuleList([Layer(index, weights, fused) for index in range(g.LAYERS)])
    model.start_layer, model.end_layer = 0, g.LAYERS
    model.use_fused_mhc_post_pre = fused
    model.hc_head = lambda streams, *_: streams.mean(dim=1)
    model.hc_head_fn = model.hc_head_scale = model.hc_head_base = None
    model.norm = torch.nn.Identity()
    model.dspark_layers_to_capture = list(g.CAPTURED_LAYERS)
    recorder = SimpleNamespace(with_current_layer=lambda index: contextlib.nullcontext())
    deepseek_v4.get_global_expert_distribution_recorder = lambda: recorder
    return model


class TargetWorker:
    """Stands where SGLang's target worker stands: pads the batch as the runner does and runs the model."""

    def __init__(self, model: Any, cp_size: int, requests: Any) -> None:
        self.model_runner = SimpleNamespace(
            model=model,
            device="cpu",
            # positions are computed by SGLang's torch path: its Triton kernel needs a GPU
            server_args=SimpleNamespace(attention_backend="torch_native"),
            effective_max_total_num_tokens=g.POOL_PAGES * g.PAGE,
            kv_cache_dtype_str="fp8_e4m3",
            req_to_token_pool=requests,
        )
        self.device = "cpu"
        self._cp_size = cp_size

    @torch.no_grad()
    def forward_batch_generation(self, batch: Any, capture_hidden_mode: Any = None) -> Any:
        """Run one extend batch; every forward is one call of `DeepseekV4Model.forward`."""
        from sglang.srt.layers.attention.dsa.utils import can_dsa_cp_split
        from sglang.srt.layers.aux_hidden_states import pack_aux_hidden_states
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.layers.utils.cp_utils import prepare_context_parallel_metadata
        from sglang.srt.managers.utils import GenerationBatchResult

        tokens = sum(batch.extend_lens)
        padded = -(-tokens // self._cp_size) * self._cp_size
        starts = zip(batch.prefix_lens, batch.extend_lens, strict=True)
        positions = torch.cat([torch.arange(start, start + length) for start, length in starts])

        def pad(values: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(values, (0, padded - tokens))

        forward_batch = SimpleNamespace(
            forward_mode=batch.forward_mode,
            extend_seq_lens_cpu=list(batch.extend_lens),
            seq_lens_cpu=batch.seq_lens,
            out_cache_loc=pad(batch.out_cache_loc),
            attn_cp_metadata=None,
            return_logprob=False,
            multi_item_delimiter_indices=None,
            can_run_tbo=False,
            tbo_children=None,
        )
        if can_dsa_cp_split(padded, self._cp_size, True, forward_batch):
            forward_batch.attn_cp_metadata = prepare_context_parallel_metadata(
                padded, 0, self._cp_size, batch.seq_lens.tolist(), extend_seqs_len=batch.extend_lens
            )
        model = self.model_runner.model
        (_, _), aux = model.forward(pad(batch.input_ids), pad(positions), forward_batch, None)
        # The runner's own cut, which leaves pad rows in place when requests have cached prefixes.
        hidden = pack_aux_hidden_states(aux)[: int(batch.seq_lens.sum())]
        ends = torch.tensor(batch.extend_lens).cumsum(0) - 1
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden),
            next_token_ids=batch.input_ids[ends] + 1,
            can_run_cuda_graph=False,
        )


def target_worker(model: Any, server_args: Any, cp_size: int, requests: Any) -> Any:
    """No LM head: the forward ends with hidden states."""
    return TargetWorker(model, cp_size, requests)


# ----------------------------------------------------------------------------------------------------------- draft


def build_draft(server_args: Any) -> Any:
    """In bf16, as the loader builds it."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark

    config = ModelConfig.from_server_args(server_args, model_path=server_args.model_path, is_draft_model=True)
    torch.set_default_dtype(torch.bfloat16)
    try:
        return DeepseekV4ForCausalLMDSpark(config.hf_config, None, "")
    finally:
        torch.set_default_dtype(torch.float32)


def attach(draft: Any, target: Any, cp_size: int) -> None:
    """The LM head's shape is all that is read of it."""
    lm_head = SimpleNamespace(
        org_vocab_size=g.VOCAB,
        tp_size=cp_size,
        num_embeddings_per_partition=g.VOCAB // cp_size,
        num_embeddings_padded=g.VOCAB,
    )
    draft.attach_shared_modules(embed_tokens=target.model_runner.model.embed_tokens, lm_head=lm_head)


def use_reference_writer() -> None:
    """See `Release`."""
    from sglang.srt.mem_cache import deepseek_v4_memory_pool

    deepseek_v4_memory_pool.fused_k_norm_rope_flashmla = write_rows


def make_worker(worker_class: Any, target: Any, draft: Any, draft_pool: Any) -> Any:
    """Without the constructor: it loads both models on a GPU."""
    from sglang.srt.speculative.dspark_components.dspark_kv_inject import TargetHiddenKvInjector

    worker = worker_class.__new__(worker_class)
    worker._target_worker, worker.device, worker.model_runner = target, "cpu", target.model_runner
    worker.page_size = g.PAGE
    worker._kv_injector = TargetHiddenKvInjector(
        draft_model=draft,
        draft_model_runner=SimpleNamespace(token_to_kv_pool=draft_pool),
        model_runner=target.model_runner,
        device="cpu",
        verify_num_draft_tokens=g.BLOCK + 1,
        block_pos_offsets=torch.arange(g.BLOCK + 1),
    )
    return worker


# ------------------------------------------------------------------------------------------------------- scheduler


def _scheduler_class() -> type:
    from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
    from sglang.srt.managers.scheduler import Scheduler

    class SmallScheduler(SchedulerDisaggregationPrefillMixin):
        """SGLang's prefill scheduler methods on an object with just the attributes that they use."""

        abort_request = Scheduler.abort_request
        process_pending_chunked_abort = Scheduler.process_pending_chunked_abort

    return SmallScheduler


def make_scheduler(rank: Any, radix: bool) -> Any:
    """See `Release`."""
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
    from sglang.srt.disaggregation.utils import DisaggregationMode, ReqToMetadataIdxAllocator, TransferBackend
    from sglang.srt.distributed import parallel_state
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    tokens, requests = (g.POOL_PAGES - 1) * g.PAGE, rank.target.model_runner.req_to_token_pool
    allocator = SWATokenToKVPoolAllocator(
        size=tokens, size_swa=tokens, page_size=g.PAGE, dtype=torch.float8_e4m3fn, device="cpu",
        kvcache=rank.target_pool, need_sort=False,
    )  # fmt: skip
    rank.draft_pool.register_mapping(allocator.full_to_swa_index_mapping)
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
    s = _scheduler_class()()
    s.server_args, s.spec_algorithm, s.sliding_window_size = rank.server_args, rank.algorithm, g.WINDOW
    s.enable_overlap, s.enable_staging, s.enable_hicache_storage = rank.overlap, False, False
    s.tp_worker, s.tree_cache, s.req_to_token_pool = rank.target, cache, requests
    s.token_to_kv_pool_allocator = allocator
    s.attn_cp_cpu_group = cp_group.cpu_group
    s.attn_tp_cpu_group = parallel_state.get_attn_tp_group().cpu_group
    s.ps = SimpleNamespace(dp_rank=0, gpu_id=0, tp_rank=rank.config.rank, pp_rank=0, pp_size=1)
    s.model_config = SimpleNamespace(num_hidden_layers=len(g.TARGET_RATIOS))
    s.disagg_metadata_buffers = metadata_buffers(requests.size)
    s.req_to_metadata_buffer_idx_allocator = ReqToMetadataIdxAllocator(requests.size)
    s.disagg_prefill_inflight_queue, s.waiting_queue, s.chunked_req = [], [], None
    s.running_batch = s.last_batch = s._pending_chunked_abort_req = s.dllm_config = None
    s.disaggregation_mode = DisaggregationMode.PREFILL
    s.grammar_manager = SimpleNamespace(abort_requests=lambda _: None)
    s.ipc_channels = SimpleNamespace(send_to_tokenizer=SimpleNamespace(send_output=rank._aborted))
    s.batch_result_processor = SimpleNamespace(move_logprobs_to_cpu=lambda **_: None)
    s.metrics_reporter = SimpleNamespace(enable_metrics=False, report_prefill_stats=lambda **_: None)
    s.output_streamer = SimpleNamespace(stream_output=rank._finished)
    s.disagg_prefill_bootstrap_queue = PrefillBootstrapQueue(
        token_to_kv_pool=rank.target_pool,
        draft_token_to_kv_pool=rank.draft_pool,
        req_to_metadata_buffer_idx_allocator=s.req_to_metadata_buffer_idx_allocator,
        metadata_buffers=s.disagg_metadata_buffers,
        tp_rank=rank.config.rank,
        tp_size=rank.cp_size,
        gpu_id=0,
        bootstrap_port=rank.server_args.disaggregation_bootstrap_port,
        gloo_group=cp_group.cpu_group,
        max_total_num_tokens=tokens,
        scheduler=s,
        pp_rank=0,
        pp_size=1,
        transfer_backend=TransferBackend.MOONCAKE,
    )
    return s


def make_request(prompt: Any, server_args: Any) -> Any:
    """One output token, as prefill makes it."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    return Req(
        rid=f"room-{prompt.room}",
        origin_input_text="",
        origin_input_ids=array("q", prompt.tokens),
        sampling_params=SamplingParams(max_new_tokens=1),
        bootstrap_host="127.0.0.1",
        bootstrap_port=server_args.disaggregation_bootstrap_port,
        bootstrap_room=prompt.room,
        vocab_size=g.VOCAB,
    )


def begin(scheduler: Any, req: Any, *, first: bool) -> int:
    """Later rounds continue what `process_prefill_chunk` left."""
    if not first:
        req.init_next_round_input()
    else:
        req.init_next_round_input(scheduler.tree_cache)
        req.swa_uuid_for_lock = scheduler.tree_cache.inc_lock_ref(req.last_node).swa_uuid_for_lock
    return len(req.prefix_indices)


def admit(req: Any, end: int) -> None:
    """As the admission of a batch does."""
    req.set_extend_range(len(req.prefix_indices), end)


def end_of(req: Any) -> int:
    """The round's range is an object of its own."""
    return int(req.extend_range.end)


def make_batch(scheduler: Any, reqs: Sequence[Any]) -> Any:
    """By the allocator's and pool's own methods; the batch has just the fields that are read."""
    from sglang.srt.managers.schedule_batch import ReqKvInfo
    from sglang.srt.mem_cache.common import evict_from_tree_cache
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    s = scheduler
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


def run_batch(worker: Any, batch: Any) -> Any:
    """Prefill of one batch; the batch remembers what the next step drafts from."""
    result = worker._forward_prefill(batch, None)
    batch.spec_info = result.next_draft_input
    return result
