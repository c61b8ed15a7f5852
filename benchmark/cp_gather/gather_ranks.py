"""Rank processes of the gather benchmark: NCCL, gloo or an emulated link; clocks; and the parent's side of them."""

from __future__ import annotations

import abc
import contextlib
import gc
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gather_designs import (
    DESIGNS,
    STAGES,
    DesignInfo,
    Inputs,
    Rank,
    Recorder,
    Shape,
    State,
    Step,
    check_writer,
    closeness,
    formula,
    make_inputs,
    reference_pools,
    run,
    steps_of,
    tail_bytes,
    verdict,
    wrong_bytes,
)

from sglang_dspark_cp.core import rows
from sglang_dspark_cp.core.layout import send_all
from sglang_dspark_cp.core.reference import ROW_WIDTH

SABOTAGES = ("row", "payload", "raise")
L2_BYTES = 60_000_000
MOST_SETS = 64
LINK_PROBE_BYTES = 1 << 28
MATMUL_SIZE = 8192
PROBE_RUNS = 12
BLOCKS = 3
PART_RUNS = 12
COLLECTIVE_TIMEOUT_S = 120
CYCLES_PER_MS = 2_000_000
"""Of `torch.cuda._sleep`, at the highest clock there is: at a lower one the wait is longer, which does no harm."""


@dataclass(frozen=True)
class Job:
    """What a group of ranks does.

    Attributes:
        mode: `gpu` (a GPU per rank, NCCL), `emulate` (one process as rank 0) or `cpu` (gloo).
        runs: timed runs of each design and shape.
        sabotage: empty or one of `SABOTAGES`: what the last rank does to each gather. CPU only.
    """

    mode: str
    cp: int
    tokens: tuple[int, ...]
    hidden: tuple[int, ...]
    runs: int
    sabotage: str = ""

    @property
    def processes(self) -> int:
        return 1 if self.mode == "emulate" else self.cp

    @property
    def shapes(self) -> list[Shape]:
        return [Shape(self.cp, tokens, hidden) for hidden in self.hidden for tokens in self.tokens]


# ------------------------------------------------------------------------------------------------------------- links


class CountedLink(abc.ABC):
    """Counts what a rank receives from the others."""

    def __init__(self, cp: int) -> None:
        self.cp = cp
        self.reset()

    def reset(self) -> None:
        """Start counting anew."""
        self.collectives = self.received = 0

    def gather(self, tag: str, output: torch.Tensor, local: torch.Tensor) -> None:
        """See `gather_designs.Link`."""
        self.collectives += 1
        self.received += (self.cp - 1) * local.numel() * local.itemsize
        self._gather(tag, output, local)

    @abc.abstractmethod
    def _gather(self, tag: str, output: torch.Tensor, local: torch.Tensor) -> None:
        """Fill `output` [cp * rows, width] with every rank's `local` [rows, width]."""


class GroupLink(CountedLink):
    """NCCL or gloo."""

    def __init__(self, cp: int, sabotage: str = "") -> None:
        super().__init__(cp)
        self._sabotage = sabotage

    def _gather(self, tag: str, output: torch.Tensor, local: torch.Tensor) -> None:
        if self._sabotage == "raise":
            raise RuntimeError(f"sabotaged before gather {tag!r}")
        dist.all_gather_into_tensor(output, local)
        if self._sabotage == "row":
            output[:2] = output[:2].flip(0)
        elif self._sabotage == "payload":
            output[0, :32] *= -3


class EmulatedLink(CountedLink):
    """Copies what the other ranks would have sent, from this GPU's own memory."""

    def __init__(self, cp: int, rest: Mapping[str, torch.Tensor]) -> None:
        super().__init__(cp)
        self._rest = rest

    def _gather(self, tag: str, output: torch.Tensor, local: torch.Tensor) -> None:
        output[: local.shape[0]].copy_(local)
        output[local.shape[0] :].copy_(self._rest[tag])


# ------------------------------------------------------------------------------------------------------------ clocks


