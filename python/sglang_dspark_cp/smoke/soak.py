"""The CPU run for a given time: requests come, are aborted, and decode ranks are killed and replaced."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import random
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from . import geometry as g
from . import native
from .arguments import prefill_arguments, write_model_folder
from .cpu import START_TIMEOUT, CpuRun, compare, first_tokens, proportional_memory
from .processes import RankConfig, RankPool, RankProcess, free_ports
from .workload import FIRST_TOKEN, Prompt

if TYPE_CHECKING:
    from .decode import Received

IN_FLIGHT = 32
FIRST_PORT, LAST_PORT, PORTS_EACH = 17100, 32700, 8
"""Above those that prefill's Mooncake draws, below those of outgoing connections."""
LONGEST = 1500
LOST_AFTER_S = 90.0
"""A request without an end after this time counts as lost. SGLang's own time-outs are set well below it."""
TIMEOUTS = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "30",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "40",
}
"""SGLang's time-outs during a soak; its defaults are 300 s. They bound what a dead peer can hold up."""
ABORTS = ("bootstrapping", "waiting", "chunks", "transfer", "decode")
"""Where a client's abort comes: in prefill's bootstrap queue, in its waiting queue, between two chunks, between the
last chunk and Success, or at a random moment by decode's own message alone."""
ABORT_SHARE = 0.25
PREFIX_SHARE = 0.2
RESTART_EVERY_S = (8.0, 16.0)
WARM_UP_SHARE = 1 / 3
GROWTH_ALLOWED = 0.03
"""Growth of the mean memory from the second third of the run to the last third above which it is not flat."""
JUDGE_MEMORY_FROM_S = 60.0

REDUCED = (
    "Reduced: each decode rank is a process group of its own, transfers are TCP on loopback, the scheduler's loop and"
    " decode's page table are this package's, prefill ranks are not restarted."
)
HELP = (
    "keep requests in flight for this time (90s, 10m, 1h) with random lengths, client aborts and decode ranks that are"
    " killed and replaced; each finished request's rows are compared with the oracle. A request without an end after"
    f" {LOST_AFTER_S:.0f} s counts as lost. Each decode rank is a process group of its own then, because a killed rank"
    " cannot rejoin one; prefill ranks are not restarted"
)


# ---------------------------------------------------------------------------------------------------------- options


def own_ports(start: int) -> dict[str, str]:
    """Mooncake's ports of one decode process, none of which an earlier one had.

    Mooncake draws a port between 15000 and 17000, and `host:port` is the name of the session. A process that draws the
    port of one that was killed inherits its name: prefill's Mooncake then still writes to the memory of the dead one,
    and SGLang counts the new one as dead. With a decode killed every ten seconds that happens in a run of ten minutes.
    """
    first = FIRST_PORT + start * PORTS_EACH % (LAST_PORT - FIRST_PORT - PORTS_EACH)
    low, high = str(first), str(first + PORTS_EACH - 1)
    # Mooncake before 0.3.14 knows only the second spelling.
    return {"MC_MIN_RPC_PORT": low, "MC_MAX_RPC_PORT": high, "MC_MIN_PRC_PORT": low, "MC_MAX_PRC_PORT": high}


def duration(text: str) -> float:
    """Seconds of `90s`, `10m`, `1h`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; give a number with s, m or h, such as 90s or 10m")
    return float(match[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[match[2]]


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Options of the soak."""
    group.add_argument("--soak", type=duration, metavar="TIME", help=HELP)
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the soak's random choices (default 0)")


def usage_error(args: argparse.Namespace) -> str | None:
    """What does not go together with --soak, or None."""
    for flag, value in (("--stock", args.stock), ("--inject-fault", args.inject_fault), ("--prompts", args.prompts)):
        if value:
            return f"{flag} does not go together with --soak"
    if args.max_tokens is not None and not 1 <= args.max_tokens < g.POSITIONS // 2:
        return f"--max-tokens {args.max_tokens}: allowed with --soak are 1 to {g.POSITIONS // 2 - 1}"
    return None


