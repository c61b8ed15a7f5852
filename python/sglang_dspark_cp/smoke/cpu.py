"""The CPU run: CP prefill ranks, a real Mooncake engine on loopback TCP, DP decode ranks, and an independent oracle."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import config
from ..core.costs import ADDRESS
from ..errors import DsparkCpError
from . import geometry as g
from . import native
from .arguments import prefill_arguments, write_model_folder
from .processes import RankConfig, RankFailed, RankPool, RankProcess, free_ports
from .release import installed
from .set_ups import flags
from .stock import HIDDEN_SIZES
from .workload import Prompt, WorkloadError, build, read_questions

CP_SIZES = (2, 4, 8)
START_TIMEOUT = 180.0
ROPE_TOLERANCE = 1e-2
NOPE_TOLERANCE = 3e-2
"""Relative error (norm over a row's part) above which a row counts as wrong. The rotated part is bf16; the rest is
e4m3, where bf16 rounding in another order moves single codes by one step (measured: below 1e-2). Another token's row
is off by about 1.4, the right row at the next position by about 0.2 in the rotated part."""


@dataclass(frozen=True)
class Served:
    """One prefill server and its decode ranks after a run.

    Attributes:
        prefill: `PrefillReport` of each CP rank.
        received: `Received` by room.
        resolving_hooks: hooks of the process that resolved the arguments.
        memory_bytes: of all processes at the end.
    """

    prefill: list[Any]
    received: dict[int, Any]
    resolving_hooks: list[dict[str, Any]]
    memory_bytes: int


@dataclass(frozen=True)
class RowCheck:
    """Decode's rows of one request against the oracle's."""

    compared: int
    mismatched: int
    byte_equal: int
    max_rel_err: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the CPU run."""
    from . import soak

    group = parser.add_argument_group("CPU run")
    group.add_argument("--prefill-cp", type=int, default=8, metavar="N", help="prefill ranks: 2, 4 or 8 (default 8)")
    group.add_argument("--decode-dp", type=int, default=8, metavar="M", help="decode ranks, 1 to 8 (default 8)")
    group.add_argument("--prompts", type=Path, metavar="FILE", help="JSONL with a `prompt` or `question` per line")
    group.add_argument("--only-prompts", action="store_true", help="no requests beside those of the prompts file")
    group.add_argument("--chunk", type=int, default=512, metavar="N", help="chunked prefill size in tokens")
    group.add_argument("--max-tokens", type=int, metavar="N", help="leave out prompts of more than N tokens")
    group.add_argument("--no-overlap", action="store_true", help="process each batch's result before the next batch")
    group.add_argument("--no-radix", action="store_true", help="without the radix cache")
    group.add_argument("--no-fused", action="store_true", help="without the fused mHC path")
    group.add_argument("--all-cp-ranks", action="store_true", help="SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER=1")
    group.add_argument("--timeout", type=float, default=120.0, metavar="S", help="bound on the requests' part, seconds")
    soak.add_arguments(group)


def usage_error(args: argparse.Namespace) -> str | None:
    """What is wrong with the options, or None."""
    if args.prefill_cp not in CP_SIZES:
        return f"--prefill-cp {args.prefill_cp}: allowed are {', '.join(map(str, CP_SIZES))} (attention CP == TP <= 8)"
    if not 1 <= args.decode_dp <= 8:
        return f"--decode-dp {args.decode_dp}: allowed are 1 to 8"
    if not 1 <= args.chunk <= g.POSITIONS:
        return f"--chunk {args.chunk}: allowed are 1 to {g.POSITIONS} tokens"
    if len(args.inject_fault) > 1:
        return "--inject-fault: the CPU run takes one fault at a time"
    for fault in args.inject_fault:
        try:
            config.from_environment({config.FAULT: fault})
        except config.ConfigError as error:
            return f"--inject-fault {fault}: {error}"
    if args.soak is not None:
        from . import soak

        return soak.usage_error(args)
    return None


def run(args: argparse.Namespace) -> int:
    """Run and report; 0 ok, 1 failed, 2 usage."""
    from . import soak

    console = Console(stderr=True, highlight=False)
    if (text := usage_error(args)) is not None:
        console.print(f"[red]{text}[/red]")
        return 2
    try:
        questions = [] if args.soak else read_questions(args.prompts)
        prompts = (
            []
            if args.soak
            else build(questions, args.prefill_cp, args.chunk, args.max_tokens, only_questions=args.only_prompts)
        )
    except WorkloadError as error:
        console.print(f"[red]{error}[/red]")
        return 2
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dspark-cp-") as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            report = (soak.SoakRun if args.soak else CpuRun)(args, prompts, folder, console).result()
        except (DsparkCpError, KeyboardInterrupt) as error:
            report = _base_report(args, prompts) | {"ok": False, "reasons": [f"{type(error).__name__}: {error}"]}
    report["seconds"] = round(time.monotonic() - started, 2)
    if args.keep:
        (args.keep / "report.json").write_text(json.dumps(report, indent=1))
    if args.soak:
        soak.show(report, console)
    else:
        _print(report, console)
    if args.json:
        print(json.dumps(report))
    return 0 if report["ok"] else 1


PATIENCE = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16384",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "16384",
    "MC_TCP_MAX_QUEUED_BYTES_PER_PEER": str(4 << 30),
    "MC_TCP_ADMISSION_TIMEOUT_MS": "60000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "60",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "60",
    "MC_TRANSFER_TIMEOUT": "60",
}
"""Mooncake's TCP lane gives a write up that waits too long; 16 ranks on two busy cores make it wait."""


