"""`sglang-dspark-cp`: exit 0 ok, 1 failed, 2 usage."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from ..config import FaultKind, GatherMode


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="sglang-dspark-cp", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_smoke(commands)
    _add_checkpoint(commands)
    _add_hooks(commands)
    _add_plan(commands)
    _add_doctor(commands)
    return parser


def _add_smoke(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from ..smoke import cpu, cuda

    smoke = commands.add_parser("smoke", help="run the whole path and compare draft KV with an independent oracle")
    smoke.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu (default) or real servers on GPUs")
    smoke.add_argument(
        "--stock",
        action="store_true",
        help="without the plugin: what stock SGLang refuses (0.5.17), or its own run beside this package's (0.5.23)",
    )
    smoke.add_argument(
        "--inject-fault",
        action="append",
        default=[],
        metavar="KIND[@RANK][#N]",
        help="spoil draft rows on purpose (cpu: on one rank, the run must fail; cuda: which negative controls run)."
        f" KIND: {', '.join(kind.value for kind in FaultKind)}",
    )
    smoke.add_argument(
        "--mode",
        choices=[mode.value for mode in GatherMode],
        help="what of each row is gathered (default: what SGLANG_DSPARK_CP_GATHER says, else auto)",
    )
    smoke.add_argument("--json", action="store_true", help="one JSON object on standard output")
    smoke.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and report.json there")
    cpu.add_arguments(smoke)
    cuda.add_arguments(smoke)
    smoke.set_defaults(run=lambda args: (cuda if args.device == "cuda" else cpu).run(args))


def _add_checkpoint(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("make-checkpoint", help="write a small DeepSeek-V4 + DSpark checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder that is written")
    parser.add_argument("--kind", choices=("oracle", "random"), default="oracle", help="default: oracle")
    parser.add_argument("--quant", choices=("bf16", "fp8"), default="bf16", help="default: bf16")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size, a multiple of 128, at least 1024")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=_make_checkpoint)


def _make_checkpoint(args: argparse.Namespace) -> int:
    from ..smoke.checkpoint import write_checkpoint

    try:
        info = write_checkpoint(args.out, kind=args.kind, quant=args.quant, hidden=args.hidden, seed=args.seed)
    except ValueError as error:
        print(f"make-checkpoint: {error}", file=sys.stderr)
        return 2
    print(f"wrote {info.path}: {info.num_tensors} tensors, {info.num_bytes:,} bytes, kind {info.kind}, {info.quant}")
    return 0


def _add_hooks(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from . import hooks

    parser = commands.add_parser("hooks", help="the hook table: print it, or check it against the installed SGLang")
    hooks.add_arguments(parser)
    parser.set_defaults(run=hooks.run)


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from . import plan

    parser = commands.add_parser("plan", help="bytes, memory and time of each way to gather, for a model and a chunk")
    plan.add_arguments(parser)
    parser.set_defaults(run=plan.run)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from . import doctor

    parser = commands.add_parser("doctor", help="say before a start whether this machine and these arguments will work")
    doctor.add_arguments(parser)
    parser.set_defaults(run=doctor.run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    args = build_parser().parse_args(arguments)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
