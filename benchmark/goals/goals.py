"""The project's goals beside what result files measured: a table, and plots.

goals.py RESULT.json ...                          a table of goals
goals.py RESULT.json ... --markdown FILE          the same as Markdown
goals.py RESULT.json ... --plot FOLDER            plots there, goals-RESULT.png
goals.py merge OUT.json GATHER.json ...           results of cp_gather for other sizes or tokens in one file

Results of `smoke --device cuda`, benchmark/cp_gather and benchmark/prefill_cost are known.
Exit status: 0 no goal was missed, 1 one was, 2 usage. A goal that nothing was measured for is not missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MET, MISSED, OPEN, NONE, INFO = "met", "MISSED", "not settled", "not measured", "for information"
ACCEPT_WITHIN = 0.02
ROWS_WITHIN = 1e-2
GATHER_CP, GATHER_TOKENS = 8, 8192
STOCK = "stock-layers"
FASTER = {"kv": 8.0, "window-noradix": 25.0}
"""Design of cp_gather -> how many times faster than stock per layer it is to be."""
OF_LIMIT = 1.5
NOT_OURS = {"off-2": "control: 0 %", "stock": "none, for comparison"}
"""Sides of prefill_cost that no goal is about."""
SERIES = {"ttft": "TTFT", "throughput": "input tokens/s"}
GATHER, PREFILL, SMOKE = "cp_gather", "prefill_cost", "smoke"
KINDS = (SMOKE, GATHER, PREFILL)


class Usage(Exception):
    """Files or options that cannot be used."""


@dataclass(frozen=True)
class Goal:
    """One line of the table."""

    what: str
    goal: str
    measured: str
    verdict: str
    source: str = ""


def judged(met: bool | None) -> str:
    """Verdict of a goal; None is one that nothing was measured for."""
    return NONE if met is None else MET if met else MISSED


# -------------------------------------------------------------------------------------------------------------- files


def kind_of(result: Any) -> str | None:
    """Which program wrote a result, None if it is not one of those that are known."""
    if not isinstance(result, dict):
        return None
    if result.get("benchmark") in (GATHER, PREFILL):
        return str(result["benchmark"])
    return SMOKE if result.get("device") == "cuda" and "reasons" in result else None


def read(path: Path) -> dict[str, Any]:
    """A result.

    Raises:
        Usage: it is none, or of a program that is not known here.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Usage(f"{path}: {error}") from None
    if kind_of(result) is None:
        raise Usage(f"{path}: allowed is a JSON result of smoke --device cuda, cp_gather or prefill_cost")
    found: dict[str, Any] = result
    return found