def bytes_at(mode: str, counters: dict[str, int], cp_size: int) -> dict[str, dict[str, int]]:
    """Bytes per rank that the same rows would be in models of real width, and what stock gathers for them."""
    others, ours, stock = cp_size - 1, {}, {}
    for hidden in HIDDEN_SIZES:
        width = {"packed": len(g.CAPTURED_LAYERS) * hidden, "context": hidden}.get(mode, g.STAGES * g.ROW)
        rows = counters["rows_captured"] * (2 * width + ADDRESS)
        ours[str(hidden)] = others * (rows + counters["heads_sent"] * 2 * hidden)
        stock[str(hidden)] = others * counters["rows_on_shard"] * 2 * hidden * installed().STOCK_WIDTH
    return {"gather_bytes_at_hidden": ours, "gather_bytes_stock_at_hidden": stock}


def first_tokens(tokens: list[int], target: Any) -> set[int]:
    """First output tokens that are right for a prompt."""
    from . import oracle
    from .weights import lm_head_weight

    return oracle.first_tokens(tokens, target, lm_head_weight()) if installed().HEADS else {tokens[-1] + 1}


def _base_report(args: argparse.Namespace, prompts: list[Prompt]) -> dict[str, Any]:
    from importlib import metadata

    mooncake = next(
        (
            f"{dist.metadata['Name']} {dist.version}"
            for dist in metadata.distributions()
            if dist.metadata["Name"].startswith("mooncake-transfer-engine")
        ),
        "not installed",
    )
    return {
        "ok": False,
        "reasons": [],
        "sglang": metadata.version("sglang"),
        "torch": metadata.version("torch"),
        "mooncake": mooncake,
        "device": "cpu",
        "stock": bool(args.stock),
        "prefill_cp": args.prefill_cp,
        "decode_dp": args.decode_dp,
        "chunk": args.chunk,
        "fault": args.inject_fault[0] if args.inject_fault else None,
        "requests": len(prompts),
        "tokens": sum(len(prompt.tokens) for prompt in prompts),
    }


