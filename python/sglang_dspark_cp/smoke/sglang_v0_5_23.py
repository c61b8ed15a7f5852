"""SGLang 0.5.23 as the CPU run drives it. Names: see `release.Release`.

The runner splits a batch and gathers after the model, so its own extend step runs here; the batch, the forward batch
and the logits are SGLang's too. On a GPU the model's layers leave their residual update to the next boundary
(`residual_stream`); the stand-in layers do the same, in the branch that CUDA takes.
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
from .weights import lm_head_weight, target_weights

STOCK_WIDTH = 1 + g.STREAMS + len(g.CAPTURED_LAYERS)
"""The head's input, the streams before the head (which DSPARK drops), the captured layers in one tensor."""
DRAFT_POOL: dict[str, bool] = {"is_draft_worker": True}
HEADS = True


# ---------------------------------------------------------------------------------------------- arguments, groups


def resolve(arguments: list[str]) -> Any:
    """Reading the command line does not resolve it."""
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(arguments)
    server_args.resolve_once()
    return server_args


def without_gpu() -> None:
    """NCCL, the registered gather (no CPU kernel), CUDA streams and events; the branch for CUDA in model and draft."""
    import sglang.srt.distributed.device_communicators.pynccl as pynccl
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender
    from sglang.srt.distributed import parallel_state
    from sglang.srt.models import deepseek_v4, deepseek_v4_dspark

    class NoNccl:
        """In place of the NCCL communicator: disabled, so that torch.distributed (gloo) is used."""

        disabled = True
        available = False

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

    pynccl.PyNcclCommunicator = NoNccl
    parallel_state._ENABLE_CUSTOM_ALL_REDUCE = False
    parallel_state._is_cpu = True
    torch.cuda.current_stream = lambda *args, **kwargs: None  # type: ignore[assignment]
    # Page indices would be handed over in pinned memory with a CUDA event; without, SGLang hands over NumPy arrays.
    MooncakeKVSender.supports_host_tensor_indices = False
    deepseek_v4._is_cuda = deepseek_v4_dspark._is_cuda = True
    deepseek_v4_dspark.DSparkV4Stage = deepseek_v4_dspark.DSparkV4CudaStage


def join_groups(world_size: int, rank: int, port: int, *, dp_size: int, cp_size: int) -> None:
    """Widths are published before in this release; what is given here must be what is published."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    published = (parallel.tp_size, parallel.attn_dp_size, parallel.attn_cp_size)
    assert published == (world_size, dp_size, cp_size), published
    parallel_state.init_distributed_environment(
        world_size=world_size,
        rank=rank,
        local_rank=rank,
        backend="gloo",
        distributed_init_method=f"tcp://127.0.0.1:{port}",
    )
    parallel_state.initialize_model_parallel(backend="gloo")


def join_alone(port: int, *, dp_rank: int, dp_size: int) -> None:
    """A decode manager reads published widths and ranks only; it needs no group."""


def publish_prefill(server_args: Any, rank: int) -> None:
    """The arguments were resolved for a GPU."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe.utils import initialize_moe_config

    runtime_context.publish(server_args, role="scheduler", ranks=_placed(rank))
    runtime_context.get_context().config_bag("device")._set("device", "cpu")
    initialize_moe_config()


def publish(rank: int, **arguments: Any) -> Any:
    """Dummy arguments with these fields, for world rank `rank`; data-parallel attention as resolution leaves it."""
    from sglang.srt import runtime_context

    if arguments.pop("enable_dp_attention", False):
        arguments |= {"attn_dp_size": arguments.pop("dp_size"), "dp_size": 1}
    if arguments.get("speculative_algorithm") is not None:  # the rings of compression state depend on it
        arguments["speculative_num_draft_tokens"] = g.BLOCK + 1
    server_args = runtime_context.get_context().override_server_args(**arguments).install()
    runtime_context.publish(server_args, role="scheduler", ranks=_placed(rank))
    return server_args


def _placed(rank: int) -> Any:
    from sglang.srt.runtime_context import SpawnRanks

    return SpawnRanks(world_rank=rank, gpu_id=0)


def request_state(pool: Any, request_slot: int, length: int) -> Any:
    """By the pool's own method."""
    return pool.request_state_transfer_indices(request_slot, length)


def kv_args(*, rank: int, dp_rank: int, prefill: bool, pools: tuple[Any, Any], metadata: Any) -> Any:
    """The draft has no KV buffers here, only state."""
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.utils import get_kv_transfer_buf_infos, get_pd_kv_layout, setup_state_kv_args

    target, draft = pools
    args = KVArgs()
    args.engine_rank, args.pp_rank, args.system_dp_rank, args.gpu_id = rank, 0, dp_rank, 0
    args.rust_http_port, args.ib_device = None, None
    args.kv_cache_dtype_str, args.page_size, args.kv_layout = "fp8_e4m3", g.PAGE, get_pd_kv_layout(target)
    args.prefill_start_layer, args.prefill_end_layer = 0, target.end_layer
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = get_kv_transfer_buf_infos(target)
    args.kv_layer_ids = []
    args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = metadata.get_buf_infos()
    setup_state_kv_args(args, target, draft, len(g.TARGET_RATIOS))
    return args


