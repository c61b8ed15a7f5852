"""What moving captured hidden states costs, and what a context-only draft saves, by arithmetic. Standard library only.

Legend of T, C, P, A, H, S, D, W: `core`. Bytes are bytes, MB is 10^6 bytes, rates are per second and per GPU.

Nothing here is measured. Every formula is in the docstring of the function that uses it, with what it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ..errors import DsparkCpError
from .topology import Violation

Dtype = Literal["fp4", "fp8", "bf16"]
DTYPES: Final[tuple[Dtype, ...]] = ("fp4", "fp8", "bf16")

ELEMENT: Final = 2
"""Bytes of a bf16 element: hidden rows and KV rows travel in bf16."""
ADDRESS: Final = 16
"""Bytes of a row's own address (`core.pack.ADDRESS_BYTES`, repeated here so that this module needs no torch)."""
MAX_CP: Final = 8
"""SGLang's prefill CP takes the whole TP group of one host and refuses more than 8 ranks."""
CHECKPOINTS: Final = "a config.json of a DeepSeek-V4 checkpoint with a DSpark draft"


class CostInputError(DsparkCpError, ValueError):
    """A number or a config.json that costs cannot be computed from."""

    def __init__(self, found: str, allowed: str, why: str, fix: str) -> None:
        super().__init__(str(Violation(found, allowed, why, fix)))


# -- the model ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelShape:
    """Numbers of a DeepSeek-V4 checkpoint with a DSpark draft. The draft's stages have the target's layer shapes.

    Attributes:
        name: for people.
        source: where the numbers are from.
        hidden: H. targets: A, captured layers; also S, SGLang builds one draft stage per captured layer.
        heads, head_dim (D), rope_dim: attention. q_lora, o_lora, o_groups: its low-rank paths.
        experts, shared_experts, moe_intermediate: one MoE layer.
        vocab, markov_rank: the Markov head's two matrices [vocab, rank]. positions: rows of the rope table.
        hc_mult: streams of the mHC residual. window: W.
        linear: dtype of linear weights. expert: dtype of routed experts. expert_assumed: config.json does not say it.
        ratios: compression ratio of each target layer, None when unknown. index_dim: width of an indexer key.
    """

    name: str
    source: str
    hidden: int
    targets: int
    heads: int
    head_dim: int
    rope_dim: int
    q_lora: int
    o_lora: int
    o_groups: int
    experts: int
    shared_experts: int
    moe_intermediate: int
    vocab: int
    markov_rank: int
    positions: int
    hc_mult: int
    window: int
    linear: Dtype
    expert: Dtype
    expert_assumed: bool
    ratios: tuple[int, ...] | None
    index_dim: int

    @property
    def stages(self) -> int:
        """S."""
        return self.targets


_PUBLISHED: Final[dict[str, object]] = {
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "n_shared_experts": 1,
    "vocab_size": 129280,
    "max_position_embeddings": 1048576,
    "hc_mult": 4,
    "sliding_window": 128,
    "index_head_dim": 128,
    "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}

FLASH: Final[dict[str, object]] = {
    **_PUBLISHED,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0],
}
"""DeepSeek-V4-Flash with DSpark.

Source: config.json of the checkpoint `deepseek-ai/DeepSeek-V4-Flash-0731` at revision 7872f01b (sha256 6c8f3d2d...),
as pinned key by key in a public front end for that release (found with the exact string `"dspark_markov_rank": 512`);
a second public test fixture has the same keys. hidden_size, experts, heads and ranks also equal the defaults of
SGLang 0.5.17's `DeepSeekV4Config`. The file itself was not downloaded.
"""

PRO: Final[dict[str, object]] = {
    **_PUBLISHED,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "dspark_target_layer_ids": [58, 59, 60],
    "dspark_markov_rank": 512,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0, 0, 0],
}
"""DeepSeek-V4-Pro with DSpark.

Source: config.json of the checkpoint `deepseek-ai/DeepSeek-V4-Pro-0813` at revision 72e1d323 (sha256 9dd2a892...), as
pinned in the same place as `FLASH`; the target's part also on the Hugging Face page of the copy
`SinterForge/DeepSeek-V4-Pro`, the dspark_* keys of `deepseek-ai/DeepSeek-V4-Pro-DSpark` in three more public
repositories. The file itself was not downloaded.
"""