# ----------------------------------------------------------------------------------------------------------- driver


@dataclass
class Request:
    """One request as its client sees it: it has ended when both sides have answered.

    Attributes:
        plan: one of `ABORTS`, where its client aborts it, or "".
        landed: where the abort came to be.
        prefill, decode: "" for success, a text for a failure, None while there is no answer.
    """

    prompt: Prompt
    decode_rank: int
    plan: str
    sent: float
    landed: str = ""
    killed: bool = False
    prefill: str | None = None
    decode: str | None = None

    @property
    def ended(self) -> bool:
        """Whether both sides answered."""
        return self.prefill is not None and self.decode is not None

    @property
    def outcome(self) -> str:
        """`finished`, `aborted`, `failed` (its decode rank was killed) or `unexplained`."""
        if self.prefill == "" and self.decode == "":
            return "finished"
        if self.killed:
            return "failed"
        return "aborted" if self.landed else "unexplained"


@dataclass
class _Decode:
    """One decode rank's process, replaced after a kill."""

    number: int
    process: RankProcess
    commands: Connection
    ready: bool = False


class Fleet:
    """Prefill ranks, decode ranks and the bootstrap server, driven by commands and answers.

    Args:
        run: for its ports, folder and settings.
        environment: for every rank, over the soak's own.
        prefill: factory of the prefill ranks and options beside the usual ones.
    """

    def __init__(
        self,
        run: CpuRun,
        pool: RankPool,
        server_args: Any,
        environment: dict[str, str] | None = None,
        prefill: tuple[str, dict[str, Any]] = (f"{__package__}.soak_ranks:SoakPrefillRank", {}),
    ) -> None:
        self.run, self.pool = run, pool
        self.environment = TIMEOUTS | (environment or {})
        self._starts = itertools.count()
        self.requests: dict[int, Request] = {}
        self.on_end: Callable[[Request, Received | None], None] = lambda request, received: None
        self.deaths: dict[str, str] = {}
        """Ranks that ended by themselves, and their last words."""
        self.answers: dict[str, Any] = {}
        self.restarts = 0
        self._received: dict[int, Received] = {}
        args = run.args
        self.bootstrap = pool.spawn([run.config("bootstrap", 0, "decode:BootstrapRank", {}, self.environment)])[0]
        pool.collect([self.bootstrap], START_TIMEOUT)
        run.ports["prefill"] = free_ports(1)[0]
        reader, self.commands = multiprocessing.Pipe(duplex=False)
        common = {
            "server_args": server_args,
            "cp_size": args.prefill_cp,
            "chunk": args.chunk,
            "overlap": not args.no_overlap,
            "radix": not args.no_radix,
            "fused": not args.no_fused,
            "stock": False,
            "dist_port": run.ports["prefill"],
            **prefill[1],
        }
        self.prefill: list[RankProcess] = []
        for number in range(args.prefill_cp):
            own = {"commands": reader} if number == 0 else {}
            config = run.config("prefill", number, "", common | own, self.environment)
            self.prefill += pool.spawn([replace(config, factory=prefill[0])])
        reader.close()
        self.decode = [self._spawn_decode(number) for number in range(args.decode_dp)]
        pool.collect([*self.prefill, *(decode.process for decode in self.decode)], START_TIMEOUT)
        for rank in self.prefill:
            rank.start("soak")
        for decode in self.decode:
            self._ready(decode)

    def _spawn_decode(self, number: int) -> _Decode:
        reader, commands = multiprocessing.Pipe(duplex=False)
        options = {"dp_size": self.run.args.decode_dp, "dist_port": free_ports(1)[0], "commands": reader}
        environment = self.environment | own_ports(next(self._starts))
        process = self.pool.spawn(
            [self.run.config("decode", number, "soak_ranks:SoakDecodeRank", options, environment)]
        )
        reader.close()
        return _Decode(number, process[0], commands)

    @staticmethod
    def _ready(decode: _Decode) -> None:
        decode.process.start("soak")
        decode.ready = True

    def submit(self, prompt: Prompt, decode_rank: int, plan: str = "", delay: float = 0.1) -> Request:
        """One request, to both sides; `delay`: seconds from decode's asking to its abort, for the plan `decode`."""
        request = Request(prompt, decode_rank, plan, time.monotonic())
        self.requests[prompt.room] = request
        with contextlib.suppress(OSError):  # a rank that died shows in `deaths`
            self.commands.send(("request", prompt, "" if plan == "decode" else plan))
        with contextlib.suppress(OSError):
            self.decode[decode_rank].commands.send(("request", prompt, delay if plan == "decode" else None))
        return request

    def kill_decode(self, number: int) -> list[Request]:
        """End a decode rank's process at once (SIGKILL); its open requests have their answer from decode by that."""
        decode = self.decode[number]
        decode.process.kill()
        decode.commands.close()
        decode.ready = False
        self.pool.ranks.remove(decode.process)
        hit = [r for r in self.requests.values() if r.decode_rank == number and r.decode is None]
        for request in hit:
            request.killed, request.decode = True, f"decode rank {number} was killed"
            self._settle(request)
        return hit

    def restart_decode(self, number: int) -> None:
        """Start a fresh process for a killed decode rank; it registers with its first request."""
        self.decode[number] = self._spawn_decode(number)
        self.restarts += 1

    def pump(self, timeout: float) -> None:
        """Take in what the ranks say, for at most `timeout` seconds without news."""
        by_pipe: dict[Any, tuple[RankProcess, _Decode | None]] = {
            rank.pipe: (rank, None) for rank in self.prefill if rank.config.name not in self.deaths
        }
        by_pipe |= {
            d.process.pipe: (d.process, d)
            for d in self.decode
            if not d.process.pipe.closed and d.process.config.name not in self.deaths
        }
        for pipe in wait(list(by_pipe), timeout):
            rank, decode = by_pipe[pipe]
            name = rank.config.name
            try:
                kind, value = rank.pipe.recv()
            except (EOFError, OSError):
                self.deaths[name] = f"died\n{_last_words(rank.config)}"
                continue
            if kind == "error":
                self.deaths[name] = value
            elif kind == "ok" and decode is not None and not decode.ready:
                self._ready(decode)
            elif kind == "ok":
                self.answers[name] = value
            else:
                self._event(*value)

    def _event(self, kind: str, *values: Any) -> None:
        room = values[0].room if kind == "decode-end" else values[0]
        request = self.requests.get(room)
        if request is None:
            return  # given up as lost
        if kind == "aborting":
            request.landed = values[1]
            if values[1] != "decode" and self.decode[request.decode_rank].ready and request.decode is None:
                with contextlib.suppress(OSError):
                    self.decode[request.decode_rank].commands.send(("abort", room, None))
        elif kind == "prefill-end":
            request.prefill = values[1]
        else:
            received: Received = values[0]
            request.decode = received.failure if not received.ok else ""
            self._received[room] = received
        self._settle(request)

    def _settle(self, request: Request) -> None:
        if request.ended:
            room = request.prompt.room
            del self.requests[room]
            self.on_end(request, self._received.pop(room, None))

    def stop(self, timeout: float) -> dict[str, Any]:
        """Stop all ranks; what each reports, by name. A rank that does not answer is left out."""
        with contextlib.suppress(OSError):
            self.commands.send(("stop", None, None))
        names = {rank.config.name for rank in self.prefill}
        for decode in self.decode:
            if decode.ready:
                with contextlib.suppress(OSError):
                    decode.commands.send(("stop", None, None))
                names.add(decode.process.config.name)
        deadline = time.monotonic() + timeout
        while not names <= {*self.answers, *self.deaths} and time.monotonic() < deadline:
            self.pump(0.2)
        return self.answers


