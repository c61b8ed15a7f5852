"""SGLang 0.5.23: a context-only DSpark draft on prefill workers; what it shares with other releases is in `draft`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .draft import DRAFT, MODEL, draft_hook, fill_stage, forward, init_draft, init_worker, load_weights, needed_tensors
from .draft import init_markov_head as without_matrices
from .runtime import runtime


def _rope_table(config: Any) -> torch.Tensor:
    """[positions, 32] complex: plain rotary embedding, which an original length of 0 selects.

    SGLang caches it under these arguments, by keyword and in this order, for the target's window layers too.
    """
    from sglang.kernels.ops.attention.dsv4.rope import precompute_freqs_cis
    from sglang.srt.models.deepseek_v4 import get_rope_config

    theta, scaling = get_rope_config(config)
    yarn = scaling or {}
    table: torch.Tensor = precompute_freqs_cis(
        dim=config.qk_rope_head_dim,
        seqlen=config.max_position_embeddings,
        original_seq_len=0,
        base=theta,
        factor=yarn.get("factor", 1.0),
        beta_fast=yarn.get("beta_fast", 32),
        beta_slow=yarn.get("beta_slow", 1),
    )
    return table


def _nothing_cached() -> None:
    """In place of a stage's refresh of caches over norms and stream mixing, which it does not hold."""


def init_stage(
    original: Callable[..., None],
    stage: Any,
    config: Any,
    layer_id: int,
    stage_id: int,
    num_stages: int,
    num_target_layers: int,
    quant_config: Any = None,
    prefix: str = "",
    **streams: Any,
) -> None:
    """Build a stage without what only drafting uses; on CUDA it declares no layer boundaries either."""
    fill_stage(stage, config, layer_id, stage_id, num_target_layers, quant_config, prefix, _rope_table(config))
    stage.refresh_mhc_norm_weight_cache = _nothing_cached


def init_markov_head(original: Callable[..., None], head: Any, **shape: Any) -> None:
    """Build a Markov head without its matrices; attaching the LM head then finds nothing to shard."""
    without_matrices(original, head, **shape)
    head._opt_markov_w2_tp_shard = False


def weights_iterator(
    original: Callable[..., Any], loader: Any, source: Any, **options: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """While the draft loads: open only the files that hold a needed tensor, and read only these tensors."""
    if not runtime().draft_loading:
        return original(loader, source, **options)  # type: ignore[no-any-return]
    resolved = options.get("resolved_source")
    if resolved is not None:
        folder, files, are_safetensors = resolved.hf_folder, resolved.weight_files, resolved.use_safetensors
    else:
        folder, files, are_safetensors = loader._prepare_weights(
            source.model_or_path, source.revision, source.fall_back_to_pt, source.allow_patterns_overrides
        )
    if not are_safetensors:
        return original(loader, source, **options)  # type: ignore[no-any-return]
    return ((source.prefix + name, tensor) for name, tensor in needed_tensors(Path(folder), files))


# ---------------------------------------------------------------------------------------------------------- table

_SPARK = f"{DRAFT}DeepseekV4ForCausalLMDSpark."
_LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader."

DRAFT_HOOKS = (
    draft_hook(
        "context-stage",
        f"{DRAFT}DSparkV4StageMixin.__init__",
        init_stage,
        ("self", "config", "layer_id", "stage_id", "num_stages", "num_target_layers", "quant_config", "prefix"),
        "8362417a8b32",
        why="a stage holds only what makes KV rows; experts, query and output paths are never allocated",
        reads=(
            (f"{MODEL}DeepseekV4DecoderLayerBase.__init__", "80f147a9408c"),
            (f"{MODEL}DeepseekV4DecoderLayerBase.refresh_mhc_norm_weight_cache", "5d58fdcb2873"),
            (f"{MODEL}MqaAttentionBase.__init__", "67fa02d4a497"),
            (f"{DRAFT}DSparkAttention.__init__", "275e11f8f243"),
            (f"{_SPARK}project_target_hidden", "67966bf7ee7b"),
            (f"{_SPARK}project_commit_kv", "29d7695f6aff"),
            (f"{_SPARK}store_commit_kv", "fee7fa64b472"),
            ("sglang.srt.layers.layer_boundary.factories.layer_stack", "481f04bbb781"),
        ),
    ),
    draft_hook(
        "context-markov",
        f"{DRAFT}DSparkV4MarkovHead.__init__",
        init_markov_head,
        ("self", "vocab_size", "markov_rank"),
        "847fb0cc9e31",
        why="the Markov head's [vocab, rank] matrices are used by drafting only",
        reads=(
            (f"{DRAFT}DSparkV4MarkovHead.configure_tp_shard", "0c1a8712688b"),
            (f"{_SPARK}attach_shared_modules", "8779c1bf1060"),
        ),
    ),
    draft_hook(
        "context-draft",
        f"{_SPARK}__init__",
        init_draft,
        ("self", "config"),
        "701729a00776",
        why="the confidence head is used by drafting only; the planner wants one to be there",
    ),
    draft_hook(
        "context-forward",
        f"{_SPARK}forward",
        forward,
        ("self", "input_ids", "positions", "forward_batch"),
        "33804c04b04e",
        why="a pruned draft that is asked to draft says so",
    ),
    draft_hook(
        "context-load",
        f"{_SPARK}load_weights",
        load_weights,
        ("self", "weights"),
        "a0f1c3e25ce5",
        why="only needed tensors are loaded, and all of them must be there",
        reads=(
            (f"{_SPARK}_remap_dspark_weight_name", "1edc0f51eef3"),
            (f"{_SPARK}_assert_confidence_head_loaded", "b4824ddaa797"),
            (f"{_SPARK}post_load_weights", "7a976dcbb271"),
            (f"{MODEL}DeepseekV4ForCausalLM.precompile_kernels_after_loading", "8b854846b61d"),
        ),
    ),
    draft_hook(
        "context-read",
        f"{_LOADER}_get_weights_iterator",
        weights_iterator,
        ("self", "source", "resolved_source"),
        "d9a7b149065e",
        why="stock reads the whole checkpoint a second time for the draft",
        reads=((f"{_LOADER}_prepare_weights", "1b8679a5cf36"),),
    ),
    draft_hook(
        "context-worker",
        "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2.__init__",
        init_worker,
        ("self", "server_args"),
        "8041af0ddacb",
        why="warm-up must not run the pruned draft; the log says what was left out",
        reads=(("sglang.srt.model_executor.runner.base_runner.BaseRunner._warmup", "609045b5b105"),),
    ),
)
