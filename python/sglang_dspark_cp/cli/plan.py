"""`sglang-dspark-cp plan`: what each way to bring captured hidden states to every rank costs, by arithmetic.

Nothing runs on a GPU and no checkpoint is read except its config.json. Formulas: `core.costs`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core import costs
from ..core.costs import Chunk, CostInputError, ModelShape, Rates

LINK_GB_S = 250.0
"""All-gather into one rank, measured on two H200 (NVLink) with rows of this size: 230 to 275 GB/s."""
MATMUL_TFLOP_S = 700.0
"""bf16 matmul on an H200; with it `core.costs.milliseconds` is 3 to 23 % below the probe on two H200."""
LAUNCH_US = 20.0
"""Fixed cost of a collective: assumed, not measured."""
STOCK = "stock-0.5.23"
"""Ratios are to this design."""
SCHEMA = 1


def _integer(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(
                f"found {text!r}; allowed: an integer of at least {least}; because it is a count"
            )
        return value

    return parse


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a number above 0; because times are divided by it")
    return value


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a number of at least 0; because it is a duration")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `plan`."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="flash|pro|PATH",
        help="DeepSeek-V4-Flash or -Pro with DSpark, or a folder with such a checkpoint's config.json",
    )
    parser.add_argument("--tp", type=_integer(1), default=8, help="GPUs of one prefill worker (default 8)")
    parser.add_argument("--cp", type=_integer(1), help="attention CP size, must equal --tp (default: --tp)")
    parser.add_argument("--chunk", type=_integer(1), default=8192, help="tokens of the forward (default 8192)")
    parser.add_argument("--requests", type=_integer(1), default=1, help="requests that share the chunk (default 1)")
    parser.add_argument(
        "--prefix", type=_integer(0), default=0, help="tokens before the chunk in each request (default 0)"
    )
    parser.add_argument("--page", type=_integer(1), default=256, help="tokens per cache page (default 256)")
    parser.add_argument("--radix", choices=("on", "off"), default="on", help="radix cache (default on)")
    parser.add_argument(
        "--boundary",
        choices=("dropped", "kept"),
        default="dropped",
        help="kept: with the target's own [T,4H] gather, which stays for batches that want input logprobs",
    )
    parser.add_argument("--experts", choices=costs.DTYPES, help="dtype of the draft's routed experts (default: config)")
    parser.add_argument(
        "--shared-expert",
        choices=("sharded", "replicated"),
        default="sharded",
        help="replicated: with an all-to-all MoE back-end or SGLANG_SHARED_EXPERT_TP1=1",
    )
    parser.add_argument(
        "--link",
        type=_positive,
        metavar="GB/S",
        help=f"what arrives at a rank in an all-gather (default {LINK_GB_S:g}, measured on two H200)",
    )
    parser.add_argument(
        "--matmul",
        type=_positive,
        metavar="TFLOP/S",
        help=f"bf16 matmul rate (default {MATMUL_TFLOP_S:g}, fits a probe on two H200)",
    )
    parser.add_argument(
        "--launch-us",
        type=_not_negative,
        metavar="US",
        help=f"fixed microseconds per collective (default {LAUNCH_US:g}, assumed)",
    )
    parser.add_argument(
        "--nodes", type=_integer(1), nargs="+", default=[1], metavar="N", help="prefill workers, for the totals"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def load_shape(model: str) -> ModelShape:
    """A built-in model, or that of a folder with config.json.

    Raises:
        CostInputError: neither.
    """
    if model in costs.BUILT_IN:
        return costs.built_in(model)
    file = Path(model) / "config.json"
    allowed = f"{', '.join(costs.BUILT_IN)}, or a folder with {costs.CHECKPOINTS}"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CostInputError(
            f"model {model!r}", allowed, f"{file} cannot be read ({error.strerror})", "--model"
        ) from None
    except ValueError as error:
        raise CostInputError(f"{file}", allowed, f"it is not JSON ({error})", "--model") from None
    if not isinstance(config, dict):
        raise CostInputError(f"{file}", allowed, "it is not a JSON object", "--model")
    return costs.shape_from_config(config, str(model), str(file))


def _rate(given: float | None, default: float, origin: str) -> dict[str, Any]:
    return {"value": default if given is None else given, "source": origin if given is None else "given"}


def _notes(shape: ModelShape, chunk: Chunk, boundary: bool) -> list[str]:
    notes = [
        "MB is 10^6 bytes; milliseconds leave out order-restoring copies, norms and the pool write",
        "times at --cp above 2 use rates measured at 2: give --link for your fabric",
    ]
    if shape.linear == "fp8":
        notes.append("projections of fp8 weights run in fp8: give their rate with --matmul")
    if boundary:
        notes.append(f"with SGLang's own gather [T,{shape.hc_mult}H] before the head, as for input logprobs")
    if not chunk.split:
        notes.append("fewer tokens than ranks: SGLang runs this forward without CP, nothing is gathered")
    if shape.expert_assumed:
        notes.append(f"assumed: routed experts are {shape.expert}, config.json does not say (--experts)")
    if shape.ratios is None:
        notes.append("KV tokens are left out: config.json has no usable compress_ratios and num_hidden_layers")
    return notes


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is printed.

    Raises:
        CostInputError: what was asked for cannot be computed.
    """
    shape = load_shape(args.model)
    if args.experts is not None:
        shape = dataclasses.replace(shape, expert=args.experts, expert_assumed=False)
    cp = args.tp if args.cp is None else args.cp
    if cp != args.tp:
        raise CostInputError(
            f"context-parallel size {cp} with tensor-parallel size {args.tp}",
            "equal sizes",
            "this plugin supports attention TP 1 only",
            f"--cp {args.tp} or --tp {cp}",
        )
    chunk = Chunk(args.chunk, cp, args.requests, args.prefix, args.page, args.radix == "on")
    costs.check_chunk(chunk, shape.positions)
    rates = {
        "link_gb_s": _rate(args.link, LINK_GB_S, "measured on two H200, 230 to 275"),
        "matmul_tflop_s": _rate(args.matmul, MATMUL_TFLOP_S, "fits a probe on two H200"),
        "launch_us": _rate(args.launch_us, LAUNCH_US, "assumed"),
    }
    boundary = args.boundary == "kept"
    found = costs.designs(shape, chunk, Rates(**{k: v["value"] for k, v in rates.items()}), boundary=boundary)
    stock = next(design for design in found if design.id == STOCK)
    parts = costs.draft_parts(shape, args.tp, shared_sharded=args.shared_expert == "sharded")
    saved = sum(part.saved for part in parts)
    per_token = costs.kv_bytes_per_token(shape)
    tokens = None if per_token is None else int(saved / per_token)
    return {
        "schema": SCHEMA,
        "model": dataclasses.asdict(shape),
        "forward": {**dataclasses.asdict(chunk), "tp": args.tp, "split": chunk.split, "boundary": args.boundary},
        "rates": rates,
        "designs": [
            {
                **dataclasses.asdict(design),
                "received_ratio": design.received_bytes / stock.received_bytes if stock.received_bytes else None,
                "milliseconds_ratio": design.milliseconds / stock.milliseconds,
            }
            for design in found
        ],
        "ratio_to": STOCK,
        "draft": {
            "parts": [{**dataclasses.asdict(part), "saved": part.saved} for part in parts],
            "stock_bytes": sum(part.stock for part in parts),
            "context_bytes": sum(part.context for part in parts),
            "saved_bytes": saved,
            "kv_bytes_per_token": per_token,
            "kv_tokens": tokens,
        },
        "nodes": [
            {
                "nodes": nodes,
                "gpus": nodes * args.tp,
                "saved_bytes": nodes * args.tp * saved,
                "kv_tokens": None if tokens is None else nodes * tokens,
            }
            for nodes in args.nodes
        ],
        "notes": _notes(shape, chunk, boundary),
    }


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f}"


