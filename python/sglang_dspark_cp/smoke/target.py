"""The stand-in target's arithmetic; the model around it is SGLang's own `DeepseekV4Model`.

The layers are the only stand-in on the target side: DeepSeek-V4's attention and MoE kernels exist for CUDA only.
"""

from __future__ import annotations

from typing import Any

import torch

from . import geometry as g
from .release import installed
from .weights import TargetWeights


class SmallLayer(torch.nn.Module):
    """One stand-in layer, see `TargetWeights` for what it computes. Subclasses give it a release's interface.

    With `fused`, a layer leaves its last step to the next one, as SGLang's fused mHC paths do.
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

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """What a layer adds at positions [P]: [P, M, H]."""
        return self.place[positions].unsqueeze(1).expand(-1, g.STREAMS, -1)


def build_model(cp_size: int, fused: bool) -> Any:
    """A `DeepseekV4Model` without its constructor (which allocates CUDA streams and attention)."""
    return installed().build_model(cp_size, fused)