def _last_words(config: RankConfig, lines: int = 15) -> str:
    path = Path(config.log)
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.is_file() else ""


class Requests:
    """Random requests: any length, now and then behind a prefix that others have too, some aborted by their client."""

    def __init__(self, rng: random.Random, longest: int) -> None:
        self.rng, self.longest = rng, longest
        self.room = 1_000_000
        self.prefixes: list[list[int]] = []

    def _noise(self, length: int) -> list[int]:
        return self.rng.choices(range(FIRST_TOKEN, g.VOCAB), k=length)

    def next(self) -> tuple[Prompt, str, float]:
        """A prompt, its client's plan, and the delay of that plan."""
        rng = self.rng
        # Half of them uniform, half by magnitude: short prompts are as likely as long ones.
        length = rng.randint(1, self.longest)
        if rng.random() < 0.5:
            length = min(self.longest, max(1, int(2 ** rng.uniform(0, self.longest.bit_length()))))
        name, tokens = "random", self._noise(length)
        if length > g.PAGE + 1 and rng.random() < PREFIX_SHARE:
            if len(self.prefixes) < 4 or rng.random() < 0.1:
                self.prefixes = [*self.prefixes[-3:], self._noise(self.longest)]
            shared = rng.randint(1, (length - 1) // g.PAGE) * g.PAGE
            name, tokens = "shared prefix", [*rng.choice(self.prefixes)[:shared], *tokens[shared:]]
        plan = rng.choice(ABORTS) if rng.random() < ABORT_SHARE else ""
        self.room += 1
        return Prompt(name, tokens, self.room, 0), plan, rng.uniform(0, 0.5)


@dataclass
class Tallies:
    """What happened so far."""

    submitted: int = 0
    tokens: int = 0
    finished: int = 0
    aborted: Counter[str] = field(default_factory=Counter)
    abort_came_too_late: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    failed_by_kill: int = 0
    unexplained: list[str] = field(default_factory=list)
    without_text: int = 0
    lost: list[str] = field(default_factory=list)
    rows: int = 0
    wrong: int = 0
    byte_equal: int = 0
    requests_with_wrong_rows: list[str] = field(default_factory=list)
    wrong_pages: int = 0
    wrong_first_token: int = 0
    longest_s: float = 0.0
    longest: str = ""


class Judge:
    """Compares what arrived with the oracle and keeps the tallies."""

    def __init__(self, *, all_cp_ranks: bool, cp_size: int) -> None:
        from .ranks import prefill_tag
        from .weights import draft_checkpoint, target_weights

        self.state_tags = (prefill_tag(0),)
        self.target, self.draft = target_weights(), draft_checkpoint()
        self.tags = {prefill_tag(rank) for rank in (range(cp_size) if all_cp_ranks else (0,))}
        self.tallies = Tallies()

    def ended(self, request: Request, received: Received | None) -> None:
        """Take in the end of a request."""
        t, prompt = self.tallies, request.prompt
        took = time.monotonic() - request.sent
        label = f"room {prompt.room} ({len(prompt.tokens)} tokens, decode rank {request.decode_rank})"
        if took > t.longest_s:
            t.longest_s, t.longest = took, f"{label}: {request.outcome}, prefill: {request.prefill or 'ok'}"
        if received is not None and received.ok:
            self._rows(request, received, label)
        outcome = request.outcome
        texts = f"prefill: {request.prefill or 'ok'}; decode: {request.decode or 'ok'}"
        if outcome == "finished":
            t.finished += 1
            t.abort_came_too_late += bool(request.landed)
            return
        if outcome == "aborted":
            t.aborted[request.landed] += 1
        else:
            t.failed_by_kill += outcome == "failed"
            t.failed[re.sub(r"\d+", "N", texts)] += 1
            if outcome == "unexplained":
                t.unexplained.append(f"{label}: {texts}")
        if not (request.prefill or request.decode):
            t.without_text += 1

    def _rows(self, request: Request, received: Received, label: str) -> None:
        from . import oracle

        t, tokens = self.tallies, request.prompt.tokens
        wanted = oracle.draft_rows(tokens, range(received.start, len(tokens)), self.target, self.draft)
        check = compare(received, wanted)
        t.rows += check.compared
        t.wrong += check.mismatched
        t.byte_equal += check.byte_equal
        if check.mismatched:
            t.requests_with_wrong_rows.append(
                f"{label}: {check.mismatched} of {check.compared} rows, {request.outcome}"
            )
        t.wrong_pages += not set(received.kv_tags) <= self.tags or received.state_tags != self.state_tags
        t.wrong_first_token += received.first_token not in first_tokens(tokens, self.target)


@dataclass
class Memory:
    """Proportional memory (PSS) over time: seconds, bytes of the prefill ranks, bytes of all ranks."""

    samples: list[tuple[float, int, int]] = field(default_factory=list)

    def take(self, at: float, fleet: Fleet) -> None:
        """One sample."""
        prefill = sum(proportional_memory(rank.process.pid) for rank in fleet.prefill)
        others = [fleet.bootstrap, *(decode.process for decode in fleet.decode if decode.ready)]
        self.samples.append((at, prefill, prefill + sum(proportional_memory(rank.process.pid) for rank in others)))

    def report(self) -> dict[str, Any]:
        """First, last and slope in MB and MB per minute, for prefill and for all ranks; growth of the last third."""
        found: dict[str, Any] = {"samples": len(self.samples)}
        if len(self.samples) < 6:
            return found
        times = [sample[0] for sample in self.samples]
        start = times[0] + (times[-1] - times[0]) * WARM_UP_SHARE
        middle = times[0] + (times[-1] - times[0]) * (1 + WARM_UP_SHARE) / 2
        for name, column in (("prefill", 1), ("all", 2)):
            late = [(sample[0], sample[column]) for sample in self.samples if sample[0] >= start]
            slope = statistics.linear_regression(*zip(*late, strict=True)).slope
            before = statistics.mean(value for at, value in late if at < middle)
            after = statistics.mean(value for at, value in late if at >= middle)
            found[name] = {
                "first_mb": round(self.samples[0][column] / 1e6, 1),
                "last_mb": round(self.samples[-1][column] / 1e6, 1),
                "peak_mb": round(max(sample[column] for sample in self.samples) / 1e6, 1),
                "slope_mb_per_min": round(slope * 60 / 1e6, 2),
                "growth": round(after / before - 1, 4),
            }
        return found


class _Interrupted:
    """The first Ctrl-C ends the run with a report, the second one at once."""

    def __init__(self) -> None:
        self.set = False

    def __enter__(self) -> _Interrupted:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, *_: object) -> None:
        if self.set:
            raise KeyboardInterrupt
        self.set = True


