"""What the DSpark draft costs a PD prefill worker: SGLang's own against the context-only one of this plugin.

draft_cost.py bytes     parameter bytes on one GPU, by building SGLang's draft class on a CPU
draft_cost.py load      seconds to load it from a checkpoint of several GB, on a CPU
draft_cost.py servers   GPU memory and load seconds of real prefill servers

Exit status: 0 measured, 1 something failed (what was measured is reported), 2 usage.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sglang_dspark_cp import config
from sglang_dspark_cp.core import costs
from sglang_dspark_cp.hooks.check import sglang_release
from sglang_dspark_cp.smoke import cuda, geometry, set_ups
from sglang_dspark_cp.smoke.checkpoint import Geometry, model_config
from sglang_dspark_cp.smoke.processes import RankConfig, RankFailed, RankPool, RankProcess, free_ports

SHAPES = ("flash", "pro", "tiny")
SIZES = (2, 4, 8)
EXPERTS = ("fp4", "fp8")
RUNNER = {"fp4": "marlin", "fp8": "auto"}
"""MoE back-end by dtype of routed experts: on Hopper, fp4 experts need the one that is named."""
BUILDS = "0.5.17"
"""The release whose draft `bytes` and `load` know how to build on a CPU."""
BLOCK = 128
STARTS_WITHIN = 180.0
ANSWERS_WITHIN = 900.0
GOAL_BYTES_GONE, GOAL_FASTER = 0.95, 10.0
"""What the project wants: this share of the draft's bytes gone, and loading this many times faster."""
SIDES = ("stock", "context")


class CannotMeasure(Exception):
    """A side could not be set up."""


# ------------------------------------------------------------------------------------------------------------ ranks


class Ranks:
    """Rank processes that build drafts; a context manager that leaves none behind.

    Args:
        folder: where logs go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = RankPool()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.__exit__()

    def _spawn(
        self, factory: str, count: int, environment: dict[str, str], options: dict[str, Any]
    ) -> list[RankProcess]:
        started = len(self.pool.ranks)
        new = self.pool.spawn(
            RankConfig("draft-cost", rank, factory, environment, str(self.folder / f"{started}-{rank}.log"), options)
            for rank in range(count)
        )
        self.pool.collect(new, STARTS_WITHIN)
        return new

    def group(self, model: Path, size: int, experts: str) -> list[RankProcess]:
        """Ranks of a CP prefill worker of `size` GPUs, with the settings that SGLang makes of its launch arguments.

        Raises:
            CannotMeasure: SGLang refuses the arguments, or a rank does not start.
        """
        from sglang_dspark_cp.smoke.arguments import prefill_arguments

        environment = {
            "SGLANG_PLUGINS": "dspark_cp",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "SGLANG_NCCL_SO_PATH": "/nonexistent",
            "SGLANG_DSV4_FP4_EXPERTS": "1" if experts == "fp4" else "0",
            config.ENABLED: "1",
            config.DRAFT: "context",
        }
        try:
            (resolver,) = self._spawn("sglang_dspark_cp.smoke.arguments:Resolver", 1, environment, {})
            bootstrap, port = free_ports(2)
            arguments = [*prefill_arguments(model, size, 512, bootstrap), "--fp8-gemm-backend", "triton"]
            arguments += ["--moe-runner-backend", RUNNER[experts]]
            settings = self.ask(resolver, "resolve", arguments)
            self.end([resolver])
            if not isinstance(settings, bytes):
                raise CannotMeasure(f"SGLang refuses the arguments: {settings}")
            return self._spawn("draft_ranks:CostRank", size, environment, {"server_args": settings, "port": port})
        except RankFailed as error:
            raise CannotMeasure(last_line(error)) from error

    def ask(self, rank: RankProcess, method: str, *arguments: Any) -> Any:
        """One rank's answer.

        Raises:
            CannotMeasure: it raised or died.
        """
        rank.start(method, *arguments)
        try:
            (answer,) = self.pool.collect([rank], ANSWERS_WITHIN)
        except RankFailed as error:
            raise CannotMeasure(last_line(error)) from error
        return answer

    def hook(self, ranks: Sequence[RankProcess]) -> list[str]:
        """Install the plugin's hooks in a group; ids of those that prune the draft, of rank 0.

        Raises:
            CannotMeasure: no such hook was installed.
        """
        for rank in ranks:
            rank.start("hook")
        try:
            found: list[str] = self.pool.collect(ranks, ANSWERS_WITHIN)[0]
        except RankFailed as error:
            raise CannotMeasure(last_line(error)) from error
        if not found:
            raise CannotMeasure("the plugin installed no hook that prunes the draft")
        return found

    def end(self, ranks: Sequence[RankProcess]) -> None:
        """End some ranks."""
        for rank in ranks:
            rank.kill()
            self.pool.ranks.remove(rank)


def last_line(error: Exception) -> str:
    """The line that names the error; a whole traceback holds paths of this machine."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


