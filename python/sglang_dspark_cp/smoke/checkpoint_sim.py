"""CPU simulation of an oracle checkpoint: greedy target, draft context rows, draft block, accept length.

It reads the tensors of a checkpoint by name and follows the arithmetic of the V4 target and of its DSpark draft
with bf16 activations, KV rows stored as e4m3 tiles plus bf16 rotary part, and for fp8 checkpoints activations
quantised per 128 values. It is a reference for the construction, not for speed or for the last bit, and covers
only what an oracle checkpoint uses: attention layers whose ``wo_b`` is zero and experts whose ``w2`` is zero are
checked to be so and left out, which leaves the sliding-window attention of uncompressed layers and the shared
experts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import safe_open

from .checkpoint import GROUP, NOISE_TOKEN, WEIGHTS_FILE, CheckpointInfo, read_checkpoint_info

Rows = torch.Tensor
"""Draft context rows [stages, tokens, head_dim] as the attention reads them."""


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).float()


def _fp8_groups(x: torch.Tensor) -> torch.Tensor:
    """Round activations [.., k] to e4m3 with one scale per 128 values, as dynamic quantisation does."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448.0
    rounded = (groups / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.reshape(x.shape)


def store_row(row: torch.Tensor, nope_dim: int) -> torch.Tensor:
    """What the KV pool gives back for rows [.., head_dim]: e4m3 per 64 no-position dims, bf16 for the rest."""
    tiles = row[..., :nope_dim].reshape(*row.shape[:-1], -1, 64)
    exponent = torch.ceil(torch.log2(tiles.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448.0))
    scale = torch.exp2(exponent)
    tiles = (tiles / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return torch.cat([tiles.flatten(-2), _bf16(row[..., nope_dim:])], dim=-1)


@dataclass(frozen=True)
class TargetOutput:
    """Result of a target forward: logits [T, vocab] and captured layer outputs [T, 3, H]."""

    logits: torch.Tensor
    aux: torch.Tensor


class CheckpointSim:
    """An oracle checkpoint in memory.

    Args:
        path: checkpoint folder.
        tp: attention tensor-parallel size; each rank's share of ``wo_b`` is rounded before the sum.
    """

    def __init__(self, path: Path | str, *, tp: int = 1) -> None:
        self.info: CheckpointInfo = read_checkpoint_info(path)
        self.config = json.loads((Path(path) / "config.json").read_text())
        self.tp = tp
        self.heads: int = self.config["num_attention_heads"]
        self.head_dim: int = self.config["head_dim"]
        self.rope_dim: int = self.config["qk_rope_head_dim"]
        self.nope_dim = self.head_dim - self.rope_dim
        self.groups: int = self.config["o_groups"]
        self.eps: float = self.config["rms_norm_eps"]
        self.stages = len(self.info.target_layers)
        self._file = cast(Any, safe_open(str(Path(path) / WEIGHTS_FILE), framework="pt"))
        self._names: set[str] = set(self._file.keys())
        self._cache: dict[str, torch.Tensor] = {}
        self._check_silent_parts()

    def _check_silent_parts(self) -> None:
        for name in self._names:
            routed = ".experts." in name and name.endswith("w2.weight")
            if routed and self._file.get_tensor(name).float().any():
                raise ValueError(f"{name} is not zero: not an oracle checkpoint")
        layers = range(self.config["num_hidden_layers"])
        self._attending = {i for i in layers if self.weight(f"layers.{i}.attn.wo_b").any()}
        for i in self._attending:
            if self.config["compress_ratios"][i]:
                raise ValueError(f"layer {i} has compressed attention with an output: cannot be simulated")

    # -- tensors and primitive steps ---------------------------------------------------------------------

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the checkpoint as float32."""
        if name not in self._cache:
            self._cache[name] = self._file.get_tensor(name).float()
        return self._cache[name]

    def weight(self, name: str) -> torch.Tensor:
        """Weight [n, k] of a linear layer, dequantised."""
        key = f"{name}:dequantised"
        if key not in self._cache:
            value = self._file.get_tensor(f"{name}.weight").float()
            if f"{name}.scale" in self._names:
                scale = self._file.get_tensor(f"{name}.scale").float()
                value = value * scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
            self._cache[key] = value
        return self._cache[key]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Linear layer; activations are rounded to fp8 where the weight is fp8."""
        if f"{name}.scale" in self._names:
            x = _fp8_groups(x)
        return _bf16(x @ self.weight(name).T)

    def norm(self, name: str | None, x: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dim, with the weight ``name`` if given; not rounded."""
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return scaled if name is None else scaled * self.tensor(f"{name}.weight")

    def angles(self, positions: torch.Tensor, yarn: bool) -> torch.Tensor:
        """Rotary angles [T, rope_dim / 2] of uncompressed layers; the target interpolates low frequencies."""
        dims = torch.arange(0, self.rope_dim, 2, dtype=torch.float32) / self.rope_dim
        theta = self.config["rope_theta"]
        freqs = torch.pow(torch.tensor(theta, dtype=torch.float32), -dims)
        if yarn:
            scaling = self.config["rope_scaling"]

            def pair_at(turns: float) -> float:
                length = scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)
                return self.rope_dim * math.log(length) / (2 * math.log(theta))

            low, high = math.floor(pair_at(scaling["beta_fast"])), math.ceil(pair_at(scaling["beta_slow"]))
            ramp = ((torch.arange(self.rope_dim // 2) - low) / (high - low)).clamp(0, 1)
            freqs = freqs * (1 - ramp) + freqs / scaling["factor"] * ramp
        return positions.float()[:, None] * freqs

    @staticmethod
    def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Rotate the interleaved pairs of x [T, .., rope_dim] by angles [T, rope_dim / 2]."""
        angles = angles.view(angles.shape[0], *(1 for _ in x.shape[1:-1]), -1)
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = angles.cos(), angles.sin()
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)

    # -- hyper-connections -------------------------------------------------------------------------------

    def collapse(self, prefix: str, site: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """mHC before a sublayer: x [T, m, H] to its input [T, H], post [T, m] and comb [T, m, m]."""
        m, eps = x.shape[1], self.config["hc_eps"]
        flat = self.norm(None, x.flatten(1))
        mixes = flat @ self.tensor(f"{prefix}.hc_{site}_fn").T
        scale, base = self.tensor(f"{prefix}.hc_{site}_scale"), self.tensor(f"{prefix}.hc_{site}_base")
        pre = torch.sigmoid(mixes[:, :m] * scale[0] + base[:m]) + eps
        post = 2 * torch.sigmoid(mixes[:, m : 2 * m] * scale[1] + base[m : 2 * m])
        comb = (mixes[:, 2 * m :] * scale[2] + base[2 * m :]).view(-1, m, m).softmax(-1) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return _bf16((pre[..., None] * x).sum(1)), post, comb

    @staticmethod
    def spread(y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        """mHC after a sublayer with output y [T, H]: the new streams [T, m, H]."""
        return _bf16(post[..., None] * y[:, None] + torch.einsum("tjk,tjh->tkh", comb, x))

    def head(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        """Streams [T, m, H] to logits [T, vocab]: collapse, final norm, LM head."""
        mixes = self.norm(None, x.flatten(1)) @ self.tensor(f"{prefix}hc_head_fn").T
        mixes = mixes * self.tensor(f"{prefix}hc_head_scale") + self.tensor(f"{prefix}hc_head_base")
        collapsed = _bf16(((torch.sigmoid(mixes) + self.config["hc_eps"])[..., None] * x).sum(1))
        return _bf16(_bf16(self.norm(f"{prefix}norm", collapsed)) @ self.tensor("head.weight").T)

    # -- sublayers ---------------------------------------------------------------------------------------

    def _distinct_heads(self, prefix: str) -> torch.Tensor:
        """wq_b as [n, head_dim, q_lora], where n is 1 if all heads have the same weights."""
        key = f"{prefix}.wq_b:heads"
        if key not in self._cache:
            heads = self.weight(f"{prefix}.wq_b").view(self.heads, self.head_dim, -1)
            same = torch.equal(heads, heads[:1].expand_as(heads))
            self._cache[key] = heads[:1].clone() if same else heads
        return self._cache[key]

    def queries(self, prefix: str, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Queries [T, n, head_dim]; n is 1 when all heads have the same weights, which saves time."""
        latent = _bf16(self.norm(f"{prefix}.q_norm", self.linear(f"{prefix}.wq_a", x)))
        if f"{prefix}.wq_b.scale" in self._names:
            latent = _fp8_groups(latent)
        q = self.norm(None, _bf16(torch.einsum("tk,ndk->tnd", latent, self._distinct_heads(prefix))))
        return _bf16(torch.cat([q[..., : self.nope_dim], self.rotate(q[..., self.nope_dim :], angles)], -1))

    def key_rows(self, prefix: str, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """KV rows [T, head_dim] as read back from the pool."""
        row = self.norm(f"{prefix}.kv_norm", self.linear(f"{prefix}.wkv", x))
        row = torch.cat([row[:, : self.nope_dim], self.rotate(row[:, self.nope_dim :], angles)], -1)
        return store_row(row, self.nope_dim)

    def attend(self, prefix: str, q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attention with a sink per head: q [T, n, d], kv [K, d], mask [T, K] of visible rows."""
        scores = torch.einsum("tnd,kd->tnk", q, kv) / math.sqrt(self.head_dim)
        scores = scores.masked_fill(~mask[:, None], float("-inf"))
        sink = self.tensor(f"{prefix}.attn_sink")[: q.shape[1]].view(1, -1, 1).expand(q.shape[0], -1, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        return _bf16(torch.einsum("tnk,kd->tnd", weights, kv))

    def output(self, prefix: str, o: torch.Tensor, angles: torch.Tensor, fp8_wo_a: bool) -> torch.Tensor:
        """Inverse rotation and the grouped output projection of o [T, n, d], summed over the ranks."""
        o = torch.cat([o[..., : self.nope_dim], self.rotate(o[..., self.nope_dim :], -angles)], -1)
        grouped = _bf16(o).expand(-1, self.heads, -1).reshape(o.shape[0], self.groups, -1)
        if fp8_wo_a and f"{prefix}.wo_a.scale" in self._names:
            grouped = _fp8_groups(grouped)
        wo_a = self.weight(f"{prefix}.wo_a").view(self.groups, -1, grouped.shape[-1])
        latent = _bf16(torch.einsum("tgd,grd->tgr", grouped, wo_a)).flatten(1)
        if f"{prefix}.wo_b.scale" in self._names:
            latent = _fp8_groups(latent)
        shares = zip(latent.chunk(self.tp, 1), self.weight(f"{prefix}.wo_b").chunk(self.tp, 1), strict=True)
        return _bf16(sum((_bf16(part @ weight.T) for part, weight in shares), torch.zeros(1)))

    def feed_forward(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        """The shared expert; the routed ones give zero."""
        limit = self.config["swiglu_limit"]
        gate = self.linear(f"{prefix}.shared_experts.w1", x).clamp(max=limit)
        up = self.linear(f"{prefix}.shared_experts.w3", x).clamp(-limit, limit)
        return self.linear(f"{prefix}.shared_experts.w2", _bf16(F.silu(gate) * up))

    # -- models ------------------------------------------------------------------------------------------

    def _streams(self, ids: Sequence[int]) -> torch.Tensor:
        embed = self.tensor("embed.weight")[torch.tensor(ids)]
        return embed[:, None].repeat(1, self.config["hc_mult"], 1)

    @torch.inference_mode()
    def target(self, ids: Sequence[int]) -> TargetOutput:
        """Forward of the target over a whole sequence."""
        positions = torch.arange(len(ids))
        angles = self.angles(positions, yarn=True)
        x = self._streams(ids)
        aux = []
        for i in range(self.config["num_hidden_layers"]):
            prefix = f"layers.{i}"
            if i in self._attending:
                h, post, comb = self.collapse(prefix, "attn", x)
                x = self.spread(self._window_attention(prefix, h, angles), x, post, comb)
            h, post, comb = self.collapse(prefix, "ffn", x)
            h = _bf16(self.norm(f"{prefix}.ffn_norm", h))
            x = self.spread(self.feed_forward(f"{prefix}.ffn", h), x, post, comb)
            if i in self.info.target_layers:
                aux.append(_bf16(x.mean(1)))
        return TargetOutput(logits=self.head("", x), aux=torch.stack(aux, 1))

    def _window_attention(self, prefix: str, h: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        h = _bf16(self.norm(f"{prefix}.attn_norm", h))
        q = self.queries(f"{prefix}.attn", h, angles)
        kv = self.key_rows(f"{prefix}.attn", h, angles)
        window, parts = self.info.window, []
        for start in range(0, len(h), window):
            stop, first = min(start + window, len(h)), max(0, start - window + 1)
            query, key = torch.arange(start, stop)[:, None], torch.arange(first, stop)[None]
            mask = (key <= query) & (key > query - window)
            parts.append(self.attend(f"{prefix}.attn", q[start:stop], kv[first:stop], mask))
        return self.output(f"{prefix}.attn", torch.cat(parts), angles, fp8_wo_a=True)

    @torch.inference_mode()
    def context_rows(self, aux: torch.Tensor, positions: torch.Tensor) -> Rows:
        """Draft rows of captured outputs aux [T, 3, H], written for ``positions`` [T]."""
        x = _bf16(self.norm("mtp.0.main_norm", self.linear("mtp.0.main_proj", aux.flatten(1))))
        angles = self.angles(positions, yarn=False)
        return torch.stack([self.key_rows(f"mtp.{s}.attn", x, angles) for s in range(self.stages)])

    @torch.inference_mode()
    def propose(self, rows: Rows, prefix_len: int, anchor: int) -> list[int]:
        """Draft tokens of the block that starts with ``anchor`` at position ``prefix_len``.

        Every block position sees the last 128 rows before the block and all rows of the block. The Markov
        bias of the oracle is zero, so each token is the best one of its own logits.
        """
        gamma = self.info.gamma
        positions = torch.arange(prefix_len, prefix_len + gamma)
        angles = self.angles(positions, yarn=False)
        x = self._streams([anchor] + [NOISE_TOKEN] * (gamma - 1))
        for s in range(self.stages):
            prefix = f"mtp.{s}"
            h, post, comb = self.collapse(prefix, "attn", x)
            h = _bf16(self.norm(f"{prefix}.attn_norm", h))
            context = rows[s, max(0, prefix_len - self.info.window) : prefix_len]
            kv = torch.cat([context, self.key_rows(f"{prefix}.attn", h, angles)])
            q = self.queries(f"{prefix}.attn", h, angles)
            o = self.attend(f"{prefix}.attn", q, kv, torch.ones(gamma, len(kv), dtype=torch.bool))
            x = self.spread(self.output(f"{prefix}.attn", o, angles, fp8_wo_a=False), x, post, comb)
            h, post, comb = self.collapse(prefix, "ffn", x)
            h = _bf16(self.norm(f"{prefix}.ffn_norm", h))
            x = self.spread(self.feed_forward(f"{prefix}.ffn", h), x, post, comb)
        return self.head(f"mtp.{self.stages - 1}.", x).argmax(-1).tolist()


@dataclass(frozen=True)
class Prompt:
    """A prompt with its teacher-forced continuation and the target's outputs for both."""

    length: int
    ids: list[int]
    output: TargetOutput

    @property
    def aux(self) -> torch.Tensor:
        """Captured outputs [length, 3, H] of the prompt alone."""
        return self.output.aux[: self.length]


def run_target(sim: CheckpointSim, prompt: Sequence[int], new_tokens: int) -> Prompt:
    """Run the target over prompt and expected continuation.

    Raises ``ValueError`` unless greedy decoding gives that continuation at every step.
    """
    # A draft block may reach past the last counted token.
    continuation = sim.info.expected_continuation(prompt, new_tokens + sim.info.gamma + 1)
    ids = [*prompt, *continuation]
    output = sim.target(ids)
    greedy = output.logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    if greedy != continuation:
        raise ValueError("greedy decoding does not give the expected continuation")
    return Prompt(length=len(prompt), ids=ids, output=output)


def accept_length(sim: CheckpointSim, prompt: Prompt, prompt_rows: Rows, new_tokens: int) -> float:
    """Mean tokens per draft-and-verify step, at most gamma + 1.

    ``prompt_rows`` are the rows of the prompt, as a prefill server would send them; the rows of generated
    tokens are right, as the decode server writes them itself.
    """
    length = prompt.length
    own_rows = sim.context_rows(prompt.output.aux[length:], torch.arange(length, len(prompt.ids)))
    rows = torch.cat([prompt_rows, own_rows], dim=1)
    position, steps = length, 0
    while position < length + new_tokens:
        draft = sim.propose(rows, position, prompt.ids[position])
        wanted = prompt.ids[position + 1 : position + 1 + len(draft)]
        wrong = (i for i, (a, b) in enumerate(zip(draft, wanted, strict=False)) if a != b)
        position += 1 + next(wrong, len(wanted))
        steps += 1
    return (position - length) / steps


Control = Callable[[CheckpointSim, Prompt, Prompt], Rows]
"""Makes the rows of the first prompt in some way; the second is another prompt of the same length."""


def _right(sim: CheckpointSim, prompt: Prompt, other: Prompt) -> Rows:
    return sim.context_rows(prompt.aux, torch.arange(prompt.length))


def _order_not_restored(cp: int) -> Control:
    def rows(sim: CheckpointSim, prompt: Prompt, other: Prompt) -> Rows:
        order = torch.cat([torch.arange(rank, prompt.length, cp) for rank in range(cp)])
        return sim.context_rows(prompt.aux[order], torch.arange(prompt.length))

    return rows


def _shifted_positions(offset: int) -> Control:
    def rows(sim: CheckpointSim, prompt: Prompt, other: Prompt) -> Rows:
        return sim.context_rows(prompt.aux, torch.arange(prompt.length) + offset)

    return rows


def _tokens_moved(sim: CheckpointSim, prompt: Prompt, other: Prompt) -> Rows:
    return sim.context_rows(prompt.aux.roll(1, dims=0), torch.arange(prompt.length))


def _layer_order(order: Sequence[int]) -> Control:
    def rows(sim: CheckpointSim, prompt: Prompt, other: Prompt) -> Rows:
        return sim.context_rows(prompt.aux[:, list(order)], torch.arange(prompt.length))

    return rows


def _one_layer_zero(sim: CheckpointSim, prompt: Prompt, other: Prompt) -> Rows:
    aux = prompt.aux.clone()
    aux[:, 0] = 0
    return sim.context_rows(aux, torch.arange(prompt.length))


CONTROLS: dict[str, Control] = {
    "right": _right,
    "zeroed": lambda sim, prompt, other: torch.zeros_like(_right(sim, prompt, other)),
    "exchanged": lambda sim, prompt, other: _right(sim, other, prompt),
    "cp2 order": _order_not_restored(2),
    "cp8 order": _order_not_restored(8),
    "positions +1": _shifted_positions(1),
    "positions -1": _shifted_positions(-1),
    "tokens moved by one": _tokens_moved,
    "layers swapped": _layer_order((1, 0, 2)),
    "layers reversed": _layer_order((2, 1, 0)),
    "one layer zero": _one_layer_zero,
    "stages swapped": lambda sim, prompt, other: _right(sim, prompt, other)[[1, 0, 2]],
    "one stage zero": lambda sim, prompt, other: (
        _right(sim, prompt, other) * torch.tensor([1.0, 1.0, 0.0]).view(3, 1, 1)
    ),
}
"""Ways to make the prompt's rows: ``right``, and faults that must bring the accept length down to about 1."""


def measure(sim: CheckpointSim, lengths: Sequence[int], new_tokens: int = 64, seed: int = 0) -> dict[str, float]:
    """Accept length of each entry of :data:`CONTROLS`, the mean over one random prompt per length."""
    totals = dict.fromkeys(CONTROLS, 0.0)
    for length in lengths:
        pair = [run_target(sim, sim.info.sample_prompt(length, seed + k), new_tokens) for k in (0, 1)]
        for name, control in CONTROLS.items():
            totals[name] += accept_length(sim, pair[0], control(sim, *pair), new_tokens)
    return {name: total / len(lengths) for name, total in totals.items()}
