"""SGLang 0.5.17: a context-only DSpark draft on prefill workers; what it shares with other releases is in `draft`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .draft import (
    DRAFT,
    MODEL,
    draft_hook,
    fill_stage,
    forward,
    init_draft,
    init_markov_head,
    init_worker,
    load_weights,
    needed_tensors,
)
from .runtime import runtime


def _rope_table(config: Any) -> torch.Tensor:
    """[positions, 32] complex: plain rotary embedding, which an original length of 0 selects.

    SGLang caches it under these arguments, so that all stages share one.
    """
    from sglang.kernels.ops.attention.deepseek_v4_rope import precompute_freqs_cis
    from sglang.srt.models.deepseek_v4 import get_rope_config

    theta, scaling = get_rope_config(config)
    yarn = scaling or {}
    table: torch.Tensor = precompute_freqs_cis(
        config.qk_rope_head_dim,
        config.max_position_embeddings,
        0,
        theta,
        yarn.get("factor", 1.0),
        yarn.get("beta_fast", 32),
        yarn.get("beta_slow", 1),
    )
    return table


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
    alt_streams: Any = None,
) -> None:
    """Build a stage without what only drafting uses."""
    fill_stage(stage, config, layer_id, stage_id, num_target_layers, quant_config, prefix, _rope_table(config))


def weights_iterator(original: Callable[..., Any], loader: Any, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """While the draft loads: open only the files that hold a needed tensor, and read only these tensors."""
    if not runtime().draft_loading:
        return original(loader, source)  # type: ignore[no-any-return]
    folder, files, are_safetensors = loader._prepare_weights(
        source.model_or_path, source.revision, source.fall_back_to_pt
    )
    if not are_safetensors:
        return original(loader, source)  # type: ignore[no-any-return]
    return ((source.prefix + name, tensor) for name, tensor in needed_tensors(Path(folder), files))


# ---------------------------------------------------------------------------------------------------------- table

DRAFT_HOOKS = (
    draft_hook(
        "context-stage",
        f"{DRAFT}DSparkV4Stage.__init__",
        init_stage,
        ("self", "config", "layer_id", "stage_id", "num_stages", "num_target_layers", "quant_config", "prefix"),
        "2d4ba4ffc8d3",
        why="a stage holds only what makes KV rows; experts, query and output paths are never allocated",
        reads=(
            (f"{MODEL}DeepseekV4DecoderLayer.__init__", "9b71be5b99f4"),
            (f"{MODEL}MqaAttentionBase.__init__", "b122667d751b"),
            (f"{DRAFT}DSparkAttention.__init__", "459a15dc68eb"),
            (f"{DRAFT}DeepseekV4ForCausalLMDSpark.write_target_hidden_kv", "a63583956148"),
            (f"{DRAFT}DeepseekV4ForCausalLMDSpark.project_target_hidden", "67966bf7ee7b"),
        ),
    ),
    draft_hook(
        "context-markov",
        f"{DRAFT}DSparkV4MarkovHead.__init__",
        init_markov_head,
        ("self", "vocab_size", "markov_rank"),
        "4fe00b66a9b0",
        why="the Markov head's [vocab, rank] matrices are used by drafting only",
    ),
    draft_hook(
        "context-draft",
        f"{DRAFT}DeepseekV4ForCausalLMDSpark.__init__",
        init_draft,
        ("self", "config"),
        "73e0f8f62c88",
        why="the confidence head is used by drafting only; the planner wants one to be there",
    ),
    draft_hook(
        "context-forward",
        f"{DRAFT}DeepseekV4ForCausalLMDSpark.forward",
        forward,
        ("self", "input_ids", "positions", "forward_batch"),
        "5f3e0c7de057",
        why="a pruned draft that is asked to draft says so",
    ),
    draft_hook(
        "context-load",
        f"{DRAFT}DeepseekV4ForCausalLMDSpark.load_weights",
        load_weights,
        ("self", "weights"),
        "38c30b716c61",
        why="only needed tensors are loaded, and all of them must be there",
        reads=((f"{DRAFT}DeepseekV4ForCausalLMDSpark._remap_dspark_weight_name", "365a4554a7c3"),),
    ),
    draft_hook(
        "context-read",
        "sglang.srt.model_loader.loader.DefaultModelLoader._get_weights_iterator",
        weights_iterator,
        ("self", "source"),
        "0dad1ab08e9a",
        why="stock reads the whole checkpoint a second time for the draft",
        reads=(("sglang.srt.model_loader.loader.DefaultModelLoader._prepare_weights", "14ac82047981"),),
    ),
    draft_hook(
        "context-worker",
        "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2.__init__",
        init_worker,
        ("self", "server_args"),
        "82faf8901179",
        why="warm-up must not run the pruned draft; the log says what was left out",
        reads=(("sglang.srt.model_executor.runner.base_runner.BaseRunner.warmup", "c9973d59f5a0"),),
    ),
)
