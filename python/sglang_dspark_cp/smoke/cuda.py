"""The GPU run: real servers with an oracle checkpoint, CP prefill beside the references, one report."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .. import config
from ..errors import DsparkCpError
from .processes import free_ports
from .servers import Server, ServerFailed, ServerSet, first_traceback, launch_command

SET_UPS = {
    "plain": "one GPU, no speculation",
    "dspark": "one GPU, DSPARK, no PD",
    "pd": "PD, TP prefill without CP -> TP decode",
    "cp-tp": "PD, CP prefill -> TP decode",
    "cp-dp": "PD, CP prefill -> TP/DP decode",
}
FAULTS = ("zero-rows", "swap-requests", "skip-restore", "shift-positions")
CHUNK = 512
BLOCK = 4
LENGTHS = (
    *(121, 127, 128, 129, 150, 200, 255, 256, 257, 300, 383, 511, 512, 513, 514, 600, 640, 700, 768, 900),
    *(1023, 1024, 1025, 1100, 1500, 2049),
)
"""Residues of T % cp, page (256) and chunk (512) boundaries, several chunks."""
SHORT_LENGTHS = (1, 2, 3, 7)
"""Shorter than the period: only answered, the continuation is not defined."""
WINDOW = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the GPU run."""
    group = parser.add_argument_group("GPU run")
    group.add_argument("--kind", choices=("oracle", "random"), default="oracle", help="checkpoint that is written")
    group.add_argument("--quant", choices=("bf16", "fp8"), default="bf16", help="of the checkpoint (default bf16)")
    group.add_argument("--model-dir", type=Path, help="use a checkpoint of `make-checkpoint` instead of writing one")
    group.add_argument("--gpus", metavar="LIST", help="GPU indices to use, such as 0,1 (default: all visible)")
    group.add_argument("--prefill-gpus", metavar="LIST", help="GPUs of prefill servers (default: --gpus)")
    group.add_argument("--decode-gpus", metavar="LIST", help="GPUs of decode servers (default: --gpus)")
    group.add_argument("--set-ups", metavar="LIST", help=f"of {', '.join(SET_UPS)} (default: what the GPUs allow)")
    group.add_argument("--transfer", choices=("mooncake", "mooncake_tcp"), default="mooncake_tcp")
    group.add_argument("--new-tokens", type=int, default=120, metavar="N", help="tokens per answer (default 120)")
    group.add_argument("--boot-timeout", type=float, default=300.0, metavar="S", help="for servers to get ready")
    group.add_argument("--no-controls", action="store_true", help="without the negative controls")
    group.add_argument("--server-args", default="", metavar="ARGS", help="added to every server's command line")


@dataclass(frozen=True)
class Gpus:
    """Which GPUs serve what."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]

    @property
    def cp_size(self) -> int:
        """CP size of prefill."""
        return len(self.prefill)


@dataclass
class Answer:
    """One answered request."""

    tokens: list[int] | None
    accept_length: float | None = None
    error: str = ""
    seconds: float = 0.0


@dataclass
class SetUpResult:
    """All answers of one set-up, in the order of the prompts."""

    name: str
    answers: list[Answer] = field(default_factory=list)
    together: list[Answer] = field(default_factory=list)
    ttft_ms: dict[int, float] = field(default_factory=dict)
    gaps: list[float | None] = field(default_factory=list)

    def accept_lengths(self) -> list[float]:
        """Accept lengths of the answers that have one."""
        return [answer.accept_length for answer in self.answers if answer.accept_length is not None]

    def mean_accept_length(self) -> float | None:
        """Mean over the prompts, None without speculation."""
        lengths = self.accept_lengths()
        return round(statistics.fmean(lengths), 4) if lengths else None


def visible_gpus() -> tuple[str, ...]:
    """Indices that `nvidia-smi` lists, narrowed by CUDA_VISIBLE_DEVICES."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(part for part in named.split(",") if part)
    if shutil.which("nvidia-smi") is None:
        return ()
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True, timeout=60
    )
    return tuple(listed.stdout.split()) if listed.returncode == 0 else ()


