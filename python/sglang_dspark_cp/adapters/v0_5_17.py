"""SGLang 0.5.17: the release in which the feature is missing.

Handlers take engine objects, call `core`, write back. Here: arguments, the worker, how `scheduler` reads this release,
and the table of all hooks; the forward itself is in `forward_v0_5_17`, the draft's construction in `draft_v0_5_17`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from ..config import DraftParts
from ..core.topology import PrefillTopology, require_live_groups, require_supported
from ..errors import TopologyError
from ..hooks.install import install
from ..hooks.spec import Hook, ReliesOn, Tier
from . import scheduler
from .draft_v0_5_17 import DRAFT_HOOKS
from .forward import pruned_states
from .forward_v0_5_17 import gather_before_head, inject_target_hidden, model_forward
from .gather_mode import CacheSetup, choose
from .handshake_v0_5_17 import HANDSHAKE_HOOKS, fail_room
from .runtime import runtime

logger = logging.getLogger(__name__)

MODEL_ARCHITECTURE = "DeepseekV4ForCausalLM"


# ---------------------------------------------------------------------------------------------- argument handling


def _is_dspark_prefill(server_args: Any) -> bool:
    return bool(server_args.speculative_algorithm == "DSPARK" and server_args.disaggregation_mode == "prefill")


def _is_deepseek_v4(server_args: Any) -> bool:
    return bool(server_args.get_model_config().hf_config.architectures[0] == MODEL_ARCHITECTURE)


def topology_of(server_args: Any) -> PrefillTopology:
    """What a `ServerArgs` asks for, in the words of `core.topology`."""
    from sglang.kernels.ops.attention.dsv4.unified_kv_kernels.env_gate import is_unified_kv_triton
    from sglang.srt.environ import envs

    return PrefillTopology(
        tp_size=server_args.tp_size,
        dp_size=server_args.dp_size,
        pp_size=server_args.pp_size,
        attn_cp_size=server_args.attn_cp_size,
        cp_strategy=server_args.cp_strategy if server_args.enable_prefill_cp else None,
        transfer_backend=server_args.disaggregation_transfer_backend,
        dcp_size=server_args.dcp_size,
        cp_v2=bool(envs.SGLANG_ENABLE_CP_V2.get()),
        unified_kv=is_unified_kv_triton(),
        hierarchical_cache=server_args.enable_hierarchical_cache,
        cache_layer_split=server_args.enable_dsa_cache_layer_split,
        pdmux=server_args.enable_pdmux,
        two_batch_overlap=server_args.enable_two_batch_overlap,
    )


def cache_setup_of(server_args: Any) -> CacheSetup:
    """What a `ServerArgs` says about who may read draft rows again."""
    doubts = {
        "--enable-hierarchical-cache": server_args.enable_hierarchical_cache,
        "--enable-streaming-session": server_args.enable_streaming_session,
        "--enable-session-radix-cache": server_args.enable_session_radix_cache,
        "--enable-lmcache": server_args.enable_lmcache,
        "--enable-flexkv": server_args.enable_flexkv,
        "--enable-hisparse": server_args.enable_hisparse,
        "--radix-cache-backend": server_args.radix_cache_backend is not None,
    }
    return CacheSetup(
        radix=not server_args.disable_radix_cache,
        page=int(server_args.page_size),
        window=int(server_args.get_model_config().sliding_window_size),
        unproved=tuple(flag for flag, on in doubts.items() if on),
    )


def validate_cp(original: Callable[..., None], server_args: Any) -> None:
    """Refuse unsupported set-ups before stock looks at them, and let the unified CP flags mean what the old ones do."""
    if not (_is_dspark_prefill(server_args) and server_args.enable_prefill_cp):
        return original(server_args)
    require_supported(topology_of(server_args))
    original(server_args)
    # The unified flags were mirrored to the generic legacy alias before the model was known; stock has just set the
    # DeepSeek alias too and would call the pair mutually exclusive.
    server_args.enable_prefill_context_parallel = False


def handle_dspark(original: Callable[..., None], server_args: Any) -> None:
    """Admit DSPARK on a supported prefill topology."""
    asked = _is_dspark_prefill(server_args) and (server_args.attn_cp_size > 1 or server_args.enable_prefill_cp)
    if not (asked and _is_deepseek_v4(server_args)):
        return original(server_args)
    require_supported(topology_of(server_args))
    # Stock turns DP attention on while it resolves CP arguments and off again later; with one data-parallel rank it
    # changes nothing, but stock's DSPARK checks refuse what they see in between.
    held = server_args.enable_dp_attention
    server_args.enable_dp_attention = False
    try:
        original(server_args)
    finally:
        server_args.enable_dp_attention = held
    _require_bundled_draft(server_args)


def _require_bundled_draft(server_args: Any) -> None:
    from sglang.srt.speculative.dspark_components.dspark_config import draft_is_deepseek_v4

    if not draft_is_deepseek_v4(server_args=server_args):
        raise TopologyError(
            f"found a DSPARK draft at {server_args.speculative_draft_model_path!r} that is not a DeepSeek-V4 draft;"
            " allowed with prefill context parallelism is the draft of a DeepSeek-V4 DSpark checkpoint, because only"
            " its KV rows are made here; fix: leave out --speculative-draft-model-path, or take the CP flags away."
        )


def create_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    """Second tier: hook the model and the scheduler only in a worker that uses the feature."""
    if algorithm.is_dspark() and server_args.disaggregation_mode == "prefill" and server_args.attn_cp_size > 1:
        state = runtime()
        setup = cache_setup_of(server_args)
        state.mode, why = choose(state.config.gather, setup)
        state.page, state.window = setup.cache_page, setup.window
        install(PATH_HOOKS if state.config.draft is DraftParts.FULL else WORKER_HOOKS)
        logger.info(
            "sglang-dspark-cp: DSPARK on CP prefill is active, attn_cp_size=%d, alignment proof=%s, gather=%s (%s)",
            server_args.attn_cp_size,
            state.config.align.value,
            state.mode.value,
            why,
        )
        if (fault := runtime().config.fault) is not None:
            logger.warning("sglang-dspark-cp: draft rows are spoilt on purpose: %s", fault)
    elif algorithm.is_dspark() and runtime().config.dump_dir is not None:
        from .debug_v0_5_17 import install_for

        install_for(server_args.disaggregation_mode)
    return original(algorithm, server_args)


# ------------------------------------------------------------------------------------------- draft initialisation


def attach_shared_modules(original: Callable[..., None], draft: Any, *, embed_tokens: Any, lm_head: Any) -> None:
    """Leave the embedding, the LM head and the Markov TP shard alone: only drafting uses them, prefill never drafts."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    require_live_groups(
        attn_tp_size=parallel.attn_tp_group.world_size,
        attn_cp_size=parallel.attn_cp_group.world_size,
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
    )


