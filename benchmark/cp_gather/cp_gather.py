"""Gathers of a CP prefill forward, all designs side by side: captured shard -> written draft-pool rows.

cp_gather.py --json FILE                         one process per visible GPU, NCCL
cp_gather.py --emulate-cp 8 --tokens 8K          one GPU plays rank 0, the link is emulated by device copies
cp_gather.py --device cpu                        gloo: rows and bytes are checked, nothing is timed
cp_gather.py plot RESULT.json OUT.png            a plot of an earlier result

Exit status: 0 ok, 1 a check or a rank failed (what was measured is reported), 2 usage.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
for folder in (HERE, REPOSITORY / "python"):
    sys.path.insert(0, str(folder))

EMULATED = "link emulated"
COMMIT = "DSPARK_CP_COMMIT"
SIZES = (2, 4, 8)
PARTS = ("plan", "mean", "project", "gather", "reorder", "head", "proof", "write")
GPU_TOKENS = tuple(1024 << power for power in range(7))
GPU_HIDDEN = (4096, 7168)
CPU_TOKENS = (67, 800)
CPU_HIDDEN = (64, 96)
WORST_ERROR = 3e-2
"""Relative error of a pool row against stock's, above which it is another row: products of other shapes differ by a
bit, which can move an e4m3 code by one step; a wrong row has an error near 1.4."""
WRITER_ERROR, WRITER_EQUAL = 5e-3, 0.99
NOT_THERE = "-"
BUSY = "ms, GPU kept busy"
"""Unit of what is plotted: in serving, the GPU still runs target layers while the host launches these kernels."""
TABLE_WIDTH = 160


class Usage(Exception):
    """Arguments that cannot be met here."""


# ---------------------------------------------------------------------------------------------------------- arguments


def size(text: str) -> int:
    """A whole number of at least 1, K stands for 1024."""
    digits, factor = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    if not digits.isdecimal() or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed is a whole number of at least 1, such as 8192 or 8K")
    return int(digits) * factor


def build_parser() -> argparse.ArgumentParser:
    """Options of a measurement."""
    parser = argparse.ArgumentParser(
        prog="cp_gather.py",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="cp_gather.py plot RESULT.json OUT.png plots an earlier result. Exit status: 0 ok, 1 failed, 2 usage.",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: check rows and bytes on gloo")
    parser.add_argument("--cp", type=int, nargs="+", choices=SIZES, help="default: all that the visible GPUs allow")
    parser.add_argument("--emulate-cp", type=int, choices=SIZES, metavar="N", help="one GPU as rank 0 of N (2, 4, 8)")
    parser.add_argument("--tokens", type=size, nargs="+", metavar="T", help="default: 1K to 64K; cpu: 67 800")
    parser.add_argument("--hidden", type=size, nargs="+", metavar="H", help="default: 4096 7168; cpu: 64 96")
    parser.add_argument("--runs", type=size, default=36, help="timed runs per design and shape (default: %(default)s)")
    parser.add_argument("--timeout", type=size, default=1500, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot (.png, .svg, .pdf); needs matplotlib")
    parser.add_argument("--sabotage", choices=("row", "payload", "raise"), default="", help=argparse.SUPPRESS)
    return parser


def plot_parser() -> argparse.ArgumentParser:
    """Options of `plot`."""
    parser = argparse.ArgumentParser(prog="cp_gather.py plot", description="Plot an earlier result.")
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    parser.add_argument("plot", type=Path, metavar="OUT", help=".png, .svg or .pdf")
    return parser


def check_output(path: Path | None, option: str) -> None:
    """Raise `Usage` if a file cannot be written there."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise Usage(f"{option} {path}: allowed is a file in a folder that exists")


def check_plot(path: Path | None) -> None:
    """Raise `Usage` if no plot can be written there: before anything is measured."""
    check_output(path, "--plot")
    if path is None:
        return
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise Usage(f"--plot {path}: allowed is a name that ends in .png, .svg or .pdf")
    if importlib.util.find_spec("matplotlib") is None:
        raise Usage(
            "a plot needs matplotlib, which is not installed; pip install matplotlib, or run with --json and plot that"
            " file elsewhere: cp_gather.py plot RESULT.json OUT.png"
        )


