"""The `servers` command of `draft_cost`: real CP prefill servers with the whole and with the context-only draft."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import draft_checkpoint as large
from launch_measured import FOLDER
from rich.console import Console
from rich.table import Table

from sglang_dspark_cp import config
from sglang_dspark_cp.smoke import cuda, set_ups
from sglang_dspark_cp.smoke.checkpoint import Geometry, write_checkpoint
from sglang_dspark_cp.smoke.servers import (
    Ports,
    Server,
    ServerFailed,
    ServerSet,
    first_traceback,
    group_members,
    launch_command,
)
from sglang_dspark_cp.smoke.set_ups import Gpus

LAUNCH = Path(__file__).with_name("launch_measured.py")
TRANSFER = "mooncake_tcp"
SIDES = ("full", "context")
DRAFT_CLASS = "DeepseekV4ForCausalLMDSpark"
PHRASE = "the draft on this prefill worker holds"
SMI_INTERVAL = 0.2
POLL = 0.25
SETTLE = 3.0
RESERVE = 8.0
"""Seconds of the limit that are kept for stopping servers and writing the result."""
MIB = 2**20


# ------------------------------------------------------------------------------------------------------------- logs

LOADED = re.compile(
    r"Load weight end\. elapsed=(?P<seconds>[\d.]+) s, type=(?P<type>\w+),.*?mem usage=(?P<memory>-?[\d.]+) GB"
)
RANK = re.compile(r"^\[[^\]]*?\bTP(?P<rank>\d+)")
MEGABYTES = re.compile(r"(?P<what>[A-Za-z][A-Za-z_, ]*?):? (?P<value>[\d.]+) MB")


@dataclass(frozen=True)
class Loaded:
    """One `Load weight end` line.

    Attributes:
        rank: TP rank, 0 when the line names none.
        type: class of the model.
        seconds: for building and loading it.
        memory_gb: what the GPU's free memory fell by meanwhile, whoever took it.
    """

    rank: int
    type: str
    seconds: float
    memory_gb: float


def rank_of(line: str) -> int:
    """TP rank in the prefix of a log line, 0 without one."""
    found = RANK.match(line)
    return int(found["rank"]) if found else 0


def loads(log: str) -> list[Loaded]:
    """Every model that a server's log says was loaded."""
    found = []
    for line in log.splitlines():
        if match := LOADED.search(line):
            found.append(Loaded(rank_of(line), match["type"], float(match["seconds"]), float(match["memory"])))
    return found


def told_by_plugin(log: str) -> dict[int, dict[str, Any]]:
    """By rank: what the plugin's own line says the draft holds, and what was left out, in MB."""
    found: dict[int, dict[str, Any]] = {}
    for line in log.splitlines():
        if PHRASE not in line:
            continue
        text = line[line.index(PHRASE) :]
        held, _, rest = text.partition("Left out")
        numbers = [float(match["value"]) for match in MEGABYTES.finditer(held)]
        left_out = {match["what"].strip(" ,"): float(match["value"]) for match in MEGABYTES.finditer(rest)}
        found[rank_of(line)] = {"text": text, "held_mb": numbers[-1] if numbers else None, "left_out_mb": left_out}
    return found


def read_notes(path: Path) -> list[dict[str, Any]]:
    """Lines of one rank's memory file; a last line that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def counters(notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """PyTorch's bytes of one rank: what loading the draft added, the peak, and the last sample."""
    found: dict[str, Any] = {
        "draft_allocated_bytes": None,
        "draft_reserved_bytes": None,
        "peak_reserved_bytes": max((note["peak"] for note in notes), default=None),
        "steady_allocated_bytes": notes[-1]["allocated"] if notes else None,
        "steady_reserved_bytes": notes[-1]["reserved"] if notes else None,
    }
    begun: Mapping[str, Any] | None = None
    for note in notes:
        if note["event"].startswith("Load weight begin"):
            begun = note
        elif f"type={DRAFT_CLASS}," in note["event"] and begun is not None:
            found["draft_allocated_bytes"] = note["allocated"] - begun["allocated"]
            found["draft_reserved_bytes"] = note["reserved"] - begun["reserved"]
    return found


# -------------------------------------------------------------------------------------------------------- nvidia-smi


def parse_apps(text: str) -> dict[int, int]:
    """MiB by process id from `nvidia-smi --query-compute-apps=pid,used_memory`; lines without numbers are left out."""
    found: dict[int, int] = {}
    for line in text.splitlines():
        pid, _, used = (part.strip() for part in line.partition(","))
        if pid.isdigit() and used.isdigit():
            found[int(pid)] = found.get(int(pid), 0) + int(used)
    return found


@dataclass
class Seen:
    """MiB of one server over time, summed over its processes."""

    samples: list[int] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)