class CpuRun:
    """The processes of a CPU run, and its verdict."""

    def __init__(self, args: argparse.Namespace, prompts: list[Prompt], folder: Path, console: Console) -> None:
        self.args, self.prompts, self.folder, self.console = args, prompts, folder, console
        self.ports = {"bootstrap": free_ports(1)[0]}
        self.plugin = not args.stock
        """Whether the processes that start now have the plugin."""
        self.phases: dict[str, float] = {}
        self._mark = time.monotonic()

    def base_report(self) -> dict[str, Any]:
        """What every report says."""
        return _base_report(self.args, self.prompts)

    def result(self) -> dict[str, Any]:
        """Everything that the run measured."""
        self.stand_in = native.prepare(self.folder)
        self.model = write_model_folder(self.folder / "model")
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=self.console) as self.progress:
            self.task = self.progress.add_task("resolving launch arguments", total=None)
            if not self.args.stock:
                return self._judge(self._serve())
            return self._beside_stock() if flags().stock_serves else self._refused_by_stock()

    def _launch_arguments(self) -> list[str]:
        arguments = prefill_arguments(self.model, self.args.prefill_cp, self.args.chunk, self.ports["bootstrap"])
        return [*arguments, "--disable-radix-cache"] if self.args.no_radix else arguments

    def _resolver(self, pool: RankPool) -> RankProcess:
        self.progress.update(self.task, description="resolving launch arguments", total=None)
        (resolver,) = pool.spawn([self.config("resolve", 0, "arguments:Resolver", {})])
        pool.collect([resolver], START_TIMEOUT)
        return resolver

    def _serve(self) -> Served:
        """One prefill server and its decode ranks serve all prompts."""
        progress, task = self.progress, self.task
        with RankPool() as pool:
            resolver = self._resolver(pool)
            server_args = self.resolve(pool, resolver, self._launch_arguments())
            self._end_phase("imports_and_arguments")
            progress.update(task, description="starting ranks")
            prefill, decode = self._start(pool, server_args)
            self._end_phase("start_ranks")
            total = len(self.prompts) * (1 + self.args.prefill_cp)
            progress.update(task, description="prefill -> Mooncake -> decode", total=total, completed=0)
            for rank in prefill:
                rank.start("run", self.prompts, self.args.timeout)
            for number, rank in enumerate(decode):
                mine = [prompt for prompt in self.prompts if prompt.room % len(decode) == number]
                rank.start("serve", mine, self.args.timeout)
            answers = pool.collect([*prefill, *decode], self.args.timeout + 30, lambda event: progress.advance(task, 1))
            self._end_phase("serve")
            memory = sum(proportional_memory(rank.process.pid) for rank in pool.ranks)
            resolver.start("hooks")
            hooks = pool.collect([resolver], 30)[0]
        received = {item.room: item for part in answers[len(prefill) :] for item in part}
        return Served(answers[: len(prefill)], received, hooks, memory)

    def _end_phase(self, name: str) -> None:
        now = time.monotonic()
        self.phases[name], self._mark = round(now - self._mark, 2), now

    # ---------------------------------------------------------------------------------------------------- pieces

    def config(
        self, role: str, rank: int, factory: str, options: dict[str, Any], extra: dict[str, str] | None = None
    ) -> RankConfig:
        """Configuration of one rank; `extra` is its environment beside what all have."""
        environment = {
            "SGLANG_HOST_IP": "127.0.0.1",
            "MOONCAKE_PROTOCOL": "tcp",
            "MC_FORCE_TCP": "1",
            "MC_TCP_ENABLE_CONNECTION_POOL": "1",
            **PATIENCE,
            "GLOG_minloglevel": "2",
            "MC_LOG_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "SGLANG_NCCL_SO_PATH": "/nonexistent",
            "SGLANG_DISAGGREGATION_THREAD_POOL_SIZE": "4",
            "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "1" if self.args.all_cp_ranks else "0",
            config.ENABLED: "1" if self.plugin else "0",
            **(extra or {}),
        }
        if self.args.inject_fault and role == "prefill":
            fault = self.args.inject_fault[0]
            kind, mark, rest = fault.partition("#")
            environment[config.FAULT] = (kind if "@" in kind else f"{kind}@{self.args.prefill_cp - 1}") + mark + rest
        if self.plugin:
            passed = (config.ALIGN, config.GATHER, config.DRAFT, config.DUMP_DIR)
            environment |= {name: os.environ[name] for name in passed if name in os.environ}
            if self.args.mode:
                environment[config.GATHER] = self.args.mode
        return RankConfig(
            role,
            rank,
            f"{__package__}.{factory}",
            environment,
            str(self.folder / f"{'' if self.plugin else 'stock-'}{role}-{rank}.log"),
            {"stand_in": self.stand_in, "bootstrap_port": self.ports["bootstrap"], **options},
        )

    def resolve(self, pool: RankPool, resolver: RankProcess, arguments: list[str]) -> Any:
        """`ServerArgs` of the launch arguments, pickled."""
        resolver.start("resolve", arguments)
        server_args = pool.collect([resolver], 60)[0]
        if isinstance(server_args, str):
            raise RankFailed(f"SGLang refused the launch arguments: {server_args}")
        return server_args

    def _start(
        self, pool: RankPool, server_args: Any, extra: dict[str, str] | None = None
    ) -> tuple[list[RankProcess], list[RankProcess]]:
        self.ports |= dict(zip(("prefill", "decode"), free_ports(2), strict=True))
        if not any(rank.config.role == "bootstrap" for rank in pool.ranks):
            pool.collect(pool.spawn([self.config("bootstrap", 0, "decode:BootstrapRank", {})]), START_TIMEOUT)
        args = self.args
        prefill_options = {
            "server_args": server_args,
            "cp_size": args.prefill_cp,
            "chunk": args.chunk,
            "overlap": not args.no_overlap,
            "radix": not args.no_radix,
            "fused": not args.no_fused,
            "stock": not self.plugin,
            "dist_port": self.ports["prefill"],
        }
        decode_options = {"dp_size": args.decode_dp, "dist_port": self.ports["decode"]}
        prefill = pool.spawn(
            self.config("prefill", rank, "prefill:PrefillRank", prefill_options, extra)
            for rank in range(args.prefill_cp)
        )
        decode = pool.spawn(
            self.config("decode", rank, "decode:DecodeRank", decode_options) for rank in range(args.decode_dp)
        )
        pool.collect([*prefill, *decode], START_TIMEOUT)
        return prefill, decode

    def _refused_by_stock(self) -> dict[str, Any]:
        """What stock SGLang says to the same deployment, step by step (the plugin is switched off)."""
        with RankPool() as pool:
            return self._attempts(pool, self._resolver(pool))

    def _attempts(self, pool: RankPool, resolver: RankProcess) -> dict[str, Any]:
        from .stock import Attempts, refusals

        def ask(method: str) -> Callable[[list[str]], Any]:
            def answer(line: list[str]) -> Any:
                resolver.start(method, line)
                return pool.collect([resolver], 60)[0]

            return answer

        def boot(server_args: Any, environment: dict[str, str]) -> str:
            try:
                self._start(pool, server_args, environment)
            except RankFailed as error:
                return str(error)
            return ""

        def serve(server_args: Any, environment: dict[str, str]) -> str:
            try:
                prefill, decode = self._start(pool, server_args, environment)
                prompt = max(self.prompts, key=lambda prompt: len(prompt.tokens))
                for rank in prefill:
                    rank.start("run", [prompt], self.args.timeout)
                decode[prompt.room % len(decode)].start("serve", [prompt], self.args.timeout)
                return next((r.stock_error for r in pool.collect(prefill, self.args.timeout) if r.stock_error), "")
            except RankFailed as error:
                return str(error)

        attempts = Attempts(ask("resolve"), ask("resolve_past_dspark_check"), boot, serve)
        found = refusals(attempts, self._launch_arguments())
        accepted = [refusal.what for refusal in found if not refusal.error]
        return _base_report(self.args, self.prompts) | {
            "stock_refusals": [asdict(refusal) for refusal in found],
            "reasons": [f"stock SGLang accepted: {what}" for what in accepted],
            "ok": not accepted,
        }

    def _beside_stock(self) -> dict[str, Any]:
        """Stock serves the workload, then the plugin does, in processes of their own."""
        from .stock import of_ours, of_stock, ratios

        served = self._serve()
        stock = self._delivered(served)
        self.plugin, self.ports = True, {"bootstrap": free_ports(1)[0]}
        with_plugin = self._serve()
        ours = self._judge(with_plugin)
        split = [tokens for tokens in with_plugin.prefill[0].forward_tokens if tokens >= self.args.prefill_cp]
        sides = of_stock(served.prefill[0], self.args.prefill_cp), of_ours(ours, sum(split))
        stock["reasons"] += self._unexpected(sides[0])
        reasons = [f"{name}: {reason}" for name, run in (("stock", stock), ("ours", ours)) for reason in run["reasons"]]
        return _base_report(self.args, self.prompts) | {
            "ok": not reasons,
            "reasons": reasons,
            "stock_run": stock,
            "our_run": ours,
            "end_of_forward": {"stock": asdict(sides[0]), "ours": asdict(sides[1]), "ours_to_stock": ratios(*sides)},
        }

    @staticmethod
    def _unexpected(side: Any) -> list[str]:
        per_forward = {part.name: part.collectives / side.cp_forwards for part in side.parts}
        return [
            f"{count:g} collectives of {name} per CP forward, reviewed was 1"
            for name, count in per_forward.items()
            if count != 1
        ]

    # ---------------------------------------------------------------------------------------------------- verdict

    def _judge(self, served: Served) -> dict[str, Any]:
        """Report and verdict of a run with the plugin."""
        report = self._delivered(served)
        prefill, reasons, first = served.prefill, report["reasons"], served.prefill[0]
        counters = first.counters
        reasons[:0] = [f"attn_cp_rank {rank.cp_rank}: {error}" for rank in prefill for error in rank.errors[:1]]
        if counters["aux_collectives"] != counters["cp_forwards"]:
            reasons.append(f"{counters['aux_collectives']} aux collectives in {counters['cp_forwards']} CP forwards")
        if len({tuple(rank.counters.items()) for rank in prefill}) != 1:
            reasons.append("the prefill ranks counted different things")
        counted = [
            *("forwards", "cp_forwards", "aux_collectives", "gather_bytes", "rows_on_shard", "rows_captured"),
            *("rows_gathered", "rows_injected", "alignment_failures"),
        ]
        report |= {
            "ok": not reasons,
            **{name: counters[name] for name in counted},
            "mode": first.mode,
            **bytes_at(first.mode, counters, self.args.prefill_cp),
            "alignment_errors_by_rank": [len(rank.errors) for rank in prefill],
            "hooks": self._hooks([served.resolving_hooks, *(rank.hooks for rank in prefill)]),
        }
        self._end_phase("compare")
        return report | {"memory_bytes": served.memory_bytes, "phase_seconds": self.phases}

    def _delivered(self, served: Served) -> dict[str, Any]:
        """What reached decode, compared with the oracle; the same with and without the plugin."""
        from .ranks import prefill_tag
        from .weights import target_weights

        self.progress.update(self.task, description="comparing with the oracle", total=None)
        prefill, received, first = served.prefill, served.received, served.prefill[0]
        checks, target = self._check_rows(received), target_weights()
        reasons: list[str] = []
        state_senders = [r.cp_rank for r in prefill if any(name.startswith("swa") for name in r.writes)]
        rows = []
        for prompt, seen in zip(self.prompts, first.requests, strict=True):
            got, check = received[prompt.room], checks.get(prompt.room)
            if not got.ok:
                reasons.append(f"room {prompt.room} ({prompt.name}): {got.failure}; prefill: {seen.failure or 'ok'}")
            elif got.first_token not in (right := first_tokens(prompt.tokens, target)):
                reasons.append(f"room {prompt.room}: first token {got.first_token}, expected one of {sorted(right)}")
            rows.append(
                {
                    "room": prompt.room,
                    "name": prompt.name,
                    "tokens": seen.tokens,
                    "cached": seen.cached,
                    "chunks": seen.chunks,
                    "captured": seen.rows_computed,
                    "injected": seen.rows_injected,
                    "decode_rank": got.decode_rank,
                    "compared": check.compared if check else 0,
                    "mismatched": check.mismatched if check else 0,
                    "byte_equal": check.byte_equal if check else 0,
                    "failure": seen.failure,
                }
            )
        mismatched = sum(check.mismatched for check in checks.values())
        if mismatched:
            reasons.append(f"{mismatched} draft-KV rows differ from the oracle")
        if state_senders != [0]:
            reasons.append(f"state was sent by CP ranks {state_senders}, expected only rank 0")
        failures = sum(rank.write_failures for rank in prefill)
        if failures:
            reasons.append(f"{failures} Mooncake writes failed")
        leaked = [rank.leaked_pages for rank in prefill]
        if any(leaked):
            reasons.append(f"KV pages that no request holds any more, by CP rank: {leaked}")
        kv_tags = sorted({tag for item in received.values() for tag in item.kv_tags})
        state_tags = sorted({tag for item in received.values() if item.ok for tag in item.state_tags})
        if any(item.ok for item in received.values()) and state_tags != [prefill_tag(0)]:
            reasons.append(f"target state carries the tags {state_tags}, expected only that of rank 0")
        allowed = {prefill_tag(rank) for rank in (range(self.args.prefill_cp) if self.args.all_cp_ranks else [0])}
        if not set(kv_tags) <= allowed:
            reasons.append(f"target KV pages carry the tags {kv_tags}, expected {sorted(allowed)}")
        return _base_report(self.args, self.prompts) | {
            "ok": not reasons,
            "reasons": reasons,
            "forwards": len(first.forward_tokens),
            "cp_forwards": sum(tokens >= self.args.prefill_cp for tokens in first.forward_tokens),
            "cp_group_collectives": len(first.model_collectives),
            "rows_compared": sum(check.compared for check in checks.values()),
            "rows_mismatched": mismatched,
            "rows_byte_equal": sum(check.byte_equal for check in checks.values()),
            "max_rel_err": max((check.max_rel_err for check in checks.values()), default=0.0),
            "leaked_pages": max(leaked),
            "draft_bytes": first.draft_bytes,
            "draft_bytes_stock": first.draft_bytes_stock,
            "state_senders": state_senders,
            "kv_senders": [r.cp_rank for r in prefill if "kv" in r.writes],
            "transfer_bytes": sum(sum(rank.writes.values()) for rank in prefill),
            "per_request": rows,
        }

    @staticmethod
    def _hooks(by_process: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        fired: dict[str, dict[str, Any]] = {}
        for hooks in by_process:
            for hook in hooks:
                fired.setdefault(hook["id"], {**hook, "fired": 0})["fired"] += hook["fired"]
        return list(fired.values())

    def _check_rows(self, received: dict[int, Any]) -> dict[int, RowCheck]:
        import torch

        from . import oracle
        from .weights import draft_checkpoint, target_weights

        torch.set_num_threads(max(1, os.cpu_count() or 1))
        target, draft = target_weights(), draft_checkpoint()
        checks = {}
        for prompt in self.prompts:
            got = received[prompt.room]
            if got.ok:
                wanted = oracle.draft_rows(prompt.tokens, range(got.start, len(prompt.tokens)), target, draft)
                checks[prompt.room] = compare(got, wanted)
        return checks


def proportional_memory(pid: int | None) -> int:
    """Bytes of a process' memory with shared pages divided among those who share them (Linux PSS)."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def compare(got: Any, wanted: Any) -> RowCheck:
    """Rows that arrived at decode against the oracle's; every stage's row counts."""
    import torch

    from ..core.reference import RowParts, dequantise

    compared = mismatched = byte_equal = 0
    worst = 0.0
    for stage in range(wanted.nope.shape[0]):
        rope = torch.from_numpy(got.rope[stage]).to(torch.bfloat16)
        ours = RowParts(torch.from_numpy(got.nope[stage]), rope, torch.from_numpy(got.scale[stage]))
        theirs = RowParts(wanted.nope[stage], wanted.rope[stage], wanted.scale[stage])
        a, b = dequantise(ours), dequantise(theirs)
        nope = (a[:, :448] - b[:, :448]).norm(dim=1) / b[:, :448].norm(dim=1)
        turned = (a[:, 448:] - b[:, 448:]).norm(dim=1) / b[:, 448:].norm(dim=1)
        # nan compares false with everything, so ask for what is right, not for what is wrong
        right = (nope <= NOPE_TOLERANCE) & (turned <= ROPE_TOLERANCE)
        same = (
            ours.nope.eq(theirs.nope).all(dim=1)
            & ours.rope.eq(theirs.rope).all(dim=1)
            & ours.scale.eq(theirs.scale).all(dim=1)
        )
        compared += int(right.numel())
        mismatched += int((~right).sum())
        byte_equal += int(same.sum())
        worst = max(worst, float(torch.maximum(nope, turned).nan_to_num(nan=float("inf")).max()))
    return RowCheck(compared, mismatched, byte_equal, worst)


def _print(report: dict[str, Any], console: Console) -> None:
    if report.get("per_request"):
        table = Table(title=f"CP{report['prefill_cp']} prefill -> Mooncake -> DP{report['decode_dp']} decode")
        names = ("room", "name", "tokens", "cached", "chunks", "captured", "injected", "decode_rank", "compared")
        for name in (*names, "mismatched", "byte_equal"):
            table.add_column(name.replace("_", " "), justify="left" if name == "name" else "right")
        for row in report["per_request"]:
            table.add_row(*(str(row[name]) for name in (*names, "mismatched", "byte_equal")))
        console.print(table)
        console.print(
            f"forwards {report['forwards']}, with CP {report['cp_forwards']}, aux collectives"
            f" {report['aux_collectives']} | gathered {report['gather_bytes']:,} B per rank ({report['mode']}) | sent"
            f" {report['transfer_bytes']:,} B | rows compared {report['rows_compared']}, mismatched"
            f" {report['rows_mismatched']}, byte-equal {report['rows_byte_equal']}, worst relative error"
            f" {report['max_rel_err']:.1e}"
        )
    if "end_of_forward" in report:
        from . import stock

        console.print(stock.table(report["end_of_forward"]))
        for name, run in (("stock", report["stock_run"]), ("ours", report["our_run"])):
            console.print(
                f"{name}: forwards {run['forwards']}, with CP {run['cp_forwards']} | rows compared"
                f" {run['rows_compared']}, mismatched {run['rows_mismatched']}, byte-equal {run['rows_byte_equal']} |"
                f" draft {run['draft_bytes']:,} B"
            )
    for refusal in report.get("stock_refusals", []):
        console.print(f"{refusal['step']}. {refusal['what']}\n   -> {refusal['error'] or 'no error'}", markup=False)
    for reason in report["reasons"]:
        console.print(reason, style="red", markup=False)
    verdict = "ok" if report["ok"] else "FAILED"
    console.print(f"{verdict} in {report.get('seconds', 0)} s (SGLang {report['sglang']}, {report['mooncake']})")
    sys.stderr.flush()