# ----------------------------------------------------------------------------------------------- one prefill batch


def forward_prefill(original: Callable[..., Any], worker: Any, batch: Any, on_publish: Any) -> Any:
    """Open the batch's proof, run stock's prefill (target forward, then injection), hand the proof to the result."""
    if batch.forward_mode.is_idle():
        return original(worker, batch, on_publish)
    proof = scheduler.open_proof(ENGINE, worker, batch)
    try:
        result = original(worker, batch, on_publish)
    finally:
        runtime().require_ledger(scheduler.cp_rank()).current = None
        proof.drop_hidden()
    result.logits_output.hidden_states = None
    result.dspark_cp_proof = proof
    return result


# ------------------------------------------------------------------------------------------------------ scheduler


def _skip_cache(req: Any) -> None:
    # A request between two chunks goes on to its last one: the cache hands it the prefix of its next chunk.
    req.skip_radix_cache_insert = req.inflight_middle_chunks <= 0


def _fail(req: Any, text: str) -> None:
    """Stock's next poll, reduced over the CP ranks, then aborts the request everywhere and answers its client."""
    sender = req.disagg_kv_sender
    fail_room(sender.kv_mgr, sender.bootstrap_room, text)


def _dump_rows(prefill: Any, req: Any) -> None:
    from .debug_v0_5_17 import dump_prefill_rows

    dump_prefill_rows(prefill, req)


