"""Small DeepSeek-V4 checkpoints with a bundled DSpark draft, for smoke tests of a real engine.

Two kinds are written, both in the official Hugging Face layout (``embed.*``, ``layers.N.*``, ``norm.*``,
``head.*``, ``mtp.S.*``) that SGLang loads for ``DeepseekV4ForCausalLM`` and its DSpark draft:

``random``
    Random weights. The engine boots and answers, but the accept length of the draft says nothing: with such
    weights the Markov head decides the proposals and the context rows of the draft do not matter.

``oracle``
    Weights built by hand. Greedy decoding of the target repeats the token that stands ``period`` positions
    back, and the draft can propose the right tokens only by attending to the right context rows, each written
    for the right position, in every draft stage, and from every captured target layer. See
    ``docs/oracle-checkpoint.md`` for the construction.

Layout of the residual stream of the oracle (hidden dims, groups of 128; dims above 1024 are zero)::

    [   0,  128)  CONST   1.0 for every token: source of queries, of the rotary part of keys, of gates
    [ 128,  256)  TAG     one digit of the own token, a different one after each captured target layer
    [ 256,  640)  OWN     three digit codes of the own token, 128 dims each
    [ 640, 1024)  COPY    three digit codes of the attended token, small; the only dims that the LM head reads

A token is a triple of digits in base ``ceil(vocab ** (1/3))``. A digit is a row of a sign-flipped Hadamard
matrix, so codes of different digits at one place are orthogonal.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Kind = Literal["oracle", "random"]
Quant = Literal["bf16", "fp8"]

INFO_FILE = "smoke_checkpoint.json"
WEIGHTS_FILE = "model-00001-of-00001.safetensors"

GROUP = 128
"""Width of one digit code, of one fp8 weight block and of one fp8 activation group."""
NUM_DIGITS = 3
"""Digits of a token; also captured target layers and draft stages, each of which carries one digit."""
CONST = slice(0, GROUP)
TAG = slice(GROUP, 2 * GROUP)
OWN_START = 2 * GROUP
COPY_START = OWN_START + NUM_DIGITS * GROUP
MIN_HIDDEN = COPY_START + NUM_DIGITS * GROUP

FIRST_TOKEN = 8
"""Token ids below this one are special; the oracle's LM head never emits them."""
NOISE_TOKEN = 3

ROPE_ENERGY = (0.615, 0.105, 0.055, 0.01, 0.0, 0.0, 0.02, 0.04, 0.10, 0.04, 0.015)
"""Share of the query-key score on rotary pair i (frequency ``10000 ** (-i / 32)``).

Chosen (linear program, rounded) to keep ``sum_i e_i cos(theta_i * delta)`` low for every
``0 < |delta| <= 132``. Only pairs 0 to 10 are used: there the plain rotary table of the draft and the YaRN
table of the target's uncompressed layers (4096 original positions, beta_fast 32) are the same.
"""
PEAK_SCORE = 80.0
"""Attention logit at the wanted distance; every other distance in the window stays about 0.3 of it lower."""
TARGET_SINK = 68.0
"""Attention sink of the target's copy layer, half way between the peak and the best other distance (56.6).

Before position ``period - 1`` no row stands at the wanted distance. There the sink takes all attention but some 1e-5.
Without it attention would blend rows whose scores nearly tie, and the last bit of a sum could move a draft row by a
whole e4m3 code.
"""
COPY_SIZE = 1 / 32
"""Entries of COPY. Small beside the 1 of the other parts, so that norms hardly change where nothing was copied."""
DRAFT_SINK = -2 * PEAK_SCORE
"""Attention sink of the draft's stages: plays no part. The wanted row of a block is always in the window."""


def own(digit: int) -> slice:
    """Hidden dims that hold code number ``digit`` of the own token."""
    return slice(OWN_START + digit * GROUP, OWN_START + (digit + 1) * GROUP)


def copy(digit: int) -> slice:
    """Hidden dims that receive code number ``digit`` of the attended token."""
    return slice(COPY_START + digit * GROUP, COPY_START + (digit + 1) * GROUP)


