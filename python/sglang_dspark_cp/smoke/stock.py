"""What stock SGLang answers to the same deployment, in the order in which a user meets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