class Crew:
    """This rank among the others: clocks whose readings are those of the slowest rank."""

    def __init__(self, job: Job, cp_rank: int, device: torch.device, send: Callable[[str, Any], None]) -> None:
        self.job, self.cp_rank, self.device = job, cp_rank, device
        self._send = send if cp_rank == 0 else lambda *_: None
        self._one = torch.zeros(1, device=device)

    def tell(self, kind: str, value: Any) -> None:
        """To the parent, by rank 0."""
        self._send(kind, value)

    def objects(self, value: Any) -> list[Any]:
        """Every rank's value."""
        if self.job.processes == 1:
            return [value]
        found: list[Any] = [None] * self.job.processes
        dist.all_gather_object(found, value)
        return found

    def slowest(self, times: Sequence[float]) -> list[float]:
        """Run by run, the largest of all ranks."""
        return [max(each) for each in zip(*self.objects(list(times)), strict=True)]

    def _start_together(self, ahead_ms: float) -> None:
        torch.cuda.synchronize()
        if ahead_ms:
            torch.cuda._sleep(int(ahead_ms * CYCLES_PER_MS))  # type: ignore[no-untyped-call]
        if self.job.processes > 1:
            dist.all_reduce(self._one)

    def clock(self, action: Callable[[int], Any], runs: int, ahead_ms: float = 0.0) -> list[float]:
        """Milliseconds between two CUDA events around `action(run)`.

        Args:
            action: what is timed.
            runs: how often.
            ahead_ms: keep the GPU busy that long first, so that it never waits for the host's launches; 0: do not.
        """
        times = []
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for number in range(runs):
            self._start_together(ahead_ms)
            start.record()
            kept = action(number)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
            del kept
        return times

    def clock_steps(self, steps: Sequence[Step], rank: Rank, sets: Sequence[Inputs], ahead_ms: float) -> list[float]:
        """Median milliseconds of each step within the path."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        readings = []
        for number in range(PART_RUNS):
            self._start_together(ahead_ms)
            state: State = {"inputs": sets[number % len(sets)]}
            marks[0].record()
            for (_, step), mark in zip(steps, marks[1:], strict=True):
                step(rank, state)
                mark.record()
            torch.cuda.synchronize()
            readings.append([one.elapsed_time(two) for one, two in itertools.pairwise(marks)])
        return [median(self.slowest(each)) for each in zip(*readings, strict=True)]


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    """Middle value."""
    return percentile(values, 0.5)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Figures of one series of runs."""
    return {
        "median": median(values),
        "p10": percentile(values, 0.1),
        "p90": percentile(values, 0.9),
        "runs": len(values),
    }


# -------------------------------------------------------------------------------------------------------------- GPUs


def _link_rate(crew: Crew) -> tuple[int, float]:
    """Bytes that arrive in the probe's all-gather, and GB/s."""
    cp, width = crew.job.cp, 4096
    rows = LINK_PROBE_BYTES // cp // (2 * width)
    local = torch.randn(rows, width, device=crew.device, dtype=torch.bfloat16)
    output = local.new_empty(cp * rows, width)
    link: CountedLink = GroupLink(cp)
    if crew.job.mode == "emulate":
        link = EmulatedLink(cp, {"probe": output.new_zeros((cp - 1) * rows, width)})

    def once(_: int) -> None:
        link.gather("probe", output, local)

    crew.clock(once, 3)
    received = (cp - 1) * rows * width * 2
    return received, received / median(crew.slowest(crew.clock(once, PROBE_RUNS, 0.5))) / 1e6


