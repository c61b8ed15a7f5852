"""SGLang 0.5.23: the release that serves the feature by itself, without checks and with whole drafts and gathers.

Handlers take engine objects, call `core`, write back. Here: arguments, the worker, how `scheduler` reads this release,
and the table of all hooks; the forward itself is in `forward_v0_5_23`, the draft's construction in `draft_v0_5_23`.

Arguments are read through SGLang's resolving view and never written. DeepSeek-V4.1, which has other rows and another
way to keep its window, is left to stock as a whole.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from typing import Any

from ..config import DraftParts
from ..core.topology import PrefillTopology, require_live_groups, require_supported
from ..errors import TopologyError
from ..hooks.install import install
from ..hooks.spec import Hook, ReliesOn, Tier
from . import scheduler
from .draft_v0_5_23 import DRAFT_HOOKS
from .forward import pruned_states
from .forward_v0_5_23 import gather_after_forward, inject_prefill, model_forward
from .gather_mode import CacheSetup, choose
from .handshake_v0_5_23 import HANDSHAKE_HOOKS, fail_room
from .runtime import runtime

logger = logging.getLogger(__name__)

MODEL_ARCHITECTURE = "DeepseekV4ForCausalLM"
LEFT_TO_STOCK = "deepseek_v41"


# ---------------------------------------------------------------------------------------------- argument handling


def _view(server_args: Any) -> Any:
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def _model_config(server_args: Any) -> Any:
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(server_args)


def _is_deepseek_v4(server_args: Any) -> bool:
    """Whether the target is of the family; V4.1 is, see `_is_left_to_stock`."""
    return bool(_model_config(server_args).hf_config.architectures[0] == MODEL_ARCHITECTURE)


def _is_left_to_stock(server_args: Any) -> bool:
    return bool(_model_config(server_args).hf_config.model_type == LEFT_TO_STOCK)


def topology_of(server_args: Any) -> PrefillTopology:
    """What a `ServerArgs` asks for, in the words of `core.topology`."""
    from sglang.srt.layers.attention.dsv4.unified_kv_gate import is_unified_kv_triton
    from sglang.srt.model_executor.cuda_graph_config import Backend

    asked = _view(server_args)
    return PrefillTopology(
        tp_size=asked.tp_size,
        dp_size=asked.attn_dp_size,
        pp_size=asked.pp_size,
        attn_cp_size=server_args.attn_cp_size,  # as it was given: stock replaces another size without a word
        cp_strategy=asked.cp_strategy if asked.enable_prefill_cp else None,
        transfer_backend=asked.disaggregation_transfer_backend,
        dcp_size=asked.dcp_size,
        unified_kv=is_unified_kv_triton(),
        hierarchical_cache=asked.enable_hierarchical_cache,
        cache_layer_split=asked.enable_dsa_cache_layer_split,
        pdmux=asked.enable_pdmux,
        two_batch_overlap=asked.enable_two_batch_overlap,
        prefill_graph=asked.cuda_graph_config.prefill.backend != Backend.DISABLED,
    )


def cache_setup_of(server_args: Any) -> CacheSetup:
    """What a `ServerArgs` says about who may read draft rows again."""
    asked = _view(server_args)
    doubts = {
        "--enable-hierarchical-cache": asked.enable_hierarchical_cache,
        "--enable-streaming-session": asked.enable_streaming_session,
        "--enable-session-radix-cache": asked.enable_session_radix_cache,
        "--enable-lmcache": asked.enable_lmcache,
        "--enable-flexkv": asked.enable_flexkv,
        "--enable-hisparse": asked.enable_hisparse,
        "--radix-cache-backend": asked.radix_cache_backend is not None,
    }
    return CacheSetup(
        radix=not asked.disable_radix_cache,
        page=int(asked.page_size),
        window=int(_model_config(server_args).sliding_window_size),
        unproved=tuple(flag for flag, on in doubts.items() if on),
    )


def handle_dspark(original: Callable[..., None], server_args: Any) -> None:
    """Add what stock does not check about DSPARK on a CP prefill worker."""
    asked = _view(server_args)
    feature = asked.disaggregation_mode == "prefill" and (asked.attn_cp_size > 1 or asked.enable_prefill_cp)
    if not (feature and _is_deepseek_v4(server_args)):
        return original(server_args)
    if _is_left_to_stock(server_args):
        logger.info("sglang-dspark-cp: DeepSeek-V4.1 is left to SGLang as it is; this plugin does nothing for it")
        return original(server_args)
    require_supported(topology_of(server_args))
    original(server_args)
    _require_bundled_draft(asked)


def _require_bundled_draft(asked: Any) -> None:
    from sglang.srt.configs.model_config import is_deepseek_v4
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(
        asked.speculative_draft_model_path,
        trust_remote_code=asked.trust_remote_code,
        revision=asked.speculative_draft_model_revision,
        model_override_args=json.loads(asked.json_model_override_args),
        model_config_parser=asked.model_config_parser,
    )
    if not is_deepseek_v4(config):
        raise TopologyError(
            f"found a DSPARK draft at {asked.speculative_draft_model_path!r} that is not a DeepSeek-V4 draft;"
            " allowed with prefill context parallelism is the draft of a DeepSeek-V4 DSpark checkpoint, because only"
            " its KV rows are made here; fix: leave out --speculative-draft-model-path, or take the CP flags away."
        )


def create_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    """Second tier: hook the model and the scheduler only in a worker that uses the feature."""
    asked = _view(server_args)
    if not algorithm.is_dspark():
        return original(algorithm, server_args)
    prefill_cp = asked.disaggregation_mode == "prefill" and asked.attn_cp_size > 1
    if prefill_cp and _is_deepseek_v4(server_args) and not _is_left_to_stock(server_args):
        _require_groups()
        state = runtime()
        setup = cache_setup_of(server_args)
        state.mode, why = choose(state.config.gather, setup)
        state.page, state.window = setup.cache_page, setup.window
        install(PATH_HOOKS if state.config.draft is DraftParts.FULL else WORKER_HOOKS)
        logger.info(
            "sglang-dspark-cp: DSPARK on CP prefill is active, attn_cp_size=%d, alignment proof=%s, gather=%s (%s)",
            asked.attn_cp_size,
            state.config.align.value,
            state.mode.value,
            why,
        )
        if state.config.fault is not None:
            logger.warning("sglang-dspark-cp: draft rows are spoilt on purpose: %s", state.config.fault)
    elif runtime().config.dump_dir is not None and not _is_left_to_stock(server_args):
        from .debug_v0_5_23 import install_for

        install_for(asked.disaggregation_mode)
    return original(algorithm, server_args)


def _require_groups() -> None:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    require_live_groups(
        attn_tp_size=parallel.attn_tp_group.world_size,
        attn_cp_size=parallel.attn_cp_group.world_size,
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
    )


# ----------------------------------------------------------------------------------------------- one prefill batch


def forward_prefill(
    original: Callable[..., Any], worker: Any, batch: Any, on_publish: Any, pp_proxy_tensors: Any = None
) -> Any:
    """Open the batch's proof, run stock's prefill (places, target forward, injection), hand the proof to the result."""
    if batch.forward_mode.is_idle():
        return original(worker, batch, on_publish, pp_proxy_tensors)
    state = runtime()
    proof = scheduler.open_proof(ENGINE, worker, batch)
    try:
        result = original(worker, batch, on_publish, pp_proxy_tensors)
    finally:
        state.require_ledger(state.cp_rank).current = None
        state.passes, state.last_hidden = (), None
        proof.drop_hidden()
    result.dspark_cp_proof = proof
    return result


# ------------------------------------------------------------------------------------------------------ scheduler


def _skip_cache(req: Any) -> None:
    req.skip_radix_cache_insert = True  # a chunk that comes next goes on behind it, published or not


def _fail(req: Any, text: str) -> None:
    """Stock's next poll, reduced over the CP ranks, then aborts the request everywhere and answers its client."""
    sender = req.disagg_kv_sender
    fail_room(sender.kv_mgr, sender.bootstrap_room, text)