ENGINE = scheduler.Engine(
    end_of=lambda req: int(req.extend_range.end),
    pool_row=lambda req: req.req_pool_idx,
    skip_cache=_skip_cache,
    sends_from=lambda prefill, req, end: max(0, end - prefill.sliding_window_size),
    fail=_fail,
    refused_decodes=lambda manager: len(manager.decode_kv_args_table.refused),
    has_prefixes=lambda cache: not cache.is_chunk_cache(),
    retire=lambda prefill, req: None,
    dump_rows=_dump_rows,
)

process_batch_result = functools.partial(scheduler.process_batch_result, ENGINE)
send_kv_chunk = functools.partial(scheduler.send_kv_chunk, ENGINE)
process_inflight_queue = functools.partial(scheduler.process_inflight_queue, ENGINE)


# ---------------------------------------------------------------------------------------------------------- table

_SRT = "sglang.srt."
_PREFILL_SCHEDULER = f"{_SRT}disaggregation.prefill.SchedulerDisaggregationPrefillMixin."

EAGER_HOOKS = (
    Hook(
        id="validate-cp",
        target=f"{_SRT}arg_groups.deepseek_v4_hook.validate_deepseek_v4_cp",
        handler=validate_cp,
        parameters=("server_args",),
        digest="8ce3d3c75b54",
        tier=Tier.EAGER,
        relies_on=ReliesOn.BODY,
        process="launcher and every scheduler, while arguments resolve",
        why="list every violation at once before stock's own checks; make --enable-prefill-cp --cp-strategy interleave"
        " resolve to the same configuration as the legacy flags",
        upstream="none, because 0.5.18 and later dropped the alias that collides",
        remove_when="0.5.17 is no longer supported",
    ),
    Hook(
        id="admit",
        target=f"{_SRT}arg_groups.speculative_hook._handle_dspark",
        handler=handle_dspark,
        parameters=("server_args",),
        digest="06f26d0274ad",
        tier=Tier.EAGER,
        relies_on=ReliesOn.BODY,
        process="launcher and every scheduler, while arguments resolve",
        why="stock refuses DSPARK while enable_dp_attention is set, which CP resolution sets for a moment",
        upstream="sgl-project/sglang: fixed in 0.5.18",
        remove_when="0.5.17 is no longer supported",
    ),
    Hook(
        id="create-worker",
        target=f"{_SRT}speculative.spec_info.SpeculativeAlgorithm.create_worker",
        handler=create_worker,
        parameters=("self", "server_args"),
        digest="e6d34efedc54",
        tier=Tier.EAGER,
        relies_on=ReliesOn.SIGNATURE,
        process="every scheduler, once",
        why="install the worker hooks only where the feature is used",
        upstream="none, because it is this package's own seam",
        remove_when="SGLang offers a per-worker plugin point",
    ),
)