def visible_gpus() -> int:
    """How many GPUs torch sees; `Usage` if the pool writer cannot run on them."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise Usage("no GPU is visible; --device cpu checks rows and bytes without one")
    if torch.cuda.get_device_capability(0) < (8, 9):
        raise Usage("the pool writer needs a GPU with e4m3 (compute capability 8.9 or later)")
    if importlib.util.find_spec("triton") is None:
        raise Usage("the pool writer needs triton, which comes with torch on Linux")
    return count


def plan_jobs(args: argparse.Namespace) -> list[Any]:
    """What to run.

    Raises:
        Usage: it cannot be run here.
    """
    from gather_ranks import Job

    cpu = args.device == "cpu"
    tokens = tuple(sorted(set(args.tokens or (CPU_TOKENS if cpu else GPU_TOKENS))))
    hidden = tuple(sorted(set(args.hidden or (CPU_HIDDEN if cpu else GPU_HIDDEN))))
    if cpu and args.emulate_cp:
        raise Usage("--emulate-cp is for a GPU; on a CPU every rank is a process, see --cp")
    if args.emulate_cp and args.cp:
        raise Usage("give --cp or --emulate-cp, not both")
    if args.sabotage and not cpu:
        raise Usage("--sabotage is for --device cpu")
    if cpu:
        mode, sizes = "cpu", args.cp or SIZES
    elif args.emulate_cp:
        visible_gpus()
        mode, sizes = "emulate", (args.emulate_cp,)
    else:
        gpus = visible_gpus()
        mode, sizes = "gpu", args.cp or [each for each in SIZES if each <= gpus]
        if not sizes:
            raise Usage("one GPU is visible and CP needs two; --emulate-cp N plays one rank of N on it")
        if max(sizes) > gpus:
            raise Usage(f"--cp {max(sizes)} with {gpus} visible GPU(s); allowed is at most one rank per GPU")
    if tokens[0] < max(sizes):
        raise Usage(f"--tokens {tokens[0]} at CP {max(sizes)}: SGLang splits no batch with fewer tokens than ranks")
    odd = [each for each in hidden if each % 4]
    if odd:
        raise Usage(f"--hidden {odd[0]}: allowed is a multiple of 4 (rows are filled up to 8 bytes otherwise)")
    return [Job(mode, cp, tokens, hidden, args.runs, args.sabotage) for cp in sorted(set(sizes))]


# ------------------------------------------------------------------------------------------------------------ results


def output_of(*command: str) -> str | None:
    """What a command prints, None if it cannot be run."""
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def version(package: str) -> str | None:
    """Of an installed distribution."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def frame(arguments: Sequence[str], args: argparse.Namespace, mode: str) -> dict[str, Any]:
    """The result without figures. `changed`: files of package and benchmark that differ from the commit."""
    told = os.environ.get(COMMIT)
    changed = None if told else output_of("git", "status", "--porcelain", "--", "python", "benchmark/cp_gather")
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if mode != "cpu" else None
    return {
        "benchmark": "cp_gather",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": told or output_of("git", "rev-parse", "HEAD"),
        "changed": None if changed is None else len(changed.splitlines()),
        "command": shlex.join(["cp_gather.py", *arguments]),
        "mode": mode,
        "link": {"gpu": "NCCL", "emulate": EMULATED, "cpu": "gloo"}[mode],
        "driver": driver.splitlines()[0] if driver else None,
        "torch": version("torch"),
        "triton": version("triton"),
        "python": platform.python_version(),
        "runs": args.runs,
        "facts": {},
        "rates": [],
        "cells": [],
        "ok": False,
        "problems": [],
    }