def metadata_buffers(slots: int) -> Any:
    """A small hidden size: nothing of it travels under DSPARK."""
    from sglang.srt.disaggregation.utils import MetadataBuffers

    return MetadataBuffers(slots, 16, torch.float32, max_sampling_mask_tokens=16)


def make_sender(manager: Any, address: str, room: int, rank: int) -> Any:
    """The manager knows its rank."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    return MooncakeKVSender(manager, address, room)


# ---------------------------------------------------------------------------------------------------------- target


class Layer(SmallLayer):
    """The stand-in layer with this release's interface on CUDA: an unfinished layer records its residual update.

    Attributes:
        boundary_pre_from_prev: read by SGLang's `HcUpdate`: a DeepSeek-V4 layer, not V4.1.
    """

    boundary_pre_from_prev = False

    def forward(
        self, *, positions: torch.Tensor, hidden_states: Any, forward_batch: Any, input_ids: Any, input_ids_global: Any
    ) -> Any:
        """[P, M, H] streams in, streams (or what is still to be added to them) out."""
        from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
        from sglang.srt.models import deepseek_v4_boundary as boundary

        stream = residual_batch.stream_of(forward_batch)
        streams = boundary.materialize(hidden_states, forward_batch)
        places = self.places(positions)
        if not self.fused:
            return stream.write(self.hc_post(places, streams, self.gain, self.bias))
        stream.write(boundary.ReadState(streams, self.gain, self.bias))
        return stream.record(places, boundary.HcUpdate(self, attention=False))


def build_model(cp_size: int, fused: bool) -> Any:
    """Without the model's constructor, which allocates CUDA streams and attention."""
    import sglang.srt.models.deepseek_v4 as deepseek_v4

    weights = target_weights()
    model = deepseek_v4.DeepseekV4Model.__new__(deepseek_v4.DeepseekV4Model)
    torch.nn.Module.__init__(model)
    model.pp_group = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1)
    model.hc_mult, model.hidden_size = g.STREAMS, g.HIDDEN
    model.embed_tokens = torch.nn.Embedding.from_pretrained(weights.embedding)
    model.layers = torch.nn.ModuleList([Layer(index, weights, fused) for index in range(g.LAYERS)])
    model.start_layer, model.end_layer = 0, g.LAYERS
    model.hc_pre_from_prev_sublayer, model.late_layer_start = False, None
    model.hc_head = lambda streams, *_: streams.mean(dim=1)
    model.hc_head_fn = model.hc_head_scale = model.hc_head_base = None
    model.norm = torch.nn.Identity()
    model.dspark_layers_to_capture = list(g.CAPTURED_LAYERS)
    recorder = SimpleNamespace(with_current_layer=lambda index: contextlib.nullcontext())
    deepseek_v4.get_global_expert_distribution_recorder = lambda: recorder
    return model


def _causal_lm(model: Any, config: Any) -> Any:
    """`DeepseekV4ForCausalLM` around the model, with its real logits processor and LM head (sharded over TP)."""
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
    from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM

    whole = DeepseekV4ForCausalLM.__new__(DeepseekV4ForCausalLM)
    torch.nn.Module.__init__(whole)
    whole.config, whole.model, whole.pp_group, whole.vision = config, model, model.pp_group, None
    whole.capture_aux_hidden_states = True
    whole.logits_processor = LogitsProcessor(config)
    whole.lm_head = ParallelLMHead(g.VOCAB, g.HIDDEN, params_dtype=torch.bfloat16)
    whole.lm_head.weight.weight_loader(whole.lm_head.weight, lm_head_weight())
    return whole


class NoAttention:
    """In place of the attention backend: the stand-in layers have none."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing to plan."""

    def resolve_prefill_shared_read_ends(self, forward_batch: Any, *, num_qo_tokens: int) -> Any:
        """The conservative answer."""
        from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

        return SharedReadEnds.UNKNOWN