BUILT_IN: Final[dict[str, tuple[str, Mapping[str, object]]]] = {
    "flash": ("DeepSeek-V4-Flash + DSpark", FLASH),
    "pro": ("DeepSeek-V4-Pro + DSpark", PRO),
}
"""Models known by name: title and config."""

_INTEGERS: Final = {
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "head_dim": ("head_dim",),
    "rope_dim": ("qk_rope_head_dim",),
    "q_lora": ("q_lora_rank",),
    "o_lora": ("o_lora_rank",),
    "o_groups": ("o_groups",),
    "experts": ("n_routed_experts",),
    "shared_experts": ("n_shared_experts",),
    "moe_intermediate": ("moe_intermediate_size",),
    "vocab": ("vocab_size",),
    "markov_rank": ("dspark_markov_rank",),
    "positions": ("max_position_embeddings",),
    "hc_mult": ("hc_mult",),
    "window": ("sliding_window", "window_size"),
    "index_dim": ("index_head_dim",),
}
"""Field of `ModelShape` -> keys of config.json, the first that is there counts."""


def _integer(config: Mapping[str, object], keys: tuple[str, ...]) -> int | None:
    """Value of the first of `keys` that is there, None when none is."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CostInputError(
                f"{key} = {value!r} in config.json",
                "an integer of at least 1",
                "it is a size of the model",
                "--model with " + CHECKPOINTS,
            )
        return value
    return None


def _dtypes(config: Mapping[str, object]) -> tuple[Dtype, Dtype, bool]:
    """Dtype of linear weights, dtype of routed experts, whether the latter is assumed."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method not in (None, "fp8"):
        raise CostInputError(
            f"quantization_config.quant_method = {method!r} in config.json",
            "'fp8' or no quantization_config",
            "the bytes per weight of other methods are not known here",
            "--model with " + CHECKPOINTS,
        )
    linear: Dtype = "fp8" if method == "fp8" else "bf16"
    named = config.get("expert_dtype")
    for dtype in DTYPES:
        if named == dtype:
            return linear, dtype, False
    if named is not None:
        raise CostInputError(
            f"expert_dtype = {named!r} in config.json",
            ", ".join(DTYPES),
            "the bytes per expert weight of others are not known here",
            "--model with " + CHECKPOINTS,
        )
    return linear, linear, True


def _ratios(config: Mapping[str, object]) -> tuple[int, ...] | None:
    """Compression ratios of the target's layers; what follows them in the list belongs to the draft."""
    ratios, layers = config.get("compress_ratios"), _integer(config, ("num_hidden_layers",))
    if layers is None or not isinstance(ratios, list) or len(ratios) < layers:
        return None
    return tuple(ratios[:layers]) if all(ratio in (0, 4, 128) for ratio in ratios[:layers]) else None


def shape_from_config(config: Mapping[str, object], name: str, source: str) -> ModelShape:
    """Numbers of a parsed config.json.

    Raises:
        CostInputError: a needed key is missing or has a value that is not a size; all missing keys are named at once.
    """
    found = {field: _integer(config, keys) for field, keys in _INTEGERS.items()}
    missing = [" or ".join(keys) for field, keys in _INTEGERS.items() if found[field] is None]
    targets = config.get("dspark_target_layer_ids")
    if not isinstance(targets, list) or not targets:
        missing.append("dspark_target_layer_ids (a list)")
    if missing:
        raise CostInputError(
            f"config.json of {name} without {', '.join(missing)}",
            CHECKPOINTS,
            "the sizes of the draft follow from these keys",
            f"--model {' or '.join(BUILT_IN)}, or --model with such a folder",
        )
    linear, expert, assumed = _dtypes(config)
    sizes = {field: value for field, value in found.items() if value is not None}
    return ModelShape(
        name=name,
        source=source,
        targets=len(targets) if isinstance(targets, list) else 0,
        linear=linear,
        expert=expert,
        expert_assumed=assumed,
        ratios=_ratios(config),
        **sizes,
    )


def built_in(name: str) -> ModelShape:
    """One of `BUILT_IN` by name."""
    title, config = BUILT_IN[name]
    return shape_from_config(config, title, "built in: published config.json, see core/costs.py")