def place(cell: Mapping[str, Any]) -> str:
    """A cell for people."""
    return f"cp {cell['cp']}, H {cell['hidden']}, T {cell['tokens']}, {cell['design']}"


def problems_of(cell: Mapping[str, Any]) -> list[str]:
    """What is wrong with a cell."""
    found, check = [], cell["check"]
    expected = cell["formula_bytes"] + cell["tail_bytes"]
    if not cell["same_on_all_ranks"]:
        found.append("ranks received different numbers of bytes")
    if cell["received_bytes"] != expected:
        found.append(f"{cell['received_bytes']} bytes received, core.costs says {expected}")
    if cell["collectives"] != cell["formula_collectives"]:
        found.append(f"{cell['collectives']} collectives, core.costs says {cell['formula_collectives']}")
    found += [f"the proof refused the batch: {text}" for text in check["refused"][:1]]
    for kind, text in (("wrong_rows", "wrong pool rows"), ("misplaced_rows", "pool rows missing or not to be written")):
        bad = {rank: count for rank, count in enumerate(check.get(kind, [])) if count}
        if bad:
            found.append(f"{text}: " + ", ".join(f"{count} on rank {rank}" for rank, count in bad.items()))
    if not all(check.get("head_right", [])):
        found.append("the row for the LM head is wrong")
    worst = max(check.get("worst_relative_error", [0.0]))
    if not worst <= WORST_ERROR:
        found.append(f"a pool row differs from stock-layers' by {worst:.3g} (relative), allowed is {WORST_ERROR}")
    return [f"{place(cell)}: {text}" for text in found]


def complete(result: dict[str, Any]) -> None:
    """Figures that follow from others: limit, ratios, problems."""
    rates = {each["cp"]: each for each in result["rates"]}
    stock = {
        (cell["cp"], cell["hidden"], cell["tokens"]): cell
        for cell in result["cells"]
        if cell["design"] == "stock-layers"
    }
    for cell in result["cells"]:
        result["problems"] += problems_of(cell)
        if "ms" not in cell:
            continue
        rate, base = rates[cell["cp"]], stock[(cell["cp"], cell["hidden"], cell["tokens"])]
        transfer = cell["received_bytes"] / rate["link_gb_s"] / 1e6
        cell["limit_ms"] = transfer + cell["flops"] / rate["matmul_tflop_s"] / 1e9
        for series in ("ms", "queued_ms"):
            cell[series]["of_limit"] = cell[series]["median"] / cell["limit_ms"]
            cell[series]["of_stock"] = cell[series]["median"] / base[series]["median"]
        cell["peak_of_stock"] = cell["peak_bytes"] / base["peak_bytes"]
    cells = {(cell["cp"], cell["hidden"], cell["tokens"], cell["design"]): cell for cell in result["cells"]}
    for (*shape, design), cell in cells.items():
        bare = cells.get((*shape, f"{design}-unproved"))
        if bare is not None and "ms" in cell:
            cost = cell["queued_ms"]["median"] - bare["queued_ms"]["median"]
            cell["proof"] = {"queued_ms": cost, "share": cost / cell["queued_ms"]["median"]}
    writer = result["facts"].get("writer_check")
    if writer and not (writer["worst_relative_error"] <= WRITER_ERROR and writer["equal_bytes"] >= WRITER_EQUAL):
        result["problems"].append(f"the pool writer of this benchmark differs from core.reference: {writer}")
    result["ok"] = not result["problems"]