class Sampler(threading.Thread):
    """Asks `nvidia-smi` again and again what each process holds, until `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: dict[str, Seen] = {}
        self.listed: set[int] = set()
        self.asked = 0
        self._servers: list[Server] = []
        self._ended = threading.Event()

    def watch(self, server: Server) -> None:
        """Sum up this server's processes from now on."""
        self.seen[server.name] = Seen()
        self._servers.append(server)

    def forget(self, servers: Iterable[Server]) -> None:
        """Stop summing up; what was seen stays."""
        gone = list(servers)
        self._servers = [server for server in self._servers if server not in gone]

    def run(self) -> None:
        """Sample."""
        while not self._ended.is_set():
            started = time.monotonic()
            self._sample()
            self._ended.wait(max(0.0, SMI_INTERVAL - (time.monotonic() - started)))

    def _sample(self) -> None:
        command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return
        self.asked += 1
        used = parse_apps(answer.stdout)
        self.listed |= set(used)
        for server in list(self._servers):
            if server.process is not None and (mine := set(group_members(server.process.pid)) & set(used)):
                seen = self.seen[server.name]
                seen.pids |= mine
                seen.samples.append(sum(used[pid] for pid in mine))

    def stop(self) -> None:
        """End sampling."""
        self._ended.set()
        self.join(15)

    def of(self, name: str) -> dict[str, Any]:
        """Peak and last sample of a server; None where `nvidia-smi` does not tell this server's processes."""
        seen = self.seen.get(name, Seen())
        return {
            "processes": len(seen.pids),
            "samples": len(seen.samples),
            "peak_mib": max(seen.samples, default=None),
            "steady_mib": seen.samples[-1] if seen.samples else None,
        }

    def note(self) -> str:
        """How far to trust it."""
        if any(seen.samples for seen in self.seen.values()):
            return f"{self.asked} samples; sums over the processes of a server, CUDA contexts included"
        if self.listed:
            return f"{self.asked} samples; it lists processes, but none by an id that is known in this container"
        return f"{self.asked} samples; it lists no process here"


# --------------------------------------------------------------------------------------------------------------- run


def wide_geometry(args: argparse.Namespace, size: int) -> Geometry:
    """A draft as wide as Flash, with experts as narrow as fp8 blocks on every rank allow."""
    return Geometry(
        hidden=args.hidden,
        q_lora=1024,
        o_lora=1024,
        experts=args.experts,
        topk=min(6, args.experts),
        moe_intermediate=max(256, large_block(size)),
        markov_rank=256,
    )


def large_block(size: int) -> int:
    """Smallest width of experts that leaves whole fp8 blocks to each of `size` ranks."""
    return 128 * size


def all_fit(gpus: Gpus, wide_bytes: int) -> bool:
    """Whether four servers leave free what SGLang wants free on a GPU while it loads (1 - its memory fraction)."""
    totals = [int(text.split()[0]) for text in cuda._nvidia_smi("memory.total") if text.split()[:1]]
    if not totals:
        return False
    ranks_per_gpu = len(gpus.prefill) / len(set(gpus.prefill))
    needed = 2 * 1.4 * wide_bytes / len(set(gpus.prefill)) + 4 * ranks_per_gpu * 1500 * MIB
    return needed < 0.3 * min(totals) * MIB