def merged(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Results of cp_gather in one: cells, rates and problems of all; the first one's frame.

    Raises:
        Usage: they are not of one program on one machine at one commit.
    """
    for key in ("benchmark", "mode", "commit", "torch", "driver"):
        values = {str(result.get(key)) for result in results}
        if len(values) > 1:
            raise Usage(f"results with {key} {', '.join(sorted(values))} do not belong into one file")
    if results[0].get("benchmark") != GATHER:
        raise Usage("merge takes results of cp_gather")
    whole: dict[str, Any] = dict(results[0])
    for key in ("cells", "rates", "problems"):
        whole[key] = [each for result in results for each in result[key]]
    places = [(cell["cp"], cell["hidden"], cell["tokens"], cell["design"]) for cell in whole["cells"]]
    if len(set(places)) < len(places):
        raise Usage("two of the results hold the same size, H, T and design")
    whole["cells"].sort(key=lambda cell: (cell["cp"], cell["hidden"], cell["tokens"]))  # designs keep their order
    whole["facts"] = next((result["facts"] for result in results if result["facts"]), {})
    whole["ok"] = all(result["ok"] for result in results)
    whole["command"] = [result["command"] for result in results]
    return whole


# -------------------------------------------------------------------------------------------------------------- smoke


def goals_of_smoke(result: Mapping[str, Any], source: str) -> list[Goal]:
    """Accept length, draft rows, controls, collectives of a GPU run."""
    found = []
    set_ups: Mapping[str, Any] = result.get("set_ups", {})
    alone = (set_ups.get("dspark") or {}).get("mean_accept_length")
    for name, each in set_ups.items():
        if not name.startswith("cp"):
            continue
        accept, ratio = each.get("mean_accept_length"), each.get("accept_length_vs_non_cp")
        beside = f", without PD {alone:g}" if alone else ""
        found.append(
            Goal(
                f"{name}: accept length against PD without CP",
                f"within {ACCEPT_WITHIN:.0%}",
                "" if ratio is None or accept is None else f"{accept:g}, {ratio:.4f} of PD without CP{beside}",
                judged(None if ratio is None else ratio >= 1 - ACCEPT_WITHIN),
                source,
            )
        )
        rows, other = each.get("rows_vs_cp1"), "CP 1"
        if rows is None:
            rows, other = each.get("rows_vs_non_cp"), "PD without CP"
        found.append(
            Goal(
                f"{name}: draft rows against {other}, settled positions",
                f"error below {ROWS_WITHIN:g}, none missing",
                rows_text(rows),
                judged(None if not rows else rows["max_rel_err"] < ROWS_WITHIN and not rows["rows_missing"]),
                source,
            )
        )
        sent = each.get("rows_prefill_vs_decode")
        found.append(
            Goal(
                f"{name}: draft rows on decode against those that were sent",
                "all bytes equal, none missing",
                rows_text(sent),
                judged(None if not sent else sent["rows_byte_equal"] == sent["rows"] and not sent["rows_missing"]),
                source,
            )
        )
    found += [*controls(result, source), *collectives(result, source)]
    reasons = result["reasons"]
    text = "ok" if result.get("ok") else f"{len(reasons)} complaint(s), the first: {first_line(reasons)}"
    found.append(Goal("smoke: the run as a whole", "no complaint", text, judged(bool(result.get("ok"))), source))
    return found


def rows_text(rows: Mapping[str, Any] | None) -> str:
    """A comparison of rows."""
    return "" if not rows else f"{rows['rows_byte_equal']} of {rows['rows']} equal, worst {rows['max_rel_err']:.2g}"


def first_line(texts: Sequence[str]) -> str:
    """Of the first text."""
    return (texts[0].strip().splitlines() or [""])[0][:120] if texts else ""


def controls(result: Mapping[str, Any], source: str) -> list[Goal]:
    """Negative controls: as `smoke.judge` judges them."""
    found = []
    for fault, each in result.get("controls", {}).items():
        accept, right = each["mean_accept_length"], each["reference_accept_length"]
        first = (each.get("proposal_agreement") or {}).get("first_step")
        shows = None if not accept or not right else accept <= 0.7 * right or (first is not None and first < 0.5)
        text = f"{accept} instead of {right}" + ("" if first is None else f", first proposals {first:.0%}")
        goal = "accept length falls by 30 %, or proposals agree by less than half"
        found.append(Goal(f"control {fault}, proof off", goal, text, judged(shows), source))
    for each in result.get("proof_on", []):
        refused = "AlignmentError" in each["error"] and not each["answered"]
        ranks, size = each["ranks_with_alignment_error"], cp_size_of(result)
        answered = "answered" if each["next_request_answered"] else "NOT answered"
        found.append(
            Goal(
                f"control {each['control']}, proof on",
                "AlignmentError on all ranks, next request answered",
                f"{'AlignmentError' if refused else 'no AlignmentError'} on {ranks} of {size}, next {answered}",
                judged(refused and ranks == size and each["next_request_answered"]),
                source,
            )
        )
    return found


def cp_size_of(result: Mapping[str, Any]) -> int:
    """Of a GPU run."""
    return int(result["prefill_gpus"]) * int(result["ranks_per_gpu"])


def collectives(result: Mapping[str, Any], source: str) -> list[Goal]:
    """NCCL collectives for draft rows per CP forward."""
    found = []
    for server, each in result.get("counters", {}).items():
        counters = each["counters"]
        ran, forwards = counters["aux_collectives"], counters["cp_forwards"]
        text = f"{ran} in {forwards} CP forwards, mode {each.get('mode')}"
        met = None if not forwards else ran == forwards
        found.append(Goal(f"{server}: collectives for draft rows", "one a CP forward", text, judged(met), source))
    return found


# ------------------------------------------------------------------------------------------------------------- gather


def goals_of_gather(result: Mapping[str, Any], source: str) -> list[Goal]:
    """Times of the gather against stock and against the limit; judged at CP 8 and T = 8192 on a real link only."""
    cells = {
        (cell["cp"], cell["hidden"], cell["tokens"], cell["design"]): cell for cell in result["cells"] if "ms" in cell
    }
    sizes = sorted({cp for cp, *_ in cells})
    link = "" if result["mode"] == "gpu" else f", {result['link']}"
    found = []
    for cp in sizes:
        for hidden in sorted({key[1] for key in cells if key[0] == cp}):
            for design, times in FASTER.items():
                cell = cells.get((cp, hidden, GATHER_TOKENS, design))
                stock = cells.get((cp, hidden, GATHER_TOKENS, STOCK))
                if cell is None or stock is None:
                    continue
                real = cp == GATHER_CP and result["mode"] == "gpu"
                where = f"gather {design}, cp {cp}, H {hidden}, T {GATHER_TOKENS}{link}"
                busy, idle = (stock[key]["median"] / cell[key]["median"] for key in ("queued_ms", "ms"))
                text = f"{busy:.1f} times ({cell['queued_ms']['median']:.3f} ms), from an idle GPU {idle:.1f} times"
                verdict = judged(busy >= times) if real else INFO
                found.append(Goal(where, f"{times:g} times faster than {STOCK}", text, verdict, source))
                share = cell["queued_ms"]["of_limit"]
                text = f"{share:.2f} times {cell['limit_ms']:.3f} ms"
                verdict = judged(share <= OF_LIMIT) if real else INFO
                found.append(Goal(where, f"within {OF_LIMIT:g} times the limit", text, verdict, source))
    text = "ok" if result["ok"] else f"{len(result['problems'])} problem(s): {first_line(result['problems'])}"
    what = f"gather: checks of all {len(result['cells'])} cells{link}"
    return [*found, Goal(what, "rows, bytes and collectives are right", text, judged(bool(result["ok"])), source)]


# ------------------------------------------------------------------------------------------------------------ prefill


def goals_of_prefill(result: Mapping[str, Any], source: str) -> list[Goal]:
    """Cost of DSpark on prefill in each mode; judged where each rank has a GPU of its own."""
    found = []
    limit = result["goal_percent"]
    shared = result["ranks_per_gpu"] > 1
    where = f"CP{result['cp_size']}, {result['load']['input_len']} tokens" + (", ranks share a GPU" if shared else "")
    for side, each in result["summary"].items():
        for series, label in SERIES.items():
            if each["cost"] is None:
                continue
            cost = each["cost"][series]
            control = side in NOT_OURS
            goal = NOT_OURS.get(side, f"at most {limit:g} %")
            if cost is None:
                text, verdict = "", INFO if control else NONE
            else:
                text = f"{cost['percent']:+.2f} % ({cost['low']:+.2f} to {cost['high']:+.2f}), {cost['rounds']} rounds"
                told = {"met": MET, "missed": MISSED, "not settled": OPEN}[cost["verdict"]]
                verdict = INFO if control or shared else told
            found.append(Goal(f"prefill {side}, {where}: cost in {label}", goal, text, verdict, source))
    text = "ok" if result["ok"] else f"{len(result['problems'])} problem(s): {first_line(result['problems'])}"
    return [*found, Goal("prefill cost: the run as a whole", "no problem", text, judged(bool(result["ok"])), source)]


GOALS = {SMOKE: goals_of_smoke, GATHER: goals_of_gather, PREFILL: goals_of_prefill}
MISSING = {
    SMOKE: "smoke on GPUs: accept length, draft rows, controls, collectives",
    GATHER: f"gather at cp {GATHER_CP}, T {GATHER_TOKENS}, on a real link",
    PREFILL: "cost of DSpark on prefill",
}


def all_goals(results: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Goal]:
    """Goals of all results, and a line for each kind that nothing was measured for."""
    found: list[Goal] = []
    for kind in KINDS:
        mine = [goal for name, result in results if kind_of(result) == kind for goal in GOALS[kind](result, name)]
        if kind == GATHER:
            judged_here = any(goal.what.startswith("gather ") and goal.verdict != INFO for goal in mine)
        else:
            judged_here = bool(mine)
        found += mine
        if not judged_here:
            found.append(Goal(MISSING[kind], "see the README", "", NONE))
    return found


# ----------------------------------------------------------------------------------------------------------- printing


def headers(results: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """One line about each file."""
    lines = []
    for name, result in results:
        facts = result.get("facts") or {}
        gpus = result.get("gpus") or [facts.get("gpu", "GPU not told")]
        sglang = f", SGLang {result['sglang']}" if result.get("sglang") else ""
        text = f"{len(gpus)} x {gpus[0]}" if result.get("gpus") else str(gpus[0])
        torch = f", torch {result['torch']}" if result.get("torch") else ""
        lines.append(f"{name}: {result['date'][:10]}, commit {result.get('commit')}, {text}{sglang}{torch}")
    return lines


def markdown(goals: Sequence[Goal], about: Sequence[str]) -> str:
    """The table as Markdown."""

    def cell(text: str) -> str:
        return text.replace("|", "\\|")

    lines = [*(f"- {cell(line)}" for line in about), "", "| what | goal | measured | verdict | file |"]
    lines.append("|---|---|---|---|---|")
    lines += [
        "| "
        + " | ".join(cell(text) for text in (each.what, each.goal, each.measured, each.verdict, each.source))
        + " |"
        for each in goals
    ]
    return "\n".join(lines) + "\n"


def show(goals: Sequence[Goal], about: Sequence[str]) -> None:
    """The table on the screen."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_lines=False)
    for title in ("what", "goal", "measured", "verdict"):
        table.add_column(title, overflow="fold")
    style = {MET: "green", MISSED: "bold red", OPEN: "yellow"}
    for each in goals:
        table.add_row(each.what, each.goal, each.measured, each.verdict, style=style.get(each.verdict))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    for line in about:
        console.print(line, markup=False, soft_wrap=True)
    console.print(table)


# --------------------------------------------------------------------------------------------------------------- plot


def speedups(result: Mapping[str, Any]) -> dict[tuple[int, int], dict[str, list[tuple[int, float]]]]:
    """(cp, H) -> design -> [(T, times faster than stock per layer while the GPU is busy), ...]."""
    timed = [cell for cell in result["cells"] if "ms" in cell]
    stock = {
        (cell["cp"], cell["hidden"], cell["tokens"]): cell["queued_ms"]["median"]
        for cell in timed
        if cell["design"] == STOCK
    }
    found: dict[tuple[int, int], dict[str, list[tuple[int, float]]]] = {}
    for cell in sorted(timed, key=lambda cell: int(cell["tokens"])):
        base = stock.get((cell["cp"], cell["hidden"], cell["tokens"]))
        if base is not None and cell["design"] != STOCK and not cell["design"].endswith("-unproved"):
            lines = found.setdefault((cell["cp"], cell["hidden"]), {})
            lines.setdefault(cell["design"], []).append((cell["tokens"], base / cell["queued_ms"]["median"]))
    return found


def draw_gather(result: Mapping[str, Any], path: Path) -> None:
    """Times faster than stock per layer, by T, a panel for each size and H."""
    from matplotlib import pyplot

    panels = speedups(result)
    sizes, widths = sorted({cp for cp, _ in panels}), sorted({hidden for _, hidden in panels})
    figure, axes = pyplot.subplots(
        len(sizes), len(widths), figsize=(5.4 * len(widths), 3.8 * len(sizes)), squeeze=False, sharey=True
    )
    note = "" if result["mode"] == "gpu" else f", {result['link']}"
    for row, cp in enumerate(sizes):
        for column, hidden in enumerate(widths):
            axis = axes[row][column]
            for design, points in panels.get((cp, hidden), {}).items():
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=design)
            if cp == GATHER_CP:
                for design, times in FASTER.items():
                    axis.plot([GATHER_TOKENS], [times], marker="_", markersize=16, color="k")
                    axis.annotate(f" goal {design}", (GATHER_TOKENS, times), fontsize=7)
            axis.axhline(1, color="0.5", linewidth=0.8)
            axis.set(title=f"cp {cp}, H {hidden}{note}", xlabel="tokens", ylabel=f"times faster than {STOCK}")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.grid(True, which="both", alpha=0.3)
    axes[0][0].legend(fontsize=7)
    gpu = (result.get("facts") or {}).get("gpu", "GPU not told")
    figure.suptitle(f"Captured shard to draft-pool rows, GPU kept busy, {gpu}, {result['date'][:10]}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_all(results: Sequence[tuple[str, Mapping[str, Any]]], folder: Path) -> list[Path]:
    """Plots of all results that hold figures for one, each named after its file."""
    import matplotlib

    matplotlib.use("Agg")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "prefill_cost"))
    written: list[Path] = []
    for name, result in results:
        kind = kind_of(result)
        stem = Path(name).stem
        if kind == GATHER and speedups(result):
            written.append(folder / f"goals-{stem}.png")
            draw_gather(result, written[-1])
        if kind == PREFILL and any(each["cost"] and any(each["cost"].values()) for each in result["summary"].values()):
            from cost_plot import draw

            written.append(folder / f"goals-{stem}.png")
            draw(result, written[-1])
    return written