def milliseconds(value: float) -> str:
    """For a table."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def megabytes(value: float) -> str:
    """For a table."""
    return f"{value / 1e6:.2f}" if value < 1e8 else f"{value / 1e6:.0f}"


def tables(result: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, headings and rows of each table."""
    cells = result["cells"]
    note = f" ({EMULATED})" if result["link"] == EMULATED else ""
    if result["mode"] == "cpu":
        heading = ["cp", "H", "T", "design", "collectives", "bytes in", "formula", "head rows", "rows"]
        rows = []
        for cell in cells:
            wrong = sum(cell["check"]["wrong_rows"])
            rows.append(
                [
                    *(str(cell[name]) for name in ("cp", "hidden", "tokens", "design", "collectives")),
                    *(f"{cell[name]:,}" for name in ("received_bytes", "formula_bytes", "tail_bytes")),
                    f"{wrong} wrong" if wrong else "equal",
                ]
            )
        return [("Bytes that a rank receives", heading, rows)]
    found = []
    for cp, hidden in dict.fromkeys((cell["cp"], cell["hidden"]) for cell in cells):
        heading = ["T", "design", "ms", "p10", "p90", "queued", "of stock", "MB in", "coll.", "peak MB", "limit"]
        heading.append("x limit")
        times, parts = [], []
        for cell in cells:
            if (cell["cp"], cell["hidden"]) != (cp, hidden):
                continue
            ms, queued = cell["ms"], cell["queued_ms"]
            times.append(
                [
                    *(str(cell["tokens"]), cell["design"]),
                    *(milliseconds(ms[name]) for name in ("median", "p10", "p90")),
                    milliseconds(queued["median"]),
                    f"{ms['of_stock']:.3f}",
                    megabytes(cell["received_bytes"]),
                    str(cell["collectives"]),
                    megabytes(cell["peak_bytes"]),
                    milliseconds(cell["limit_ms"]),
                    f"{ms['of_limit']:.2f}",
                ]
            )
            parts.append([str(cell["tokens"]), cell["design"]])
            for name in PARTS:
                part = cell["parts"].get(name)
                parts[-1].append(
                    f"{milliseconds(part['in_path_ms'])} / {milliseconds(part['alone_ms'])}" if part else NOT_THERE
                )
        where = f"cp {cp}, H {hidden}{note}"
        found.append((f"{where}: captured shard to pool rows, ms", heading, times))
        found.append((f"{where}: parts in the path / alone, ms", ["T", "design", *PARTS], parts))
        passes = [
            [str(cell["tokens"]), name, *(f"{each[key]:.4f}" for key in ("ms", "torch_ms")), f"{each['of_torch']:.2f}"]
            for cell in cells
            if (cell["cp"], cell["hidden"]) == (cp, hidden)
            for name, each in cell.get("kernels", {}).items()
        ]
        found.append(
            (f"{where}: passes over rows, kernel and torch", ["T", "design", "ms", "torch", "of torch"], passes)
        )
        proofs = [
            [str(cell["tokens"]), cell["design"], f"{cell['proof']['queued_ms']:.4f}", f"{cell['proof']['share']:.2%}"]
            for cell in cells
            if (cell["cp"], cell["hidden"]) == (cp, hidden) and "proof" in cell
        ]
        found.append((f"{where}: what the proof adds while the GPU is busy", ["T", "design", "ms", "share"], proofs))
    return found


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """With rich, or plainly where it is not installed."""
    left = headings.index("design")
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[index]) for row in (headings, *rows)) for index in range(len(headings))]
        print(f"\n{title}")
        for row in (headings, *rows):
            cells = [
                cell.ljust(width) if index == left else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            print("  ".join(cells).rstrip())
        return
    table = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=max(Console().width, TABLE_WIDTH)).print(table)


def report(result: Mapping[str, Any]) -> None:
    """Tables, rates, problems."""
    for title, headings, rows in tables(result):
        print_table(title, headings, rows)
    for rate in result["rates"]:
        print(
            f"cp {rate['cp']}: {rate['link_gb_s']:.0f} GB/s arrive at a rank"
            f" ({result['link']}, {rate['link_probe_bytes'] / 1e6:.0f} MB), {rate['matmul_tflop_s']:.0f} TFLOP/s bf16"
        )
    if result["link"] == EMULATED:
        print(f"{EMULATED}: no other GPU took part; device copies of the same bytes stand for the all-gather.")
    for text in result["problems"]:
        print(f"problem: {text}", file=sys.stderr)


# --------------------------------------------------------------------------------------------------------------- plot


