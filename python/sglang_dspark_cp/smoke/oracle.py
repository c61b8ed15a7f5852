"""The draft-KV rows of one request, in float64, by an oracle that knows nothing of context parallelism.

It takes a whole prompt, runs the stand-in target and the draft's context path straight from their definition, and
rounds to bfloat16 only where the served model stores bfloat16. It shares no code with `core`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import geometry as g
from .weights import TargetWeights


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(torch.float64)


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + g.NORM_EPS).sqrt() * weight.to(torch.float64)


@dataclass(frozen=True)
class OracleRows:
    """Rows of one request and stage set.

    Attributes:
        nope: [S, N, 448] uint8, e4m3 codes.
        rope: [S, N, 64] bf16.
        scale: [S, N, 7] uint8, UE8M0 exponents.
        exact: [S, N, 512] float64, the row before it is quantised.
    """

    nope: torch.Tensor
    rope: torch.Tensor
    scale: torch.Tensor
    exact: torch.Tensor


def aux_hidden(tokens: list[int], positions: range, weights: TargetWeights) -> torch.Tensor:
    """Mean over the streams after each captured layer: [N, A * H] float64 (bf16 values)."""
    index = torch.tensor(list(positions))
    ids = torch.tensor([tokens[position] for position in positions])
    h = weights.embedding[ids].double().unsqueeze(1).repeat(1, g.STREAMS, 1)
    captured = []
    for layer in range(g.LAYERS):
        gain = weights.gain[layer].double().view(1, g.STREAMS, 1)
        h = _bf16(h * gain + weights.bias[layer].double() + weights.place[layer][index].double().unsqueeze(1))
        if layer in g.CAPTURED_LAYERS:
            captured.append(_bf16(h.mean(dim=1)))
    return torch.cat(captured, dim=1)


def draft_rows(
    tokens: list[int], positions: range, target: TargetWeights, draft: dict[str, torch.Tensor]
) -> OracleRows:
    """Rows that the draft pool must hold for `positions` of the prompt `tokens`."""
    hidden = aux_hidden(tokens, positions, target)
    projected = _bf16(hidden @ draft["mtp.0.main_proj.weight"].double().T)
    context = _bf16(_rms(projected, draft["mtp.0.main_norm.weight"]))
    place = torch.tensor([float(position) for position in positions], dtype=torch.float64)
    nope, rope, scale, exact = [], [], [], []
    for stage in range(g.STAGES):
        kv = _bf16(context @ draft[f"mtp.{stage}.attn.wkv.weight"].double().T)
        row = _rms(kv, draft[f"mtp.{stage}.attn.kv_norm.weight"])
        row = torch.cat([row[:, : g.NOPE], _rotate(row[:, g.NOPE :], place)], dim=1)
        codes, exponents = _quantise(row[:, : g.NOPE])
        nope.append(codes)
        scale.append(exponents)
        rope.append(row[:, g.NOPE :].to(torch.bfloat16))
        exact.append(row)
    return OracleRows(torch.stack(nope), torch.stack(rope), torch.stack(scale), torch.stack(exact))


def first_tokens(tokens: list[int], target: TargetWeights, lm_head: torch.Tensor) -> set[int]:
    """The best next token, and those that bf16 logits cannot tell from it."""
    last = len(tokens) - 1
    hidden = aux_hidden(tokens, range(last, last + 1), target)[0, -g.HIDDEN :]  # the last layer is a captured one
    logits = lm_head.double() @ hidden
    return set((logits >= logits.max() * (1 - 2.0**-7)).nonzero().flatten().tolist())


def _rotate(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Rotary embedding on interleaved pairs; x: [N, 64], place: [N]."""
    pairs = x.shape[1] // 2
    frequency = torch.tensor([g.ROPE_THETA ** (-2.0 * pair / x.shape[1]) for pair in range(pairs)]).double()
    angle = place[:, None] * frequency
    even, odd = x[:, 0::2], x[:, 1::2]
    turned = torch.empty_like(x)
    turned[:, 0::2] = even * angle.cos() - odd * angle.sin()
    turned[:, 1::2] = even * angle.sin() + odd * angle.cos()
    return turned


def _quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes [N, 448] and one power-of-two exponent per 64-wide tile [N, 7]; the exponent is rounded up."""
    tiles = x.reshape(x.shape[0], 7, 64)
    mantissa, exponent = torch.frexp(tiles.abs().amax(dim=2).clamp(min=1e-4) / 448.0)
    exponent = exponent - mantissa.eq(0.5).to(exponent.dtype)
    scaled = (tiles * torch.exp2(-exponent.double()).unsqueeze(2)).clamp(-448.0, 448.0)
    codes = scaled.float().to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.reshape(x.shape[0], 448), (exponent + 127).to(torch.uint8)
