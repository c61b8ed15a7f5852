"""What DSpark costs a PD prefill server with context parallelism: input tokens/s and time to the first token.

prefill_cost.py --json cost.json                              all visible GPUs, a rank on each
prefill_cost.py --gpus 0 --ranks-per-gpu 2 --modes window     tries the program on one GPU, its times say nothing
prefill_cost.py plot cost.json cost.png                       a plot of an earlier result

Exit status: 0 measured, 1 something failed (what was measured is reported), 2 usage. A missed goal is no failure.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "draft_cost"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "prefill_cost"))

import bench_http as http
import cost_servers as servers
from cost_plot import draw
from cost_rounds import (
    FEWEST_ROUNDS,
    FIRST_TOKEN_ID,
    GOAL_PERCENT,
    NO_TRANSFER_HOST,
    Load,
    Round,
    figures_of,
    measure,
    summary_of,
)
from draft_cost import package_changed
from draft_servers import last_of, machine
from rich.console import Console
from rich.table import Table

from sglang_dspark_cp.smoke import cuda, set_ups
from sglang_dspark_cp.smoke.servers import HOST, ServerFailed, ServerSet

RESERVE = 10.0
"""Seconds of the limit that are kept for stopping servers and writing the result."""
NOT_TOLD = "n/a"
PLOTS = (".png", ".svg", ".pdf")


# ------------------------------------------------------------------------------------------------------ command line


def build_parser() -> argparse.ArgumentParser:
    """Options of a measurement."""
    parser = argparse.ArgumentParser(
        prog="prefill_cost.py",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="prefill_cost.py plot RESULT.json OUT.png plots an earlier result. Exit status: 0 measured, 1 failed,"
        " 2 usage.",
    )
    parser.add_argument("--gpus", metavar="LIST", help="GPU indices, such as 0,1 (default: all visible)")
    parser.add_argument("--ranks-per-gpu", type=int, default=1, choices=(1, 2, 4, 8), help="(default: %(default)s)")
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=servers.SIDES,
        default=list(servers.DEFAULT_SIDES),
        help="sides beside `off`: gather modes; `off-2`, a second server without DSPARK that shows how much two equal"
        " servers differ; `stock`, DSPARK without this package, on releases that serve it (default: %(default)s)",
    )
    parser.add_argument("--input-len", type=http.positive, default=8192, metavar="T", help="(default: %(default)s)")
    parser.add_argument("--chunk", type=http.positive, metavar="T", help="chunk size (default: --input-len)")
    parser.add_argument("--rounds", type=http.positive, default=24, help="at most (default: %(default)s)")
    parser.add_argument("--warmup", type=http.not_negative, default=2, help="rounds before (default: %(default)s)")
    parser.add_argument("--single", type=http.positive, default=5, help="requests one by one (default: %(default)s)")
    parser.add_argument("--together", type=http.positive, default=8, help="requests at once (default: %(default)s)")
    parser.add_argument("--concurrency", type=http.positive, default=4, help="of those (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument("--timeout", type=http.positive_seconds, default=120.0, help="s/request (default: %(default)s)")
    parser.add_argument("--hidden", type=http.positive, default=4096, metavar="H", help="(default: %(default)s)")
    parser.add_argument("--layers", type=http.positive, default=16, help="target layers (default: %(default)s)")
    parser.add_argument("--experts", type=http.positive, default=64, help="per layer (default: %(default)s)")
    parser.add_argument("--moe-intermediate", type=http.positive, default=1024, help="(default: %(default)s)")
    parser.add_argument("--vocab", type=http.positive, default=16384, help="(default: %(default)s)")
    parser.add_argument("--limit", type=http.positive, default=560, metavar="S", help="end after S (default: 560)")
    parser.add_argument("--measure", type=http.positive, default=150, metavar="S", help="of it kept for rounds (150)")
    parser.add_argument("--first-alone", action="store_true", help="boot `off` first: it fills cold JIT caches")
    parser.add_argument("--ports", type=http.port_number, default=30000, metavar="FIRST", help="first port to try")
    parser.add_argument("--server-args", default="", metavar="ARGS", help="added to every server's command line")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the checkpoint goes; it is deleted afterwards")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy the servers' logs there")
    parser.add_argument("--json", type=http.result_file, metavar="FILE", help="write the result there")
    return parser


def chosen_sides(modes: Sequence[str]) -> list[str]:
    """The sides of a run, the one without DSPARK first."""
    return [side for side in servers.SIDES if side == servers.BASE or side in modes]


def usage_of(args: argparse.Namespace) -> tuple[set_ups.Gpus, Any]:
    """GPUs and sizes of a run.

    Raises:
        UsageError: the options do not fit together or do not fit the machine.
    """
    sides = chosen_sides(args.modes)
    if len(sides) < 2:
        raise set_ups.UsageError("--modes off: nothing to compare; name a gather mode or off-2")
    if args.vocab <= FIRST_TOKEN_ID:
        raise set_ups.UsageError(f"--vocab {args.vocab}: allowed is more than {FIRST_TOKEN_ID}, lower ids are special")
    if args.measure + RESERVE >= args.limit:
        raise set_ups.UsageError(f"--measure {args.measure}: allowed is less than --limit {args.limit} by {RESERVE:g}")
    if args.dir is not None and not args.dir.is_dir():
        raise set_ups.UsageError(f"--dir {args.dir}: no such folder")
    cuda.check_ports(args.ports)
    gpus = set_ups.choose_gpus(cuda.visible_gpus(), args.gpus, None, None, args.ranks_per_gpu)
    if gpus.cp_size < 2:
        raise set_ups.UsageError("context parallelism takes at least two ranks: --gpus or --ranks-per-gpu")
    if args.input_len < gpus.cp_size:
        raise set_ups.UsageError(f"--input-len {args.input_len}: SGLang splits no prompt shorter than CP")
    geometry = servers.geometry_of(args, gpus.cp_size)
    servers.check_fit(geometry, gpus, len(sides))
    return gpus, geometry


# --------------------------------------------------------------------------------------------------------------- run


def run(args: argparse.Namespace, given: Sequence[str], console: Console) -> dict[str, Any]:
    """Boot, measure, report.

    Raises:
        UsageError: see `usage_of`.
    """
    gpus, geometry = usage_of(args)
    sides = chosen_sides(args.modes)
    load = Load(args.input_len, args.single, args.together, args.concurrency, args.vocab, args.timeout)
    found: dict[str, list[Round]] = {side: [] for side in sides}
    problems: list[str] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="prefill-cost-", dir=args.dir) as scratch:
        fleet = servers.Fleet(args, gpus, sides, Path(scratch), console)

        def usable() -> list[str]:
            return [side for side in fleet.usable() if fleet.alive(side)] if fleet.alive(servers.BASE) else []

        try:
            model = fleet.write(geometry)
            with ServerSet() as group:
                fleet.start(group, model, fleet.left() - args.measure - RESERVE)
                if len(usable()) >= 2:
                    asyncio.run(
                        measure(
                            {side: f"http://{HOST}:{server.port}" for side, server in fleet.servers.items()},
                            load,
                            rounds=args.rounds,
                            warmup=args.warmup,
                            seed=args.seed,
                            found=found,
                            usable=usable,
                            time_left=lambda: fleet.left() - RESERVE,
                            say=fleet.say,
                        )
                    )
                else:
                    problems.append(f"nothing was measured: it takes {servers.BASE} and another side")
        except (ServerFailed, OSError, ValueError, KeyboardInterrupt) as error:
            problems.append(f"{type(error).__name__}: {last_of(str(error))}")
        about_servers = dict(fleet.report())
        problems += [f"{side}: {why}" for side, why in fleet.failed.items()]
        if args.keep is not None:
            args.keep.mkdir(parents=True, exist_ok=True)
            for path in fleet.folder.glob("*.log"):
                shutil.copy(path, args.keep)
        written = fleet.written
    for side, rounds in found.items():
        problems += [f"{side}, round {done.number}: {text}" for done in rounds for text in done.failures[:1]]
        counted = sum(done.number > 0 and not done.failures for done in rounds)
        if counted < FEWEST_ROUNDS and side not in fleet.failed:
            problems.append(f"{side}: {counted} whole rounds, a cost takes {FEWEST_ROUNDS}")
    return {
        **about(given),
        "ok": not problems,
        "problems": problems,
        **machine(),
        "gpus_used": len(set(gpus.prefill)),
        "ranks_per_gpu": args.ranks_per_gpu,
        "cp_size": gpus.cp_size,
        "checkpoint": {**written, "quant": "fp8", "weights": "random"},
        "load": vars(load) | {"chunk": args.chunk or args.input_len, "warmup_rounds": args.warmup, "seed": args.seed},
        "measured_by": {
            "transfer": f"none: bootstrap host {NO_TRANSFER_HOST}, SGLang's mark for KV that goes nowhere",
            "ttft": "from sending a request to the prefill server's answer, one request at a time, median of a round",
            "input_tokens_per_s": "prompt tokens / seconds of the requests that are sent at once",
            "cost": "against `off` of the same round; median of the rounds, 95 % interval by resampling rounds",
        },
        "goal_percent": GOAL_PERCENT,
        "servers": about_servers,
        "rounds": {side: [figures_of(done, load) for done in rounds] for side, rounds in found.items()},
        "summary": summary_of(found, load, servers.BASE),
        "seconds": round(time.monotonic() - started, 1),
    }


def about(given: Sequence[str]) -> dict[str, Any]:
    """What the result says about its making. `DSPARK_CP_COMMIT` names the commit where there is no git."""
    return {
        "benchmark": "prefill_cost",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get("DSPARK_CP_COMMIT") or cuda._commit(),
        "package_changed_since": package_changed(),
        "command": shlex.join(["prefill_cost.py", *given]),
        **{name: importlib.metadata.version(name) for name in ("sglang", "torch")},
        "python": platform.python_version(),
    }


# --------------------------------------------------------------------------------------------------------- printing


def shown_cost(cost: Mapping[str, Any] | None, series: str) -> str:
    """A cost for the table."""
    found = cost[series] if cost else None
    if found is None:
        return ""
    return f"{found['percent']:+.2f} % ({found['low']:+.2f} to {found['high']:+.2f}) {found['verdict']}"


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Medians and costs."""
    load = result["load"]
    table = Table(
        title=f"CP{result['cp_size']} prefill alone, {load['input_len']} tokens, goal at most {GOAL_PERCENT:g} %"
    )
    for title in ("", "TTFT, ms", "input tokens/s", "cost, TTFT", "more ms", "cost, tokens/s", "same first token"):
        table.add_column(title, justify="right")
    for side, each in result["summary"].items():
        cost, same = each["cost"], each["first_tokens_as_off"]
        more = cost["ttft"]["ms"] if cost and cost["ttft"] else None
        table.add_row(
            side,
            NOT_TOLD if each["ttft_ms"] is None else f"{each['ttft_ms']:.2f}",
            NOT_TOLD if each["input_tokens_per_s"] is None else f"{each['input_tokens_per_s']:,.0f}",
            shown_cost(cost, "ttft"),
            "" if more is None else f"{more:+.2f}",
            shown_cost(cost, "throughput"),
            "" if same is None else f"{same:.1%}",
        )
    console.print(table)
    cached = {side: sum(each["cached_tokens"] for each in rounds) for side, rounds in result["rounds"].items()}
    for side, count in cached.items():
        if count:
            console.print(f"{side}: {count} tokens came from the prefix cache; its figures are too good", markup=False)
    if result["ranks_per_gpu"] > 1:
        console.print("Several ranks share a GPU: these times say nothing about speed.", markup=False)
    for problem in result["problems"]:
        console.print(f"failed: {problem}", style="red", markup=False, soft_wrap=True)


