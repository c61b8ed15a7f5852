"""The designs, from the captured shard to written draft-pool rows, as steps that can be timed one by one.

Symbols: `sglang_dspark_cp.core`. Imports torch and this package's core, never sglang.

A step takes what one batch of one rank has so far out of a `State` and leaves there what later steps need. It takes out
what a forward would let go of at that place, so that the peak memory of a path is that of the design.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from sglang_dspark_cp.core import costs, reference
from sglang_dspark_cp.core.align import explain
from sglang_dspark_cp.core.capture import AuxCapture
from sglang_dspark_cp.core.gather import ArrivedRows, gather_rows
from sglang_dspark_cp.core.inject import NOT_WRITTEN, BatchProof
from sglang_dspark_cp.core.layout import SendPlan, rows_per_rank, send_all, send_last, shard
from sglang_dspark_cp.core.pack import Address
from sglang_dspark_cp.core.project import capture_blocks, pack_context, pack_kv
from sglang_dspark_cp.core.window import kept_rows, send_kept

LAYERS = 3
STREAMS = 4
STAGES = LAYERS
WINDOW = 128
PAGE = 256
EPS = 1e-6

State = dict[str, Any]
Step = tuple[str, Callable[["Rank", State], None]]


@dataclass(frozen=True)
class Shape:
    """One forward: T tokens of one request without a prefix, on C ranks, with hidden size H."""

    cp: int
    tokens: int
    hidden: int

    @property
    def rows(self) -> int:
        """P."""
        return rows_per_rank(self.tokens, self.cp)

    @property
    def model(self) -> costs.ModelShape:
        """For the formulas of `core.costs`."""
        return replace(costs.built_in("flash"), hidden=self.hidden)


@dataclass(frozen=True)
class DesignInfo:
    """A design's name here, its id in `core.costs`, whether the prefix cache is on, whether rows are proved."""

    name: str
    id: str
    radix: bool = True
    proved: bool = True

    @property
    def stock(self) -> bool:
        return self.name.startswith("stock")

    @property
    def windowed(self) -> bool:
        return self.id == "window"

    @property
    def page(self) -> int | None:
        """For `core.window`."""
        return PAGE if self.radix else None


DESIGNS = (
    DesignInfo("stock-layers", "stock-0.5.18"),
    DesignInfo("stock-packed", "stock-0.5.23"),
    DesignInfo("packed", "packed"),
    DesignInfo("context", "context"),
    DesignInfo("kv", "kv"),
    DesignInfo("kv-unproved", "kv", proved=False),
    DesignInfo("window", "window"),
    DesignInfo("window-noradix", "window", radix=False),
)


def formula(design: DesignInfo, shape: Shape) -> costs.DesignCost:
    """What `core.costs` says about a design; its milliseconds are not used here."""
    chunk = costs.Chunk(shape.tokens, shape.cp, page=PAGE, radix=design.radix)
    rates = costs.Rates(1.0, 1.0, 0.0)
    (found,) = [cost for cost in costs.designs(shape.model, chunk, rates) if cost.id == design.id]
    if design.proved:
        return found
    return replace(found, received_bytes=found.received_bytes - (shape.cp - 1) * shape.rows * costs.ADDRESS)