# ------------------------------------------------------------------------------------------------------------ bytes


def published_config(name: str, experts: str) -> dict[str, Any]:
    """`config.json` of a shape: published sizes, and what else SGLang wants, from the smoke checkpoint."""
    base = model_config(Geometry(), "fp8")
    if name == "tiny":
        return {**base, **geometry.MODEL_CONFIG, "expert_dtype": experts}
    sizes = dict(costs.BUILT_IN[name][1])
    positions = int(str(sizes["max_position_embeddings"]))
    return {
        **base,
        **sizes,
        "quantization_config": base["quantization_config"],
        "expert_dtype": experts,
        "rope_scaling": {**base["rope_scaling"], "original_max_position_embeddings": positions // 16},
    }


def arithmetic(found: Mapping[str, Any], name: str, tp: int) -> dict[str, Any]:
    """`core.costs.draft_parts` for a config, with one name for routed experts of every dtype."""
    shape = costs.shape_from_config(found, name, "draft_cost")
    parts = {part.name.partition(", fp")[0]: part for part in costs.draft_parts(shape, tp)}
    rope = parts.pop("rope table")
    sides: dict[str, Any] = {}
    for side in SIDES:
        by_part = {title: getattr(part, side) for title, part in parts.items() if getattr(part, side)}
        sides[side] = {
            "parameter_bytes": sum(by_part.values()),
            "parts": by_part,
            "rope_table_bytes": getattr(rope, side),
        }
    return sides


def share_gone(stock: float, context: float) -> float:
    """Share of stock's bytes that the context-only draft does not hold."""
    return 1 - context / stock


def measure_bytes(ranks: Ranks, name: str, experts: str, tp: int) -> dict[str, Any]:
    """Bytes of one shape with one expert dtype on one GPU: built before and after the hooks, and by arithmetic."""
    model = published_config(name, experts)
    folder = ranks.folder / f"{name}-{experts}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": model["max_position_embeddings"]}))
    group = ranks.group(folder, tp, experts)
    try:
        settings = ranks.ask(group[0], "settings")
        built = {"stock": ranks.ask(group[0], "build")}
        hooks = ranks.hook(group)
        built["context"] = ranks.ask(group[0], "build")
    finally:
        ranks.end(group)
    counted = arithmetic(model, name, tp)
    stock, context = (built[side]["parameter_bytes"] for side in SIDES)
    rope = built["context"]["buffers"].get("freqs_cis", 0)
    return {
        "settings": settings,
        "hooks": hooks,
        "built": built,
        "arithmetic": counted,
        "built_over_arithmetic": {
            side: built[side]["parameter_bytes"] / counted[side]["parameter_bytes"] for side in SIDES
        },
        "parameters_gone": share_gone(stock, context),
        "parameters_and_rope_table_gone": share_gone(stock + rope, context + rope),
        "goal": GOAL_BYTES_GONE,
        "goal_met": share_gone(stock, context) >= GOAL_BYTES_GONE,
    }


def run_bytes(args: argparse.Namespace, console: Console) -> tuple[dict[str, Any], list[str]]:
    """The `bytes` command."""
    shapes: dict[str, dict[str, Any]] = {}
    problems = []
    wanted = [(name, experts) for name in dict.fromkeys(args.shape) for experts in args.experts]
    with (
        tempfile.TemporaryDirectory(prefix="draft-cost-") as scratch,
        Ranks(Path(scratch)) as ranks,
        bar(console) as shown,
    ):
        task = shown.add_task("building drafts", total=len(wanted))
        for name, experts in wanted:
            shown.update(task, description=f"{name}, {experts} experts")
            try:
                found = measure_bytes(ranks, name, experts, args.tp)
            except CannotMeasure as error:
                problems.append(f"{name}, {experts} experts: {error}")
                found = {"error": str(error)}
            shapes.setdefault(name, {"config": costs_of(name), "experts": {}})["experts"][experts] = found
            shown.advance(task)
    result = {"tp": args.tp, "attention_tp": 1, "rank": 0, "unit": "bytes on one GPU", "shapes": shapes}
    show_bytes(console, result)
    return result, problems