class Bench:
    """Checkpoints, servers and what they did."""

    def __init__(self, args: argparse.Namespace, gpus: Gpus, folder: Path, console: Console) -> None:
        self.args, self.gpus, self.folder, self.console = args, gpus, folder, console
        self.deadline = time.monotonic() + args.limit - RESERVE
        self.ports = Ports(args.ports)
        self.sampler = Sampler()
        self.servers: dict[str, Server] = {}
        self.failed: dict[str, str] = {}
        self.written: dict[str, dict[str, Any]] = {}
        self.role = f"prefill-cp{gpus.cp_size}"

    def say(self, text: str) -> None:
        """One line of progress."""
        left = self.deadline - time.monotonic()
        self.console.print(f"{text} ({left:.0f} s left)", markup=False)

    def make(self, model: str, side: str) -> Server:
        """A server that is not started yet."""
        name, port = f"{model}-{side}", self.ports.take()
        memory = self.folder / name
        memory.mkdir(exist_ok=True)
        arguments = [
            *set_ups.base_arguments(self.folder / model, "fp8"),
            *set_ups.role_arguments(self.role, TRANSFER, port + 50),
        ]
        command = launch_command(arguments, port, set_ups.launch_module(self.gpus.prefill))
        # The same server with a look at PyTorch's counters inside each rank.
        command[1:3] = [str(LAUNCH)]
        environment = set_ups.environment("fp8", TRANSFER, self.gpus.prefill)
        environment |= {config.DRAFT: side, FOLDER: str(memory), "PYTHONUNBUFFERED": "1"}
        self.servers[name] = Server(name, port, command, environment, self.folder)
        return self.servers[name]

    def start(self, group: ServerSet, models: Iterable[str]) -> list[Server]:
        """Start both sides of some models."""
        new = [self.make(model, side) for model in models for side in SIDES]
        for server in new:
            group.servers.append(server)
            server.start()
            self.sampler.watch(server)
        return new

    def wait(self, waiting: list[Server]) -> None:
        """Until all are ready or have failed, or the time is over."""
        while waiting and time.monotonic() < self.deadline - SETTLE:
            for server in list(waiting):
                try:
                    server.require_alive()
                except ServerFailed:
                    waiting.remove(server)
                    self.failed[server.name] = f"{server.name} ended: " + last_of(first_traceback(server.log()))
                    self.say(self.failed[server.name])
                    continue
                if server.ready():
                    waiting.remove(server)
                    self.say(f"{server.name} is ready after {server.boot_seconds} s")
            time.sleep(POLL)
        for server in waiting:
            self.failed[server.name] = f"{server.name} was not ready within the limit of {self.args.limit} s"
        time.sleep(SETTLE)

    def end(self, group: ServerSet, servers: list[Server]) -> None:
        """Stop servers; what they give back then is not sampled."""
        self.sampler.forget(servers)
        group.stop(servers)

    def write_tiny(self) -> None:
        """The smoke test's fp8 checkpoint."""
        info = write_checkpoint(self.folder / "tiny", kind="random", quant="fp8")
        self.written["tiny"] = {"bytes": info.num_bytes, "tensors": info.num_tensors, "hidden": info.hidden}

    def write_wide(self) -> None:
        """The checkpoint with the wide draft."""
        geometry, started = wide_geometry(self.args, self.gpus.cp_size), time.monotonic()
        written = large.write_large(self.folder / "wide", geometry)
        self.written["wide"] = {**vars(geometry), **vars(written)}
        self.say(f"wrote {written.bytes / 1e9:.1f} GB in {time.monotonic() - started:.0f} s")

    def run(self) -> None:
        """Everything."""
        self.write_tiny()
        self.sampler.start()
        try:
            with ServerSet() as group:
                started = self.start(group, ["tiny"])
                self.write_wide()
                if self.args.pairs or not all_fit(self.gpus, self.written["wide"]["bytes"]):
                    self.say("two servers at a time")
                    self.wait(started)
                    self.end(group, started)
                    started = []
                started += self.start(group, ["wide"])
                self.wait(started)
                self.end(group, started)
        finally:
            self.sampler.stop()

    def report(self) -> dict[str, Any]:
        """What the logs, the ranks' own counters and `nvidia-smi` say, by model and side."""
        found: dict[str, Any] = {}
        for name, server in self.servers.items():
            model, _, side = name.partition("-")
            found.setdefault(model, {})[side] = self._of(server)
        return found

    def _of(self, server: Server) -> dict[str, Any]:
        log = server.log()
        loaded, told = loads(log), told_by_plugin(log)
        ranks = []
        for rank in range(self.gpus.cp_size):
            mine = {each.type == DRAFT_CLASS: each for each in loaded if each.rank == rank}
            draft, target = mine.get(True), mine.get(False)
            ranks.append(
                {
                    "rank": rank,
                    "target_load_s": target.seconds if target else None,
                    "draft_load_s": draft.seconds if draft else None,
                    "draft_log_memory_gb": draft.memory_gb if draft else None,
                    "plugin": told.get(rank),
                    **counters(read_notes(self.folder / server.name / f"rank-{rank}.jsonl")),
                }
            )
        return {
            "ready": server.boot_seconds is not None,
            "boot_seconds": server.boot_seconds,
            "error": self.failed.get(server.name),
            "ranks": ranks,
            "nvidia_smi": self.sampler.of(server.name),
        }


def last_of(text: str) -> str:
    """Its last line."""
    return (text.strip().splitlines() or [""])[-1]


