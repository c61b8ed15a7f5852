"""Prefill servers of `prefill_cost`: one per side, on the same GPUs, with a checkpoint as wide as a real model."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import draft_checkpoint as large
from draft_servers import large_block, last_of
from rich.console import Console

from sglang_dspark_cp import config
from sglang_dspark_cp.smoke import cuda, set_ups
from sglang_dspark_cp.smoke.checkpoint import Geometry
from sglang_dspark_cp.smoke.servers import Ports, Server, ServerFailed, ServerSet, first_traceback, launch_command
from sglang_dspark_cp.smoke.set_ups import Gpus, UsageError

BASE, CONTROL, STOCK = "off", "off-2", "stock"
WITHOUT = (BASE, CONTROL)
"""Sides without DSPARK."""
SIDES = (*WITHOUT, STOCK, "window", "kv", "context", "packed", "auto")
DEFAULT_SIDES = (CONTROL, "window", "kv", "context", "packed")
TRANSFER = "mooncake_tcp"
SHARE_OF_GPU = 0.9
RANK_OVERHEAD = 4 * 2**30
"""Bytes of a rank beside its weights: CUDA context, NCCL, pools, activations of a chunk. A guess on the safe side."""
POLL = 0.25

ACTIVE = re.compile(r"DSPARK on CP prefill is active, attn_cp_size=(?P<size>\d+),.*?gather=(?P<mode>\w+)")
RANK = re.compile(r"\bTP(?P<rank>\d+)\]")


@dataclass(frozen=True)
class Told:
    """What a server's log says about the plugin.

    Attributes:
        ranks: how many ranks say that DSPARK on CP prefill is active.
        modes: gather modes that they name.
    """

    ranks: int
    modes: tuple[str, ...]


def told_by(log: str) -> Told:
    """Read a log."""
    ranks: set[str] = set()
    modes: set[str] = set()
    for line in log.splitlines():
        if found := ACTIVE.search(line):
            rank = RANK.search(line)
            ranks.add(rank["rank"] if rank else "0")
            modes.add(found["mode"])
    return Told(len(ranks), tuple(sorted(modes)))


def not_as_asked(side: str, told: Told, cp_size: int) -> str | None:
    """Why a server is not what its side's name says: a cost would be that of something else."""
    if side in (*WITHOUT, STOCK):
        return f"{told.ranks} ranks say that this package is active, wanted is none" if told.ranks else None
    if told.ranks != cp_size:
        return f"{told.ranks} of {cp_size} ranks say that DSPARK on CP prefill is active"
    if side != "auto" and told.modes != (side,):
        return f"the log names gather mode {', '.join(told.modes)}, wanted is {side}"
    return None


def geometry_of(args: Any, cp_size: int) -> Geometry:
    """Sizes of the checkpoint.

    Raises:
        UsageError: such a checkpoint cannot be written, or not be split over the ranks.
    """
    block = large_block(cp_size)
    if args.moe_intermediate % block:
        raise UsageError(
            f"--moe-intermediate {args.moe_intermediate}: allowed is a multiple of {block}, whole fp8 blocks for each"
            f" of {cp_size} ranks"
        )
    geometry = Geometry(
        hidden=args.hidden,
        vocab=args.vocab,
        layers=args.layers,
        q_lora=1024,
        o_lora=1024,
        experts=args.experts,
        topk=min(6, args.experts),
        moe_intermediate=args.moe_intermediate,
        markov_rank=256,
    )
    try:
        geometry.validate("random", "fp8")
    except ValueError as error:
        raise UsageError(str(error)) from error
    return geometry


def rank_bytes(geometry: Geometry, cp_size: int) -> int:
    """Weights of one rank, about: routed experts are split over the ranks, everything else is on each of them."""
    g = geometry
    attention = g.hidden * (g.q_lora + g.head_dim) + g.q_lora * (g.heads * g.head_dim + g.index_heads * g.index_dim)
    output = g.heads * g.head_dim * g.o_lora * 2 + g.hidden * g.o_groups * g.o_lora  # SGLang holds wo_a in bf16
    expert = 3 * g.hidden * g.moe_intermediate
    layer = attention + output + expert + g.experts * expert // cp_size
    return g.layers * layer + 2 * 2 * g.vocab * g.hidden


def check_fit(geometry: Geometry, gpus: Gpus, sides: int) -> None:
    """Refuse what the GPUs' memory does not hold: all sides are up at the same time, so that they can take turns.

    Raises:
        UsageError: with the sizes.
    """
    totals = [int(text.split()[0]) * 2**20 for text in cuda._nvidia_smi("memory.total") if text.split()[:1]]
    ranks = len(gpus.prefill) // len(set(gpus.prefill))
    needed = sides * ranks * (rank_bytes(geometry, gpus.cp_size) + RANK_OVERHEAD)
    if totals and needed > SHARE_OF_GPU * min(totals):
        raise UsageError(
            f"{sides} servers with {ranks} rank(s) on a GPU need about {needed / 2**30:.0f} GiB of it, it has"
            f" {min(totals) / 2**30:.0f} GiB; fewer --modes, --layers or --experts need less"
        )