def costs_of(name: str) -> dict[str, Any]:
    """The sizes that decide, and where they are from."""
    model = published_config(name, "fp8")
    kept = (
        "hidden_size",
        "num_attention_heads",
        "q_lora_rank",
        "o_lora_rank",
        "o_groups",
        "n_routed_experts",
        "moe_intermediate_size",
        "vocab_size",
        "dspark_markov_rank",
        "dspark_target_layer_ids",
        "max_position_embeddings",
    )
    source = "core/costs.py" if name in costs.BUILT_IN else "smoke/geometry.py"
    return {"source": source, **{key: model[key] for key in kept}}


def show_bytes(console: Console, result: Mapping[str, Any]) -> None:
    """One table per shape and expert dtype."""
    for name, shape in result["shapes"].items():
        for experts, found in shape["experts"].items():
            if "error" in found:
                continue
            table = Table(title=f"{name}, {experts} experts, TP{result['tp']}, MB of parameters on one GPU")
            for title in ("part", "stock", "context-only", "arithmetic, stock"):
                table.add_column(title, justify="left" if title == "part" else "right")
            sides = [found["built"][side]["parts"] for side in SIDES] + [found["arithmetic"]["stock"]["parts"]]
            for part in dict.fromkeys(part for side in sides for part in side):
                table.add_row(part, *(f"{side.get(part, 0) / 1e6:,.1f}" for side in sides))
            totals = [*(found["built"][side] for side in SIDES), found["arithmetic"]["stock"]]
            table.add_row("all", *(f"{side['parameter_bytes'] / 1e6:,.1f}" for side in totals))
            table.add_row(
                "rope table", *(f"{found['built'][s]['buffers'].get('freqs_cis', 0) / 1e6:,.1f}" for s in SIDES)
            )
            table.add_row("parameters gone", "", f"{found['parameters_gone']:.2%}")
            console.print(table)


# ------------------------------------------------------------------------------------------------------------- load


def load_geometry(args: argparse.Namespace) -> Geometry:
    """The checkpoint of the `load` command: Flash's attention when it is as wide as Flash, else a small one."""
    wide = args.hidden >= 4096
    return Geometry(
        hidden=args.hidden,
        vocab=args.vocab,
        layers=args.layers,
        q_lora=1024 if wide else 256,
        o_lora=1024 if wide else 128,
        experts=args.experts,
        topk=min(6, args.experts),
        moe_intermediate=args.moe_intermediate,
        markov_rank=256 if wide else 64,
    )


def run_load(args: argparse.Namespace, console: Console) -> tuple[dict[str, Any], list[str]]:
    """The `load` command."""
    import draft_checkpoint as large

    size = load_geometry(args)
    with tempfile.TemporaryDirectory(prefix="draft-cost-", dir=args.dir) as scratch:
        folder = Path(scratch)
        with bar(console, DownloadColumn()) as shown:
            task = shown.add_task("writing the checkpoint", total=None)

            def start(total: int) -> None:
                free = shutil.disk_usage(folder).free
                if free < 1.1 * total:
                    raise CannotMeasure(f"{total / 1e9:.1f} GB to write, {free / 1e9:.1f} GB free; see --dir")
                shown.update(task, total=total)

            written = large.write_large(
                folder / "model",
                size,
                shard_bytes=args.shard_mb * 10**6,
                threads=2,
                flush=True,
                start=start,
                advance=lambda done: shown.advance(task, done),
            )
        files = sorted((folder / "model").glob("*.safetensors"))
        runs: list[dict[str, Any]] = []
        with Ranks(folder) as ranks, bar(console) as shown:
            task = shown.add_task("starting ranks", total=2 * (2 * args.runs + 1))
            first = {side: ranks.group(folder / "model", 2, "fp8") for side in SIDES}
            hooks = ranks.hook(first["context"])

            def one(side: str, state: str, number: int) -> None:
                shown.update(task, description=f"{side}, {state}")
                if state == "cold":
                    large.drop_cache(files)
                else:
                    large.fill_cache(files)
                cached = large.cached_share(files)
                found = ranks.ask(first[side][0], "load")
                runs.append({"side": side, "state": state, "run": number, "cached_share_before": cached, **found})
                shown.advance(task)

            for side in SIDES:  # not counted: imports, and the first touch of everything
                one(side, "first", 0)
            for state in ("cold", "warm"):
                for number in range(1, args.runs + 1):
                    for side in SIDES if number % 2 else reversed(SIDES):
                        one(side, state, number)
    result = {
        "checkpoint": {**vars(size), **vars(written), "quant": "fp8", "shard_mb": args.shard_mb},
        "ranks": {"tp": 2, "attention_cp": 2, "loading": 1},
        "host": host(),
        "hooks": hooks,
        "page_cache": page_cache_note(runs),
        "runs": runs,
        "summary": summary(runs),
    }
    show_load(console, result)
    return result, []