PATH_HOOKS = (
    Hook(
        id="no-decode-init",
        target=f"{_SRT}models.deepseek_v4_dspark.DeepseekV4ForCausalLMDSpark.attach_shared_modules",
        handler=attach_shared_modules,
        parameters=("self", "embed_tokens", "lm_head"),
        digest="45ffb2d9d5b6",
        tier=Tier.WORKER,
        relies_on=ReliesOn.BODY,
        process="prefill scheduler, once",
        why="the Markov shard wants as many LM head shards as attention TP ranks (8 vs 1); prefill never drafts",
        upstream="none, because later releases attach the modules for nothing on prefill",
        remove_when="SGLang does not attach them on PD prefill",
    ),
    Hook(
        id="proof",
        target=f"{_SRT}speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2._forward_prefill",
        handler=forward_prefill,
        parameters=("self", "batch", "on_publish"),
        digest="2a7e50cf0496",
        tier=Tier.WORKER,
        relies_on=ReliesOn.BODY,
        process="prefill scheduler, every batch",
        why="one proof per batch, from before the forward to the processing of its result",
        upstream="none, because no release checks alignment",
        remove_when="SGLang proves alignment itself",
    ),
    Hook(
        id="capture-gather",
        target=f"{_SRT}models.deepseek_v4.DeepseekV4Model.forward",
        handler=model_forward,
        parameters=("self", "input_ids", "positions", "forward_batch"),
        digest="9f31900ad379",
        tier=Tier.WORKER,
        relies_on=ReliesOn.BODY,
        process="prefill scheduler, every batch",
        why="stock raises NotImplementedError when capture meets CP; capture and project on the shard, one all-gather",
        upstream="sgl-project/sglang: capture under CP since 0.5.18 (one collective per layer), packed since 0.5.23",
        remove_when="0.5.17 is no longer supported",
    ),
    Hook(
        id="head-on-shard",
        target=f"{_SRT}layers.utils.cp_utils.cp_all_gather_rerange_output",
        handler=gather_before_head,
        parameters=("input_tensor", "cp_size", "forward_batch", "stream"),
        digest="d70e118ff169",
        tier=Tier.WORKER,
        relies_on=ReliesOn.SIGNATURE,
        process="prefill scheduler, at the end of every CP forward",
        why="stock gathers all streams [T, 4, H] before the head, of which one row per request is used",
        upstream="none, because every release up to 0.5.23 gathers them",
        remove_when="SGLang runs the head on the shard",
    ),
    Hook(
        id="head-rows",
        target=f"{_SRT}layers.logits_processor.LogitsProcessor._get_pruned_states",
        handler=pruned_states,
        parameters=("self", "hidden_states", "hidden_states_before_norm", "aux_hidden_states", "logits_metadata"),
        digest="74d200690e7b",
        tier=Tier.WORKER,
        relies_on=ReliesOn.BODY,
        process="prefill scheduler, every batch",
        why="only the rows that it would pick are there, so it picks by request instead of by token",
        upstream="none, because it follows from head-on-shard",
        remove_when="head-on-shard goes",
    ),
    Hook(
        id="align-inject",
        target=f"{_SRT}speculative.dspark_components.dspark_kv_inject.TargetHiddenKvInjector.inject_target_hidden",
        handler=inject_target_hidden,
        parameters=("self", "target_hidden", "cache_loc", "positions"),
        digest="2335b5d62809",
        tier=Tier.WORKER,
        relies_on=ReliesOn.BODY,
        process="prefill scheduler, every batch",
        why="stock cuts surplus rows silently and does not notice short or permuted ones",
        upstream="none, because no release checks alignment",
        remove_when="SGLang proves alignment itself",
    ),
    Hook(
        id="settle",
        target=f"{_PREFILL_SCHEDULER}process_batch_result_disagg_prefill",
        handler=process_batch_result,
        parameters=("self", "batch", "result"),
        digest="f0b0d98331bd",
        tier=Tier.WORKER,
        relies_on=ReliesOn.BODY,
        process="prefill scheduler, every batch",
        why="all ranks reach one verdict before the batch's requests are cached or sent",
        upstream="none, because no release checks alignment",
        remove_when="SGLang proves alignment itself",
    ),
    Hook(
        id="send-complete",
        target=f"{_PREFILL_SCHEDULER}send_kv_chunk",
        handler=send_kv_chunk,
        parameters=("self", "req", "last_chunk", "end_idx"),
        digest="93ef0516ff54",
        tier=Tier.WORKER,
        relies_on=ReliesOn.BODY,
        process="prefill scheduler, every chunk that is sent",
        why="the draft KV of a last chunk leaves only when its final window was injected",
        upstream="none, because no release checks it",
        remove_when="SGLang checks it itself",
    ),
    Hook(
        id="finish",
        target=f"{_PREFILL_SCHEDULER}process_disagg_prefill_inflight_queue",
        handler=process_inflight_queue,
        parameters=("self",),
        digest="50e408e55afa",
        tier=Tier.WORKER,
        relies_on=ReliesOn.BODY,
        process="prefill scheduler, every loop with transfers in flight",
        why="bookkeeping of finished requests; no prefix with rows of a refused request stays cached",
        upstream="none, because it follows from the checks above",
        remove_when="the checks above go",
    ),
    *HANDSHAKE_HOOKS,
)

WORKER_HOOKS = (*PATH_HOOKS, *DRAFT_HOOKS)
"""Every hook that a CP prefill worker can have; DRAFT_HOOKS are left out with SGLANG_DSPARK_CP_DRAFT=full."""
