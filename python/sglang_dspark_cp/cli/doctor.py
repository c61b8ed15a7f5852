"""`sglang-dspark-cp doctor`: will this machine and these launch arguments work? Answered before a model is loaded.

Read-only: no server is started, no weights are loaded, nothing is changed, no network is used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ..hooks.check import sglang_release
from .doctor_arguments import ROLES, argument_checks, role_of, work_checks
from .doctor_check import Check, Machine, Status
from .doctor_draft import draft_checks
from .doctor_machine import gpu_checks, port_checks, release_checks, transfer_checks
from .doctor_resolve import Answer, resolve

TIMEOUT_S = 300.0
STYLE = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "red", Status.NOT_CHECKED: "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `doctor`."""
    parser.usage = "%(prog)s [-h] [--role {prefill,decode}] [--json] [--timeout S] -- LAUNCH_SERVER_ARGUMENT ..."
    parser.add_argument("--role", choices=ROLES, help="what the server is for (default: --disaggregation-mode)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=TIMEOUT_S,
        metavar="S",
        help=f"seconds that SGLang may take to read the arguments (default {TIMEOUT_S:g})",
    )
    parser.add_argument("launch", nargs="*", metavar="LAUNCH_SERVER_ARGUMENT", help="after --, as for launch_server")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: seconds, above 0; because it is a time-out")
    return value


def launch_arguments(words: Sequence[str]) -> list[str]:
    """The arguments themselves, when the whole command was pasted (`python -m sglang.launch_server ...`)."""
    start = next((i for i, word in enumerate(words[:6]) if word in ("sglang.launch_server", "serve")), None)
    return list(words if start is None else words[start + 1 :])


def has_flag(launch: Sequence[str], flag: str) -> bool:
    """Whether a flag is on the command line, in full."""
    return any(word == flag or word.startswith(f"{flag}=") for word in launch)


def ask_sglang(launch: Sequence[str], timeout: float) -> Answer:
    """What SGLang makes of the arguments; without an SGLang nothing."""
    from importlib.metadata import PackageNotFoundError

    try:
        sglang_release()
    except PackageNotFoundError:
        return Answer(error="SGLang is not installed", broke=True)
    return resolve(launch, timeout)


def diagnose(role: str | None, launch: Sequence[str], answer: Answer, machine: Machine) -> list[Check]:
    """Every check, by area."""
    side = role_of(role, answer, launch)
    return [
        *release_checks(side, machine),
        *argument_checks(role, answer),
        *work_checks(side, answer, machine),
        *draft_checks(answer),
        *transfer_checks(side, answer, machine),
        *gpu_checks(answer, machine),
        *port_checks(side, answer, has_flag(launch, "--disaggregation-bootstrap-port")),
    ]


def report(role: str | None, checks: Sequence[Check]) -> dict[str, Any]:
    """For `--json`."""
    ready = all(check.status is not Status.FAILED for check in checks)
    return {"ready": ready, "role": role, "checks": [check.as_json() for check in checks]}


def _print(role: str | None, checks: Sequence[Check]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 150)
    for area, group in groupby(checks, key=lambda check: check.area):
        table = Table(title=area, box=box.SIMPLE, title_justify="left", show_header=False)
        for width in (11, 31):
            table.add_column(width=width)
        table.add_column()
        for check in group:
            body = [check.found]
            body += [f"{word}: {text}" for word, text in _advice(check) if text]
            table.add_row(Text(check.status.value, style=STYLE[check.status]), check.name, Text("\n".join(body)))
        console.print(table)
    for check in checks:
        if check.log:
            console.print(f"{check.area}, {check.name}:\n{check.log}\n")
    count = {status: sum(check.status is status for check in checks) for status in Status}
    console.print(
        f"{role or 'no role'}: {count[Status.OK]} ok, {count[Status.WARNING]} warnings,"
        f" {count[Status.NOT_CHECKED]} not checked, {count[Status.FAILED]} failed"
    )
    problems = count[Status.FAILED]
    console.print(f"not ready: {problems} problem(s)" if problems else "ready")


def _advice(check: Check) -> list[tuple[str, str]]:
    if check.status is Status.OK:
        return [("note", check.why)]
    return [("allowed", check.allowed), ("because", check.why), ("fix", check.fix)]


def run(args: argparse.Namespace) -> int:
    """0 ready, 1 not ready, 2 no launch arguments."""
    launch = launch_arguments(args.launch)
    if not launch:
        print(
            "doctor: found no launch arguments; allowed: those of launch_server; because they decide what is needed;"
            " fix: sglang-dspark-cp doctor -- --model-path ... --tp 8 ...",
            file=sys.stderr,
        )
        return 2
    if sys.stderr.isatty():
        print("SGLang reads the arguments, that takes a minute ...", file=sys.stderr)
    answer = ask_sglang(launch, args.timeout)
    checks = diagnose(args.role, launch, answer, Machine())
    role = role_of(args.role, answer, launch)
    if args.json:
        print(json.dumps(report(role, checks)))
    else:
        _print(role, checks)
    return 1 if any(check.status is Status.FAILED for check in checks) else 0