def page_cache_note(runs: Sequence[Mapping[str, Any]]) -> str:
    """What is known about the page cache before cold and warm runs."""
    shares = {
        state: [run["cached_share_before"] for run in runs if run["state"] == state] for state in ("cold", "warm")
    }
    if any(share is None for each in shares.values() for share in each):
        return (
            "posix_fadvise(DONTNEED) on all files before each cold run; this kernel does not tell what its cache kept"
        )
    return (
        "posix_fadvise(DONTNEED) on all files before each cold run, all files read before each warm run; in the page"
        f" cache before a run (mincore): cold at most {max(shares['cold']):.1%}, warm at least"
        f" {min(shares['warm']):.1%} of the files. What lies below this kernel's cache (a hypervisor, the drive) was"
        " not dropped."
    )


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians and ratios by state of the page cache."""
    found: dict[str, Any] = {}
    for state in ("cold", "warm"):
        median = {}
        for side in SIDES:
            mine = [run for run in runs if run["state"] == state and run["side"] == side]
            median[side] = {
                key: statistics.median(run[key] for run in mine)
                for key in ("seconds", "parameter_bytes", "disk_bytes", "files_opened")
            }
        stock, context = median["stock"], median["context"]
        seconds = {(run["side"], run["run"]): run["seconds"] for run in runs if run["state"] == state}
        each = [spent / seconds["context", run] for (side, run), spent in seconds.items() if side == "stock"]
        faster = stock["seconds"] / context["seconds"]
        found[state] = {
            "median": median,
            "times_faster": faster,
            "times_faster_by_run": each,
            "goal": GOAL_FASTER,
            "goal_met": faster >= GOAL_FASTER,
            "parameters_gone": share_gone(stock["parameter_bytes"], context["parameter_bytes"]),
        }
    return found


def show_load(console: Console, result: Mapping[str, Any]) -> None:
    """Medians of both sides."""
    written = result["checkpoint"]
    title = f"one rank of TP2 loads the draft, {written['bytes'] / 1e9:.1f} GB in {written['files']} files"
    table = Table(title=title)
    for column in ("page cache", "stock, s", "context-only, s", "times faster", "off the disk, MB", "files opened"):
        table.add_column(column, justify="right")
    for state, found in result["summary"].items():
        sides = [found["median"][side] for side in SIDES]
        table.add_row(
            state,
            *(f"{side['seconds']:.3f}" for side in sides),
            f"{found['times_faster']:.1f}",
            " / ".join(f"{side['disk_bytes'] / 1e6:,.0f}" for side in sides),
            " / ".join(f"{side['files_opened']:g}" for side in sides),
        )
    console.print(table)
    console.print(result["page_cache"], soft_wrap=True, markup=False)


def host() -> dict[str, Any]:
    """The machine, as far as it matters for loading."""
    cpu = platform.processor() or "unknown"
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory / 2**30, 1)}


# ------------------------------------------------------------------------------------------------------ command line


def bar(console: Console, *more: Any) -> Progress:
    """A progress bar on the screen of messages."""
    columns = (TextColumn("{task.description}"), BarColumn(), *(more or (MofNCompleteColumn(),)), TimeElapsedColumn())
    return Progress(*columns, console=console)


def about(command: str, arguments: Sequence[str]) -> dict[str, Any]:
    """What every result says about its making. `DSPARK_CP_COMMIT` names the commit where there is no git."""
    return {
        "benchmark": f"draft_cost {command}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get("DSPARK_CP_COMMIT") or cuda._commit(),
        "package_changed_since": package_changed(),
        "command": shlex.join(["draft_cost.py", *arguments]),
        **{name: importlib.metadata.version(name) for name in ("sglang", "torch", "safetensors")},
        "python": platform.python_version(),
    }


def package_changed() -> bool | None:
    """Whether the package that was measured has changes that are not committed; None without git."""
    where = Path(config.__file__).parent
    if shutil.which("git") is None:
        return None
    answer = subprocess.run(
        ["git", "-C", str(where), "status", "--porcelain", "--", "."], capture_output=True, text=True, timeout=20
    )
    return bool(answer.stdout.strip()) if answer.returncode == 0 else None


def run_servers(args: argparse.Namespace, console: Console) -> tuple[dict[str, Any], list[str]]:
    """The `servers` command."""
    import draft_servers

    return draft_servers.run(args, console)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="draft_cost.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    counted = commands.add_parser("bytes", help="parameter bytes on one GPU, by building the draft on a CPU")
    counted.add_argument(
        "--shape",
        action="append",
        required=True,
        choices=SHAPES,
        help="published sizes of DeepSeek-V4-Flash or -Pro, or those of the smoke test; may be repeated",
    )
    counted.add_argument("--tp", type=int, default=8, choices=SIZES, help="GPUs of the prefill worker (default 8)")
    counted.add_argument(
        "--experts", action="append", choices=EXPERTS, help="dtype of routed experts; may be repeated (default: both)"
    )

    loaded = commands.add_parser("load", help="seconds to load the draft from a large checkpoint, on a CPU")
    loaded.add_argument("--hidden", type=positive, default=4096, metavar="H", help="hidden size (default 4096)")
    loaded.add_argument("--experts", type=positive, default=16, metavar="N", help="per layer (default 16)")
    loaded.add_argument("--moe-intermediate", type=positive, default=2048, metavar="I", help="default 2048")
    loaded.add_argument("--layers", type=positive, default=6, metavar="N", help="target layers, at least 6 (default 6)")
    loaded.add_argument("--vocab", type=positive, default=16384, metavar="V", help="tokens (default 16384)")
    loaded.add_argument("--shard-mb", type=positive, default=500, metavar="MB", help="of a file (default 500)")
    loaded.add_argument("--runs", type=positive, default=3, metavar="N", help="cold and warm, each (default 3)")
    loaded.add_argument("--dir", type=Path, metavar="DIR", help="where the checkpoint goes; it is deleted afterwards")

    served = commands.add_parser("servers", help="GPU memory and load seconds of real prefill servers")
    served.add_argument("--gpus", metavar="LIST", help="GPU indices, such as 0,1 (default: all visible)")
    served.add_argument("--ranks-per-gpu", type=int, default=2, choices=(1, 2, 4, 8), help="default 2")
    served.add_argument("--limit", type=positive, default=150, metavar="S", help="end everything after S (default 150)")
    served.add_argument("--hidden", type=positive, default=4096, metavar="H", help="of the wide model (default 4096)")
    served.add_argument("--experts", type=positive, default=256, metavar="N", help="of the wide model (default 256)")
    served.add_argument("--pairs", action="store_true", help="two servers at a time even if all four fit")
    served.add_argument("--ports", type=positive, default=30000, metavar="FIRST", help="first port to try")
    served.add_argument("--keep", type=Path, metavar="DIR", help="keep logs there (checkpoints are deleted)")

    for each in (counted, loaded, served):
        each.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    return parser


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return value


def usage_error(args: argparse.Namespace) -> str | None:
    """What is wrong with options that argparse lets through."""
    if args.json and not args.json.absolute().parent.is_dir():
        return f"--json {args.json}: the folder does not exist"
    release = sglang_release().split("+", 1)[0]
    if args.command != "servers" and release != BUILDS:
        return (
            f"SGLang {release} is installed; bytes and load build the draft of {BUILDS}: run them with"
            f" .venv/{BUILDS}/bin/python (make setup SGLANG={BUILDS}). servers measures what is installed"
        )
    if args.command == "load":
        if args.moe_intermediate % (2 * BLOCK):
            return f"--moe-intermediate {args.moe_intermediate}: a multiple of {2 * BLOCK}, for two ranks"
        if args.dir and not args.dir.is_dir():
            return f"--dir {args.dir}: no such folder"
        try:
            load_geometry(args).validate("random", "fp8")
        except ValueError as error:
            return str(error)
    return None


COMMANDS: dict[str, Callable[[argparse.Namespace, Console], tuple[dict[str, Any], list[str]]]] = {
    "bytes": run_bytes,
    "load": run_load,
    "servers": run_servers,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the JSON."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = build_parser().parse_args(given)
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 140)
    if args.command == "bytes":
        args.experts = list(dict.fromkeys(args.experts or EXPERTS))
    text = usage_error(args)
    if text is None:
        try:
            result, problems = COMMANDS[args.command](args, console)
        except set_ups.UsageError as error:
            text = str(error)
        except CannotMeasure as error:
            result, problems = {}, [str(error)]
    if text is not None:
        console.print(f"draft_cost.py {args.command}: {text}", style="red", markup=False)
        return 2
    for problem in problems:
        console.print(f"[red]failed:[/red] {escape(problem)}", soft_wrap=True)
    if args.json:
        whole = {**about(args.command, given), "ok": not problems, "problems": problems, **result}
        args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