# ---------------------------------------------------------------------------------------------------------------- run


def merge_main(given: Sequence[str]) -> int:
    """`goals.py merge`."""
    parser = argparse.ArgumentParser(prog="goals.py merge", description="Results of cp_gather in one file.")
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    args = parser.parse_args(given)
    if not args.out.absolute().parent.is_dir():
        raise Usage(f"{args.out}: the folder does not exist")
    whole = merged([read(path) for path in args.results])
    args.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Options of the table."""
    parser = argparse.ArgumentParser(
        prog="goals.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write plots there; needs matplotlib")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["merge"]:
            return merge_main(given[1:])
        args = build_parser().parse_args(given)
        if args.markdown is not None and not args.markdown.absolute().parent.is_dir():
            raise Usage(f"--markdown {args.markdown}: the folder does not exist")
        if args.plot is not None and not args.plot.is_dir():
            raise Usage(f"--plot {args.plot}: no such folder")
        if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise Usage("--plot needs matplotlib, which is not installed")
        results = [(path.name, read(path)) for path in args.results]
        if len({Path(name).stem for name, _ in results}) < len(results):
            raise Usage("two of the files have the same name: the table and the plots name them by it")
    except Usage as error:
        print(f"goals.py: error: {error}", file=sys.stderr)
        return 2
    goals, about = all_goals(results), headers(results)
    show(goals, about)
    if args.markdown is not None:
        args.markdown.write_text(markdown(goals, about), encoding="utf-8")
    for path in draw_all(results, args.plot) if args.plot is not None else []:
        print(f"wrote {path}")
    return 1 if any(goal.verdict == MISSED for goal in goals) else 0


if __name__ == "__main__":
    sys.exit(main())