# -- one prefill forward --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """One prefill forward.

    Attributes:
        tokens: T. cp: C.
        requests: how many requests share the T tokens, as evenly as possible, longer ones first.
        prefix: position of each request's first token in this forward (tokens before it are cached or were chunks).
        page: tokens per page of the radix cache. radix: whether that cache is on.
    """

    tokens: int
    cp: int
    requests: int = 1
    prefix: int = 0
    page: int = 256
    radix: bool = True

    @property
    def split(self) -> bool:
        """Whether the forward runs under CP: SGLang leaves fewer tokens than ranks whole on every rank."""
        return self.tokens >= self.cp > 1

    @property
    def rows_per_rank(self) -> int:
        """P = ceil(T / C) rows that every rank sends; T without CP."""
        return -(-self.tokens // self.cp) if self.split else self.tokens

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request, sum T."""
        short, longer = divmod(self.tokens, self.requests)
        return [short + (index < longer) for index in range(self.requests)]


def check_chunk(chunk: Chunk, positions: int) -> None:
    """Raise `CostInputError` for a forward that cannot be.

    Args:
        chunk: the forward.
        positions: max_position_embeddings of the model.
    """
    if not 2 <= chunk.cp <= MAX_CP:
        raise CostInputError(
            f"context-parallel size {chunk.cp}", f"2 to {MAX_CP}", "SGLang's prefill CP is one host's TP group", "--cp"
        )
    if chunk.requests > chunk.tokens:
        raise CostInputError(
            f"{chunk.requests} requests in a chunk of {chunk.tokens} tokens",
            "at most one request per token",
            "every request of a forward has a token in it",
            "--requests or --chunk",
        )
    if chunk.page % 128:
        raise CostInputError(
            f"a page of {chunk.page} tokens",
            "a multiple of 128",
            "SGLang's compressed DeepSeek-V4 pools need it",
            "--page 256",
        )
    end = chunk.prefix + chunk.lengths[0]
    if end > positions:
        raise CostInputError(
            f"a request that ends at position {end}",
            f"at most {positions}, the model's max_position_embeddings",
            "there is no rope row for later positions",
            "--prefix, --chunk or --requests",
        )


