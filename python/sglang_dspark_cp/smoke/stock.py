"""Stock SGLang and the same deployment: what it refuses, in the order in which a user meets it, or, where it serves it,
what it gathers at the end of a CP forward beside what this package gathers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from . import geometry as g


@dataclass(frozen=True)
class Refusal:
    """One step: what was tried, and the last line of what stock says to it (empty: stock accepts it)."""

    step: int
    what: str
    error: str


@dataclass(frozen=True)
class Attempts:
    """How to try things; made by the run, which owns the processes.

    Attributes:
        resolve: launch arguments -> `ServerArgs`, or the error's text.
        resolve_past_dspark_check: the same with stock's DSPARK / DP-attention check bypassed.
        boot: `ServerArgs`, extra environment -> the error that a rank stops with at start, or "".
        serve: `ServerArgs`, extra environment -> the error of the first prefill batch, or "".
    """

    resolve: Callable[[list[str]], Any]
    resolve_past_dspark_check: Callable[[list[str]], Any]
    boot: Callable[[Any, dict[str, str]], str]
    serve: Callable[[Any, dict[str, str]], str]


def unified(arguments: list[str]) -> list[str]:
    """The same arguments with the unified spelling of the CP flags."""
    legacy = ("--enable-dsa-prefill-context-parallel", "--dsa-prefill-cp-mode", "round-robin-split")
    rest = [argument for argument in arguments if argument not in legacy]
    return [*rest, "--enable-prefill-cp", "--cp-strategy", "interleave"]


def refusals(attempts: Attempts, arguments: list[str]) -> list[Refusal]:
    """All steps; a later step goes around the refusal before it."""
    with_lm_head = [*arguments, "--enable-dp-lm-head"]
    found = [
        ("unified flags: --enable-prefill-cp --cp-strategy interleave", _text(attempts.resolve(unified(arguments)))),
        ("legacy flags: --enable-dsa-prefill-context-parallel", _text(attempts.resolve(arguments))),
        ("legacy flags and --enable-dp-lm-head", _text(attempts.resolve(with_lm_head))),
    ]
    server_args = attempts.resolve_past_dspark_check(arguments)
    if isinstance(server_args, str):
        found.append(("that check bypassed: start", server_args))
    else:
        found.append(("that check bypassed: start", attempts.boot(server_args, {})))
        no_shard = {"SGLANG_DSPARK_OPT_MARKOV_W2_TP_SHARD": "0"}
        what = "SGLANG_DSPARK_OPT_MARKOV_W2_TP_SHARD=0 too: first prefill batch"
        found.append((what, attempts.serve(server_args, no_shard)))
    return [Refusal(step, what, last_line(error)) for step, (what, error) in enumerate(found, 1)]


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else ""


def last_line(text: str) -> str:
    """The line of a traceback that names the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line.split(":", 1)[0].endswith(("Error", "Exception", "Exit"))]
    return (named or lines or [""])[-1]


# ------------------------------------------------------------------------------------------- where stock serves it

HIDDEN_SIZES = (g.HIDDEN, 4096, 7168)
"""Of the run, Flash and Pro."""
PARTS = {
    1: "input of the head",
    g.STREAMS: "streams before it",
    len(g.CAPTURED_LAYERS): "captured layers",
}
"""What stock gathers, by its width in hidden sizes."""


@dataclass(frozen=True)
class Part:
    """One kind of collective at the end of CP forwards.

    Attributes:
        collectives: how many there were.
        bytes_at_hidden: bytes that one rank received, by hidden size.
    """

    name: str
    collectives: int
    bytes_at_hidden: dict[str, int]


@dataclass(frozen=True)
class Side:
    """One run.

    Attributes:
        cp_forwards: forwards that were split.
        tokens: of these forwards; runs differ a little in how they form batches.
    """

    cp_forwards: int
    tokens: int
    parts: tuple[Part, ...]

    def bytes_per_token(self, hidden: str) -> float:
        """Bytes that one rank receives for each token of a CP forward."""
        return sum(part.bytes_at_hidden[hidden] for part in self.parts) / self.tokens


def of_stock(first: Any, cp_size: int) -> Side:
    """From the `PrefillReport` of a rank; each row that stock gathers is a multiple of the hidden size."""
    split = [tokens for tokens in first.forward_tokens if tokens >= cp_size]
    found: dict[str, list[Any]] = {name: [] for name in PARTS.values()}
    for each in first.model_collectives:
        width, rest = divmod(each.nbytes, each.rows * 2 * g.HIDDEN)
        name = PARTS.get(width, f"{each.nbytes // each.rows} bytes per row") if not rest else "other"
        found.setdefault(name, []).append(each)

    def received(of: Iterable[Any], hidden: int) -> int:
        return (cp_size - 1) * sum(int(each.nbytes) for each in of) * hidden // g.HIDDEN

    parts = (
        Part(name, len(of), {str(hidden): received(of, hidden) for hidden in HIDDEN_SIZES})
        for name, of in found.items()
    )
    return Side(len(split), sum(split), tuple(parts))


def of_ours(report: dict[str, Any], tokens: int) -> Side:
    """From the report of a run with the plugin."""
    name = f"draft rows ({report['mode']}) and head rows"
    part = Part(name, report["cp_group_collectives"], report["gather_bytes_at_hidden"])
    return Side(report["cp_forwards"], tokens, (part,))


def ratios(stock: Side, ours: Side) -> dict[str, float]:
    """Bytes per token, ours to stock's, by hidden size."""
    sizes = (str(hidden) for hidden in HIDDEN_SIZES)
    return {size: round(ours.bytes_per_token(size) / stock.bytes_per_token(size), 4) for size in sizes}


def table(found: dict[str, Any]) -> Table:
    """The two sides as `--stock` prints them."""
    shown = Table(title="End of a CP forward: collectives, MB that a rank receives (mean of a run)")
    shown.add_column("")
    for column in ("calls", *(f"H {hidden}" for hidden in HIDDEN_SIZES)):
        shown.add_column(column, justify="right")
    for side in ("stock", "ours"):
        forwards = found[side]["cp_forwards"]

        def row(name: str, parts: list[dict[str, Any]], forwards: int = forwards) -> list[str]:
            sums = (sum(part["bytes_at_hidden"][str(hidden)] for part in parts) for hidden in HIDDEN_SIZES)
            count = sum(part["collectives"] for part in parts)
            return [name, f"{count / forwards:g}", *(f"{total / forwards / 1e6:.3f}" for total in sums)]

        for part in found[side]["parts"]:
            shown.add_row(*row(f"{side}: {part['name']}", [part]))
        if len(found[side]["parts"]) > 1:
            shown.add_row(*row(f"{side}: all", found[side]["parts"]), end_section=True)
    percent = (f"{100 * found['ours_to_stock'][str(hidden)]:.1f} %" for hidden in HIDDEN_SIZES)
    shown.add_row("ours / stock, per token", "", *percent)
    return shown