class TargetWorker:
    """Stands where SGLang's target worker and model runner stand; a forward is the runner's own extend step."""

    def __init__(self, model: Any, server_args: Any, cp_size: int, requests: Any) -> None:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.model_executor.cuda_graph_buffer_registry import build_eager_registry
        from sglang.srt.model_executor.runner.eager_runner import EagerRunner
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.device = "cpu"
        model_config = ModelConfig.from_server_args(server_args)
        self.model_runner = SimpleNamespace(
            model=_causal_lm(model, model_config.hf_config),
            model_config=model_config,
            device="cpu",
            device_timer=None,
            is_draft_worker=False,
            attn_backend=NoAttention(),
            # positions are computed by SGLang's torch path: its Triton kernel needs a GPU
            prefill_attention_backend_str="torch_native",
            spec_algorithm=SpeculativeAlgorithm.DSPARK,
            ngram_embedding_manager=SimpleNamespace(enabled=False),
            lora_manager=None,
            effective_logical_max_total_num_tokens=g.POOL_PAGES * g.PAGE,
            kv_cache_dtype_str="fp8_e4m3",
            req_to_token_pool=requests,
            _extend_forward_kwargs=lambda forward_batch, pp_proxy_tensors: {},
        )
        self.runner = EagerRunner.__new__(EagerRunner)
        self.runner.model_runner, self.runner.enable_pdmux = self.model_runner, False
        self.runner._eager_registry = build_eager_registry(
            device=torch.device("cpu"),
            max_bs=requests.size,
            max_num_token=g.POOL_PAGES * g.PAGE,
            cache_loc_dtype=torch.int64,
        )

    @torch.no_grad()
    def forward_batch_generation(self, batch: Any, *, pp_proxy_tensors: Any = None, capture_hidden_mode: Any) -> Any:
        """Run one extend batch; the next token is the LM head's best."""
        from sglang.srt.managers.utils import GenerationBatchResult
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        forward_batch = ForwardBatch.init_new(
            batch,
            self.model_runner,
            capture_hidden_mode=capture_hidden_mode,
            return_hidden_states_before_norm=False,
        )
        context = ForwardContext(attn_backend=self.model_runner.attn_backend)
        with forward_context(context, forward_batch=forward_batch):
            output = self.runner._execute_extend(forward_batch)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=output.next_token_logits.argmax(dim=-1).to(torch.int32),
            can_run_cuda_graph=False,
        )


def target_worker(model: Any, server_args: Any, cp_size: int, requests: Any) -> Any:
    """See `TargetWorker`."""
    return TargetWorker(model, server_args, cp_size, requests)


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
    """The target's embedding and LM head."""
    model = target.model_runner.model
    draft.attach_shared_modules(embed_tokens=model.get_input_embeddings(), lm_head=model.lm_head)


def use_reference_writer() -> None:
    """It knows one of the layouts of this release, and rotates no queries."""
    from sglang.srt.mem_cache import deepseek_v4_memory_pool
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import KVLayout

    def write(*, layout: Any, q: Any, **rows: Any) -> None:
        assert layout is KVLayout.V4, layout
        assert q is None
        write_rows(**rows)

    deepseek_v4_memory_pool.fused_k_norm_rope_flashmla = write