def median_of(ranks: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Median over ranks, None when no rank told."""
    values = [rank[key] for rank in ranks if rank[key] is not None]
    return statistics.median(values) if values else None


KEYS = (
    "draft_load_s",
    "target_load_s",
    "draft_allocated_bytes",
    "draft_log_memory_gb",
    "peak_reserved_bytes",
    "steady_reserved_bytes",
)


def compare(sides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over ranks of both sides of one model, and how they relate; None where something is missing."""
    median = {side: {key: median_of(sides[side]["ranks"], key) for key in KEYS} for side in SIDES}
    full, context = median["full"], median["context"]

    def both(key: str) -> tuple[float, float] | None:
        one, two = full[key], context[key]
        return None if one is None or two is None else (one, two)

    seconds, allocated, steady = both("draft_load_s"), both("draft_allocated_bytes"), both("steady_reserved_bytes")
    smi = [sides[side]["nvidia_smi"]["steady_mib"] for side in SIDES]
    return {
        "median_over_ranks": median,
        "times_faster": seconds[0] / seconds[1] if seconds and seconds[1] else None,
        "draft_bytes_gone": 1 - allocated[1] / allocated[0] if allocated and allocated[0] else None,
        "steady_reserved_saved_bytes_per_rank": steady[0] - steady[1] if steady else None,
        "nvidia_smi_steady_saved_mib": smi[0] - smi[1] if None not in smi else None,
    }


def run(args: argparse.Namespace, console: Console) -> tuple[dict[str, Any], list[str]]:
    """The `servers` command: the result and what went wrong.

    Raises:
        UsageError: the GPUs do not allow it.
    """
    gpus = set_ups.choose_gpus(cuda.visible_gpus(), args.gpus, None, None, args.ranks_per_gpu)
    if gpus.cp_size < 2:
        raise set_ups.UsageError("context parallelism takes at least two ranks: --gpus or --ranks-per-gpu")
    try:
        wide_geometry(args, gpus.cp_size).validate("random", "fp8")
    except ValueError as error:
        raise set_ups.UsageError(str(error)) from error
    problems: list[str] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="draft-cost-") as scratch:
        bench = Bench(args, gpus, Path(scratch), console)
        try:
            bench.run()
        except (ServerFailed, OSError, ValueError, KeyboardInterrupt) as error:
            problems.append(f"{type(error).__name__}: {last_of(str(error))}")
        found = bench.report()
        problems += bench.failed.values()
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
            for path in (*bench.folder.glob("*.log"), *bench.folder.glob("*/rank-*.jsonl")):
                shutil.copy(path, args.keep / str(path.relative_to(bench.folder)).replace("/", "-"))
    summary = {model: compare(sides) for model, sides in found.items() if set(sides) == set(SIDES)}
    for model, each in summary.items():
        if each["times_faster"] is None or each["draft_bytes_gone"] is None:
            problems.append(f"{model}: the logs or counters do not tell load seconds and bytes of both sides")
    result = {
        **machine(),
        "gpus_used": len(set(gpus.prefill)),
        "ranks_per_gpu": args.ranks_per_gpu,
        "cp_size": gpus.cp_size,
        "transfer": TRANSFER,
        "checkpoints": bench.written,
        "measured_by": {
            "draft_allocated_bytes": "PyTorch's counter in each rank, from begin to end of the draft's load",
            "draft_log_memory_gb": "SGLang's log: fall of the GPU's free memory, other processes on it included",
            "nvidia_smi": bench.sampler.note(),
        },
        "servers": found,
        "summary": summary,
        "seconds": round(time.monotonic() - started, 1),
    }
    show(console, result)
    return result, problems


def machine() -> dict[str, Any]:
    """GPUs, driver, CUDA."""
    import torch

    return {
        "gpus": cuda._nvidia_smi("name"),
        "driver": next(iter(cuda._nvidia_smi("driver_version")), None),
        "cuda": torch.version.cuda,
    }


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Medians over ranks of both sides."""
    table = Table(title=f"draft on CP{result['cp_size']} prefill, median over ranks: full / context-only")
    for title in ("model", "load, s", "times faster", "draft, MB", "gone", "saved, MB a rank", "nvidia-smi, MiB"):
        table.add_column(title, justify="right")

    def pair(each: Mapping[str, Any], key: str, scale: float, digits: int) -> str:
        values = [each["median_over_ranks"][side][key] for side in SIDES]
        return " / ".join("n/a" if value is None else f"{value / scale:,.{digits}f}" for value in values)

    for model, each in result["summary"].items():
        saved, gone, faster = (
            each[key] for key in ("steady_reserved_saved_bytes_per_rank", "draft_bytes_gone", "times_faster")
        )
        smi = [result["servers"][model][side]["nvidia_smi"]["steady_mib"] for side in SIDES]
        table.add_row(
            model,
            pair(each, "draft_load_s", 1, 2),
            "n/a" if faster is None else f"{faster:.1f}",
            pair(each, "draft_allocated_bytes", 1e6, 1),
            "n/a" if gone is None else f"{gone:.2%}",
            "n/a" if saved is None else f"{saved / 1e6:,.1f}",
            " / ".join("n/a" if value is None else str(value) for value in smi),
        )
    console.print(table)
    console.print(f"nvidia-smi: {result['measured_by']['nvidia_smi']}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    sys.exit("run draft_cost.py servers")