def plan(args: argparse.Namespace, visible: tuple[str, ...]) -> tuple[Gpus, list[str]] | str:
    """GPUs and set-ups of a run, or what is wrong with the options."""

    def choose(text: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(part.strip() for part in text.split(",") if part.strip()) if text else default

    everything = choose(args.gpus, visible)
    if not everything:
        return "--device cuda: no GPU is visible here (nvidia-smi lists none); use --device cpu"
    gpus = Gpus(choose(args.prefill_gpus, everything), choose(args.decode_gpus, everything))
    unknown = sorted({*gpus.prefill, *gpus.decode} - set(visible))
    if unknown:
        return f"GPU {', '.join(unknown)} is not visible; visible are {', '.join(visible)}"
    for side, chosen in (("prefill", gpus.prefill), ("decode", gpus.decode)):
        if len(chosen) not in (1, 2, 4, 8):
            return f"{side} uses {len(chosen)} GPUs; allowed are 1, 2, 4 or 8"
    possible = list(SET_UPS)
    if gpus.cp_size == 1:
        possible = ["plain", "dspark", "pd"]
    elif len(gpus.decode) == 1:
        possible.remove("cp-dp")
    chosen = choose(args.set_ups, tuple(possible))
    wrong = [name for name in chosen if name not in SET_UPS]
    if wrong:
        return f"--set-ups {', '.join(wrong)}: allowed are {', '.join(SET_UPS)}"
    impossible = [name for name in chosen if name not in possible]
    if impossible:
        return f"--set-ups {', '.join(impossible)}: not with {len(gpus.prefill)} + {len(gpus.decode)} GPUs"
    for fault in args.inject_fault:
        try:
            config.from_environment({config.FAULT: fault})
        except config.ConfigError as error:
            return f"--inject-fault {fault}: {error}"
    if args.new_tokens < 2:
        return f"--new-tokens {args.new_tokens}: at least 2"
    return gpus, list(chosen)


def run(args: argparse.Namespace) -> int:
    """Run and report; 0 ok, 1 failed, 2 usage."""
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 160)
    planned = plan(args, visible_gpus())
    if isinstance(planned, str):
        console.print(planned, style="red", markup=False)
        return 2
    gpus, set_ups = planned
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dspark-cp-") as scratch:
        folder = (args.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        job = _Run(args, gpus, set_ups, folder, console)
        try:
            report = job.stock() if args.stock else job.result()
        except (DsparkCpError, KeyboardInterrupt) as error:
            report = job.base() | {"ok": False, "reasons": [f"{type(error).__name__}: {error}"]}
        report["seconds"] = round(time.monotonic() - started, 1)
        if args.keep:
            (folder / "report.json").write_text(json.dumps(report, indent=1))
    _print(report, console)
    if args.json:
        print(json.dumps(report))
    return 0 if report["ok"] else 1


class _Run:
    def __init__(
        self, args: argparse.Namespace, gpus: Gpus, set_ups: list[str], folder: Path, console: Console
    ) -> None:
        self.args, self.gpus, self.set_ups, self.folder, self.console = args, gpus, set_ups, folder, console
        self.room = 100_000
        self.rooms: dict[str, list[int]] = {}
        self.servers: dict[str, Server] = {}
        self.started = time.monotonic()

    def base(self) -> dict[str, Any]:
        """What every report says about the machine and the versions."""
        from importlib import metadata

        import torch

        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.splitlines()
        return {
            "ok": False,
            "reasons": [],
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "device": "cuda",
            "gpus": driver,
            "sglang": metadata.version("sglang"),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "commit": os.environ.get("DSPARK_CP_COMMIT") or _commit(),
            "command": " ".join(sys.argv[1:]),
            "kind": self.args.kind,
            "quant": self.args.quant,
            "prefill_cp": self.gpus.cp_size,
            "decode_gpus": len(self.gpus.decode),
            "transfer": self.args.transfer,
            "chunk": CHUNK,
            "new_tokens": self.args.new_tokens,
        }

    def _say(self, text: str) -> None:
        self.console.print(f"[{time.monotonic() - self.started:6.1f}] {text}", markup=False)

    # --------------------------------------------------------------------------------------------------- servers

    def _checkpoint(self) -> Any:
        from .checkpoint import read_checkpoint_info, write_checkpoint

        if self.args.model_dir:
            return read_checkpoint_info(self.args.model_dir)
        target = self.folder / "checkpoint"
        if (target / "config.json").is_file():
            return read_checkpoint_info(target)
        return write_checkpoint(target, kind=self.args.kind, quant=self.args.quant)

    def _base_arguments(self, model: Path) -> list[str]:
        quant = ["--fp8-gemm-backend", "triton"] if self.args.quant == "fp8" else []
        return [
            *("--model-path", str(model), "--context-length", "8192", "--max-total-tokens", "65536"),
            *("--mem-fraction-static", "0.25", "--chunked-prefill-size", str(CHUNK), "--max-running-requests", "16"),
            *("--cuda-graph-max-bs-decode", "4", "--swa-full-tokens-ratio", "0.5", "--mm-feature-transport", "cpu"),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--skip-server-warmup"),
            *("--random-seed", "1", "--watchdog-timeout", "600", "--disable-custom-all-reduce"),
            *quant,
            *self.args.server_args.split(),
        ]

    def _server(self, name: str, arguments: list[str], gpus: tuple[str, ...], extra: dict[str, str]) -> Server:
        port = free_ports(1)[0]
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "SGLANG_HOST_IP": "127.0.0.1", **extra}
        if self.args.transfer == "mooncake_tcp":
            environment["MC_FORCE_TCP"] = "1"
        if self.args.quant == "bf16":
            environment |= {"SGLANG_DSV4_FP4_EXPERTS": "0", "SGLANG_OPT_FP8_WO_A_GEMM": "0"}
        command = launch_command([*self._base_arguments(self.model), *arguments], port)
        return Server(name, port, command, environment, self.folder)

    def _prefill(self, name: str, cp: bool, extra: dict[str, str]) -> Server:
        tp = ["--tp", str(len(self.gpus.prefill))]
        cp_flags = ["--enable-dsa-prefill-context-parallel", "--dsa-prefill-cp-mode", "round-robin-split"]
        bootstrap = str(free_ports(1)[0])
        arguments = [
            *tp,
            *(cp_flags if cp else []),
            *("--speculative-algorithm", "DSPARK", "--disaggregation-mode", "prefill"),
            *("--disaggregation-transfer-backend", self.args.transfer, "--disaggregation-bootstrap-port", bootstrap),
        ]
        server = self._server(f"prefill-{name}", arguments, self.gpus.prefill, self._dump(name) | extra)
        self.bootstrap[name] = int(bootstrap)
        return server

    def _decode(self, name: str, dp: bool) -> Server:
        size = str(len(self.gpus.decode))
        dp_flags = ["--dp", size, "--enable-dp-attention", "--enable-dp-lm-head"] if dp else []
        arguments = [
            *("--tp", size, *dp_flags, "--speculative-algorithm", "DSPARK", "--disaggregation-mode", "decode"),
            *("--disaggregation-transfer-backend", self.args.transfer),
        ]
        return self._server(f"decode-{name}", arguments, self.gpus.decode, self._dump("decode"))

    def _dump(self, name: str) -> dict[str, str]:
        target = self.folder / "dump" / name
        target.mkdir(parents=True, exist_ok=True)
        return {config.DUMP_DIR: str(target)}

    def _references(self) -> dict[str, Server]:
        """Servers of the set-ups, by role; a decode server is shared by the pairs that can use it."""
        first, last = self.gpus.prefill[:1], self.gpus.decode[-1:]
        wanted: dict[str, Server] = {}
        if "plain" in self.set_ups:
            wanted["plain"] = self._server("plain", [], first, {})
        if "dspark" in self.set_ups:
            wanted["dspark"] = self._server("dspark", ["--speculative-algorithm", "DSPARK"], last, {})
        if "pd" in self.set_ups:
            wanted["prefill-pd"] = self._prefill("pd", cp=False, extra={})
        if {"cp-tp", "cp-dp"} & set(self.set_ups):
            wanted["prefill-cp"] = self._prefill("cp", cp=True, extra={})
        if {"pd", "cp-tp"} & set(self.set_ups):
            wanted["decode-tp"] = self._decode("tp", dp=False)
        if "cp-dp" in self.set_ups:
            wanted["decode-dp"] = self._decode("dp", dp=True)
        return wanted

    # --------------------------------------------------------------------------------------------------- requests

    def _ask(self, servers: tuple[Server, ...], bootstrap: int | None, prompt: list[int], new_tokens: int) -> Answer:
        body: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        }
        started = time.monotonic()
        if bootstrap is None:
            reply = servers[0].post("/generate", body)
        else:
            self.room += 1
            body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap, "bootstrap_room": self.room}
            with ThreadPoolExecutor(1) as pool:
                prefilled = pool.submit(servers[0].post, "/generate", body)
                reply = servers[1].post("/generate", body)
                answer = prefilled.result()
            if "output_ids" not in reply:
                reply = {"error": f"decode: {_error(reply)}; prefill: {_error(answer)}"}
        meta = reply.get("meta_info", {})
        return Answer(
            tokens=reply.get("output_ids"),
            accept_length=meta.get("spec_accept_length"),
            error="" if "output_ids" in reply else _error(reply),
            seconds=round(time.monotonic() - started, 4),
        )

    def _measure(self, name: str, servers: tuple[Server, ...], bootstrap: int | None) -> SetUpResult:
        result = SetUpResult(name)
        new_tokens = self.args.new_tokens
        rooms = self.rooms.setdefault(name, [])
        for prompt in self.prompts:
            result.answers.append(self._ask(servers, bootstrap, prompt, new_tokens))
            rooms.append(self.room)
            if result.answers[-1].tokens is None:
                for server in servers:
                    server.require_alive()
        for prompt in self.short_prompts:
            result.answers.append(self._ask(servers, bootstrap, prompt, 8))
        return result

    def _measure_together(self, result: SetUpResult, servers: tuple[Server, ...], bootstrap: int | None) -> None:
        def one(prompt: list[int]) -> Answer:
            return self._ask_in_thread(servers, bootstrap, prompt)

        with ThreadPoolExecutor(8) as pool:
            result.together = list(pool.map(one, self.prompts[:16]))

    def _ask_in_thread(self, servers: tuple[Server, ...], bootstrap: int | None, prompt: list[int]) -> Answer:
        return self._ask(servers, bootstrap, prompt, self.args.new_tokens)

    def _ttft(self, result: SetUpResult, servers: tuple[Server, ...], bootstrap: int | None) -> None:
        """Milliseconds until one token is answered, median of 3 different prompts per length."""
        for length in (512, 2048):
            times = []
            for seed in range(3):
                prompt = self.info.sample_prompt(length, 1000 + seed)
                times.append(self._ask(servers, bootstrap, prompt, 1).seconds * 1000)
            result.ttft_ms[length] = round(statistics.median(times), 1)

    def _gap(self, prompt: list[int], tokens: list[int] | None) -> float | None:
        """Worst log-probability gap between the plain server's best token and the emitted one."""
        plain = self.servers.get("plain")
        if plain is None or not tokens:
            return None
        plain.post("/flush_cache", {})
        reply = plain.post(
            "/generate",
            {
                "input_ids": prompt + tokens,
                "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
                "return_logprob": True,
                "logprob_start_len": len(prompt) - 1,
                "top_logprobs_num": 1,
            },
        )
        meta = reply.get("meta_info", {})
        given, best = meta.get("input_token_logprobs") or [], meta.get("input_top_logprobs") or []
        pairs = [(g[0], b[0][0]) for g, b in zip(given, best, strict=False) if g and b and g[0] is not None]
        return round(max(best - given for given, best in pairs[-len(tokens) :]), 3) if pairs else None

    # ----------------------------------------------------------------------------------------------------- result

    def result(self) -> dict[str, Any]:
        """Everything that the run measured."""
        self.info = self._checkpoint()
        self.model = Path(self.info.path)
        self.bootstrap: dict[str, int] = {}
        self.prompts = [self.info.sample_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
        self.prompts.append(list(self.prompts[-1]))  # the same prompt again: radix cache
        self.short_prompts = [self.info.sample_prompt(length, 500 + length) for length in SHORT_LENGTHS]
        self._say(f"checkpoint {self.info.kind} {self.info.quant}, {len(self.prompts)} prompts")
        with ServerSet() as group:
            self.servers = self._references()
            self._say(f"starting {len(self.servers)} servers")
            group.start(
                self.servers.values(),
                self.args.boot_timeout,
                lambda s: self._say(f"{s.name} ready, {s.boot_seconds} s"),
            )
            results = {}
            for name in self.set_ups:
                servers, bootstrap = self._route(name)
                results[name] = self._measure(name, servers, bootstrap)
                self._measure_together(results[name], servers, bootstrap)
                self._ttft(results[name], servers, bootstrap)
                self._say(f"{name}: mean accept length {results[name].mean_accept_length()}")
            for name in self.set_ups:
                pairs = zip(self.prompts, results[name].answers, strict=False)
                results[name].gaps = [self._gap(prompt, answer.tokens) for prompt, answer in pairs]
            controls, refusals = {}, {}
            cp_set_ups = [name for name in self.set_ups if name.startswith("cp-")]
            if cp_set_ups and not self.args.no_controls:
                controls, refusals = self._controls(group, cp_set_ups[0])
            memory = {name: server.boot_seconds for name, server in self.servers.items()}
            return self._judge(results, controls, refusals) | {"boot_seconds": memory}

    def _route(self, name: str) -> tuple[tuple[Server, ...], int | None]:
        if name in ("plain", "dspark"):
            return (self.servers[name],), None
        prefill = "pd" if name == "pd" else "cp"
        decode = "decode-dp" if name == "cp-dp" else "decode-tp"
        return (self.servers[f"prefill-{prefill}"], self.servers[decode]), self.bootstrap[prefill]

    def _controls(self, group: ServerSet, like: str) -> tuple[dict[str, SetUpResult], dict[str, Any]]:
        """Negative controls, and the same faults with the proof on."""
        faults = self.args.inject_fault or list(FAULTS)
        decode = self._route(like)[0][1]
        servers = {}
        for fault in faults:
            servers[fault] = self._prefill(fault, cp=True, extra={config.FAULT: fault, config.ALIGN: "off"})
        refused = f"{faults[0]}@{self.gpus.cp_size - 1}#1" if not self.args.inject_fault else f"{faults[0]}#1"
        servers["refused"] = self._prefill("refused", cp=True, extra={config.FAULT: refused})
        self._say(f"starting {len(servers)} prefill servers with faults")
        group.start(
            servers.values(), self.args.boot_timeout, lambda s: self._say(f"{s.name} ready, {s.boot_seconds} s")
        )
        results = {}
        for fault in faults:
            results[fault] = SetUpResult(fault)
            for prompt in self.prompts[4:24:2]:
                answer = self._ask((servers[fault], decode), self.bootstrap[fault], prompt, self.args.new_tokens)
                results[fault].answers.append(answer)
                self.rooms.setdefault(fault, []).append(self.room)
            self._say(f"control {fault}: mean accept length {results[fault].mean_accept_length()}")
        pair, bootstrap = (servers["refused"], decode), self.bootstrap["refused"]
        first = self._ask(pair, bootstrap, self.prompts[4], 8)
        second = self._ask(pair, bootstrap, self.prompts[5], 8)
        self._say(f"with the proof on: {first.error[:160]!r}, next request answered: {second.tokens is not None}")
        log = servers["refused"].log()
        return results, {
            "fault": refused,
            "first_error": first.error[:2000],
            "first_tokens": first.tokens,
            "next_request_answered": second.tokens == self._expected(self.prompts[5], 8),
            "ranks_with_alignment_error": sum(
                f"AlignmentError on attn_cp_rank {rank}:" in log for rank in range(self.gpus.cp_size)
            ),
        }

    def _expected(self, prompt: list[int], count: int) -> list[int] | None:
        return list(self.info.expected_continuation(prompt, count)) if self.info.period else None

    def _judge(
        self, results: dict[str, SetUpResult], controls: dict[str, SetUpResult], refusal: dict[str, Any]
    ) -> dict[str, Any]:
        reasons: list[str] = []
        rows = []
        for number, prompt in enumerate(self.prompts):
            expected = self._expected(prompt, self.args.new_tokens)
            row: dict[str, Any] = {"tokens": len(prompt)}
            for name, result in results.items():
                answer = result.answers[number]
                row[name] = {
                    "accept_length": answer.accept_length,
                    "as_expected": None if expected is None else answer.tokens == expected,
                    "worst_gap": result.gaps[number],
                    "room": self.rooms[name][number],
                }
                if answer.tokens is None:
                    reasons.append(f"{name}: prompt of {len(prompt)} tokens: {answer.error[:400]}")
                elif expected is not None and answer.tokens != expected:
                    reasons.append(f"{name}: prompt of {len(prompt)} tokens: answer differs from the oracle's")
            rows.append(row)
        for name, result in results.items():
            short = result.answers[len(self.prompts) :]
            bad = [answer.error[:200] for answer in short + result.together if answer.tokens is None]
            reasons += [f"{name}: {error}" for error in bad[:3]]
        means = {name: result.mean_accept_length() for name, result in results.items()}
        base_line = means.get("pd") or means.get("dspark")
        ratios = {}
        for name in ("cp-tp", "cp-dp"):
            if base_line and means.get(name):
                ratios[name] = round(means[name] / base_line, 4)  # type: ignore[operator]
                if abs(ratios[name] - 1) > 0.02:
                    reasons.append(f"{name}: mean accept length {means[name]} against {base_line} without CP")
        control_means = {fault: result.mean_accept_length() for fault, result in controls.items()}
        for fault, mean in control_means.items():
            if mean is None or base_line is None or mean > 0.7 * base_line:
                reasons.append(f"control {fault}: accept length {mean} is not at least 30 % below {base_line}")
        if refusal:
            if "AlignmentError" not in refusal["first_error"]:
                reasons.append("with the proof on, the faulty request did not fail with an AlignmentError")
            if refusal["ranks_with_alignment_error"] != self.gpus.cp_size:
                reasons.append("not every CP rank logged the AlignmentError")
            if not refusal["next_request_answered"]:
                reasons.append("with the proof on, the request after the faulty one was not answered rightly")
        witnesses = self._witnesses(reasons)
        return self.base() | {
            "ok": not reasons,
            "reasons": reasons,
            "prompts": len(self.prompts),
            "mean_accept_length": means,
            "accept_length_vs_non_cp": ratios,
            "control_accept_length": control_means,
            "proof_on": refusal,
            "ttft_ms": {name: result.ttft_ms for name, result in results.items()},
            "accept_length_together": {
                name: _mean([answer.accept_length for answer in result.together]) for name, result in results.items()
            },
            **witnesses,
            "per_prompt": rows,
        }

    def _witnesses(self, reasons: list[str]) -> dict[str, Any]:
        """Draft rows and proposals from the dumps."""
        from . import judge

        found: dict[str, Any] = {}
        dump = self.folder / "dump"
        by_set_up = {
            name: judge.load_rows(dump / folder, "prefill")
            for name, folder in (("pd", "pd"), ("cp", "cp"))
            if (dump / folder).is_dir()
        }
        decode = judge.load_rows(dump / "decode", "decode") if (dump / "decode").is_dir() else {}
        prefill_vs_decode = {}
        for name in ("pd", "cp-tp", "cp-dp"):
            prefill = by_set_up.get("pd" if name == "pd" else "cp", {})
            rooms = [room for room in self.rooms.get(name, []) if room in prefill]
            pairs = [(prefill[room], decode[room]) for room in rooms if room in decode]
            if rooms:
                different = sum(not judge.rows_identical(a, b) for a, b in pairs)
                prefill_vs_decode[name] = {"requests": len(rooms), "on_decode": len(pairs), "different": different}
                if different or len(pairs) != len(rooms):
                    reasons.append(f"{name}: {different} of {len(pairs)} requests have other rows on decode")
        found["rows_prefill_vs_decode"] = prefill_vs_decode
        for name in ("cp-tp", "cp-dp"):
            if name in self.rooms and "pd" in self.rooms:
                pairs = [
                    (by_set_up["cp"][ours], by_set_up["pd"][theirs])
                    for ours, theirs in zip(self.rooms[name], self.rooms["pd"], strict=True)
                    if ours in by_set_up.get("cp", {}) and theirs in by_set_up.get("pd", {})
                ]
                summary = judge.compare_many(pairs)
                found.setdefault("rows_cp_vs_non_cp", {})[name] = summary
                if not pairs or summary["rows_missing"] or summary["max_rel_err"] > 1e-2:
                    reasons.append(f"{name}: draft rows differ from the non-CP ones: {summary}")
        proposals = judge.load_proposals(dump / "decode")
        agreement = {}
        for name in (*(each for each in self.set_ups if each.startswith("cp-")), *self.rooms):
            if name in ("plain", "dspark", "pd") or name in agreement or "pd" not in self.rooms:
                continue
            rooms = self.rooms[name]
            references = self.rooms["pd"] if len(rooms) == len(self.rooms["pd"]) else self.rooms["pd"][4:24:2]
            agreement[name] = judge.agreement_over_rooms(proposals, rooms, references)
            share = agreement[name]["first_step"]
            if name.startswith("cp-") and (share is None or share < 0.97):
                reasons.append(f"{name}: first-step proposals agree on {share} with the non-CP ones")
        found["proposal_agreement"] = agreement
        counters = dump / "cp" / "counters-0.json"
        if counters.is_file():
            found["counters"] = json.loads(counters.read_text())
            c = found["counters"].get("counters", found["counters"])
            if c["aux_collectives"] != c["cp_forwards"]:
                reasons.append(f"{c['aux_collectives']} aux collectives in {c['cp_forwards']} CP forwards")
        return found

    # ------------------------------------------------------------------------------------------------------ stock

    def stock(self) -> dict[str, Any]:
        """Stock's refusals of the same prefill server, in order; the plugin is switched off."""
        self.info = self._checkpoint()
        self.model, self.bootstrap = Path(self.info.path), {}
        off = {config.ENABLED: "0"}
        found = []
        unified = ["--enable-prefill-cp", "--cp-strategy", "interleave"]
        steps: list[tuple[str, Callable[[Server], None]]] = [
            ("unified flags", lambda s: _swap_flags(s, unified)),
            ("legacy flags", lambda s: None),
            ("legacy flags and --enable-dp-lm-head", lambda s: s.command.append("--enable-dp-lm-head")),
        ]
        for what, change in steps:
            with ServerSet() as group:
                server = self._prefill(f"stock-{len(found) + 1}", cp=True, extra=off)
                change(server)
                try:
                    group.start([server], self.args.boot_timeout)
                    error = ""
                except ServerFailed:
                    error = first_traceback(server.log()).splitlines()[-1]
            found.append({"step": len(found) + 1, "what": what, "error": error})
            self._say(f"{what}: {error or 'accepted'}")
        accepted = [step["what"] for step in found if not step["error"]]
        return self.base() | {
            "ok": not accepted,
            "stock_refusals": found,
            "reasons": [f"stock SGLang accepted: {what}" for what in accepted],
        }


def _swap_flags(server: Server, flags: list[str]) -> None:
    legacy = ("--enable-dsa-prefill-context-parallel", "--dsa-prefill-cp-mode", "round-robin-split")
    server.command = [part for part in server.command if part not in legacy] + flags


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), 4) if known else None