@dataclass(frozen=True)
class Geometry:
    """Shapes of the checkpoint. The defaults are the smallest that SGLang's GPU kernels for V4 accept."""

    hidden: int = 1024
    vocab: int = 1024
    layers: int = 6
    heads: int = 64
    head_dim: int = 512
    rope_dim: int = 64
    q_lora: int = 256
    o_groups: int = 8
    o_lora: int = 128
    index_heads: int = 64
    index_dim: int = 128
    index_topk: int = 512
    experts: int = 8
    topk: int = 2
    moe_intermediate: int = 256
    hash_layers: int = 3
    hc_mult: int = 4
    window: int = 128
    gamma: int = 4
    markov_rank: int = 64
    rope_theta: float = 10000.0

    @property
    def nope_dim(self) -> int:
        """Leading dims of a head that carry no position."""
        return self.head_dim - self.rope_dim

    @property
    def targets(self) -> tuple[int, ...]:
        """Target layers whose output the draft sees, one draft stage for each."""
        return (1, self.layers // 2, self.layers - 1)

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratio of each target layer: two pure sliding windows, then 4 and 128 in turn."""
        return tuple(0 if i < 2 else (4, 128)[i % 2] for i in range(self.layers))

    def validate(self, kind: Kind, quant: Quant) -> None:
        """Raise ``ValueError`` for shapes that cannot be written."""
        if self.hidden % GROUP or self.moe_intermediate % GROUP:
            raise ValueError("hidden and moe_intermediate must be multiples of 128")
        if self.layers < 6 or self.topk > self.experts:
            raise ValueError("needs at least 6 layers, and topk <= experts")
        if kind == "oracle":
            if self.hidden < MIN_HIDDEN:
                raise ValueError(f"the oracle needs hidden >= {MIN_HIDDEN}, got {self.hidden}")
            if not FIRST_TOKEN < self.vocab <= (GROUP - 1) ** NUM_DIGITS:
                raise ValueError(f"vocab {self.vocab} is out of range")
            if self.moe_intermediate != 2 * GROUP or self.o_lora != GROUP or self.o_groups < NUM_DIGITS:
                raise ValueError("the oracle is laid out for moe_intermediate 256, o_lora 128, o_groups >= 3")


@dataclass(frozen=True)
class CheckpointInfo:
    """What was written, and for the oracle what greedy decoding must return."""

    path: str
    kind: Kind
    quant: Quant
    seed: int
    hidden: int
    vocab: int
    gamma: int
    window: int
    target_layers: tuple[int, ...]
    period: int | None
    """Oracle only: the next token is the one ``period`` positions back. Prompts must be at least that long."""
    num_tensors: int
    num_bytes: int
    first_token: int = FIRST_TOKEN

    def sample_prompt(self, length: int, seed: int = 0) -> list[int]:
        """``length`` uniform token ids without special ones."""
        rng = random.Random(seed * 1_000_003 + length)
        return [rng.randrange(self.first_token, self.vocab) for _ in range(length)]

    def expected_continuation(self, prompt: Sequence[int], n: int) -> list[int]:
        """The ``n`` tokens that greedy decoding of the oracle must append to ``prompt``.

        Raises ``ValueError`` for a random checkpoint, a prompt shorter than ``period`` or a prompt whose last
        ``period`` tokens hold an id that the LM head cannot emit.
        """
        if self.period is None:
            raise ValueError("only an oracle checkpoint has an expected continuation")
        if len(prompt) < self.period:
            raise ValueError(f"prompt of {len(prompt)} tokens is shorter than the period {self.period}")
        tail = list(prompt[-self.period :])
        if any(not self.first_token <= token < self.vocab for token in tail):
            raise ValueError("the last period of the prompt holds a special or unknown token id")
        return [tail[i % self.period] for i in range(n)]


def read_checkpoint_info(path: Path | str) -> CheckpointInfo:
    """Read back the :class:`CheckpointInfo` of a checkpoint; ``path`` may have been moved since."""
    values = json.loads((Path(path) / INFO_FILE).read_text())
    values["path"] = str(path)
    values["target_layers"] = tuple(values["target_layers"])
    return CheckpointInfo(**values)


def score_profile(deltas: Sequence[int], geometry: Geometry | None = None) -> list[float]:
    """Attention logit of the oracle's copy head at each offset from the wanted distance, before rounding."""
    theta = (geometry or Geometry()).rope_theta
    width = (geometry or Geometry()).rope_dim
    total = sum(ROPE_ENERGY)
    pairs = [(e / total, theta ** (-2 * i / width)) for i, e in enumerate(ROPE_ENERGY)]
    return [PEAK_SCORE * sum(e * math.cos(freq * delta) for e, freq in pairs) for delta in deltas]


def quantize_block_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 weight [n, k] and power-of-two fp32 scales [n / 128, k / 128] of a float32 weight [n, k]."""
    import torch

    n, k = weight.shape
    if n % GROUP or k % GROUP:
        raise ValueError(f"shape {tuple(weight.shape)} is not made of 128x128 blocks")
    blocks = weight.reshape(n // GROUP, GROUP, k // GROUP, GROUP)
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.exp2(torch.ceil(torch.log2(largest.clamp_min(1e-12) / 448.0)))
    scale = torch.where(largest > 0, scale, torch.ones_like(scale))
    packed = (blocks / scale[:, None, :, None]).clamp(-448, 448).reshape(n, k)
    return packed.to(torch.float8_e4m3fn), scale


@dataclass
class _RandomBuilder:
    """Collects the tensors of a checkpoint with random weights; the oracle overrides the parts it needs."""

    geometry: Geometry
    quant: Quant
    seed: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import torch

        self.rng = torch.Generator().manual_seed(self.seed)
        self.successor = self._successor()

    def _successor(self) -> torch.Tensor:
        """Token permutation [vocab] that the random target and its Markov head lean to; specials stay."""
        import torch

        shuffled = torch.randperm(self.geometry.vocab - FIRST_TOKEN, generator=self.rng) + FIRST_TOKEN
        return torch.cat([torch.arange(FIRST_TOKEN), shuffled])

    # -- primitive tensors -------------------------------------------------------------------------------

    def normal(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        """Float32 normal noise."""
        import torch

        return torch.randn(*shape, generator=self.rng) * std

    def put(self, name: str, value: torch.Tensor, dtype: str = "bfloat16") -> None:
        """Store ``value`` under ``name`` in ``dtype``."""
        import torch

        if name in self.tensors:
            raise ValueError(f"tensor {name} written twice")
        self.tensors[name] = value.to(getattr(torch, dtype)).contiguous()

    def put_linear(self, name: str, weight: torch.Tensor) -> None:
        """A linear layer [n, k] that an fp8 checkpoint quantises: ``.weight`` and, in fp8, ``.scale``."""
        if self.quant == "fp8":
            packed, scale = quantize_block_fp8(weight)
            self.put(f"{name}.weight", packed, "float8_e4m3fn")
            self.put(f"{name}.scale", scale, "float32")
        else:
            self.put(f"{name}.weight", weight)

    def random_linear(self, name: str, n: int, k: int, gain: float = 1.0) -> None:
        """A quantisable linear layer whose output has ``gain`` times the rms of its input."""
        self.put_linear(name, self.normal(n, k, std=gain / math.sqrt(k)))

    def norm(self, name: str, n: int) -> None:
        """Weight [n] of an RMSNorm."""
        self.put(f"{name}.weight", 1.0 + self.normal(n, std=0.05))

    # -- parts of a layer --------------------------------------------------------------------------------

    def hyper_connection(self, prefix: str, site: str) -> None:
        """mHC mixing of one sublayer: fn [(2 + m) m, m H], base [(2 + m) m], scale [3], order pre/post/comb."""
        m, mixes = self.geometry.hc_mult, (2 + self.geometry.hc_mult) * self.geometry.hc_mult
        width = m * self.geometry.hidden
        self.put(f"{prefix}.hc_{site}_fn", self.normal(mixes, width, std=0.5 / math.sqrt(width)), "float32")
        self.put(f"{prefix}.hc_{site}_base", self.normal(mixes, std=0.2), "float32")
        self.put(f"{prefix}.hc_{site}_scale", 0.5 + self.normal(3, std=0.05), "float32")

    def hyper_head(self, prefix: str) -> None:
        """mHC collapse before the final norm: fn [m, m H], base [m], scale [1]."""
        m, width = self.geometry.hc_mult, self.geometry.hc_mult * self.geometry.hidden
        self.put(f"{prefix}hc_head_fn", self.normal(m, width, std=0.5 / math.sqrt(width)), "float32")
        self.put(f"{prefix}hc_head_base", self.normal(m, std=0.2), "float32")
        self.put(f"{prefix}hc_head_scale", self.normal(1, std=0.0) + 0.5, "float32")

    def compressor(self, prefix: str, ratio: int, dim: int) -> None:
        """KV compressor; ratio 4 uses overlapping windows and therefore twice the width."""
        g, width = self.geometry, dim * (2 if ratio == 4 else 1)
        for part in ("wkv", "wgate"):
            self.put(f"{prefix}.{part}.weight", self.normal(width, g.hidden, std=g.hidden**-0.5))
        self.put(f"{prefix}.ape", self.normal(ratio, width, std=0.3), "float32")
        self.norm(f"{prefix}.norm", dim)

    def attention_inputs(self, prefix: str, ratio: int) -> None:
        """Everything of an attention layer but its output projections."""
        g = self.geometry
        self.random_linear(f"{prefix}.wq_a", g.q_lora, g.hidden)
        self.random_linear(f"{prefix}.wq_b", g.heads * g.head_dim, g.q_lora)
        self.random_linear(f"{prefix}.wkv", g.head_dim, g.hidden)
        self.norm(f"{prefix}.q_norm", g.q_lora)
        self.norm(f"{prefix}.kv_norm", g.head_dim)
        self.put(f"{prefix}.attn_sink", self.normal(g.heads, std=0.5), "float32")
        if ratio:
            self.compressor(f"{prefix}.compressor", ratio, g.head_dim)
        if ratio == 4:
            self.random_linear(f"{prefix}.indexer.wq_b", g.index_heads * g.index_dim, g.q_lora)
            weights = self.normal(g.index_heads, g.hidden, std=g.hidden**-0.5)
            self.put(f"{prefix}.indexer.weights_proj.weight", weights)
            self.compressor(f"{prefix}.indexer.compressor", ratio, g.index_dim)

    def attention(self, prefix: str, ratio: int, layer: int | None, stage: int | None) -> None:
        """Attention of target layer ``layer`` or of draft stage ``stage``."""
        g = self.geometry
        self.attention_inputs(prefix, ratio)
        self.random_linear(f"{prefix}.wo_a", g.o_groups * g.o_lora, g.heads * g.head_dim // g.o_groups, 2.0)
        self.random_linear(f"{prefix}.wo_b", g.hidden, g.o_groups * g.o_lora)

    def router(self, prefix: str, hashed: bool) -> None:
        """Router: token-to-expert table for the first layers, else a selection bias that avoids near-ties."""
        import torch

        g = self.geometry
        self.put(f"{prefix}.gate.weight", self.normal(g.experts, g.hidden, std=g.hidden**-0.5))
        if hashed:
            rows = [torch.randperm(g.experts, generator=self.rng)[: g.topk] for _ in range(g.vocab)]
            self.put(f"{prefix}.gate.tid2eid", torch.stack(rows), "int64")
        else:
            bias = torch.randperm(g.experts, generator=self.rng)
            self.put(f"{prefix}.gate.bias", bias, "float32")

    def expert(self, prefix: str, down_gain: float) -> None:
        """One SwiGLU expert: w1 and w3 [I, H], w2 [H, I]."""
        g = self.geometry
        self.random_linear(f"{prefix}.w1", g.moe_intermediate, g.hidden, 1.5)
        self.random_linear(f"{prefix}.w3", g.moe_intermediate, g.hidden, 1.5)
        self.random_linear(f"{prefix}.w2", g.hidden, g.moe_intermediate, down_gain)

    def shared_expert(self, prefix: str, layer: int | None) -> None:
        """The always-on expert."""
        self.expert(prefix, 0.3)

    routed_gain = 0.3

    def layer(self, prefix: str, *, ratio: int, hashed: bool, layer: int | None, stage: int | None) -> None:
        """One decoder layer of the target (``layer`` set) or one stage of the draft (``stage`` set)."""
        self.attention(f"{prefix}.attn", ratio, layer, stage)
        self.router(f"{prefix}.ffn", hashed)
        for expert in range(self.geometry.experts):
            self.expert(f"{prefix}.ffn.experts.{expert}", self.routed_gain)
        self.shared_expert(f"{prefix}.ffn.shared_experts", layer)
        for site in ("attn", "ffn"):
            self.hyper_connection(prefix, site)
            self.norm(f"{prefix}.{site}_norm", self.geometry.hidden)

    # -- ends of the models ------------------------------------------------------------------------------

    def vocabulary(self) -> None:
        """Embedding and LM head, both [vocab, H]; the head prefers the successor of the current token."""
        import torch

        g = self.geometry
        embed = self.normal(g.vocab, g.hidden)
        mixed = 0.35 * embed[torch.argsort(self.successor)]
        mixed += math.sqrt(1 - 0.35**2) * self.normal(g.vocab, g.hidden)
        head = 3.0 * mixed / math.sqrt(g.hidden)
        head[:FIRST_TOKEN] *= 1e-2
        self.put("embed.weight", embed)
        self.put("head.weight", head)

    def main_projection(self, prefix: str) -> None:
        """Projection [H, 3 H] of the captured target layers to the draft's context."""
        self.random_linear(f"{prefix}.main_proj", self.geometry.hidden, NUM_DIGITS * self.geometry.hidden)
        self.norm(f"{prefix}.main_norm", self.geometry.hidden)

    def draft_heads(self, prefix: str) -> None:
        """Markov head w1, w2 [vocab, rank] and confidence head [1, H + rank]."""
        import torch

        g = self.geometry
        w1 = self.normal(g.vocab, g.markov_rank)
        self.put(f"{prefix}.markov_head.markov_w1.weight", w1)
        w2 = 16.0 * w1[torch.argsort(self.successor)] / g.markov_rank
        self.put(f"{prefix}.markov_head.markov_w2.weight", w2)
        confidence = self.normal(1, g.hidden + g.markov_rank, std=g.hidden**-0.5)
        self.put(f"{prefix}.confidence_head.proj.weight", confidence, "float32")

    def build(self) -> dict[str, torch.Tensor]:
        """All tensors of target and draft by their names in the checkpoint."""
        g = self.geometry
        self.vocabulary()
        self.norm("norm", g.hidden)
        self.hyper_head("")
        for i, ratio in enumerate(g.ratios):
            self.layer(f"layers.{i}", ratio=ratio, hashed=i < g.hash_layers, layer=i, stage=None)
        last = len(g.targets) - 1
        for s in range(last + 1):
            prefix = f"mtp.{s}"
            self.layer(prefix, ratio=0, hashed=False, layer=None, stage=s)
            if s == 0:
                self.main_projection(prefix)
            if s == last:
                self.norm(f"{prefix}.norm", g.hidden)
                self.hyper_head(f"{prefix}.")
                self.draft_heads(prefix)
        return self.tensors


@dataclass
class _OracleBuilder(_RandomBuilder):
    """Weights that make greedy decoding periodic and the draft dependent on its context rows."""

    period: int = 120
    routed_gain = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.codes, self.digits = self._codebooks()

    def _codebooks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [3, base, 128] of the digits (entries +-1) and digits [vocab, 3] of the tokens."""
        import torch

        vocab = self.geometry.vocab
        base = next(b for b in range(2, GROUP) if b**NUM_DIGITS >= vocab)
        hadamard = torch.ones(1, 1)
        while hadamard.shape[0] < GROUP:
            hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
        books = []
        for _ in range(NUM_DIGITS):
            rows = torch.randperm(GROUP, generator=self.rng)[:base]
            signs = torch.randint(0, 2, (GROUP,), generator=self.rng) * 2.0 - 1.0
            books.append(hadamard[rows] * signs)
        index = torch.randperm(base**NUM_DIGITS, generator=self.rng)[:vocab]
        digits = torch.stack([index // base**d % base for d in range(NUM_DIGITS)], dim=1)
        return torch.stack(books), digits

    def _token_codes(self) -> torch.Tensor:
        """The three codes of each token side by side, [vocab, 384]."""
        import torch

        return torch.cat([self.codes[d][self.digits[:, d]] for d in range(NUM_DIGITS)], dim=1)

    def zeros(self, *shape: int) -> torch.Tensor:
        """Float32 zeros."""
        import torch

        return torch.zeros(*shape)

    def norm(self, name: str, n: int) -> None:
        """Weight 1 everywhere."""
        self.put(f"{name}.weight", self.zeros(n) + 1.0)

    def vocabulary(self) -> None:
        """Embedding: CONST and OWN. Head: the token's codes on COPY, logit 30 for it and at most 20 else."""
        g = self.geometry
        codes = self._token_codes()
        embed = self.zeros(g.vocab, g.hidden)
        embed[:, CONST] = 1.0
        embed[:, OWN_START:COPY_START] = codes
        head = self.zeros(g.vocab, g.hidden)
        final_copy = COPY_SIZE * self._normalised(tagged=True)
        head[FIRST_TOKEN:, COPY_START:MIN_HIDDEN] = codes[FIRST_TOKEN:] * 30.0 / (codes.shape[1] * final_copy)
        self.put("embed.weight", embed)
        self.put("head.weight", head)

    def _normalised(self, *, tagged: bool) -> float:
        """Value of a CONST dim after an RMSNorm of the residual stream."""
        groups = 1 + NUM_DIGITS + int(tagged) + NUM_DIGITS * COPY_SIZE**2
        return math.sqrt(self.geometry.hidden / (groups * GROUP))

    def hyper_connection(self, prefix: str, site: str) -> None:
        """The mean over the streams is a plain residual stream, whatever the input.

        pre = 1/4 each, comb = identity (the Sinkhorn steps keep it), post = 1.96 for one half of the streams
        and 0.04 for the other, whose mean is 1. The streams differ, so that their mean is not just any one.
        """
        m, mixes = self.geometry.hc_mult, (2 + self.geometry.hc_mult) * self.geometry.hc_mult
        base = self.zeros(mixes)
        base[:m] = -math.log(m - 1)
        base[m : m + m // 2] = 4.0
        base[m + m // 2 : 2 * m] = -4.0
        comb = base[2 * m :].view(m, m)
        comb.fill_(-20.0)
        comb.fill_diagonal_(20.0)
        self.put(f"{prefix}.hc_{site}_fn", self.zeros(mixes, m * self.geometry.hidden), "float32")
        self.put(f"{prefix}.hc_{site}_base", base, "float32")
        self.put(f"{prefix}.hc_{site}_scale", self.zeros(3) + 1.0, "float32")

    def hyper_head(self, prefix: str) -> None:
        """The mean of the streams."""
        m = self.geometry.hc_mult
        self.put(f"{prefix}hc_head_fn", self.zeros(m, m * self.geometry.hidden), "float32")
        self.put(f"{prefix}hc_head_base", self.zeros(m) - math.log(m - 1), "float32")
        self.put(f"{prefix}hc_head_scale", self.zeros(1) + 1.0, "float32")

    def attention(self, prefix: str, ratio: int, layer: int | None, stage: int | None) -> None:
        """Copy heads in target layer 0 and in every draft stage; a random input and no output elsewhere."""
        if layer == 0:
            plan = [(group % NUM_DIGITS, group % NUM_DIGITS) for group in range(self.geometry.o_groups)]
            self._copy_attention(prefix, rotate=0, plan=plan, sink=TARGET_SINK)
        elif stage is not None:
            plan = [(0, stage)] * self.geometry.o_groups
            self._copy_attention(prefix, rotate=stage, plan=plan, sink=DRAFT_SINK)
        else:
            g = self.geometry
            self.attention_inputs(prefix, ratio)
            self.random_linear(f"{prefix}.wo_a", g.o_groups * g.o_lora, g.heads * g.head_dim // g.o_groups)
            self.put_linear(f"{prefix}.wo_b", self.zeros(g.hidden, g.o_groups * g.o_lora))

    def _copy_attention(self, prefix: str, *, rotate: int, plan: Sequence[tuple[int, int]], sink: float) -> None:
        """Attention to the one row ``period - 1`` positions back, and a copy of its codes to COPY.

        Args:
            prefix: tensor name prefix.
            rotate: the row holds digit ``(chunk + rotate) % 3`` in no-position chunk ``chunk``.
            plan: for each output group the chunk that it reads and the COPY digit that it writes.
            sink: attention logit of the sink of every head.
        """
        import torch

        g = self.geometry
        energy = torch.tensor(ROPE_ENERGY, dtype=torch.float64)
        amplitude = (energy / energy.sum()).sqrt()
        pairs = torch.arange(len(ROPE_ENERGY), dtype=torch.float64)
        angle = (self.period - 1) * g.rope_theta ** (-2 * pairs / g.rope_dim)

        # Query: wq_a and q_norm give 1 in every dim; each head has the same pure rotary vector. The engine
        # normalises it to sqrt(head_dim), which the softmax scale takes out again.
        wq_a = self.zeros(g.q_lora, g.hidden)
        wq_a[:, CONST] = 1.0 / GROUP
        query = self.zeros(g.rope_dim)
        query[0 : 2 * len(pairs) : 2] = (amplitude * angle.cos()).float()
        query[1 : 2 * len(pairs) : 2] = (-amplitude * angle.sin()).float()
        wq_b = self.zeros(g.heads, g.head_dim, g.q_lora)
        wq_b[:, g.nope_dim :] = (16.0 * query / g.q_lora)[:, None]
        self.put_linear(f"{prefix}.wq_a", wq_a)
        self.norm(f"{prefix}.q_norm", g.q_lora)
        self.put_linear(f"{prefix}.wq_b", wq_b.view(-1, g.q_lora))

        # Key and value: the codes are +-1 after kv_norm, the rotary part has norm PEAK_SCORE.
        rotary_norm = math.sqrt(g.head_dim - NUM_DIGITS * GROUP)
        wkv = self.zeros(g.head_dim, g.hidden)
        for chunk in range(NUM_DIGITS):
            columns = own((chunk + rotate) % NUM_DIGITS)
            wkv[chunk * GROUP : (chunk + 1) * GROUP, columns] = torch.eye(GROUP)
        key = rotary_norm * amplitude.float() / GROUP
        wkv[g.nope_dim : g.nope_dim + 2 * len(pairs) : 2, CONST] = key[:, None]
        kv_norm = self.zeros(g.head_dim) + 1.0
        kv_norm[g.nope_dim :] = PEAK_SCORE / rotary_norm
        self.put_linear(f"{prefix}.wkv", wkv)
        self.put(f"{prefix}.kv_norm.weight", kv_norm)
        self.put(f"{prefix}.attn_sink", self.zeros(g.heads) + sink, "float32")

        # Output: a group averages its heads; the groups of one digit share its weight (powers of two).
        heads = g.heads // g.o_groups
        wo_a = self.zeros(g.o_groups, g.o_lora, heads, g.head_dim)
        wo_b = self.zeros(g.hidden, g.o_groups, g.o_lora)
        for group, (chunk, digit) in enumerate(plan):
            members = [other for other, (_, target) in enumerate(plan) if target == digit]
            doublings = min(members.index(group) + 1, len(members) - 1)
            power_of_two = len(members) & (len(members) - 1) == 0
            share = 1.0 / len(members) if power_of_two else 2.0**-doublings
            wo_a[group, :, :, chunk * GROUP : (chunk + 1) * GROUP] = torch.eye(GROUP)[:, None] / heads
            wo_b[copy(digit), group] = torch.eye(GROUP) * share * COPY_SIZE
        self.put_linear(f"{prefix}.wo_a", wo_a.view(g.o_groups * g.o_lora, -1))
        self.put_linear(f"{prefix}.wo_b", wo_b.view(g.hidden, -1))

    def _tag_changes(self, layer: int) -> list[tuple[int, float]]:
        """Digits that the FFN of target layer ``layer`` adds to (+1) or takes from (-1) TAG."""
        targets = self.geometry.targets
        changes = [(d, 1.0) for d, target in enumerate(targets) if target == layer]
        return changes + [(d, -1.0) for d, target in enumerate(targets) if target == layer - 1]

    def shared_expert(self, prefix: str, layer: int | None) -> None:
        """A linear map OWN -> TAG, by a SwiGLU expert with a constant gate; zero output in other layers.

        After captured layer number d, TAG holds digit d; the layer after it clears TAG again.
        """
        import torch

        g = self.geometry
        changes = [] if layer is None else self._tag_changes(layer)
        tagged = layer is not None and (layer - 1) in g.targets
        value = self._normalised(tagged=tagged)
        gate_weight = 2.0 ** round(math.log2(3.0 / (GROUP * value)))
        gate = GROUP * gate_weight * value
        swish = gate / (1 + math.exp(-gate))
        w1 = self.zeros(g.moe_intermediate, g.hidden)
        w3, w2 = torch.zeros_like(w1), self.zeros(g.hidden, g.moe_intermediate)
        w1[:, CONST] = gate_weight
        halves = changes * 2 if len(changes) == 1 else changes
        for half, (digit, sign) in enumerate(halves):
            rows = slice(half * GROUP, (half + 1) * GROUP)
            w3[rows, own(digit)] = torch.eye(GROUP)
            w2[TAG, rows] = torch.eye(GROUP) * sign * len(changes) / (len(halves) * swish * value)
        self.put_linear(f"{prefix}.w1", w1)
        self.put_linear(f"{prefix}.w3", w3)
        self.put_linear(f"{prefix}.w2", w2)

    def main_projection(self, prefix: str) -> None:
        """CONST is the mean of the captured ones, OWN digit d is TAG of captured layer number d."""
        import torch

        g = self.geometry
        weight = self.zeros(g.hidden, NUM_DIGITS, g.hidden)
        for slot in range(NUM_DIGITS):
            weight[CONST, slot, CONST] = torch.eye(GROUP) / NUM_DIGITS
            weight[own(slot), slot, TAG] = torch.eye(GROUP)
        self.put_linear(f"{prefix}.main_proj", weight.view(g.hidden, -1))
        self.norm(f"{prefix}.main_norm", g.hidden)

    def draft_heads(self, prefix: str) -> None:
        """A Markov head without any bias, and a confidence of 0.99995 whatever the rows are."""
        g = self.geometry
        self.put(f"{prefix}.markov_head.markov_w1.weight", self.normal(g.vocab, g.markov_rank))
        self.put(f"{prefix}.markov_head.markov_w2.weight", self.zeros(g.vocab, g.markov_rank))
        confidence = self.zeros(1, g.hidden + g.markov_rank)
        confidence[:, CONST] = 10.0 / GROUP
        self.put(f"{prefix}.confidence_head.proj.weight", confidence, "float32")


def model_config(geometry: Geometry, quant: Quant) -> dict[str, Any]:
    """``config.json`` of the checkpoint, with the key names of the official V4 and DSpark configurations."""
    g = geometry
    config: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "vocab_size": g.vocab,
        "hidden_size": g.hidden,
        "num_hidden_layers": g.layers,
        "num_attention_heads": g.heads,
        "num_key_value_heads": 1,
        "head_dim": g.head_dim,
        "v_head_dim": g.head_dim,
        "kv_lora_rank": g.head_dim,
        "qk_rope_head_dim": g.rope_dim,
        "qk_nope_head_dim": g.nope_dim,
        "q_lora_rank": g.q_lora,
        "o_lora_rank": g.o_lora,
        "o_groups": g.o_groups,
        "sliding_window": g.window,
        "window_size": g.window,
        "index_n_heads": g.index_heads,
        "index_head_dim": g.index_dim,
        "index_topk": g.index_topk,
        "compress_ratios": [*g.ratios, *(0 for _ in g.targets)],
        "compress_rope_theta": 160000.0,
        "rope_theta": g.rope_theta,
        "max_position_embeddings": 65536,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 4096,
        },
        "moe_intermediate_size": g.moe_intermediate,
        "n_routed_experts": g.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": g.topk,
        "num_hash_layers": g.hash_layers,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "hc_mult": g.hc_mult,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "num_nextn_predict_layers": len(g.targets),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "use_cache": True,
        "dspark_block_size": g.gamma,
        "dspark_markov_rank": g.markov_rank,
        "dspark_noise_token_id": NOISE_TOKEN,
        "dspark_target_layer_ids": list(g.targets),
    }
    if quant == "fp8":
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [GROUP, GROUP],
        }
    return config


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def _write_tokenizer(out: Path, vocab: int) -> None:
    """A word-level tokenizer: ``w8 w9 ...`` split on spaces, no token added to a prompt."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<bos>", "<eos>", "<pad>", "<noise>", "<unk>"]
    words = [*special, *(f"<u{i}>" for i in range(len(special), FIRST_TOKEN))]
    words += [f"w{i}" for i in range(FIRST_TOKEN, vocab)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 65536,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    }
    _write_json(out / "tokenizer_config.json", settings)


def write_checkpoint(
    out: Path,
    *,
    kind: Kind,
    quant: Quant = "bf16",
    hidden: int = 1024,
    seed: int = 0,
    vocab: int = 1024,
    layers: int = 6,
    experts: int = 8,
    gamma: int = 4,
    period: int = 120,
) -> CheckpointInfo:
    """Write a checkpoint to the folder ``out`` (made if missing) and say what it is.

    Args:
        out: target folder; files of an earlier checkpoint there are overwritten.
        kind: ``oracle`` or ``random``, see the module's text.
        quant: ``bf16``, or ``fp8`` for 128x128 e4m3 blocks with power-of-two scales.
        hidden: hidden size, a multiple of 128; the oracle needs at least 1024.
        seed: seed of all random numbers, including the oracle's codes.
        vocab: number of tokens; ids below 8 are special.
        layers: target layers, at least 6; layers 1, ``layers // 2`` and ``layers - 1`` are captured.
        experts: routed experts per layer, two of which are active.
        gamma: draft block size.
        period: oracle only, distance that greedy decoding repeats. The copied row lies ``period - 1``
            positions back and must be inside the 128-token window for the last block position as well.
    """
    from safetensors.torch import save_file

    if kind not in ("oracle", "random") or quant not in ("bf16", "fp8"):
        raise ValueError(f"unknown kind {kind!r} or quant {quant!r}")
    geometry = Geometry(hidden=hidden, vocab=vocab, layers=layers, experts=experts, gamma=gamma)
    geometry.validate(kind, quant)
    if kind == "oracle" and not 2 * gamma <= period <= geometry.window:
        raise ValueError(f"period {period} must lie between {2 * gamma} and {geometry.window}")
    builder: _RandomBuilder
    if kind == "oracle":
        builder = _OracleBuilder(geometry, quant, seed, period=period)
    else:
        builder = _RandomBuilder(geometry, quant, seed)
    tensors = builder.build()
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / WEIGHTS_FILE, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(tensors, WEIGHTS_FILE)}
    _write_json(out / "model.safetensors.index.json", index)
    _write_json(out / "config.json", model_config(geometry, quant))
    generation = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "do_sample": False}
    _write_json(out / "generation_config.json", generation)
    _write_tokenizer(out, vocab)
    info = CheckpointInfo(
        path=str(out),
        kind=kind,
        quant=quant,
        seed=seed,
        hidden=hidden,
        vocab=vocab,
        gamma=gamma,
        window=geometry.window,
        target_layers=geometry.targets,
        period=period if kind == "oracle" else None,
        num_tensors=len(tensors),
        num_bytes=total,
    )
    _write_json(out / INFO_FILE, {**asdict(info), "path": out.name})
    return info