def _print(result: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 150)

    def table(title: str, left: int, *columns: str) -> Table:
        made = Table(title=title, box=box.SIMPLE, title_justify="left")
        for index, column in enumerate(columns):
            made.add_column(column, justify="left" if index < left else "right", no_wrap=index < left)
        return made

    forward, draft = result["forward"], result["draft"]
    first = table(
        f"{result['model']['name']}, TP{forward['tp']}/CP{forward['cp']}, {forward['tokens']} tokens of"
        f" {forward['requests']} request(s) after {forward['prefix']}, page {forward['page']},"
        f" radix cache {'on' if forward['radix'] else 'off'}: one prefill forward, per rank",
        2,
        *("design", "gathered", "collectives", "rows sent", "received MB", "peak MB", "TFLOP", "ms"),
        *("MB / stock", "ms / stock"),
    )
    for row in result["designs"]:
        kinds = list(dict.fromkeys(row["gathers"]))
        counts = [f"{n} x {kind}" if (n := row["gathers"].count(kind)) > 1 else kind for kind in kinds]
        share = row["received_ratio"]
        first.add_row(
            row["title"],
            ", ".join(counts) or "nothing",
            str(row["collectives"]),
            str(row["rows_per_rank"] if row["collectives"] else 0),
            _mb(row["received_bytes"]),
            _mb(row["peak_bytes"]),
            f"{row['flops'] / 1e12:.4f}",
            f"{row['milliseconds']:.3f}",
            "-" if share is None else f"{share:.4f}",
            f"{row['milliseconds_ratio']:.4f}",
        )
    console.print(first)
    rates = result["rates"]
    console.print(
        f"ratios to {result['ratio_to']} | link {rates['link_gb_s']['value']:g} GB/s ({rates['link_gb_s']['source']})"
        f" | matmul {rates['matmul_tflop_s']['value']:g} TFLOP/s ({rates['matmul_tflop_s']['source']})"
        f" | {rates['launch_us']['value']:g} us per collective ({rates['launch_us']['source']})\n"
    )
    second = table("Draft on prefill, MB per GPU", 1, "part", "stock", "context-only", "saved")
    for part in draft["parts"]:
        second.add_row(part["name"], _mb(part["stock"]), _mb(part["context"]), _mb(part["saved"]))
    second.add_section()
    second.add_row("sum", _mb(draft["stock_bytes"]), _mb(draft["context_bytes"]), _mb(draft["saved_bytes"]))
    console.print(second)
    if draft["kv_tokens"] is not None:
        console.print(
            f"about {draft['kv_tokens']:,} more tokens of KV capacity per prefill worker, at"
            f" {draft['kv_bytes_per_token']:,.0f} bytes per token as SGLang 0.5.17 sizes its pools\n"
        )
    third = table("All prefill workers", 0, "nodes", "GPUs", "HBM saved, GB", "KV tokens")
    for row in result["nodes"]:
        tokens = "-" if row["kv_tokens"] is None else f"{row['kv_tokens']:,}"
        third.add_row(str(row["nodes"]), str(row["gpus"]), f"{row['saved_bytes'] / 1e9:,.1f}", tokens)
    console.print(third)
    for note in result["notes"]:
        console.print(f"- {note}")


def run(args: argparse.Namespace) -> int:
    """0 printed, 2 what was asked for cannot be computed."""
    try:
        result = report(args)
    except CostInputError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(result))
    else:
        _print(result)
    return 0
