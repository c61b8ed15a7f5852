"""`smoke --device cuda`: real servers with an oracle checkpoint, CP prefill beside its references, one report."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .. import config
from ..errors import ConfigError, DsparkCpError
from . import set_ups
from .set_ups import UsageError

CONTROL_FAULTS = ("zero-rows", "swap-requests", "skip-restore", "shift-positions")
"""Negative controls that run when no --inject-fault names others."""
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the GPU run."""
    group = parser.add_argument_group("GPU run")
    group.add_argument(
        "--model-dir", type=Path, metavar="DIR", help="checkpoint of `make-checkpoint` (default: write one)"
    )
    group.add_argument("--kind", choices=("oracle", "random"), default="oracle", help="checkpoint that is written")
    group.add_argument("--quant", choices=("bf16", "fp8"), default="bf16", help="of the checkpoint (default bf16)")
    group.add_argument("--gpus", metavar="LIST", help="GPU indices to use, such as 0,1 (default: all visible)")
    group.add_argument("--prefill-gpus", metavar="LIST", help="GPUs of prefill servers (default: --gpus)")
    group.add_argument("--decode-gpus", metavar="LIST", help="GPUs of decode servers (default: --gpus)")
    group.add_argument(
        "--ranks-per-gpu",
        type=int,
        default=1,
        choices=(1, 2, 4, 8),
        metavar="N",
        help="1, 2, 4 or 8 ranks on each GPU (default 1): more than one checks context parallelism on fewer GPUs than"
        " ranks; slow, and its times say nothing",
    )
    group.add_argument(
        "--pairs",
        "--set-ups",
        metavar="LIST",
        help="of plain, dspark, pd1, pd-tpN, cpN-tpM, cpN-dpM with N prefill and M decode GPUs (default: all that the"
        " GPUs allow)",
    )
    group.add_argument("--transfer", choices=("mooncake", "mooncake_tcp"), default="mooncake_tcp")
    group.add_argument(
        "--new-tokens",
        type=int,
        default=120,
        metavar="N",
        help="tokens per answer (default 120: with the oracle each row of the window is then needed once)",
    )
    group.add_argument(
        "--ports",
        type=int,
        default=30000,
        metavar="FIRST",
        help="first port to try (default 30000), below those that the kernel gives to outgoing connections",
    )
    group.add_argument("--boot-timeout", type=float, default=300.0, metavar="S", help="for servers to get ready")
    group.add_argument(
        "--fault-level",
        choices=("off", "default", "both"),
        default="both",
        help="negative controls with the alignment proof off (accept length must fall), at its default (the request"
        " must fail with AlignmentError), or both",
    )
    group.add_argument("--no-controls", action="store_true", help="without the negative controls")
    group.add_argument("--server-args", default="", metavar="ARGS", help="added to every server's command line")