def tail_bytes(design: DesignInfo, shape: Shape) -> int:
    """Bytes received for the LM head's one row: whole packed rows of each other rank. `core.costs` leaves them out."""
    if design.stock:
        return 0
    widths = {"packed": LAYERS * shape.hidden, "context": shape.hidden}
    row = widths.get(design.id, STAGES * reference.ROW_WIDTH) * costs.ELEMENT + costs.ADDRESS * design.proved
    return (shape.cp - 1) * -(-shape.hidden * costs.ELEMENT // row) * row


def kept_of(design: DesignInfo, tokens: int) -> torch.Tensor:
    """Global rows [K] that a design writes, int64 on the CPU."""
    if not design.windowed:
        return torch.arange(tokens)
    return kept_rows([(0, tokens)], WINDOW, design.page)


# --------------------------------------------------------------------------------------------------- what a rank has


class Link(Protocol):
    """The CP group as a design sees it."""

    def gather(self, tag: str, output: torch.Tensor, local: torch.Tensor) -> None:
        """output [C * n, width] <- local [n, width] of every rank; `tag` names the gather within the design."""
        ...


class Recorder:
    """A link that only remembers what a rank would send."""

    def __init__(self) -> None:
        self.sent: dict[str, torch.Tensor] = {}

    def gather(self, tag: str, output: torch.Tensor, local: torch.Tensor) -> None:
        """Nothing arrives."""
        self.sent[tag] = local.clone()


class Projection:
    """main_proj + RMS norm, and S x wkv, in bf16; on a CPU in float64, so that a row never depends on its batch."""

    def __init__(self, hidden: int, device: torch.device) -> None:
        def weight(seed: int, *size: int) -> torch.Tensor:
            generator = torch.Generator(device).manual_seed(seed)
            values = torch.randn(size, generator=generator, device=device)
            return (values / math.sqrt(size[-1])).to(torch.bfloat16)

        self.main = weight(1, hidden, LAYERS * hidden)
        self.main_norm = (weight(2, hidden) + 1).contiguous()
        # SGLang's `CommitKvProj` stacks the stages' weights on a GPU, too.
        self.wkv = torch.cat([weight(3 + stage, reference.ROW_WIDTH, hidden) for stage in range(STAGES)])
        self.kv_norm = [(weight(9 + stage, reference.ROW_WIDTH) + 1).contiguous() for stage in range(STAGES)]
        self._exact = device.type == "cpu"

    def context(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, A * H] -> [N, H]."""
        hidden, width = hidden.contiguous(), (self.main.shape[0],)
        if self._exact:
            return F.rms_norm(hidden.double() @ self.main.double().T, width, self.main_norm.double(), EPS).bfloat16()
        return F.rms_norm(F.linear(hidden, self.main), width, self.main_norm, EPS)

    def kv(self, context: torch.Tensor) -> Sequence[torch.Tensor]:
        """[N, H] -> S x [N, D]."""
        context = context.contiguous()
        exact = self._exact
        whole = (context.double() @ self.wkv.double().T).bfloat16() if exact else F.linear(context, self.wkv)
        return whole.split(reference.ROW_WIDTH, dim=1)


@dataclass(frozen=True)
class Inputs:
    """What the target's forward leaves on one rank.

    Attributes:
        streams: A x [P, 4, H].
        hidden: [P, H], stands for the head's output on the shard, which `stock-packed` gathers; it gets it for free.
    """

    streams: list[torch.Tensor]
    hidden: torch.Tensor


def make_inputs(shape: Shape, cp_rank: int, number: int, device: torch.device) -> Inputs:
    """The same values in every process for the same arguments; rows of padding are NaN."""
    generator = torch.Generator(device).manual_seed(1 + cp_rank + 8 * number + 4096 * shape.tokens)
    size = (shape.rows, STREAMS, shape.hidden)
    streams = [torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(LAYERS)]
    if cp_rank + shape.cp * (shape.rows - 1) >= shape.tokens:
        for each in streams:
            each[-1] = torch.nan
    return Inputs(streams, streams[-1].mean(dim=1))


class CapturedLayer(torch.nn.Module):
    """Stands for a target layer that has just run: hands on its streams."""

    def forward(self, streams: torch.Tensor, *, positions: torch.Tensor) -> torch.Tensor:
        """`positions` are for the capture's hook."""
        return streams


class Rank:
    """One rank's side of a shape: addresses, weights, pools, link.

    Attributes:
        positions, cache_loc: [T]; local_positions, local_loc: [P], of the shard, padded with 0 as SGLang does.
        slots: full cache location -> pool slot; the last entry, which location -1 meets, is -1.
        pools: S x [pages, page bytes].
    """

    def __init__(self, shape: Shape, cp_rank: int, device: torch.device, link: Link) -> None:
        self.shape, self.device = shape, device
        pages = -(-shape.tokens // PAGE)
        generator = torch.Generator().manual_seed(shape.tokens)
        tokens = torch.arange(shape.tokens)
        full = torch.randperm(pages, generator=generator) + 1  # page 0 is nobody's
        to_slot = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(pages, generator=generator) + 1])
        slots = (to_slot[:, None] * PAGE + torch.arange(PAGE)).flatten()
        slots[:PAGE] = 0
        self.slots = torch.cat([slots, torch.tensor([-1])]).to(device)
        self.positions = tokens.to(device)
        self.cache_loc = (full[tokens // PAGE] * PAGE + tokens % PAGE).to(device)
        self._place(cp_rank, link)
        angle = self.positions[:, None] * 10000.0 ** (-torch.arange(0, 64, 2, device=device).double() / 64)
        self.freqs = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)
        self.projection = Projection(shape.hidden, device)
        size = (pages + 1, reference.page_bytes(PAGE))
        self.pools = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(STAGES)]
        self.layers = [CapturedLayer() for _ in range(LAYERS)]

    def other(self, cp_rank: int, link: Link) -> Rank:
        """Another rank of the same forward, with weights and pools of this one."""
        found = copy.copy(self)
        found._place(cp_rank, link)
        return found

    def _place(self, cp_rank: int, link: Link) -> None:
        self.cp_rank, self.link = cp_rank, link
        padding = (0, self.shape.cp * self.shape.rows - self.shape.tokens)
        self.local_positions = shard(F.pad(self.positions, padding), self.shape.cp, cp_rank).contiguous()
        self.local_loc = shard(F.pad(self.cache_loc, padding), self.shape.cp, cp_rank).contiguous()

    def write(self, kv: Sequence[torch.Tensor], slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Rows S x [N, D] into the pools; a slot of -1 is skipped."""
        for pool, rows, weight in zip(self.pools, kv, self.projection.kv_norm, strict=True):
            if self.device.type == "cpu":
                made = reference.make_rows(rows, weight, EPS, self.freqs, positions)
                reference.write_rows(pool, PAGE, slots, made)
            else:
                from pool_kernel import write

                write(pool, PAGE, rows, weight, EPS, self.freqs, positions, slots)

    def clear(self) -> None:
        """Empty the pools."""
        for pool in self.pools:
            pool.zero_()


def run(steps: Sequence[Step], rank: Rank, inputs: Inputs) -> State:
    """The whole path once."""
    state: State = {"inputs": inputs}
    for _, step in steps:
        step(rank, state)
    return state


# ------------------------------------------------------------------------------------------------------------- stock


def _gather(tag: str, take: Callable[[State], torch.Tensor]) -> Step:
    def step(rank: Rank, state: State) -> None:
        local = take(state)
        gathered = local.new_empty(rank.shape.cp * local.shape[0], local.shape[1])
        rank.link.gather(tag, gathered, local)
        state["gathered"] = gathered

    return "gather", step


def _restore(name: str) -> Step:
    """Rank after rank -> global order, a copy of all rows."""

    def step(rank: Rank, state: State) -> None:
        gathered = state.pop("gathered")
        by_rank = gathered.view(rank.shape.cp, rank.shape.rows, -1)
        state[name] = by_rank.transpose(0, 1).reshape(gathered.shape)[: rank.shape.tokens]

    return "reorder", step


def _head_of_streams(rank: Rank, state: State) -> None:
    """The head itself is left out; the mean over streams stands for it, in every design."""
    state["head"] = state.pop("before_head")[-1:].view(1, STREAMS, -1).mean(dim=1)


def _project_and_keep(name: str) -> Step:
    def step(rank: Rank, state: State) -> None:
        state["kv"] = rank.projection.kv(rank.projection.context(state.pop(name)))

    return "project", step


def _write_all(rank: Rank, state: State) -> None:
    rank.write(state.pop("kv"), rank.slots[rank.cache_loc].to(torch.int32), rank.positions)


def _stock_layers() -> list[Step]:
    steps: list[Step] = []
    for layer in range(LAYERS):

        def mean(rank: Rank, state: State, layer: int = layer) -> None:
            state["mean"] = state["inputs"].streams[layer].mean(dim=1)

        steps += [("mean", mean), _gather(f"layer {layer}", lambda state: state.pop("mean")), _restore(f"aux {layer}")]

    def concatenate(rank: Rank, state: State) -> None:
        state["aux"] = torch.cat([state.pop(f"aux {layer}") for layer in range(LAYERS)], dim=-1)

    return [
        *steps,
        _gather("streams", lambda state: state["inputs"].streams[-1].flatten(1)),
        _restore("before_head"),
        ("head", _head_of_streams),
        ("reorder", concatenate),
        _project_and_keep("aux"),
        ("write", _write_all),
    ]


def _stock_packed() -> list[Step]:
    def mean(rank: Rank, state: State) -> None:
        state["packed"] = torch.cat([each.mean(dim=1) for each in state["inputs"].streams], dim=-1)

    def head(rank: Rank, state: State) -> None:
        state.pop("before_head")
        state["head"] = state.pop("hidden")[-1:].clone()

    return [
        ("mean", mean),
        _gather("hidden", lambda state: state["inputs"].hidden),
        _restore("hidden"),
        _gather("streams", lambda state: state["inputs"].streams[-1].flatten(1)),
        _restore("before_head"),
        _gather("packed", lambda state: state.pop("packed")),
        _restore("aux"),
        ("head", head),
        _project_and_keep("aux"),
        ("write", _write_all),
    ]


# ------------------------------------------------------------------------------------------------------ this project


def _of_requests(tail: torch.Tensor, plan: SendPlan, hidden: int) -> torch.Tensor:
    """Tails [C, >= K * H] -> the head rows of all requests in their order, [requests, H]."""
    rows = tail[:, : plan.rows * hidden].unflatten(1, (plan.rows, hidden))
    return plan.pick_arrived(rows)


def _plugin(design: DesignInfo) -> list[Step]:
    projected = design.id != "packed"

    def plan(rank: Rank, state: State) -> None:
        shape = rank.shape
        if design.windowed:
            sent = send_kept([(0, shape.tokens)], WINDOW, design.page, shape.cp, rank.cp_rank)
        else:
            sent = send_all(shape.tokens, shape.cp)
        heads = send_last((shape.tokens,), shape.cp, rank.cp_rank)
        state["plan"], state["heads"] = sent, heads
        state["select"] = sent.local_on(rank.device)

    def mean(rank: Rank, state: State) -> None:
        capture = AuxCapture(
            rank.layers,
            range(LAYERS),
            lambda _, output: output,
            expected_rows=rank.shape.rows,
            addressed=not projected and design.proved,
            select=state["select"],
            tail=0 if projected else state["heads"].rows * rank.shape.hidden,
            blocks=capture_blocks(state["plan"].rows) if projected else None,
        )
        with capture:
            for layer, streams in zip(rank.layers, state["inputs"].streams, strict=True):
                layer(streams, positions=rank.local_positions)
        state["capture"], state["captured"] = capture, capture.take()

    def wire(rank: Rank, state: State) -> None:
        pack = pack_context if design.id == "context" else pack_kv
        tail = state["heads"].rows * rank.shape.hidden
        positions = state["capture"].positions
        address = Address(positions, rank.local_loc, state["select"]) if design.proved else None
        captured = list(state.pop("captured"))  # timed alone, this step runs many times on one state
        state["packed"] = pack(rank.projection, captured, addressed=design.proved, tail=tail, address=address)

    def address(rank: Rank, state: State) -> None:
        (state["packed"],) = state.pop("captured")
        state["packed"].write_address(state["capture"].positions, rank.local_loc, state["select"])

    def local_head(rank: Rank, state: State) -> None:
        rows = state["heads"].pick_local(state["inputs"].streams[-1])
        state["packed"].write_tail(rows.mean(dim=1))

    def gather(rank: Rank, state: State) -> None:
        state["arrived"] = gather_rows(state["packed"], state["plan"], functools.partial(rank.link.gather, "rows"))

    def head(rank: Rank, state: State) -> None:
        state["head"] = _of_requests(state["arrived"].tail, state["heads"], rank.shape.hidden)

    def prove(rank: Rank, state: State) -> None:
        arrived: ArrivedRows = state.pop("arrived")
        capture: AuxCapture = state.pop("capture")
        state.pop("packed", None)
        ticket = arrived.hidden.new_empty(rank.shape.tokens, 1)
        proof = BatchProof(["request"], [0], [rank.shape.tokens], check_shape=design.proved, check_rows=design.proved)
        proof.note_arrived(arrived, capture.missing_rows(), ticket, state["plan"].sent)
        state["rows"] = proof.payload
        state["placed"] = proof.admit(
            ticket,
            rank.positions,
            rank.cache_loc,
            expected_width=arrived.hidden.shape[1],
            to_swa=lambda locations: rank.slots[locations],
        )
        state["proof"], state["admitted"] = proof, state["placed"] is not None

    def project_rest(rank: Rank, state: State) -> None:
        rows, projection = state["rows"], rank.projection
        state["kv"] = projection.kv(rows if projected else projection.context(rows))

    def write(rank: Rank, state: State) -> None:
        rows = state.pop("rows")
        kv = state.pop("kv", None)
        if kv is None:
            kv = rows.split(reference.ROW_WIDTH, dim=1)
        if state["admitted"]:
            placed = state.pop("placed")
            rank.write(kv, placed.slots, placed.positions)

    before: list[Step] = [("plan", plan), ("mean", mean)]
    if projected:
        before.append(("project", wire))
    else:
        before.append(("proof", address))
    after: list[Step] = [("proof", prove)]
    if design.id in ("packed", "context"):
        after.append(("project", project_rest))
    return [
        *before,
        ("head", local_head),
        ("gather", gather),
        ("head", head),
        *after,
        ("write", write),
    ]


def steps_of(design: DesignInfo) -> list[Step]:
    """The path of a design."""
    if design.name == "stock-layers":
        return _stock_layers()
    return _stock_packed() if design.name == "stock-packed" else _plugin(design)


# ---------------------------------------------------------------------------------------------------------- checking


def reference_pools(shape: Shape) -> tuple[list[tuple[reference.RowParts, torch.Tensor]], torch.Tensor]:
    """The rows of all T tokens without CP, on a CPU in one process, from the same inputs.

    Returns:
        For each stage the rows and their slots [T], in global order; the head's row [1, H].
    """
    device = torch.device("cpu")
    rank = Rank(shape, 0, device, Recorder())
    shards = [make_inputs(shape, each, 0, device).streams for each in range(shape.cp)]
    means = []
    for layer in range(LAYERS):
        streams = torch.empty(shape.cp * shape.rows, STREAMS, shape.hidden, dtype=torch.bfloat16)
        for cp_rank, each in enumerate(shards):
            streams[cp_rank :: shape.cp] = each[layer]
        means.append(streams[: shape.tokens].mean(dim=1))
    kv = rank.projection.kv(rank.projection.context(torch.cat(means, dim=-1)))
    slots = rank.slots[rank.cache_loc]
    made = [
        (reference.make_rows(rows, weight, EPS, rank.freqs, rank.positions), slots)
        for rows, weight in zip(kv, rank.projection.kv_norm, strict=True)
    ]
    return made, means[-1][-1:]


def wrong_bytes(rank: Rank, design: DesignInfo, rows: list[tuple[reference.RowParts, torch.Tensor]]) -> int:
    """Rows of all stages whose bytes are not those of the reference; a row that should not be written counts too."""
    kept = kept_of(design, rank.shape.tokens)
    wrong = 0
    for pool, (parts, slots) in zip(rank.pools, rows, strict=True):
        expected = torch.zeros_like(pool)
        some = reference.RowParts(parts.nope[kept], parts.rope[kept], parts.scale[kept])
        reference.write_rows(expected, PAGE, slots[kept], some)
        every = torch.arange(pool.shape[0] * PAGE)
        ours, theirs = (reference.read_rows(each, PAGE, every) for each in (pool, expected))
        same = (ours.nope == theirs.nope).all(1) & (ours.scale == theirs.scale).all(1)
        same &= (ours.rope.view(torch.int16) == theirs.rope.view(torch.int16)).all(1)
        wrong += int((~same).sum())
    return wrong


@dataclass(frozen=True)
class Closeness:
    """Pool rows against those of another design: rows that must be there and are not (or the reverse), rows with equal
    bytes among the kept ones, largest relative error of a row."""

    misplaced: int
    kept: int
    equal: int
    worst: float


def closeness(rank: Rank, design: DesignInfo, other: Sequence[torch.Tensor]) -> Closeness:
    """Compare with pools in which all rows are written: on a GPU the shape of a product may change its last bit."""
    kept_slots = rank.slots[rank.cache_loc[kept_of(design, rank.shape.tokens).to(rank.device)]]
    misplaced = equal = 0
    worst = 0.0
    wanted = torch.zeros(rank.pools[0].shape[0] * PAGE, dtype=torch.bool, device=rank.device)
    wanted[kept_slots] = True
    every = torch.arange(wanted.shape[0], device=rank.device)
    for pool, theirs in zip(rank.pools, other, strict=True):
        written = reference.read_rows(pool, PAGE, every).scale.any(dim=1)  # an exponent is never 0
        misplaced += int((written != wanted).sum())
        a, b = (reference.read_rows(each, PAGE, kept_slots) for each in (pool, theirs))
        same = (a.nope == b.nope).all(1) & (a.rope.view(torch.int16) == b.rope.view(torch.int16)).all(1)
        equal += int((same & (a.scale == b.scale).all(1)).sum())
        for some in torch.arange(kept_slots.shape[0], device=rank.device).split(16384):
            mine, right = (
                reference.dequantise(reference.RowParts(each.nope[some], each.rope[some], each.scale[some]))
                for each in (a, b)
            )
            error = ((mine - right).norm(dim=1) / right.norm(dim=1).clamp_min(1e-30)).max()
            worst = max(worst, float(torch.nan_to_num(error, nan=float("inf"))))
    return Closeness(misplaced, STAGES * kept_slots.shape[0], equal, worst)


def verdict(state: State) -> str | None:
    """Why this rank's proof failed, None if it did not or the design has none. Waits for the device."""
    proof: BatchProof | None = state.get("proof")
    if proof is None:
        return None
    reason = explain([proof.words().tolist()])
    return reason if reason or state["admitted"] else "nothing was admitted"


def check_writer(device: torch.device) -> tuple[float, float]:
    """The Triton writer against `core.reference`: worst relative error of a row, share of equal bytes.

    Rows with a slot of `NOT_WRITTEN` must not be written; a byte there counts as infinite error.
    """
    from pool_kernel import write

    rows, pages = 300, 4
    generator = torch.Generator().manual_seed(5)
    wide = torch.randn(rows, reference.ROW_WIDTH + 8, generator=generator).to(torch.bfloat16).to(device)
    kv = wide[:, : reference.ROW_WIDTH]  # rows of the wire have a stride of their own
    kv[0] = 0
    weight = (torch.rand(reference.ROW_WIDTH, generator=generator) + 0.5).to(torch.bfloat16).to(device)
    positions = torch.arange(100, 100 + rows, device=device)
    slots = torch.randperm(pages * PAGE, generator=generator)[:rows].to(torch.int32).to(device)
    slots[7] = NOT_WRITTEN
    angle = torch.arange(512)[:, None] * 10000.0 ** (-torch.arange(0, 64, 2).double() / 64)
    freqs = torch.polar(torch.ones_like(angle), angle).to(torch.complex64).to(device)
    mine = torch.zeros(pages, reference.page_bytes(PAGE), dtype=torch.uint8, device=device)
    right = torch.zeros_like(mine)
    write(mine, PAGE, kv, weight, EPS, freqs, positions, slots)
    reference.write_rows(right, PAGE, slots, reference.make_rows(kv, weight, EPS, freqs, positions))
    kept = slots[slots >= 0]
    rows_of = [reference.read_rows(each, PAGE, kept) for each in (mine, right)]
    numbers = [reference.dequantise(each) for each in rows_of]
    error = (numbers[0] - numbers[1]).norm(dim=1) / numbers[1].norm(dim=1).clamp_min(1e-30)
    every = torch.arange(pages * PAGE, device=device)
    written = [reference.read_rows(each, PAGE, every).scale.any(dim=1) for each in (mine, right)]
    if not torch.equal(*written):
        return float("inf"), 0.0
    ours, theirs = (torch.cat([each.nope, each.rope.view(torch.uint8), each.scale], dim=1) for each in rows_of)
    return float(error.max()), float((ours == theirs).float().mean())
