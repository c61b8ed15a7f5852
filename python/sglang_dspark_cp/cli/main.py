"""`sglang-dspark-cp`: exit 0 ok, 1 failed, 2 usage."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from ..config import FaultKind


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="sglang-dspark-cp", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_smoke(commands)
    _add_hooks(commands)
    return parser


def _add_smoke(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from ..smoke import cpu

    smoke = commands.add_parser("smoke", help="run the whole path and compare draft KV with an independent oracle")
    smoke.add_argument("--device", choices=("cpu",), default="cpu", help="where to run (default cpu)")
    smoke.add_argument("--stock", action="store_true", help="without the plugin: show what stock SGLang refuses")
    smoke.add_argument(
        "--inject-fault",
        action="append",
        default=[],
        metavar="KIND[@CP_RANK]",
        help=f"spoil rows on one rank; the run must fail. KIND: {', '.join(kind.value for kind in FaultKind)}",
    )
    smoke.add_argument("--json", action="store_true", help="one JSON object on standard output")
    smoke.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and report.json there")
    cpu.add_arguments(smoke)
    smoke.set_defaults(run=cpu.run)


def _add_hooks(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from . import hooks

    parser = commands.add_parser("hooks", help="the hook table: print it, or check it against the installed SGLang")
    hooks.add_arguments(parser)
    parser.set_defaults(run=hooks.run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    args = build_parser().parse_args(arguments)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
