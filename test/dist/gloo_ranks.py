"""Groups of gloo ranks for the tests beside this file. Run as a program it is the launcher: it imports torch and this
package's core once, forks the ranks, and passes jobs from the test process to them. No SGLang is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import pickle
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ANSWER_WITHIN_S = 20.0
"""A job that takes longer counts as a hang."""


@dataclass(frozen=True)
class Batch:
    """One prefill batch, the same on every rank."""

    extend: tuple[int, ...]
    prefix: tuple[int, ...] = ()
    """Empty: no request has a cached prefix."""
    level: str = "rows"
    fault: str = ""
    """As in SGLANG_DSPARK_CP_FAULT."""
    hidden: int = 7
    """H; an odd one makes the packed row need its fill to 8 bytes."""
    local_positions_on: int | None = None
    """This rank hands its own CP-local positions to injection, with hidden rows of the whole batch."""
    unmapped: tuple[int, ...] = ()
    """Global rows whose location has no slot in the sliding-window pool."""
    seed: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.extend)

    @property
    def prefixes(self) -> tuple[int, ...]:
        return self.prefix or (0,) * len(self.extend)


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of one batch."""

    hidden: Any
    """[T, A * H] as injection takes them up, in global order."""
    expected: Any
    """[T, A * H], the same batch without CP."""
    locations: Any
    """What `admit` allowed, or None."""
    cache_loc: Any
    """[T], what the scheduler asked for."""
    error: str | None
    aux_collectives: int
    word_collectives: int
    complete: list[str | None]
    """Of each request: why its draft KV may not be sent, or None."""
    sglang_imported: bool


class GlooFailed(AssertionError):
    """A rank raised, died or hung; the text holds its traceback."""


