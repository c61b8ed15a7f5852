"""A context-only DSpark draft on prefill workers (`core.draft_prune` says what and why): what the releases share.

Each release's own module has the handlers whose targets differ, and its table of hooks.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..core import draft_prune
from ..core.draft_prune import DecodeOnly, DraftLoad, parameter_bytes
from ..errors import PrunedDraftError
from ..hooks.spec import Hook, ReliesOn, Tier
from .runtime import runtime

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"


class ContextAttention(torch.nn.Module):
    """What context KV needs of one stage's attention; attribute names are those that SGLang's KV writer reads.

    Args:
        freqs_cis: the rope table of rows that are not compressed.

    Attributes:
        wkv: [H] -> [512]; kv_norm: weight [512]; eps; layer_id: global stage id; freqs_cis: [positions, 32] complex.
    """

    def __init__(self, config: Any, layer_id: int, quant_config: Any, prefix: str, freqs_cis: torch.Tensor) -> None:
        from sglang.srt.layers.layernorm import RMSNorm
        from sglang.srt.layers.linear import ReplicatedLinear
        from sglang.srt.utils import add_prefix

        super().__init__()
        self.layer_id, self.eps = layer_id, config.rms_norm_eps
        self.wkv = ReplicatedLinear(
            config.hidden_size, config.head_dim, bias=False, quant_config=quant_config, prefix=add_prefix("wkv", prefix)
        )
        self.kv_norm = RMSNorm(config.head_dim, eps=self.eps)
        self.register_buffer("freqs_cis", freqs_cis, persistent=False)


def fill_stage(
    stage: Any,
    config: Any,
    layer_id: int,
    stage_id: int,
    num_target_layers: int,
    quant_config: Any,
    prefix: str,
    freqs_cis: torch.Tensor,
) -> None:
    """Build a stage without what only drafting uses: it is never allocated, not even for a moment."""
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.linear import ReplicatedLinear
    from sglang.srt.utils import add_prefix

    torch.nn.Module.__init__(stage)
    stage.layer_id, stage.stage_id, stage.dim = layer_id, stage_id, config.hidden_size
    stage.self_attn = ContextAttention(config, layer_id, quant_config, add_prefix("self_attn", prefix), freqs_cis)
    if stage_id == 0:
        stage.main_proj = ReplicatedLinear(
            num_target_layers * config.hidden_size,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=add_prefix("main_proj", prefix),
        )
        stage.main_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


def init_markov_head(original: Callable[..., None], head: Any, **shape: Any) -> None:
    """Build a Markov head without its two [vocab, rank] matrices."""
    torch.nn.Module.__init__(head)


def init_draft(original: Callable[..., None], draft: Any, *args: Any, **kwargs: Any) -> None:
    """Build the draft; the confidence head, which the planner wants to see, becomes a stand-in."""
    original(draft, *args, **kwargs)
    if draft.confidence_head is not None:
        draft.confidence_head = DecodeOnly("the confidence head")


def forward(original: Callable[..., Any], draft: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse to draft."""
    raise PrunedDraftError(draft_prune.refusal("the forward pass"))


def load_weights(original: Callable[..., None], draft: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load the needed tensors of `weights`; the first time all of them must come."""
    state = runtime()
    first = not state.draft_loaded
    load = DraftLoad(dict(draft.named_parameters()), draft._remap_dspark_weight_name, check_shapes=first)
    state.draft_loading = True
    try:
        original(draft, load.needed(weights))
    finally:
        state.draft_loading = False
    if first:
        load.require_complete()
        state.draft_loaded = True


def needed_tensors(folder: Path, files: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Needed tensors of safetensors files on the CPU, read one by one.

    The checkpoint's index says which files to open; without an index all of them are looked into.
    """
    from safetensors import safe_open

    index = folder / INDEX
    wanted = None
    if index.is_file():
        wanted = draft_prune.needed_files(json.loads(index.read_text())["weight_map"])
    for file in sorted(files):
        if wanted is not None and Path(file).name not in wanted:
            continue
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                if draft_prune.is_needed(name):
                    yield name, tensors.get_tensor(name)


def init_worker(original: Callable[..., None], worker: Any, *args: Any, **kwargs: Any) -> None:
    """Build the worker, keep warm-up and autotuning away from the draft, and say what was left out."""
    original(worker, *args, **kwargs)
    worker.draft_model_runner._kernel_warmed_up = True
    held = parameter_bytes(worker.draft_model)
    skipped = skipped_bytes(worker.model_runner.model, worker.draft_model)
    logger.info(
        "sglang-dspark-cp: the draft on this prefill worker holds %d stages of main_proj, main_norm, wkv, kv_norm:"
        " %.1f MB. Left out: experts %.1f MB, query and output paths %.1f MB, norms and stream mixing %.1f MB, Markov"
        " head %.1f MB (SGLANG_DSPARK_CP_DRAFT=full builds all of it)",
        worker.draft_model.num_stages,
        held / 1e6,
        skipped["experts"] / 1e6,
        skipped["attention"] / 1e6,
        skipped["mixing"] / 1e6,
        skipped["heads"] / 1e6,
    )


def skipped_bytes(target: Any, draft: Any) -> dict[str, int]:
    """Parameter bytes per GPU that stock would hold in the draft beside the needed ones.

    A stage has the shape, quantisation and sharding of a target layer, so its experts and projections are counted on
    the target's last layer as it is loaded here. Differences in the draft: `wo_a` is always bf16.
    """
    from sglang.srt.environ import envs
    from sglang.srt.speculative.dspark_components.dspark_config import parse_dspark_draft_config

    layer, config = target.model.layers[-1], draft.config
    attention = layer.self_attn
    latent = config.q_lora_rank + config.head_dim
    if hasattr(attention, "wqkv_a"):
        query = parameter_bytes(attention.wqkv_a) * config.q_lora_rank // latent
    else:
        query = parameter_bytes(attention.wq_a)
    query += sum(parameter_bytes(part) for part in (attention.q_norm, attention.wq_b, attention.wo_b))
    query += 2 * attention.wo_a.weight.numel() + 4 * config.num_attention_heads
    rank = int(parse_dspark_draft_config(draft_hf_config=config).markov_rank)
    markov_w2 = 2 if envs.SGLANG_DSPARK_OPT_MARKOV_W2_BF16.get() else 4
    return {
        "experts": draft.num_stages * parameter_bytes(layer.mlp),
        "attention": draft.num_stages * query,
        "mixing": draft.num_stages * (parameter_bytes(layer) - parameter_bytes(layer.mlp) - parameter_bytes(attention)),
        "heads": int(config.vocab_size) * rank * (2 + markov_w2),
    }


# ------------------------------------------------------------------------------------------------ parts of the tables

DRAFT = "sglang.srt.models.deepseek_v4_dspark."
MODEL = "sglang.srt.models.deepseek_v4."

draft_hook = functools.partial(
    Hook,
    tier=Tier.WORKER,
    relies_on=ReliesOn.BODY,
    process="prefill scheduler, while the draft is built, loaded or updated",
    upstream="none, because every release up to 0.5.23 builds the whole DeepSeek-V4 draft on prefill",
    remove_when="SGLang prunes the DeepSeek-V4 draft on PD prefill itself",
)
"""(id, target, handler, parameters, digest, why=, reads=) of a hook of this feature."""