class SoakRun(CpuRun):
    """One soak."""

    def result(self) -> dict[str, Any]:
        """Everything that the run measured."""
        import torch

        self.stand_in = native.prepare(self.folder)
        model = write_model_folder(self.folder / "model")
        arguments = prefill_arguments(model, self.args.prefill_cp, self.args.chunk, self.ports["bootstrap"])
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        torch.set_num_threads(1)  # the ranks need the cores
        with _Interrupted() as interrupted, RankPool() as pool, Progress(*columns, console=self.console) as progress:
            task = progress.add_task("starting ranks", total=None)
            resolver = pool.spawn([self.config("resolve", 0, "arguments:Resolver", {})])
            pool.collect(resolver, START_TIMEOUT)
            server_args = self.resolve(pool, resolver[0], arguments)
            fleet = Fleet(self, pool, server_args)
            judge = Judge(all_cp_ranks=self.args.all_cp_ranks, cp_size=self.args.prefill_cp)
            fleet.on_end = judge.ended
            memory = Memory()
            seconds = self._drive(
                fleet, judge.tallies, memory, interrupted, lambda text: progress.update(task, description=text)
            )
            progress.update(task, description="stopping")
            answers = fleet.stop(20)
            return self._verdict(fleet, judge.tallies, memory, answers, seconds, interrupted.set)

    def _drive(
        self, fleet: Fleet, t: Tallies, memory: Memory, interrupted: _Interrupted, show: Callable[[str], None]
    ) -> float:
        rng = random.Random(self.args.seed)
        requests = Requests(rng, self.args.max_tokens or LONGEST)
        started = time.monotonic()
        until = started + self.args.soak
        next_restart = started + rng.uniform(*RESTART_EVERY_S)
        every = min(10.0, max(1.0, self.args.soak / 60))
        next_sample = started + every
        while True:
            now = time.monotonic()
            if fleet.deaths:
                name, text = next(iter(fleet.deaths.items()))
                t.unexplained.append(f"{name} ended by itself: {text}")
                return now - started
            going_on = now < until and not interrupted.set
            if not going_on and not fleet.requests:
                return now - started
            ready = [decode.number for decode in fleet.decode if decode.ready]
            while going_on and ready and len(fleet.requests) < IN_FLIGHT:
                prompt, plan, delay = requests.next()
                fleet.submit(prompt, rng.choice(ready), plan, delay)
                t.submitted += 1
                t.tokens += len(prompt.tokens)
            if going_on and now >= next_restart:
                next_restart = now + rng.uniform(*RESTART_EVERY_S)
                if ready:
                    number = rng.choice(ready)
                    fleet.kill_decode(number)
                    fleet.restart_decode(number)
            fleet.pump(0.1)
            for room, request in list(fleet.requests.items()):
                if time.monotonic() - request.sent > LOST_AFTER_S:
                    t.lost.append(
                        f"room {room}: prefill {request.prefill!r}, decode {request.decode!r}, {request.landed}"
                    )
                    del fleet.requests[room]
            if now >= next_sample:
                next_sample = now + every
                memory.take(now - started, fleet)
                show(
                    f"{'soak' if going_on else 'waiting for the last ones'}: in flight {len(fleet.requests)}, finished"
                    f" {t.finished}, aborted {t.aborted.total()}, failed by kill {t.failed_by_kill}, lost"
                    f" {len(t.lost)}, rows {t.rows} wrong {t.wrong}, restarts {fleet.restarts}"
                )

    def _verdict(
        self, fleet: Fleet, t: Tallies, memory: Memory, answers: dict[str, Any], seconds: float, interrupted: bool
    ) -> dict[str, Any]:
        from .soak_ranks import SoakDecodeReport, SoakPrefillReport

        prefill = [a for a in answers.values() if isinstance(a, SoakPrefillReport)]
        decode = [a for a in answers.values() if isinstance(a, SoakDecodeReport)]
        used = memory.report()
        leaked = {
            "prefill_kv_pages": sum(rank.leaked_pages for rank in prefill),
            "decode_kv_pages": sum(rank.leaked_pages for rank in decode),
            "decode_slots": sum(rank.leaked_slots for rank in decode),
        }
        for name in ("request_slots", "metadata_buffers", "open_requests"):
            leaked[f"prefill_{name}"] = sum(rank.held[name] for rank in prefill)
        reasons = [f"lost: {text}" for text in t.lost[:5]]
        reasons += [f"failed without a kill or an abort: {text}" for text in t.unexplained[:5]]
        reasons += [f"wrong rows: {text}" for text in t.requests_with_wrong_rows[:5]]
        if t.wrong_pages or t.wrong_first_token:
            reasons.append(
                f"wrong target pages in {t.wrong_pages} requests, wrong first token in {t.wrong_first_token}"
            )
        if t.without_text:
            reasons.append(f"{t.without_text} requests failed without a text")
        if not t.finished:
            reasons.append("no request finished")
        reasons += [f"leaked: {count} {name}" for name, count in leaked.items() if count]
        silent = {rank.config.name for rank in fleet.prefill} - set(answers) - set(fleet.deaths)
        reasons += [f"{name} did not report at the end" for name in sorted(silent)]
        for rank in prefill:
            reasons += [f"attn_cp_rank {rank.cp_rank}: {error}" for error in rank.errors[:1]]
        if len({(rank.ended, *rank.counters.items()) for rank in prefill}) > 1:
            reasons.append("the prefill ranks counted different things")
        judged = seconds >= JUDGE_MEMORY_FROM_S and "prefill" in used
        growing = [name for name in ("prefill", "all") if judged and used[name]["growth"] > GROWTH_ALLOWED]
        reasons += [f"memory of {name} ranks grew by {used[name]['growth']:.1%} in the last third" for name in growing]
        first = prefill[0] if prefill else None
        report = self.base_report()
        return report | {
            "ok": not reasons,
            "reasons": reasons,
            "soak_seconds": round(seconds, 1),
            "asked_seconds": self.args.soak,
            "interrupted": interrupted,
            "seed": self.args.seed,
            "in_flight": IN_FLIGHT,
            "requests": t.submitted,
            "tokens": t.tokens,
            "finished": t.finished,
            "aborted": t.aborted.total(),
            "aborted_where": dict(t.aborted),
            "abort_came_too_late": t.abort_came_too_late,
            "failed_by_kill": t.failed_by_kill,
            "failed_unexplained": len(t.unexplained),
            "failure_texts": dict(t.failed.most_common(12)),
            "lost": len(t.lost),
            "lost_after_s": LOST_AFTER_S,
            "rows_compared": t.rows,
            "rows_wrong": t.wrong,
            "rows_byte_equal": t.byte_equal,
            "restarts": fleet.restarts,
            "leaked": leaked,
            "tables_left": {"prefill": [rank.tables for rank in prefill[:2]], "decode": [r.tables for r in decode[:1]]},
            "memory": used,
            "memory_judged": judged,
            "memory_samples": [(round(at, 1), *(round(v / 1e6, 1) for v in values)) for at, *values in memory.samples],
            "longest_s": round(t.longest_s, 2),
            "longest": t.longest,
            "cp_forwards": first.counters.get("cp_forwards", 0) if first else 0,
            "forwards": first.counters.get("forwards", 0) if first else 0,
            "transfer_bytes": sum(sum(rank.writes.values()) for rank in prefill),
            "failed_writes": sum(rank.write_failures for rank in prefill),
            "sglang_timeouts": TIMEOUTS,
            "reduced": REDUCED,
        }