def _error(reply: dict[str, Any]) -> str:
    return str(reply.get("error") or reply.get("text") or {k: v for k, v in reply.items() if k != "output_ids"})[:1500]


def _commit() -> str:
    where = Path(__file__).parent
    answer = subprocess.run(["git", "-C", str(where), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=20)
    return answer.stdout.strip() if answer.returncode == 0 else "unknown"


def _print(report: dict[str, Any], console: Console) -> None:
    rows = report.get("per_prompt", [])
    if rows:
        names = [name for name in rows[0] if name != "tokens"]
        table = Table(title="accept length per prompt (worst teacher-forced gap)")
        table.add_column("tokens", justify="right")
        for name in names:
            table.add_column(name, justify="right")
        for row in rows:
            cells = [f"{row[n]['accept_length'] or '-'} ({row[n]['worst_gap']})" for n in names]
            table.add_row(str(row["tokens"]), *cells)
        console.print(table)
        for key in ("mean_accept_length", "control_accept_length", "rows_cp_vs_non_cp", "rows_prefill_vs_decode"):
            console.print(f"{key}: {report.get(key)}", markup=False)
        console.print(f"proposal_agreement: {report.get('proposal_agreement')}", markup=False)
    for step in report.get("stock_refusals", []):
        console.print(f"{step['step']}. {step['what']}\n   -> {step['error'] or 'no error'}", markup=False)
    for reason in report["reasons"]:
        console.print(reason, style="red", markup=False)
    console.print(f"{'ok' if report['ok'] else 'FAILED'} in {report.get('seconds', 0)} s")
