"""Deterministic random weights of the small model: inputs of the ranks and of the oracle alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import geometry as g


@dataclass(frozen=True)
class TargetWeights:
    """The stand-in target. Layer k maps streams h [T, M, H] at positions p [T] to
    bf16(gain[k, m] * h + bias[k, m] + place[k, p]) in float32.

    Attributes:
        embedding: [V, H] bf16.
        gain: [L, M] float32, powers of two.
        bias: [L, M, H] bf16.
        place: [L, POSITIONS, H] bf16.
    """

    embedding: torch.Tensor
    gain: torch.Tensor
    bias: torch.Tensor
    place: torch.Tensor


def target_weights(seed: int = 0) -> TargetWeights:
    """The stand-in target's weights."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    # One stream grows, so that what comes out depends on the token as much as on its position.
    gain = torch.tensor([[0.5, 2.0, 0.25, -0.5], [1.0, 2.0, 0.5, -1.0], [-0.5, 1.0, 0.5, 0.25], [0.5, 2.0, -1.0, 1.0]])
    return TargetWeights(
        embedding=normal(g.VOCAB, g.HIDDEN),
        gain=gain,
        bias=normal(g.LAYERS, g.STREAMS, g.HIDDEN),
        place=normal(g.LAYERS, g.POSITIONS, g.HIDDEN),
    )


def lm_head_weight(seed: int = 2) -> torch.Tensor:
    """The target's LM head, [V, H] bf16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(g.VOCAB, g.HIDDEN, generator=generator).to(torch.bfloat16)


def draft_checkpoint(seed: int = 1) -> dict[str, torch.Tensor]:
    """What the draft needs to make context KV, under its names in the official checkpoint layout."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).to(torch.bfloat16)

    def norm(width: int) -> torch.Tensor:
        return (torch.rand(width, generator=generator) + 0.5).to(torch.bfloat16)

    tensors = {
        "mtp.0.main_proj.weight": matrix(g.HIDDEN, g.HIDDEN * len(g.CAPTURED_LAYERS)),
        "mtp.0.main_norm.weight": norm(g.HIDDEN),
    }
    for stage in range(g.STAGES):
        tensors[f"mtp.{stage}.attn.wkv.weight"] = matrix(g.ROW, g.HIDDEN)
        tensors[f"mtp.{stage}.attn.kv_norm.weight"] = norm(g.ROW)
    return tensors