def _matmul_rate(crew: Crew) -> float:
    """TFLOP/s of a square bf16 product."""
    size = MATMUL_SIZE
    a, b = (torch.randn(size, size, device=crew.device, dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)

    def once(_: int) -> None:
        torch.mm(a, b, out=c)

    crew.clock(once, 3)
    return 2 * size**3 / median(crew.slowest(crew.clock(once, PROBE_RUNS, 0.5))) / 1e9


def rates(crew: Crew) -> dict[str, float]:
    """What link and matrix units do by themselves: GB/s that arrive, TFLOP/s."""
    received, link = _link_rate(crew)
    return {
        "cp": crew.job.cp,
        "link_probe_bytes": received,
        "link_gb_s": link,
        "matmul_size": MATMUL_SIZE,
        "matmul_tflop_s": _matmul_rate(crew),
    }


def _emulated(rank: Rank, steps: Sequence[Step]) -> EmulatedLink:
    """A link that holds what ranks 1 .. C - 1 would send in this design."""
    last = max(index for index, (part, _) in enumerate(steps) if part == "gather")
    sent: dict[str, list[torch.Tensor]] = {}
    for cp_rank in range(1, rank.shape.cp):
        recorder = Recorder()
        run(steps[: last + 1], rank.other(cp_rank, recorder), make_inputs(rank.shape, cp_rank, 0, rank.device))
        for tag, local in recorder.sent.items():
            sent.setdefault(tag, []).append(local)
    return EmulatedLink(rank.shape.cp, {tag: torch.cat(each) for tag, each in sent.items()})


def _peak(action: Callable[[int], Any]) -> int:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    action(0)
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def _frame(design: DesignInfo, shape: Shape, counts: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """What every cell has. counts: collectives and received bytes of each rank."""
    cost = formula(design, shape)
    return {
        "cp": shape.cp,
        "tokens": shape.tokens,
        "hidden": shape.hidden,
        "rows_per_rank": shape.rows,
        "design": design.name,
        "collectives": counts[0][0],
        "received_bytes": counts[0][1],
        "same_on_all_ranks": len(set(counts)) == 1,
        "formula_collectives": cost.collectives,
        "formula_bytes": cost.received_bytes,
        "tail_bytes": tail_bytes(design, shape),
        "flops": cost.flops,
    }


def measure_shape(crew: Crew, shape: Shape) -> None:
    """All designs on one shape, taking turns; a cell each."""
    job, device = crew.job, crew.device
    rank = Rank(shape, crew.cp_rank, device, Recorder())
    set_bytes = sum(each.numel() for each in make_inputs(shape, crew.cp_rank, 0, device).streams) * 2
    count = min(MOST_SETS, max(2, -(-2 * L2_BYTES // set_bytes)))
    sets = [make_inputs(shape, crew.cp_rank, number, device) for number in range(count)]
    paths = {design.name: steps_of(design) for design in DESIGNS}
    links: dict[str, CountedLink] = {}
    cells: dict[str, dict[str, Any]] = {}
    ahead: dict[str, float] = {}
    stock: list[torch.Tensor] = []

    def path(design: DesignInfo) -> Callable[[int], State]:
        steps = paths[design.name]

        def once(number: int) -> State:
            rank.link = links[design.name]
            return run(steps, rank, sets[number % len(sets)])

        return once

    for design in DESIGNS:
        crew.tell("say", f"cp {shape.cp}, H {shape.hidden}, T {shape.tokens}: {design.name}, check")
        emulated = job.mode == "emulate"
        links[design.name] = _emulated(rank, paths[design.name]) if emulated else GroupLink(shape.cp)
        once, link = path(design), links[design.name]
        rank.clear()
        link.reset()
        state = once(0)
        torch.cuda.synchronize()
        counts = crew.objects((link.collectives, link.received))
        if not stock:
            stock = [pool.clone() for pool in rank.pools]
        found = closeness(rank, design, stock)
        checks = crew.objects((found, verdict(state)))
        del state
        for number in range(3):
            once(number)
        torch.cuda.synchronize()
        started = time.perf_counter()
        once(0)
        launched = 1e3 * (time.perf_counter() - started)
        ahead[design.name] = 1.5 * launched + 0.5
        cells[design.name] = _frame(design, shape, counts) | {
            "check": {
                "misplaced_rows": [each.misplaced for each, _ in checks],
                "rows": found.kept,
                "byte_equal_rows": [each.equal for each, _ in checks],
                "worst_relative_error": [each.worst for each, _ in checks],
                "refused": [text for _, text in checks if text],
            },
            "launch_ms": max(crew.objects(launched)),
            "peak_bytes": max(crew.objects(_peak(once))),
            "input_sets": len(sets),
        }

    times: dict[str, tuple[list[float], list[float]]] = {design.name: ([], []) for design in DESIGNS}
    block = -(-job.runs // BLOCKS)
    for number in range(BLOCKS):
        for design in DESIGNS:
            crew.tell(
                "say", f"cp {shape.cp}, H {shape.hidden}, T {shape.tokens}: {design.name}, {number + 1} of {BLOCKS}"
            )
            crew.clock(path(design), 2)
            times[design.name][0].extend(crew.clock(path(design), block))
            times[design.name][1].extend(crew.clock(path(design), block, ahead[design.name]))
    for design in DESIGNS:
        crew.tell("say", f"cp {shape.cp}, H {shape.hidden}, T {shape.tokens}: {design.name}, parts")
        rank.link = links[design.name]
        cell = cells[design.name]
        cell["ms"], cell["queued_ms"] = (spread(crew.slowest(each)) for each in times[design.name])
        cell["parts"] = _parts(crew, paths[design.name], rank, sets, ahead[design.name])
        if design.name == "kv":
            cell["kernels"] = kernel_times(crew, shape, sets)
        crew.tell("cell", cell)


def _parts(
    crew: Crew, steps: Sequence[Step], rank: Rank, sets: Sequence[Inputs], ahead_ms: float
) -> dict[str, dict[str, float]]:
    """Milliseconds of each part within the path and by itself; steps of one part are added up."""
    found: dict[str, dict[str, float]] = {}
    within = crew.clock_steps(steps, rank, sets, ahead_ms)
    state: State = {"inputs": sets[0]}
    for (part, step), in_path in zip(steps, within, strict=True):

        def again(number: int, step: Callable[[Rank, State], None] = step, before: State = state) -> State:
            copy = before | {"inputs": sets[number % len(sets)]}
            step(rank, copy)
            return copy

        again(0)
        alone = median(crew.slowest(crew.clock(again, PART_RUNS, ahead_ms)))
        figures = found.setdefault(part, {"in_path_ms": 0.0, "alone_ms": 0.0})
        figures["in_path_ms"] += in_path
        figures["alone_ms"] += alone
        state = dict(state)
        step(rank, state)
    return found


def kernel_times(crew: Crew, shape: Shape, sets: Sequence[Inputs]) -> dict[str, dict[str, float]]:
    """Milliseconds of each pass of `core.rows` on this shape, as it runs here and in its torch form, by turns."""
    device, width = crew.device, STAGES * ROW_WIDTH
    every = torch.arange(shape.tokens, device=device)
    order = send_all(shape.tokens, shape.cp).order_on(device)
    wire = torch.zeros(order.shape[0], width // 4 + 2, dtype=torch.int64, device=device)
    address = wire[:, -2:]
    address[:] = order[:, None]
    slot = torch.empty(shape.rows, 3 * shape.hidden, device=device, dtype=torch.bfloat16)[:, : shape.hidden]
    local = every[: shape.rows]

    def mean(form: Callable[..., None]) -> Callable[[int], None]:
        return lambda number: form(sets[number % len(sets)].streams[0], [slot])

    def write(form: Callable[..., None]) -> Callable[[int], None]:
        return lambda _: form(address[: shape.rows], local, local)

    kv = torch.empty(shape.rows, width, device=device, dtype=torch.bfloat16)
    packed = wire.view(torch.bfloat16)[: shape.rows, :width]

    def fill(form: Callable[..., None]) -> Callable[[int], None]:
        return lambda _: form(packed, address[: shape.rows], kv, local, local)

    def place(form: Callable[..., Any]) -> Callable[[int], Any]:
        return lambda _: form(every, every, every, order=order, address=address)

    passes = {
        "mean": (mean(rows.mean_streams), mean(rows.mean_streams_torch)),
        "fill": (fill(rows.fill_rows), fill(rows.fill_rows_torch)),
        "addresses": (write(rows.write_addresses), write(rows.write_addresses_torch)),
        "place": (place(rows.place), place(rows.place_torch)),
    }
    found = {}
    for name, forms in passes.items():
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(BLOCKS + 1):
            for form, readings in zip(forms, times, strict=True):
                new = crew.clock(form, PART_RUNS, 1.0)
                readings.extend(new if number else [])  # the first block is a warm-up
        ours, plain = (median(crew.slowest(each)) for each in times)
        found[name] = {"ms": ours, "torch_ms": plain, "of_torch": ours / plain}
    return found


def _on_gpus(crew: Crew) -> None:
    crew.tell("say", "the pool writer against core.reference")
    worst, equal = check_writer(crew.device)
    crew.tell(
        "facts",
        {
            "gpu": torch.cuda.get_device_name(),
            "gpu_memory_bytes": torch.cuda.get_device_properties(crew.device).total_memory,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
            "nccl_environment": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
            "writer_check": {"worst_relative_error": worst, "equal_bytes": equal},
        },
    )
    crew.tell("say", f"cp {crew.job.cp}: link and matrix rates")
    crew.tell("rates", rates(crew))
    for shape in crew.job.shapes:
        measure_shape(crew, shape)
        gc.collect()
        torch.cuda.empty_cache()


# --------------------------------------------------------------------------------------------------------------- CPU


def _on_cpus(crew: Crew) -> None:
    sabotage = crew.job.sabotage if crew.cp_rank == crew.job.cp - 1 else ""
    for shape in crew.job.shapes:
        crew.tell("say", f"cp {shape.cp}, H {shape.hidden}, T {shape.tokens}: rows without CP")
        rows, head = reference_pools(shape)
        link = GroupLink(shape.cp, sabotage)
        rank = Rank(shape, crew.cp_rank, crew.device, link)
        inputs = make_inputs(shape, crew.cp_rank, 0, crew.device)
        for design in DESIGNS:
            crew.tell("say", f"cp {shape.cp}, H {shape.hidden}, T {shape.tokens}: {design.name}")
            rank.clear()
            link.reset()
            state = run(steps_of(design), rank, inputs)
            checks = crew.objects(
                (
                    (link.collectives, link.received),
                    wrong_bytes(rank, design, rows),
                    bool(torch.equal(state["head"], head)),
                    verdict(state),
                )
            )
            crew.tell(
                "cell",
                _frame(design, shape, [each[0] for each in checks])
                | {
                    "check": {
                        "wrong_rows": [each[1] for each in checks],
                        "head_right": [each[2] for each in checks],
                        "refused": [each[3] for each in checks if each[3]],
                    }
                },
            )


# --------------------------------------------------------------------------------------------------------- processes


def _rank(job: Job, cp_rank: int, pipe: Connection, store: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        torch.set_num_threads(1)
        device = torch.device("cpu")
        if job.mode == "cpu":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        else:
            device = torch.device("cuda", cp_rank)
            torch.cuda.set_device(device)
        if job.processes > 1:
            dist.init_process_group(
                "gloo" if job.mode == "cpu" else "nccl",
                init_method=f"file://{store}",
                rank=cp_rank,
                world_size=job.cp,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
                device_id=None if job.mode == "cpu" else device,
            )
        crew = Crew(job, cp_rank, device, lambda kind, value: pipe.send((kind, value)))
        with torch.inference_mode():
            (_on_cpus if job.mode == "cpu" else _on_gpus)(crew)
            crew.objects(None)  # nobody leaves before all are done
        pipe.send(("done", None))
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(("error", traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class RanksFailed(Exception):
    """A rank raised, died or took too long; the text holds its traceback."""


def run_ranks(job: Job, deadline: float) -> Generator[tuple[str, Any], None, None]:
    """Run a job and pass on what rank 0 tells: ("say", text), ("facts", ...), ("rates", ...), ("cell", ...).

    Args:
        job: the job.
        deadline: of `time.monotonic`.

    Raises:
        RanksFailed: with the first traceback. No process is left in any case.
    """
    # A fork shares the imported torch, but a CUDA rank needs a process of its own making.
    context = multiprocessing.get_context("fork" if job.mode == "cpu" else "spawn")
    processes: list[Any] = []
    pipes: dict[Connection, int] = {}
    last = "start"
    with tempfile.TemporaryDirectory(prefix="cp-gather-") as folder:
        try:
            for cp_rank in range(job.processes):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (job, cp_rank, theirs, str(Path(folder) / "store"))
                process = context.Process(target=_rank, args=arguments, daemon=True)  # type: ignore[attr-defined]
                process.start()
                theirs.close()
                processes.append(process)
                pipes[ours] = cp_rank
            while pipes:
                ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise RanksFailed(f"the time is up; rank 0 was at: {last}")
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    try:
                        kind, value = pipe.recv()
                    except EOFError:
                        raise RanksFailed(f"rank {pipes[pipe]} died; rank 0 was at: {last}") from None
                    if kind == "error":
                        raise RanksFailed(f"rank {pipes[pipe]} of {job.processes}, at: {last}\n{value}")
                    if kind == "done":
                        del pipes[pipe]
                        continue
                    if kind == "say":
                        last = value
                    yield kind, value
        finally:
            for process in processes:
                process.kill()
                process.join(10)