@dataclass
class Launcher:
    """Driver's side, in the test process."""

    _process: subprocess.Popen[bytes] = field(init=False)

    def __enter__(self) -> Launcher:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def run(self, cp_size: int, batches: list[Batch]) -> list[list[Outcome]]:
        """Run batches one after the other on a group of `cp_size` ranks: [batch][rank]."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((cp_size, batches), self._process.stdin)
        self._process.stdin.flush()
        kind, value = pickle.load(self._process.stdout)
        if kind == "error":
            raise GlooFailed(value)
        return [list(by_rank) for by_rank in zip(*value, strict=True)]


# ------------------------------------------------------------------------------------------------- inside a rank


def run_batch(batch: Batch, cp_size: int, cp_rank: int) -> Outcome:
    """One batch through capture, pack, gather, admit and settle, as the adapter drives them."""
    import torch
    import torch.distributed as dist

    from sglang_dspark_cp import faults
    from sglang_dspark_cp.config import AlignLevel, from_environment
    from sglang_dspark_cp.core.capture import AuxCapture
    from sglang_dspark_cp.core.gather import gather_rows
    from sglang_dspark_cp.core.inject import BatchProof, Ledger
    from sglang_dspark_cp.core.layout import rows_per_rank, send_all, shard

    class Layer(torch.nn.Module):
        def __init__(self, generator: torch.Generator) -> None:
            super().__init__()
            self.gain = torch.randn(4, batch.hidden, generator=generator)
            self.place = torch.randn(8192, 1, batch.hidden, generator=generator)

        def forward(self, streams: torch.Tensor, *, positions: torch.Tensor) -> torch.Tensor:
            return (streams.float() * self.gain + self.place[positions]).to(torch.bfloat16)

    settings = from_environment({"SGLANG_DSPARK_CP_FAULT": batch.fault, "SGLANG_DSPARK_CP_ALIGN": batch.level})
    addressed, fault = settings.align is AlignLevel.ROWS, settings.fault
    generator = torch.Generator().manual_seed(batch.seed)
    layers = torch.nn.ModuleList([Layer(generator) for _ in range(4)])
    captured = (3, 0, 2)
    tokens, rows = batch.tokens, rows_per_rank(batch.tokens, cp_size)
    streams = torch.randn(tokens, 4, batch.hidden, generator=generator).to(torch.bfloat16)
    cache_loc = torch.randperm(tokens + 500, generator=generator)[:tokens] + 256
    positions = torch.cat([torch.arange(p, p + n) for p, n in zip(batch.prefixes, batch.extend, strict=True)])

    # Without CP: no hook, no buffer of ours.
    outputs, flow = [], streams
    for layer in layers:
        flow = layer(flow, positions=positions)
        outputs.append(flow.mean(dim=1))
    expected = torch.cat([outputs[index] for index in captured], dim=-1)

    pad = cp_size * rows - tokens
    padded = torch.cat([streams, torch.full((pad, 4, batch.hidden), torch.nan, dtype=streams.dtype)])
    padded_loc = torch.nn.functional.pad(cache_loc, (0, pad))
    local_positions = torch.nn.functional.pad(positions, (0, pad))[cp_rank::cp_size]

    collectives = {"aux": 0, "words": 0}

    def all_gather(output: torch.Tensor, given: torch.Tensor) -> None:
        collectives["aux"] += 1
        dist.all_gather_into_tensor(output, given)

    def gather_words(words: torch.Tensor) -> list[list[int]]:
        collectives["words"] += 1
        gathered = [torch.empty_like(words) for _ in range(cp_size)]
        dist.all_gather(gathered, words)
        return [each.tolist() for each in gathered]

    ledger = Ledger(cp_rank)
    ids = [f"r{index}" for index in range(len(batch.extend))]
    checks = {"check_shape": settings.align is not AlignLevel.OFF, "check_rows": addressed}
    proof = BatchProof(ids, batch.prefixes, batch.extend, **checks)
    ledger.begin(proof)
    if tokens < cp_size:  # CP is off for such a batch
        proof.note_local(expected)
        hidden = expected
    else:
        capture = AuxCapture(
            layers,
            captured,
            lambda _, output: faults.spoil_streams(fault, cp_rank, output),
            expected_rows=rows,
            addressed=addressed,
        )
        with capture:
            flow = padded[cp_rank::cp_size]
            for layer in layers:
                flow = layer(flow, positions=local_positions)
        (packed,) = capture.take()
        assert capture.positions is not None
        missing = capture.missing_rows()
        if addressed and missing:
            packed.forget_address()
        elif addressed:
            packed.write_address(capture.positions, shard(padded_loc, cp_size, cp_rank))
        faults.spoil_packed(fault, cp_rank, packed)
        arrived = gather_rows(packed, send_all(tokens, cp_size), all_gather)
        arrived = dataclasses.replace(arrived, order=faults.spoil_order(fault, cp_rank, batch.extend, arrived.order))
        hidden = torch.empty(tokens, 1)
        proof.note_arrived(arrived, missing, hidden)

    wanted = faults.spoil_locations(fault, cp_rank, cache_loc)
    places = faults.spoil_positions(fault, cp_rank, positions)
    if batch.local_positions_on == cp_rank:
        places = shard(positions, cp_size, cp_rank)
    holes = torch.isin(torch.arange(tokens + 1000), cache_loc[list(batch.unmapped)])
    placed = proof.admit(
        hidden,
        places,
        wanted,
        expected_width=3 * batch.hidden,
        to_swa=lambda loc: torch.where(holes[loc], 0, loc),
    )
    locations = None if placed is None else placed.locations
    if tokens >= cp_size:
        assert arrived.order is not None
        real = arrived.order >= 0
        by_row = arrived.order[real].argsort()
        hidden = arrived.hidden[real][by_row]
        locations = None if locations is None else locations[real][by_row]
    error = ledger.settle(proof, gather_words)
    complete = [
        ledger.require_complete(rid, start + length, 128)
        for rid, start, length in zip(ids, batch.prefixes, batch.extend, strict=True)
    ]
    return Outcome(
        hidden,
        expected,
        locations,
        cache_loc,
        None if error is None else str(error),
        collectives["aux"],
        collectives["words"],
        complete,
        "sglang" in sys.modules,
    )


def _rank(pipe: Connection, cp_size: int, cp_rank: int, port: int) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=cp_rank,
            world_size=cp_size,
            timeout=timedelta(seconds=ANSWER_WITHIN_S),
        )
        while True:
            batches = pipe.recv()
            # By value: shared memory of a rank that has ended would be gone.
            pipe.send_bytes(pickle.dumps(("ok", [run_batch(batch, cp_size, cp_rank) for batch in batches])))
    except EOFError:
        pass
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send_bytes(pickle.dumps(("error", f"rank {cp_rank} of {cp_size}:\n{traceback.format_exc()}")))
    os._exit(0)


# ---------------------------------------------------------------------------------------------- inside the launcher


class Group:
    """The rank processes of one group size."""

    def __init__(self, cp_size: int) -> None:
        from sglang_dspark_cp.smoke.processes import free_ports

        context = get_context("fork")
        (port,) = free_ports(1)
        self.pipes: list[Connection] = []
        self.processes = []
        for cp_rank in range(cp_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(theirs, cp_size, cp_rank, port), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, batches: list[Batch]) -> tuple[str, Any]:
        """("ok", [rank][batch] outcomes) or ("error", text)."""
        for pipe in self.pipes:
            pipe.send(batches)
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while len(answers) < len(self.pipes):
            silent = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = wait(list(silent), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return "error", f"no answer within {ANSWER_WITHIN_S:.0f} s from ranks {sorted(silent.values())}"
            for pipe in ready:
                rank = silent[pipe]  # type: ignore[index]
                try:
                    kind, value = pickle.loads(self.pipes[rank].recv_bytes())
                except EOFError:
                    return "error", f"rank {rank} died"
                if kind == "error":
                    return "error", value
                answers[rank] = value
        return "ok", [answers[rank] for rank in range(len(self.pipes))]

    def kill(self) -> None:
        """End every rank."""
        for process in self.processes:
            process.kill()
            process.join(5)


def _launch() -> None:
    import torch

    for module in ("faults", "core.capture", "core.gather", "core.inject"):
        importlib.import_module(f"sglang_dspark_cp.{module}")
    torch.set_num_threads(1)
    groups: dict[int, Group] = {}
    try:
        while True:
            cp_size, batches = pickle.load(sys.stdin.buffer)
            if cp_size not in groups:
                groups[cp_size] = Group(cp_size)
            answer = groups[cp_size].run(batches)
            if answer[0] == "error":
                groups.pop(cp_size).kill()
            pickle.dump(answer, sys.stdout.buffer)
            sys.stdout.buffer.flush()
    except EOFError:
        pass
    finally:
        for group in groups.values():
            group.kill()


if __name__ == "__main__":
    # Pickles name the module by the name under which the tests import it.
    sys.path.insert(0, str(Path(__file__).parent))
    import gloo_ranks

    gloo_ranks._launch()