def _dump_rows(prefill: Any, req: Any) -> None:
    from .debug_v0_5_23 import dump_prefill_rows

    dump_prefill_rows(prefill, req)


ENGINE = scheduler.Engine(
    end_of=lambda req: int(req.extend_end),
    pool_row=lambda req: req.kv.req_pool_idx,
    skip_cache=_skip_cache,
    sends_from=lambda prefill, req, end: max(req.disagg_decode_prefix_len, end - prefill.sliding_window_size),
    fail=_fail,
    refused_decodes=lambda manager: len(manager.state_layout_rejections),
    has_prefixes=lambda cache: bool(cache.supports_prefix_sharing()),
    retire=lambda prefill, req: prefill.clear_pending_chunk_send(req),
    dump_rows=_dump_rows,
)

process_batch_result = functools.partial(scheduler.process_batch_result, ENGINE)
send_kv_chunk = functools.partial(scheduler.send_kv_chunk, ENGINE)
process_inflight_queue = functools.partial(scheduler.process_inflight_queue, ENGINE)


# ---------------------------------------------------------------------------------------------------------- table

_SRT = "sglang.srt."
_PREFILL_SCHEDULER = f"{_SRT}disaggregation.prefill.SchedulerDisaggregationPrefillMixin."
_WORKER = f"{_SRT}speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2."
_INJECTOR = f"{_SRT}speculative.dspark_components.dspark_kv_inject.TargetHiddenKvInjector."