# --------------------------------------------------------------------------------------------------------------- plot


def plot_main(given: Sequence[str]) -> int:
    """`prefill_cost.py plot`."""
    parser = argparse.ArgumentParser(prog="prefill_cost.py plot", description="Plot an earlier result.")
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    parser.add_argument("plot", type=http.result_file, metavar="OUT", help=", ".join(PLOTS))
    args = parser.parse_args(given)
    if args.plot.suffix not in PLOTS:
        parser.error(f"{args.plot}: allowed is a name that ends in {', '.join(PLOTS)}")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("a plot needs matplotlib, which is not installed")
    try:
        result = json.loads(args.result.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"{args.result}: {error}")
    if not isinstance(result, dict) or result.get("benchmark") != "prefill_cost":
        parser.error(f"{args.result}: allowed is a JSON result of prefill_cost.py")
    if not any(each["cost"] and any(each["cost"].values()) for each in result["summary"].values()):
        parser.error(f"{args.result}: no side has a cost in it")
    draw(result, args.plot)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["plot"]:
        return plot_main(given[1:])
    args = build_parser().parse_args(given)
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 160)
    try:
        result = run(args, given, console)
    except set_ups.UsageError as error:
        console.print(f"prefill_cost.py: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    show(console, result)
    if args.json is not None:
        http.write_json(args.json, result)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
