"""The stand-in target: SGLang's own `DeepseekV4Model.forward` over small deterministic layers.

The layers are the only stand-in on the target side: DeepSeek-V4's attention and MoE kernels exist for CUDA only.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch

from . import geometry as g
from .weights import TargetWeights, target_weights


class SmallLayer(torch.nn.Module):
    """One stand-in layer with the interface of SGLang's decoder layer, see `TargetWeights` for what it computes.

    With `fused`, a layer leaves its last step to the next one, as SGLang's fused mHC path does: it returns
    (partial, residual, post, comb) and `hc_post` finishes it.
    """

    def __init__(self, index: int, weights: TargetWeights, fused: bool) -> None:
        super().__init__()
        self.gain = weights.gain[index].view(1, g.STREAMS, 1)
        self.bias = weights.bias[index].float()
        self.place = weights.place[index]
        self.fused = fused

    def hc_post(
        self, partial: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> torch.Tensor:
        """Finish a layer's streams: [P, M, H] bf16."""
        return (residual.float() * post + comb + partial.float()).to(torch.bfloat16)

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
        place = self.place[positions].unsqueeze(1)
        if self.fused:
            return place.expand(-1, g.STREAMS, -1), hidden_states, self.gain, self.bias
        return self.hc_post(place, hidden_states, self.gain, self.bias), None, None, None


def build_model(cp_size: int, fused: bool) -> Any:
    """A `DeepseekV4Model` without its constructor (which allocates CUDA streams and attention)."""
    import sglang.srt.models.deepseek_v4 as deepseek_v4

    weights = target_weights()
    model = deepseek_v4.DeepseekV4Model.__new__(deepseek_v4.DeepseekV4Model)
    torch.nn.Module.__init__(model)
    model.pp_group = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1)
    model.hc_mult, model.hidden_size, model.cp_size = g.STREAMS, g.HIDDEN, cp_size
    model.embed_tokens = torch.nn.Embedding.from_pretrained(weights.embedding)
    model.layers = torch.nn.ModuleList([SmallLayer(index, weights, fused) for index in range(g.LAYERS)])
    model.start_layer, model.end_layer = 0, g.LAYERS
    model.use_fused_mhc_post_pre = fused
    model.hc_head = lambda streams, *_: streams.mean(dim=1)
    model.hc_head_fn = model.hc_head_scale = model.hc_head_base = None
    model.norm = torch.nn.Identity()
    model.dspark_layers_to_capture = list(g.CAPTURED_LAYERS)
    recorder = SimpleNamespace(with_current_layer=lambda index: contextlib.nullcontext())
    deepseek_v4.get_global_expert_distribution_recorder = lambda: recorder
    return model


class SmallTargetWorker:
    """Stands where SGLang's target worker stands: pads the batch as the runner does and runs the model."""

    def __init__(self, model: Any, server_args: Any, cp_size: int) -> None:
        self.model_runner = SimpleNamespace(
            model=model,
            device="cpu",
            # positions are computed by SGLang's torch path: its Triton kernel needs a GPU
            server_args=SimpleNamespace(attention_backend="torch_native"),
            effective_max_total_num_tokens=g.POOL_PAGES * g.PAGE,
            kv_cache_dtype_str="fp8_e4m3",
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