EAGER_HOOKS = (
    Hook(
        id="admit",
        target=f"{_SRT}arg_groups.speculative_hook._handle_dspark",
        handler=handle_dspark,
        parameters=("server_args",),
        digest="3cf48265a5b2",
        tier=Tier.EAGER,
        relies_on=ReliesOn.BODY,
        process="launcher, while arguments resolve",
        why="stock admits set-ups in which rows are not proved or not sent, such as other transfer backends",
        upstream="none, because these are limits of this package",
        remove_when="never",
        reads=((f"{_SRT}arg_groups.deepseek_v4_hook.validate_deepseek_v4_cp", "3b2e78742945"),),
    ),
    Hook(
        id="create-worker",
        target=f"{_SRT}speculative.spec_info.SpeculativeAlgorithm.create_worker",
        handler=create_worker,
        parameters=("self", "server_args"),
        digest="a229bb192ada",
        tier=Tier.EAGER,
        relies_on=ReliesOn.SIGNATURE,
        process="every scheduler, once",
        why="install the worker hooks only where the feature is used",
        upstream="none, because it is this package's own seam",
        remove_when="SGLang offers a per-worker plugin point",
    ),
)

_path_hook = functools.partial(Hook, tier=Tier.WORKER, relies_on=ReliesOn.BODY)