def window_runs(chunk: Chunk, window: int) -> list[tuple[int, int]]:
    """Runs [start, stop) of global rows that a later read can reach, in order and apart.

    The last W rows of each request's chunk; with the radix cache on also the rows of the last W positions of every
    page (pos % page >= page - W), because a later request can hit the prefix at any page boundary and its short extend
    then ships the W rows before it.
    """
    runs: list[tuple[int, int]] = []

    def add(start: int, stop: int) -> None:
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], stop))
        else:
            runs.append((start, stop))

    first_row = 0
    for length in chunk.lengths:
        begin, end = chunk.prefix, chunk.prefix + length  # positions
        shift = first_row - begin
        last = max(begin, end - window)
        tails: list[tuple[int, int]] = [(last, end)]
        if chunk.radix:
            pages = range(begin // chunk.page, (end - 1) // chunk.page + 1)
            tails += [((page + 1) * chunk.page - min(window, chunk.page), (page + 1) * chunk.page) for page in pages]
        for start, stop in sorted(tails):
            if max(start, begin) < min(stop, end):
                add(max(start, begin) + shift, min(stop, end) + shift)
        first_row += length
    return runs


def window_rows(chunk: Chunk, window: int) -> tuple[int, int]:
    """Rows of `window_runs`: (all of them, rows per rank).

    Rows per rank is the largest count on any rank (global row g is on rank g % C), since an all-gather takes the same
    number from every rank.
    """
    runs = window_runs(chunk, window)
    total = sum(stop - start for start, stop in runs)
    if not chunk.split:
        return total, total

    def below(row: int, rank: int) -> int:
        """Rows of `rank` before global row `row`."""
        return (row - rank + chunk.cp - 1) // chunk.cp

    per_rank = [sum(below(stop, rank) - below(start, rank) for start, stop in runs) for rank in range(chunk.cp)]
    return total, max(per_rank)


@dataclass(frozen=True)
class Gather:
    """One all-gather over the CP group.

    Attributes:
        what: for people, in T, H, S, D. width: bf16 elements per row, without address.
        rows: real rows. rows_per_rank: rows that every rank sends. address: bytes of address per row.
    """

    what: str
    width: int
    rows: int
    rows_per_rank: int
    address: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on the wire."""
        return self.width * ELEMENT + self.address


@dataclass(frozen=True)
class Rates:
    """What the hardware does: GB/s (10^9) that arrive at a rank, TFLOP/s (10^12), microseconds per collective."""

    link_gb_s: float
    matmul_tflop_s: float
    launch_us: float


@dataclass(frozen=True)
class DesignCost:
    """Cost of one design in one prefill forward, per rank unless said otherwise.

    Attributes:
        id: short name. title: for people. gathers: what is gathered.
        collectives: all-gathers per forward.
        rows, rows_per_rank: of the gather that feeds the draft.
        all_rows_bytes: bf16 bytes of all real rows of all gathers, without addresses: the size of the tensors.
        received_bytes: what arrives at a rank, (C - 1) * P * row bytes, summed.
        peak_bytes: see `peak_bytes`.
        flops: projection, see `projection_flops`.
        milliseconds: see `milliseconds`.
    """

    id: str
    title: str
    gathers: tuple[str, ...]
    collectives: int
    rows: int
    rows_per_rank: int
    all_rows_bytes: int
    received_bytes: int
    peak_bytes: int
    flops: int
    milliseconds: float


def projection_flops(shape: ModelShape, main_rows: int, kv_rows: int) -> int:
    """FLOPs of main_proj on `main_rows` rows, 2 * A * H * H each, and of S wkv on `kv_rows` rows, 2 * H * D * S each.

    Norms, rope and quantisation are left out (memory bound and small).
    """
    main = 2 * main_rows * shape.targets * shape.hidden * shape.hidden
    return main + 2 * kv_rows * shape.hidden * shape.head_dim * shape.stages


def peak_bytes(gathers: tuple[Gather, ...], cp: int) -> int:
    """Largest extra memory while the gathers run one after another.

    Gather i needs its buffer [C * P, width] and a copy [rows, width] in global order; the copies of earlier gathers
    are still there, their buffers are free again:

        max over i of  sum(copy_j for j < i) + buffer_i + copy_i

    Left out: each rank's own send rows [P, width] and what projection writes. Every mode of this plugin is charged
    with the copy; one that permutes cache locations instead of rows needs none and half of this.
    """
    kept = peak = 0
    for gather in gathers:
        copy = gather.rows * gather.row_bytes
        peak = max(peak, kept + cp * gather.rows_per_rank * gather.row_bytes + copy)
        kept += copy
    return peak


def milliseconds(received: int, collectives: int, flops: int, rates: Rates) -> float:
    """received / link + collectives * launch + flops / matmul, nothing overlapped.

    Left out: the copies that restore the order, norms, the pool write, the proof's kernels. Where they matter the real
    time is larger; against the gather probe on two H200 (see test_costs.py) this is 3 to 23 % low.
    """
    transfer = received / (rates.link_gb_s * 1e9)
    return 1e3 * (transfer + flops / (rates.matmul_tflop_s * 1e12)) + collectives * rates.launch_us / 1e3


def designs(shape: ModelShape, chunk: Chunk, rates: Rates, *, boundary: bool = False) -> list[DesignCost]:
    """Every design, stock ones first.

    | id | gathers | projected |
    |---|---|---|
    | stock-0.5.18 | A x [T, H], then [T, 4H] before the head | all rows on every rank |
    | stock-0.5.23 | [T, H], [T, 4H], [T, A * H] | all rows on every rank |
    | packed | [T, A * H] + address | all rows on every rank |
    | context | [T, H] + address | main_proj on the shard, wkv on all rows |
    | kv | [T, S * D] + address | both on the shard |
    | window | [rows of `window_rows`, S * D] + address | both on the shard, those rows only |

    Stock rows: P is ceil(T / C) as here; 0.5.20 and later fill it up to a multiple of 8. A forward with T < C runs
    without CP: no gather, and every rank projects all rows (all those of the window for `window`).

    Args:
        shape: the model.
        chunk: the forward.
        rates: for `milliseconds`.
        boundary: the target's own gather [T, 4H] before the head stays beside this plugin's gather, as it does for
            batches that want input logprobs. Off: the plugin's rows show its own gather only.
    """
    hidden, kv_width = shape.hidden, shape.stages * shape.head_dim
    tokens, per_rank = chunk.tokens, chunk.rows_per_rank

    def stock(what: str, width: int) -> Gather:
        return Gather(what, width, tokens, per_rank)

    head = stock(f"[T,{shape.hc_mult}H]", shape.hc_mult * hidden)
    per_layer = (*[stock("[T,H]", hidden)] * shape.targets, head)
    newest = (stock("[T,H]", hidden), head, stock(f"[T,{shape.targets}H]", shape.targets * hidden))

    def cost(id: str, title: str, gathers: tuple[Gather, ...], main_rows: int, kv_rows: int) -> DesignCost:
        done = gathers if chunk.split else ()
        received = sum((chunk.cp - 1) * gather.rows_per_rank * gather.row_bytes for gather in done)
        flops = projection_flops(shape, main_rows, kv_rows)
        feed = gathers[0] if id == "stock-0.5.18" else gathers[-1]
        return DesignCost(
            id,
            title,
            tuple(gather.what for gather in done),
            len(done),
            feed.rows,
            feed.rows_per_rank,
            sum(gather.rows * gather.width * ELEMENT for gather in done),
            received,
            peak_bytes(done, chunk.cp),
            flops,
            milliseconds(received, len(done), flops, rates),
        )

    def plugin(what: str, width: int, rows: int, sent: int) -> tuple[Gather, ...]:
        own = Gather(what, width, rows, sent, ADDRESS)
        return (head, own) if boundary else (own,)

    kept, sent = window_rows(chunk, shape.window)
    packed = plugin(f"[T,{shape.targets}H]+addr", shape.targets * hidden, tokens, per_rank)
    return [
        cost("stock-0.5.18", "stock 0.5.18-style per layer", per_layer, tokens, tokens),
        cost("stock-0.5.23", "stock 0.5.23", newest, tokens, tokens),
        cost("packed", "packed", packed, tokens, tokens),
        cost("context", "context", plugin("[T,H]+addr", hidden, tokens, per_rank), per_rank, tokens),
        cost("kv", "kv", plugin(f"[T,{shape.stages}*D]+addr", kv_width, tokens, per_rank), per_rank, per_rank),
        cost("window", "window", plugin(f"[rows,{shape.stages}*D]+addr", kv_width, kept, sent), sent, sent),
    ]


# -- memory of the draft on prefill ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A part of the draft and its bytes on one GPU: in stock SGLang, and in the context-only draft."""

    name: str
    stock: int
    context: int

    @property
    def saved(self) -> int:
        """Bytes that the context-only draft does not hold."""
        return self.stock - self.context


def weight_bytes(rows: int, columns: int, dtype: Dtype) -> int:
    """Bytes of a weight matrix.

    bf16: 2 per element. fp8: 1 per element and a float32 scale per 128 x 128 block (SGLang's block-fp8 parameters).
    fp4: half a byte per element and one scale byte per 32 elements of a row, as in the checkpoint.
    """
    if dtype == "bf16":
        return 2 * rows * columns
    if dtype == "fp8":
        return rows * columns + 4 * -(-rows // 128) * -(-columns // 128)
    return rows * columns // 2 + rows * -(-columns // 32)


def draft_parts(shape: ModelShape, tp: int, *, shared_sharded: bool = True) -> list[Part]:
    """Bytes of the draft on one GPU of a prefill worker with attention TP 1 (CP takes the whole TP group).

    Shapes are those of SGLang 0.5.17's `DeepseekV4ForCausalLMDSpark`; what stays is the list of `core.draft_prune`.
    Per stage and replicated on every rank unless said otherwise:

    - routed experts: experts x 3 x [moe_intermediate, H] / TP, whether sliced by TP or spread by EP;
    - shared experts: 3 x [shared * moe_intermediate, H] / TP, whole with an all-to-all MoE back-end;
    - router: [experts, H] bf16 and a float32 bias per expert;
    - query path: wq_a [q_lora, H], q_norm, wq_b [heads * D, q_lora];
    - output path: wo_a [groups * o_lora, heads * D / groups] in bf16 (the draft dequantises it), wo_b
      [H, groups * o_lora];
    - Markov head, once: two [vocab, rank] in bf16;
    - mHC, norms, attention sink: float32 mHC matrices [(2 + m) * m, m * H] twice per stage and
      [m, m * H] once, two norms [H] per stage and one at the end, a float32 sink per head;
    - stays: main_proj [H, A * H] and main_norm once, wkv [D, H] and kv_norm per stage, one rope table
      [positions, rope / 2] complex64 that all stages share.

    Embedding and LM head are the target's. The draft's KV pool is the same in both and is not here. The confidence
    head is built in a non-static verify mode only: 4 * (H + rank) bytes, left out.
    """
    stages, hidden, linear = shape.stages, shape.hidden, shape.linear
    attention = shape.heads * shape.head_dim
    groups = shape.o_groups * shape.o_lora

    def mlp(intermediate: int, dtype: Dtype) -> int:
        return 2 * weight_bytes(intermediate, hidden, dtype) + weight_bytes(hidden, intermediate, dtype)

    routed = stages * shape.experts * mlp(shape.moe_intermediate, shape.expert) // tp
    shared = stages * mlp(shape.shared_experts * shape.moe_intermediate, linear) // (tp if shared_sharded else 1)
    router = stages * shape.experts * (2 * hidden + 4)
    query = (
        weight_bytes(shape.q_lora, hidden, linear) + 2 * shape.q_lora + weight_bytes(attention, shape.q_lora, linear)
    )
    output = weight_bytes(groups, attention // shape.o_groups, "bf16") + weight_bytes(hidden, groups, linear)
    mix = (2 + shape.hc_mult) * shape.hc_mult
    streams = 4 * (2 * mix * shape.hc_mult * hidden + 2 * mix + 6)
    last = 4 * (shape.hc_mult * shape.hc_mult * hidden + shape.hc_mult + 1) + 2 * hidden
    rest = stages * (streams + 2 * 2 * hidden + 4 * shape.heads) + last
    main = weight_bytes(hidden, shape.targets * hidden, linear) + 2 * hidden
    keys = stages * (weight_bytes(shape.head_dim, hidden, linear) + 2 * shape.head_dim)
    rope = shape.positions * (shape.rope_dim // 2) * 8
    return [
        Part(f"routed experts, {shape.expert}", routed, 0),
        Part("shared experts", shared, 0),
        Part("router", router, 0),
        Part("query path", stages * query, 0),
        Part("output path", stages * output, 0),
        Part("Markov head", 2 * 2 * shape.vocab * shape.markov_rank, 0),
        Part("mHC, norms, attention sink", rest, 0),
        Part("main_proj, main_norm", main, main),
        Part("wkv, kv_norm", keys, keys),
        Part("rope table", rope, rope),
    ]


def kv_bytes_per_token(shape: ModelShape) -> float | None:
    """HBM that SGLang 0.5.17 reserves per token of KV capacity for a DeepSeek-V4 target with speculation, per GPU.

    Every CP rank holds the whole KV. Read in `DSV4PoolConfigurator`: a KV row is D - rope bytes fp8, 2 * rope bytes
    bf16 and 8 of scales (584); a tenth of the capacity is kept as window rows in every layer (V4's default of
    --swa-full-tokens-ratio); layers of ratio 4 add a quarter row, a quarter indexer key (index_dim + 4 per 128) and
    16 float32 states of 4 * (D + index_dim) per 128 window rows; layers of ratio 128 add 1/128 row. The draft is
    charged as one more layer. SGLang sizes the pool from what is free after both models are loaded, so bytes that the
    draft does not take go into it. Not counted: states of ratio 128, which depend on the number of requests.

    None when config.json gave no usable compress_ratios.
    """
    if shape.ratios is None:
        return None
    layers, quarter = len(shape.ratios), shape.ratios.count(4)
    row = shape.head_dim + shape.rope_dim + 8
    indexer = shape.index_dim + 4 * (shape.index_dim // 128)
    states = 16 / 128 * 4 * 4 * (shape.head_dim + shape.index_dim)
    per_token = 0.1 * row * layers + row * shape.ratios.count(128) / 128
    per_token += quarter * ((row + indexer) / 4 + 0.1 * states)
    return per_token * (layers + 1) / layers