def arguments_of(side: str, args: Any, gpus: Gpus, model: Path, port: int) -> list[str]:
    """A server's own command line; the last of two values of a flag counts."""
    role = set_ups.role_arguments(f"prefill-cp{gpus.cp_size}", TRANSFER, port + 50)
    if side in WITHOUT:
        role = [word for word in role if word not in set_ups.SPECULATE]
    # A chunk is a whole prompt, so that a request is one forward; the pool never makes a request wait.
    pool = 4 * (args.concurrency + 2) * args.input_len
    return [
        *set_ups.base_arguments(model, "fp8"),
        *role,
        *("--nccl-port", str(port + 60)),
        *("--context-length", str(args.input_len + 1024), "--chunked-prefill-size", str(args.chunk or args.input_len)),
        *("--max-prefill-tokens", str(max(args.input_len, 16384)), "--max-total-tokens", str(max(pool, 65536))),
        *("--mem-fraction-static", "0.85"),
        *args.server_args.split(),
    ]


class Fleet:
    """The servers of a run, by side."""

    def __init__(self, args: Any, gpus: Gpus, sides: Sequence[str], folder: Path, console: Console) -> None:
        self.args, self.gpus, self.sides, self.folder, self.console = args, gpus, tuple(sides), folder, console
        self.deadline: float = time.monotonic() + args.limit
        self.ports = Ports(args.ports)
        self.servers: dict[str, Server] = {}
        self.failed: dict[str, str] = {}
        self.written: dict[str, Any] = {}

    def left(self) -> float:
        """Seconds until the limit."""
        return self.deadline - time.monotonic()

    def say(self, text: str) -> None:
        """One line of progress."""
        self.console.print(f"{text} ({self.left():.0f} s left)", markup=False, soft_wrap=True)

    def write(self, geometry: Geometry) -> Path:
        """The checkpoint."""
        started = time.monotonic()
        model = self.folder / "wide"
        written = large.write_large(model, geometry)
        self.written = {**vars(geometry), **vars(written)}
        self.say(f"wrote {written.bytes / 1e9:.1f} GB in {time.monotonic() - started:.0f} s")
        return model

    def make(self, side: str, model: Path) -> Server:
        """A server that is not started yet."""
        port = self.ports.take()
        arguments = arguments_of(side, self.args, self.gpus, model, port)
        command = launch_command(arguments, port, set_ups.launch_module(self.gpus.prefill))
        environment = set_ups.environment("fp8", TRANSFER, self.gpus.prefill)
        if side == STOCK:
            environment[config.ENABLED] = "0"
        elif side not in WITHOUT:
            environment[config.GATHER] = side
        self.servers[side] = Server(f"prefill-{side}", port, command, environment, self.folder)
        return self.servers[side]

    def start(self, group: ServerSet, model: Path, within: float) -> None:
        """Start all sides; the first one alone if asked for, so that it fills the JIT caches for the others.

        Args:
            group: where the servers are registered, so that they are ended.
            model: the checkpoint.
            within: seconds for all of them; a side that is not ready by then is left out.
        """
        ends = time.monotonic() + within
        first = 1 if self.args.first_alone else len(self.sides)
        for sides in filter(None, (self.sides[:first], self.sides[first:])):
            servers = [self.make(side, model) for side in sides]
            for server in servers:
                group.servers.append(server)
                server.start()
            self._wait(sides, ends)
        self.drop_wrong(self.sides)
        group.stop(self.servers[side] for side in self.failed)

    def _wait(self, sides: Iterable[str], ends: float) -> None:
        waiting = {side: self.servers[side] for side in sides}
        while waiting and time.monotonic() < ends:
            for side, server in list(waiting.items()):
                if not self.alive(side):
                    del waiting[side]
                elif server.ready():
                    del waiting[side]
                    self.say(f"{side} is ready after {server.boot_seconds} s")
            time.sleep(POLL if waiting else 0)
        for side, server in waiting.items():
            self.fail(side, f"not ready in time: {last_of(first_traceback(server.log()))}")

    def alive(self, side: str) -> bool:
        """Whether a side's server still runs; if not, the reason is noted once."""
        try:
            self.servers[side].require_alive()
        except ServerFailed:
            self.fail(side, f"the server ended: {last_of(first_traceback(self.servers[side].log()))}")
        return side not in self.failed

    def fail(self, side: str, why: str) -> None:
        """Leave a side out from now on."""
        if side not in self.failed:
            self.failed[side] = why
            self.say(f"{side}: {why}")

    def drop_wrong(self, sides: Iterable[str]) -> None:
        """Leave out servers whose log does not say what the side's name says."""
        for side in sides:
            if side not in self.failed:
                why = not_as_asked(side, told_by(self.servers[side].log()), self.gpus.cp_size)
                if why is not None:
                    self.fail(side, why)

    def usable(self) -> list[str]:
        """Sides that can be measured."""
        return [side for side in self.sides if side not in self.failed]

    def report(self) -> Mapping[str, Any]:
        """What is known about each server."""
        found = {}
        for side, server in self.servers.items():
            told = told_by(server.log())
            found[side] = {
                "boot_seconds": server.boot_seconds,
                "ranks_with_dspark": told.ranks,
                "gather": list(told.modes),
                "arguments": server.command[server.command.index("--port") + 2 :],
                "error": self.failed.get(side),
            }
        return found