def visible_gpus() -> tuple[str, ...]:
    """Indices that `nvidia-smi` lists, narrowed by CUDA_VISIBLE_DEVICES."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(part.strip() for part in named.split(",") if part.strip())
    return tuple(_nvidia_smi("index"))


def check_ports(first: int) -> None:
    """Refuse a first port among those that the kernel gives to outgoing connections.

    A server's ports are chosen seconds before it listens on them; there one was taken in between (seen on a GPU host).

    Raises:
        UsageError: the port is outside 1024 to the last one below that range.
    """
    low = int(EPHEMERAL_PORTS.read_text().split()[0])
    if not 1024 <= first < low:
        raise UsageError(
            f"--ports {first}: allowed is 1024 to {low - 1}; the kernel gives {low} and above to outgoing connections"
            f" ({EPHEMERAL_PORTS}), and one of those would take a server's port before it listens"
        )


def faults_of(args: argparse.Namespace) -> list[str]:
    """Faults of the negative controls.

    Raises:
        UsageError: one has not the form KIND[@CP_RANK][#FIRST_FORWARDS].
    """
    if args.no_controls:
        return []
    for fault in args.inject_fault:
        try:
            config.from_environment({config.FAULT: fault})
        except ConfigError as error:
            raise UsageError(f"--inject-fault {fault}: {error}") from error
    return list(dict.fromkeys(args.inject_fault)) or list(CONTROL_FAULTS)


def run(args: argparse.Namespace) -> int:
    """Run and report; 0 ok, 1 failed, 2 usage."""
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 160)
    try:
        gpus = set_ups.choose_gpus(visible_gpus(), args.gpus, args.prefill_gpus, args.decode_gpus, args.ranks_per_gpu)
        chosen = set_ups.choose_set_ups(gpus, args.pairs)
        faults = faults_of(args)
        check_ports(args.ports)
        if args.new_tokens < 2:
            raise UsageError(f"--new-tokens {args.new_tokens}: at least 2")
        if args.model_dir and not (args.model_dir / "config.json").is_file():
            raise UsageError(f"--model-dir {args.model_dir}: no config.json there; see `make-checkpoint`")
        if args.stock and set_ups.flags().stock_serves:
            raise UsageError(
                "--stock shows what stock SGLang refuses; this release serves CP prefill with DSPARK. The set-up"
                f" stock-cp{gpus.cp_size}-tp{len(gpus.decode)} of --pairs runs it beside this package's"
            )
        if args.stock and gpus.cp_size < 2:
            raise UsageError(
                "--stock needs at least two ranks (GPUs, or --ranks-per-gpu): what stock refuses is context parallelism"
            )
    except UsageError as error:
        console.print(f"smoke --device cuda: {error}", style="red", markup=False)
        return 2

    from .cuda_run import GpuRun
    from .cuda_stock import stock_refusals

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dspark-cp-") as scratch:
        folder = (args.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        report = about(args, gpus)
        try:
            job = GpuRun(args, gpus, chosen, faults, folder, console, report)
            if args.stock:
                stock_refusals(job)
            else:
                job.run()
        except (DsparkCpError, KeyboardInterrupt) as error:
            report["reasons"].append(f"{type(error).__name__}: {error}")
        except Exception:  # a defect here must not cost what was measured
            report["reasons"].append(traceback.format_exc())
        report["ok"] = not report["reasons"]
        report["seconds"] = round(time.monotonic() - started, 1)
        if args.keep:
            (folder / "report.json").write_text(json.dumps(report, indent=1))
    show(report, console)
    if args.json:
        print(json.dumps(report))
    return 0 if report["ok"] else 1


def about(args: argparse.Namespace, gpus: set_ups.Gpus) -> dict[str, Any]:
    """What every report says about the machine, the versions and the options."""
    import importlib.metadata

    import torch

    driver = _nvidia_smi("driver_version")
    return {
        "ok": False,
        "reasons": [],
        "device": "cuda",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": os.environ.get("DSPARK_CP_COMMIT") or _commit(),
        "command": shlex.join(["sglang-dspark-cp", *sys.argv[1:]]),
        "gpus": _nvidia_smi("name"),
        "driver": driver[0] if driver else None,
        "sglang": importlib.metadata.version("sglang"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "kind": args.kind,
        "quant": args.quant,
        "prefill_gpus": len(set(gpus.prefill)),
        "decode_gpus": len(set(gpus.decode)),
        "ranks_per_gpu": args.ranks_per_gpu,
        "transfer": args.transfer,
        "chunk": set_ups.CHUNK,
        "new_tokens": args.new_tokens,
    }


def _nvidia_smi(field: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(
        ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"], capture_output=True, text=True, timeout=60
    )
    return [line.strip() for line in listed.stdout.splitlines()] if listed.returncode == 0 else []


def _commit() -> str:
    if shutil.which("git") is None:
        return "unknown"
    where = str(Path(__file__).parent)
    answer = subprocess.run(["git", "-C", where, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=20)
    return answer.stdout.strip() if answer.returncode == 0 else "unknown"


# ----------------------------------------------------------------------------------------------------------- screen


def show(report: dict[str, Any], console: Console) -> None:
    """The report for a reader."""
    if report.get("per_prompt"):
        console.print(_per_prompt(report))
    if report.get("set_ups"):
        console.print(_per_set_up(report))
    if report.get("controls") or report.get("proof_on"):
        console.print(_per_control(report))
    if report.get("chunk_cost"):
        console.print(_chunk_cost(report))
    for step in report.get("stock_refusals", []):
        console.print(f"{step['step']}. {step['what']}\n   -> {step['error'] or 'no error'}", markup=False)
    for reason in report["reasons"]:
        console.print(reason, style="red", markup=False)
    verdict = "ok" if report["ok"] else "FAILED"
    console.print(f"{verdict} in {report.get('seconds', 0)} s", style="green" if report["ok"] else "bold red")


def _per_prompt(report: dict[str, Any]) -> Table:
    names = list(report["set_ups"])
    table = Table(title="accept length / TTFT ms / worst teacher-forced gap, ! = not the oracle's tokens")
    for title in ("tokens", *names):
        table.add_column(title, justify="right")
    for row in report["per_prompt"]:
        cells = []
        for name in names:
            cell = row.get(name)
            if cell is None:
                cells.append("-")
                continue
            mark = "!" if cell["as_expected"] is False else ""
            values = (cell["accept_length"], cell["ttft_ms"], cell["worst_gap"])
            cells.append(" / ".join("-" if value is None else f"{value:g}" for value in values) + mark)
        table.add_row(str(row["tokens"]), *cells)
    return table


def _chunk_cost(report: dict[str, Any]) -> Table:
    table = Table(title=f"one chunk of {set_ups.CHUNK} tokens on CP prefill: NCCL's log, rank 0; memory: SGLang's log")
    for title in ("", "NCCL calls", "gathered MB", "largest gathers, MB", "draft GB per rank"):
        table.add_column(title)
    for name, each in report["chunk_cost"].items():
        draft = [value for kind, values in each["loaded_gb"].items() if kind.endswith("DSpark") for value in values]
        table.add_row(
            name,
            ", ".join(f"{count} {call}" for call, count in each["nccl"].get("calls", {}).items()),
            f"{each['nccl'].get('gather_received_bytes', 0) / 1e6:.2f}",
            ", ".join(f"{size / 1e6:.2f}" for size in each["nccl"].get("largest_gathers", [])),
            ", ".join(f"{value:g}" for value in draft),
        )
    return table


def _per_set_up(report: dict[str, Any]) -> Table:
    table = Table(title="set-ups")
    titles = ("", "accept", "/ non-CP", "at once", "answered", "first proposals", "rows = decode", "rows vs CP1")
    for title in titles:
        table.add_column(title)
    for name, each in report["set_ups"].items():
        proposals, sent = each.get("proposal_agreement") or {}, each.get("rows_prefill_vs_decode") or {}
        rows = each.get("rows_vs_cp1") or each.get("rows_vs_non_cp") or each.get("rows_vs_plugin")
        table.add_row(
            name,
            str(each["mean_accept_length"]),
            str(each.get("accept_length_vs_non_cp", "")),
            str(each["mean_accept_length_together"]),
            f"{each['answered']}/{each['asked']}",
            str(proposals.get("first_step", "")),
            f"{sent['rows_byte_equal']}/{sent['rows']}" if sent else "",
            f"{rows['rows_byte_equal']}/{rows['rows']} equal, worst {rows['max_rel_err']:.2g}" if rows else "",
        )
    return table


def _per_control(report: dict[str, Any]) -> Table:
    table = Table(title="negative controls")
    for title in ("fault", "accept, right rows", "accept, proof off", "first proposals", "proof on"):
        table.add_column(title)
    on = {each["control"]: each for each in report.get("proof_on", [])}
    for fault in dict.fromkeys([*report.get("controls", {}), *on]):
        off, refused = report.get("controls", {}).get(fault, {}), on.get(fault)
        text = ""
        if refused:
            text = "AlignmentError" if "AlignmentError" in refused["error"] else "no AlignmentError"
            text += f" on {refused['ranks_with_alignment_error']} ranks, next request "
            text += "answered" if refused["next_request_answered"] else "NOT answered"
        proposals = off.get("proposal_agreement") or {}
        table.add_row(
            fault,
            str(off.get("reference_accept_length", "")),
            str(off.get("mean_accept_length", "")),
            str(proposals.get("first_step", "")),
            text,
        )
    return table