def show(report: dict[str, Any], console: Console) -> None:
    """The report for people."""
    if "finished" in report:
        where = ", ".join(f"{name} {count}" for name, count in report["aborted_where"].items())
        console.print(
            f"requests {report['requests']}: finished {report['finished']}, aborted {report['aborted']} ({where}),"
            f" aborts that came too late {report['abort_came_too_late']}, failed by a kill {report['failed_by_kill']},"
            f" failed otherwise {report['failed_unexplained']}, lost {report['lost']} | decode restarts"
            f" {report['restarts']}"
        )
        console.print(
            f"rows compared {report['rows_compared']}, wrong {report['rows_wrong']}, byte-equal"
            f" {report['rows_byte_equal']} | leaked {sum(report['leaked'].values())} | forwards {report['forwards']},"
            f" with CP {report['cp_forwards']} | sent {report['transfer_bytes']:,} B | longest time to an end"
            f" {report['longest_s']} s"
        )
        for name in ("prefill", "all"):
            if name in report["memory"]:
                m = report["memory"][name]
                console.print(
                    f"memory of {name} ranks: first {m['first_mb']} MB, last {m['last_mb']} MB, slope"
                    f" {m['slope_mb_per_min']} MB/min, growth in the last third {m['growth']:.2%}"
                    f"{'' if report['memory_judged'] else ' (too short to judge)'}"
                )
        for text, count in report["failure_texts"].items():
            console.print(f"{count} x {text}", markup=False, soft_wrap=True)
        console.print(report["reduced"], markup=False)
        if report["interrupted"]:
            console.print(f"interrupted after {report['soak_seconds']} s of {report['asked_seconds']:.0f}")
    for reason in report["reasons"]:
        console.print(reason, style="red", markup=False)
    verdict = "ok" if report["ok"] else "FAILED"
    console.print(f"{verdict} in {report.get('seconds', 0)} s (SGLang {report['sglang']}, {report['mooncake']})")