PATH_HOOKS = (
    _path_hook(
        "proof",
        f"{_WORKER}_forward_prefill",
        forward_prefill,
        ("self", "batch", "on_publish", "pp_proxy_tensors"),
        "c7407c42355f",
        process="prefill scheduler, every batch",
        why="one proof per batch, from before the forward to the processing of its result",
        upstream="none, because no release checks alignment",
        remove_when="SGLang proves alignment itself",
        reads=((f"{_INJECTOR}place_prefill", "a9e977907ef6"),),
    ),
    _path_hook(
        "shard-output",
        f"{_SRT}models.deepseek_v4.DeepseekV4Model.forward",
        model_forward,
        ("self", "input_ids", "positions", "forward_batch"),
        "fbcdb676ec1d",
        process="prefill scheduler, every batch",
        why="project on the shard; one all-gather of what can be read and of the rows for the LM head",
        upstream="sgl-project/sglang: captured rows in one tensor since 0.5.23; projected and gathered whole",
        remove_when="SGLang projects on the shard and gathers no more than is read",
        reads=(
            (f"{_SRT}models.deepseek_v4.DeepseekV4Model._forward_impl", "a43fe39d61dc"),
            (f"{_SRT}layers.aux_hidden_states.AuxHiddenStatePacker.slot", "4ec247b723fc"),
            (f"{_SRT}layers.cp.utils.prepare_cp_forward", "2f1e98e89c37"),
            (f"{_SRT}layers.cp.utils.cp_shard_model_inputs", "5b5510f9ee39"),
            (f"{_SRT}layers.cp.interleave.InterleaveCPStrategy.shard_hidden_states", "25e895fee010"),
            (f"{_SRT}layers.cp.interleave.InterleaveCPStrategy.shard_position_ids", "ab91cea4534f"),
            (f"{_SRT}layers.cp.padding.pad_logical_token_to_physical", "f111b190c92a"),
        ),
    ),
    _path_hook(
        "no-gather-behind",
        f"{_SRT}layers.cp.utils.cp_gather_after_forward",
        gather_after_forward,
        ("x", "forward_batch", "stream"),
        "6e1d26801cbf",
        process="prefill scheduler, at the end of every CP forward",
        why="stock gathers [T, H], [T, 4H] (unused with captured layers) and [T, 3H] of all rows",
        upstream="none, because every release up to 0.5.23 gathers them",
        remove_when="SGLang gathers no more than is read",
        reads=((f"{_SRT}model_executor.runner.eager_runner.EagerRunner._execute_extend_cp", "73b8a645cd78"),),
    ),
    _path_hook(
        "head-rows",
        f"{_SRT}layers.logits_processor.LogitsProcessor._get_pruned_states",
        pruned_states,
        ("self", "hidden_states", "hidden_states_before_norm", "aux_hidden_states", "logits_metadata"),
        "48335cac5f84",
        process="prefill scheduler, every batch",
        why="only the rows that it would pick are there, so it picks by request instead of by token",
        upstream="none, because it follows from no-gather-behind",
        remove_when="no-gather-behind goes",
        reads=(
            (f"{_SRT}layers.logits_processor.LogitsProcessor.forward", "b24501473064"),
            (f"{_SRT}layers.logits_processor.LogitsProcessor._get_hidden_states_to_store", "c94e9c4edc34"),
        ),
    ),
    _path_hook(
        "align-inject",
        f"{_INJECTOR}inject_prefill",
        inject_prefill,
        ("self", "placement", "target_hidden", "token_indices", "target_hidden_is_projected"),
        "999bb60c900a",
        process="prefill scheduler, every batch",
        why="stock cuts surplus rows silently and does not notice short or permuted ones",
        upstream="none, because no release checks alignment",
        remove_when="SGLang proves alignment itself",
        reads=(
            (f"{_INJECTOR}_inject", "4112d1ed5873"),
            (f"{_INJECTOR}_inject_mla", "7d3d169efd0c"),
            (f"{_INJECTOR}committed_swa_loc", "c94b85ac8831"),
        ),
    ),
    _path_hook(
        "settle",
        f"{_PREFILL_SCHEDULER}process_batch_result_disagg_prefill",
        process_batch_result,
        ("self", "batch", "result"),
        "9c057a92c5b7",
        process="prefill scheduler, every batch",
        why="all ranks reach one verdict before the batch's requests are cached or sent",
        upstream="none, because no release checks alignment",
        remove_when="SGLang proves alignment itself",
        reads=(
            (f"{_SRT}mem_cache.common.checkpoint_kv_cache", "9f2dac257f8e"),
            (f"{_SRT}mem_cache.common.release_kv_cache", "9667edae4f20"),
        ),
    ),
    _path_hook(
        "send-complete",
        f"{_PREFILL_SCHEDULER}send_kv_chunk",
        send_kv_chunk,
        ("self", "req", "last_chunk", "end_idx"),
        "72a6f51f27cb",
        process="prefill scheduler, every chunk that is sent",
        why="the draft KV of a last chunk leaves only when its final window was injected",
        upstream="none, because no release checks it",
        remove_when="SGLang checks it itself",
        reads=((f"{_PREFILL_SCHEDULER}_send_kv_chunk", "76288567e531"),),
    ),
    _path_hook(
        "finish",
        f"{_PREFILL_SCHEDULER}process_disagg_prefill_inflight_queue",
        process_inflight_queue,
        ("self",),
        "2968b2b004fa",
        process="prefill scheduler, every loop with transfers in flight",
        why="bookkeeping of finished requests; no prefix with rows of a refused request stays cached",
        upstream="none, because it follows from the checks above",
        remove_when="the checks above go",
        reads=(
            (f"{_PREFILL_SCHEDULER}handle_pending_bootstrap", "534477a23b8c"),
            (f"{_PREFILL_SCHEDULER}optimistic_release_and_requeue", "d5651433d071"),
        ),
    ),
    *HANDSHAKE_HOOKS,
)

WORKER_HOOKS = (*PATH_HOOKS, *DRAFT_HOOKS)
"""Every hook that a CP prefill worker can have; DRAFT_HOOKS are left out with SGLANG_DSPARK_CP_DRAFT=full."""