def make_worker(worker_class: Any, target: Any, draft: Any, draft_pool: Any) -> Any:
    """Without the constructor: it loads both models on a GPU."""
    from sglang.srt.configs.draft_parallel import DraftParallelLayout
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative.dspark_components.dspark_kv_inject import TargetHiddenKvInjector
    from sglang.srt.speculative.spec_tp_sync import SpecTpSync

    worker = worker_class.__new__(worker_class)
    worker._target_worker, worker.device, worker.model_runner = target, "cpu", target.model_runner
    worker.page_size, worker._hosts_draft, worker._is_pd_prefill = g.PAGE, True, True
    worker.draft_model = draft
    worker.draft_model_runner = SimpleNamespace(token_to_kv_pool=draft_pool)
    worker.draft_parallel_layout = DraftParallelLayout(tp_group=None, attn_tp_size=1)
    worker._verify_epilogue, worker._target_hidden_projection_enabled = None, False
    worker._tp_sync = SpecTpSync(get_parallel().tp_group)
    worker.enable_dp_spec_prefill_coordination = False
    worker._verify_planner = SimpleNamespace(note_non_decode_step=lambda: None)
    worker._observers = SimpleNamespace(note_prefill_step=lambda: None)
    worker._kv_injector = TargetHiddenKvInjector(
        draft_model=draft,
        draft_model_runner=worker.draft_model_runner,
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

        kv_shard_widening = Scheduler.kv_shard_widening
        kv_checksum_computer = Scheduler.kv_checksum_computer
        rust_server = mm_receiver = None
        abort_request = Scheduler.abort_request
        process_pending_chunked_abort = Scheduler.process_pending_chunked_abort
        retire_unadmitted_request = Scheduler.retire_unadmitted_request
        _release_aborted_request = Scheduler._release_aborted_request

        def collect_inflight_reqs(self) -> list[Any]:
            """No decode batch runs on a prefill worker."""
            return []

        def maybe_send_health_check_signal(self) -> None:
            """Nobody asks."""

    return SmallScheduler


def make_scheduler(rank: Any, radix: bool) -> Any:
    """See `Release`."""
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
    from sglang.srt.disaggregation.utils import DisaggregationMode, ReqToMetadataIdxAllocator, TransferBackend
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.observability.scheduler_stage_metrics import SchedulerStageMetricsRecorder
    from sglang.srt.runtime_context import get_disagg, get_parallel

    tokens, runner = (g.POOL_PAGES - 1) * g.PAGE, rank.target.model_runner
    requests = runner.req_to_token_pool
    allocator = SWATokenToKVPoolAllocator(
        size=tokens, size_swa=tokens, page_size=g.PAGE, dtype=torch.float8_e4m3fn, device="cpu",
        kvcache=rank.target_pool, need_sort=False,
    )  # fmt: skip
    rank.draft_pool.register_mapping(allocator.full_to_swa_index_mapping)
    for each, pool in ((runner, rank.target_pool), (rank.worker.draft_model_runner, rank.draft_pool)):
        each.kv_index_translator = KVIndexTranslator(
            req_to_token=requests.req_to_token,
            token_to_kv_pool_allocator=allocator,
            token_to_kv_pool=pool,
            page_size=g.PAGE,
            device="cpu",
            is_draft_worker=each is not runner,
        )
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
    parallel = get_parallel()
    s = _scheduler_class()()
    s.server_args, s.spec_algorithm, s.sliding_window_size = rank.server_args, rank.algorithm, g.WINDOW
    s.enable_overlap, s.enable_staging, s.enable_hicache_storage = rank.overlap, False, False
    s.tp_worker, s.tree_cache, s.req_to_token_pool = rank.target, cache, requests
    s.token_to_kv_pool_allocator = allocator
    s.attn_cp_cpu_group, s.attn_tp_cpu_group = parallel.attn_cp_group.cpu_group, parallel.attn_tp_group.cpu_group
    s.model_config = runner.model_config
    s.disagg_metadata_buffers = metadata_buffers(requests.size)
    s.req_to_metadata_buffer_idx_allocator = ReqToMetadataIdxAllocator(requests.size)
    s.disagg_prefill_inflight_queue, s.waiting_queue, s.chunked_req = [], [], None
    s.disagg_prefill_pending_chunk_rids = set()
    s.running_batch = s.last_batch = s._pending_chunked_abort_req = s.dllm_config = None
    s.processed_tokens_counter = 0
    s.disaggregation_mode = DisaggregationMode.PREFILL
    s.scheduler_stage_metrics = SchedulerStageMetricsRecorder(enabled=False)
    s.grammar_manager = SimpleNamespace(abort_requests=lambda _: None)
    s.beam_coordinator = SimpleNamespace(retire_group=lambda _: None)
    s.send_abort_output = rank._aborted
    s.batch_result_processor = SimpleNamespace(
        move_logprobs_to_cpu=lambda **_: None, snapshot_auxiliary_output_starts=lambda *_: None
    )
    s.metrics_reporter = SimpleNamespace(enable_metrics=False, report_prefill_stats=lambda **_: None)
    s.output_streamer = SimpleNamespace(stream_output=rank._finished)
    s.disagg_prefill_bootstrap_queue = PrefillBootstrapQueue(
        token_to_kv_pool=rank.target_pool,
        draft_token_to_kv_pool=rank.draft_pool,
        req_to_metadata_buffer_idx_allocator=s.req_to_metadata_buffer_idx_allocator,
        metadata_buffers=s.disagg_metadata_buffers,
        gpu_id=0,
        bootstrap_port=get_disagg().disaggregation_bootstrap_port,
        max_total_num_tokens=tokens,
        scheduler=s,
        scheduler_stage_metrics=s.scheduler_stage_metrics,
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
        req.lock = scheduler.tree_cache.lock(req.last_node)
    return int(req.prefix_len)


def admit(req: Any, end: int) -> None:
    """As the admission of a batch does."""
    req.extend_end = end


def end_of(req: Any) -> int:
    """A field of the request."""
    return int(req.extend_end)


def make_batch(scheduler: Any, reqs: Sequence[Any]) -> Any:
    """`ScheduleBatch` with its own preparation: eviction, slots, cache locations."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    s = scheduler
    batch = ScheduleBatch.init_new(
        list(reqs),
        s.req_to_token_pool,
        s.token_to_kv_pool_allocator,
        s.tree_cache,
        s.model_config,
        s.enable_overlap,
        s.spec_algorithm,
        chunked_req=s.chunked_req,
    )
    batch.prepare_for_extend()
    return batch


def run_batch(worker: Any, batch: Any) -> Any:
    """Prefill of one batch; the batch remembers what the next step drafts from."""
    batch.input_ids, batch.prefill_input_ids_cpu = batch.prefill_input_ids_cpu, None
    result = worker.forward_batch_generation(batch)
    batch.spec_info = result.next_draft_input
    return result