def panels(result: Mapping[str, Any]) -> list[list[tuple[str, str, dict[str, list[tuple[int, float]]]]]]:
    """Rows of panels, a column per H: (title, unit, design -> [(T, value), ...])."""
    cells = result["cells"]
    note = f", {EMULATED}" if result["link"] == EMULATED else ""
    rows = []
    for cp in dict.fromkeys(cell["cp"] for cell in cells):
        for unit in (BUSY, "MB received per rank"):
            row = []
            for hidden in dict.fromkeys(cell["hidden"] for cell in cells):
                lines: dict[str, list[tuple[int, float]]] = {}
                for cell in sorted(cells, key=lambda cell: int(cell["tokens"])):
                    if (cell["cp"], cell["hidden"]) == (cp, hidden) and (unit != BUSY or "ms" in cell):
                        value = cell["queued_ms"]["median"] if unit == BUSY else cell["received_bytes"] / 1e6
                        lines.setdefault(cell["design"], []).append((cell["tokens"], value))
                if lines:
                    row.append((f"cp {cp}, H {hidden}{note if unit == BUSY else ''}", unit, lines))
            if row:
                rows.append(row)
    return rows


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = panels(result)
    columns = max(len(row) for row in rows)
    figure, axes = pyplot.subplots(len(rows), columns, figsize=(5.2 * columns, 3.6 * len(rows)), squeeze=False)
    for row, row_axes in zip(rows, axes, strict=True):
        for axis in row_axes[len(row) :]:
            axis.set_visible(False)
        for (title, unit, lines), axis in zip(row, row_axes, strict=False):
            for name, points in lines.items():
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
            axis.set(title=title, ylabel=unit, xlabel="tokens", yscale="log")
            axis.set_xscale("log", base=2)
            axis.grid(True, which="both", alpha=0.3)
    axes[0][0].legend(fontsize=7)
    gpu = result["facts"].get("gpu", "CPU")
    figure.suptitle(f"Captured shard to draft-pool rows, {gpu}, {result['date'][:10]}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_main(arguments: Sequence[str]) -> int:
    """`cp_gather.py plot`."""
    args = plot_parser().parse_args(arguments)
    check_plot(args.plot)
    try:
        result = json.loads(args.result.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Usage(f"{args.result}: {error}") from None
    if not isinstance(result, dict) or result.get("benchmark") != "cp_gather" or not result.get("cells"):
        raise Usage(f"{args.result}: allowed is a JSON result of cp_gather.py with figures")
    draw(result, args.plot)
    return 0


# ---------------------------------------------------------------------------------------------------------------- run


def measure(jobs: Sequence[Any], result: dict[str, Any], timeout: float) -> None:
    """Run the jobs one after the other; a job that fails is a problem and ends the run."""
    from gather_ranks import RanksFailed, run_ranks

    deadline = time.monotonic() + timeout
    live = sys.stderr.isatty()
    for job in jobs:
        try:
            with contextlib.closing(run_ranks(job, deadline)) as messages:
                for kind, value in messages:
                    if kind == "say":
                        before, after = ("\r\x1b[K", "") if live else ("", "\n")
                        print(before + value, end=after, file=sys.stderr, flush=True)
                    elif kind == "facts":
                        result["facts"] = value
                    else:
                        result["cells" if kind == "cell" else kind].append(value)
        except RanksFailed as error:
            result["problems"].append(str(error))
            return
        finally:
            if live:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    # A terminated parent ends its ranks on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if given[:1] == ["plot"]:
            return plot_main(given[1:])
        args = build_parser().parse_args(given)
        check_output(args.json, "--json")
        check_plot(args.plot)
        jobs = plan_jobs(args)
        result = frame(given, args, jobs[0].mode)
        measure(jobs, result, args.timeout)
        complete(result)
        report(result)
        if args.json is not None:
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if args.plot is not None and result["cells"]:
            draw(result, args.plot)
        return 0 if result["ok"] else 1
    except Usage as error:
        print(f"cp_gather.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
