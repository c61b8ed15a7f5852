"""`sglang-dspark-cp hooks`: the hook table as text, whether it fits an SGLang, and what an SGLang changed under it."""

from __future__ import annotations

import argparse
import difflib
import enum
import json
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from .. import adapters
from ..hooks.check import Definition, Source, digest, parameters, problems, sglang_release, sglang_root
from ..hooks.spec import Hook
from ..hooks.wheel import Tree, TreeError, bases_of_owner, excerpt, namesakes, tree_at, unpacked

INSTALLED = "installed"
"""The value of `--base` that stands for the SGLang of this environment."""

CANDIDATES = 20
"""How many candidates for a definition that is gone are looked at; text shows the first six."""


class State(enum.Enum):
    """How a definition stands to the one that was reviewed (`check`) or to that of the base (`diff`)."""

    FITS = "fits"
    MISSING = "missing"
    PARAMETERS = "parameters changed"
    BODY = "body changed"
    NOT_IN_BASE = "not in base"


MARKDOWN_STATE = {State.FITS: "same", State.MISSING: "gone", State.PARAMETERS: "changed", State.BODY: "changed"}
STYLE = {State.FITS: "green", State.MISSING: "red", State.PARAMETERS: "red", State.BODY: "yellow"}


@dataclass(frozen=True)
class Finding:
    """One hooked definition, or one that a hook reads, in one tree."""

    hook: Hook
    target: str
    reads: bool
    state: State
    found: str | None
    reviewed: str
    parameters: tuple[str, ...] | None

    @property
    def label(self) -> str:
        """Short name for tables."""
        return f"{self.hook.id} reads" if self.reads else self.hook.id

    @property
    def detail(self) -> str:
        """What was found and what the hook was written for; empty if it fits."""
        if self.state is State.FITS:
            return ""
        if self.state is State.MISSING:
            return f"no such definition, reviewed {self.reviewed}; `hooks diff` lists where it may have gone"
        text = f"found {self.found}, reviewed {self.reviewed}"
        if self.state is State.PARAMETERS:
            text += f", parameters ({', '.join(self.parameters or ())}), needed ({', '.join(self.hook.parameters)})"
        return text if self.reads else f"{text}, relies on the {self.hook.relies_on.value}"

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "hook": self.hook.id,
            "target": self.target,
            "reads": self.reads,
            "state": self.state.value,
            "found": self.found,
            "reviewed": self.reviewed,
            "parameters": self.parameters,
            "needed": None if self.reads else self.hook.parameters,
            "relies_on": "body" if self.reads else self.hook.relies_on.value,
        }


@dataclass(frozen=True)
class Change:
    """One definition that is not the same in two trees, with every hook it matters to."""

    target: str
    hooks: tuple[tuple[str, bool], ...]
    """(hook id, whether the hook only reads it)."""
    state: State
    base: str | None
    new: str | None
    diff: tuple[str, ...] = ()
    candidates: tuple[tuple[str, str], ...] = ()
    """(dotted path, digest) of definitions with the same name, nearest first, at most `CANDIDATES`."""
    namesakes: int = 0
    """How many definitions with the same name there are."""
    bases: tuple[str, ...] | None = None
    """Base classes of the class that no longer has the method itself; None if the class is gone too."""

    def as_json(self) -> list[dict[str, Any]]:
        """For `--json`: one entry per hook."""
        return [
            {
                "hook": hook,
                "target": self.target,
                "reads": reads,
                "state": self.state.value,
                "base": self.base,
                "new": self.new,
                "diff": "\n".join(self.diff),
                "candidates": [{"target": path, "digest": body} for path, body in self.candidates],
            }
            for hook, reads in self.hooks
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Actions and options of `hooks`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="{check,diff,markdown}")

    check = actions.add_parser("check", help="exit 1 if a hook does not fit the installed SGLang, or a wheel of one")
    check.add_argument("--wheel", type=Path, action="append", default=[], metavar="FILE", help=f"{_NEW}; repeatable")
    check.add_argument("--root", type=Path, action="append", default=[], metavar="DIR", help=f"{_FOLDER}; repeatable")
    _add_table_arguments(check, "the newest")
    output = check.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="one JSON object per SGLang, each on a line of its own")
    output.add_argument("--markdown", action="store_true", help="a Markdown table: a row per hook, a column per SGLang")

    diff = actions.add_parser("diff", help="what a wheel changes in the definitions that are hooked (exit 1 if any)")
    new = diff.add_mutually_exclusive_group(required=True)
    new.add_argument("--wheel", type=Path, metavar="FILE", help=_NEW)
    new.add_argument("--root", type=Path, metavar="DIR", help=_FOLDER)
    diff.add_argument(
        "--base",
        default=INSTALLED,
        metavar="BASE",
        help=f"what to compare with: a wheel, a folder or `{INSTALLED}` (default)",
    )
    _add_table_arguments(diff, "that of the base if it was reviewed, else the newest")
    diff.add_argument("--json", action="store_true", help="a list of objects with hook, target, state and diff")

    actions.add_parser("markdown", help="print docs/hooks.md")


_NEW = "a wheel of SGLang, which need not be installed"
_FOLDER = "an unpacked wheel, a checkout or any other folder with the sglang package in it"


def _add_table_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--against",
        metavar="RELEASE",
        help=f"whose hook table to use, reviewed: {', '.join(adapters.REVIEWED)} (default: {default})",
    )
    parser.add_argument(
        "--debug-hooks", action="store_true", help="also the hooks that only SGLANG_DSPARK_CP_DUMP_DIR installs"
    )


def table(release: str) -> tuple[Hook, ...]:
    """All hooks for a reviewed release."""
    adapter = adapters.find(release)
    if adapter is None:
        raise LookupError(f"SGLang {release} was not reviewed; reviewed: {', '.join(adapters.REVIEWED)}")
    return (*adapter.EAGER_HOOKS, *adapter.WORKER_HOOKS)


def newest() -> str:
    """The newest reviewed release."""
    return max(adapters.REVIEWED, key=lambda release: [int(number) for number in re.findall(r"\d+", release)])


def markdown() -> str:
    """`docs/hooks.md`."""
    lines = [
        "# Hooks",
        "",
        "Generated by `sglang-dspark-cp hooks markdown`; a test keeps it current. Every hook is checked against the",
        "installed SGLang before any is registered: the target must exist, have the parameters below, and have the",
        "body whose digest was reviewed (AST without docstrings, comments and annotations).",
    ]
    for release in adapters.REVIEWED:
        lines += ["", f"## SGLang {release}"]
        for hook in table(release):
            lines += [
                "",
                f"### `{hook.id}`",
                "",
                f"- target: `{hook.target}({', '.join(hook.parameters)})`, {hook.kind.value}, digest `{hook.digest}`",
            ]
            lines += [f"- reads: `{target}`, digest `{reviewed}`" for target, reviewed in hook.reads]
            lines += [
                f"- tier: {hook.tier.value}; relies on the target's {hook.relies_on.value}",
                f"- runs in: {hook.process}",
                f"- why: {hook.why}",
                f"- upstream: {hook.upstream}",
                f"- remove when: {hook.remove_when}",
            ]
    return "\n".join(lines) + "\n"


def findings(hooks: Iterable[Hook], tree: Tree) -> list[Finding]:
    """The state of every hook's target and of everything it reads, in the order of the table."""
    source = Source(tree.root)
    found = []
    for hook in hooks:
        for target, reviewed, reads in _definitions(hook):
            definition = _find(source, tree, target)
            names = body = None
            if definition is None:
                state = State.MISSING
            else:
                names, body = parameters(definition), digest(definition)
                if not reads and not set(hook.parameters) <= set(names):
                    state = State.PARAMETERS
                else:
                    state = State.FITS if body == reviewed else State.BODY
            found.append(Finding(hook, target, reads, state, body, reviewed, names))
    return found


def changes(hooks: Iterable[Hook], base: Tree, new: Tree) -> list[Change]:
    """Every hooked or read definition that differs between two trees, in the order of the table, each once."""
    users: dict[str, list[tuple[str, bool]]] = {}
    for hook in hooks:
        for target, _, reads in _definitions(hook):
            users.setdefault(target, []).append((hook.id, reads))
    old_source, new_source = Source(base.root), Source(new.root)
    found = []
    for target, by in users.items():
        old, now = _find(old_source, base, target), _find(new_source, new, target)
        old_digest, new_digest = (None if node is None else digest(node) for node in (old, now))
        if old_digest == new_digest and old is not None:
            continue
        if now is None:
            found.append(_gone(target, tuple(by), old_digest, new))
            continue
        if old is None:
            state = State.NOT_IN_BASE
        else:
            state = State.BODY if parameters(old) == parameters(now) else State.PARAMETERS
        found.append(Change(target, tuple(by), state, old_digest, new_digest, _unified(target, base, old, new, now)))
    return found


def _gone(target: str, hooks: tuple[tuple[str, bool], ...], old_digest: str | None, new: Tree) -> Change:
    elsewhere = namesakes(new.root, target)
    return Change(
        target,
        hooks,
        State.MISSING,
        old_digest,
        None,
        candidates=tuple((path, digest(node)) for path, node in elsewhere[:CANDIDATES]),
        namesakes=len(elsewhere),
        bases=bases_of_owner(new.root, target),
    )


def _definitions(hook: Hook) -> list[tuple[str, str, bool]]:
    """(target, reviewed digest, whether it is only read) of a hook."""
    return [(hook.target, hook.digest, False), *((target, reviewed, True) for target, reviewed in hook.reads)]


def _find(source: Source, tree: Tree, target: str) -> Definition | None:
    try:
        return source.find(target)
    except (SyntaxError, ValueError) as error:
        version = ".".join(map(str, sys.version_info[:2]))
        raise TreeError(
            f"{tree.name}: Python {version} cannot parse the module of {target} ({error}); use the Python release that"
            f" SGLang {tree.release} is made for"
        ) from error


def _unified(target: str, base: Tree, old: Definition | None, new: Tree, now: Definition) -> tuple[str, ...]:
    after = excerpt(new.root, target, now)
    before = None if old is None else excerpt(base.root, target, old)
    lines = difflib.unified_diff(
        before.lines if before else (),
        after.lines,
        f"{base.release} {before.file}:{before.line}" if before else f"{base.release} nothing",
        f"{new.release} {after.file}:{after.line}",
        lineterm="",
    )
    return tuple(lines)


def run(args: argparse.Namespace) -> int:
    """0 ok, 1 a hook does not fit (`check`) or a definition differs (`diff`), 2 usage."""
    if args.action == "markdown":
        sys.stdout.write(markdown())
        return 0
    try:
        return _diff(args) if args.action == "diff" else _check(args)
    except (TreeError, _NotReviewed, ModuleNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2


class _NotReviewed(Exception):
    """There is no hook table for a release."""


def _hooks(args: argparse.Namespace, release: str) -> tuple[Hook, ...]:
    try:
        hooks = table(release)
    except LookupError as error:
        raise _NotReviewed(str(error)) from error
    return (*hooks, *adapters.debug_hooks(release)) if args.debug_hooks else hooks


def _open(path: Path, stack: ExitStack) -> Tree:
    return tree_at(path) if path.is_dir() else stack.enter_context(unpacked(path))


def _installed() -> Tree:
    try:
        return Tree(sglang_root(), sglang_release(), "installed SGLang")
    except ModuleNotFoundError as error:
        raise TreeError(
            "SGLang is not installed in this environment; install it, or name wheels with --wheel (and --base)"
        ) from error


def _say(line: str, style: str = "") -> None:
    """One line of text, coloured on a terminal and never wrapped."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(Text(line, style), soft_wrap=True)
    else:
        print(line)


# ------------------------------------------------------------------------------------------------------------- check


def _check(args: argparse.Namespace) -> int:
    if not args.wheel and not args.root and args.against is None and not args.markdown:
        return _check_installed(args)
    release = args.against or newest()
    hooks = _hooks(args, release)
    results: list[tuple[Tree, list[Finding]]] = []
    targets = [target for hook in hooks for target, _, _ in _definitions(hook)]
    for path in args.wheel:
        with unpacked(path, targets) as tree:
            results.append((tree, findings(hooks, tree)))
    for tree in (tree_at(path) for path in args.root):
        results.append((tree, findings(hooks, tree)))
    if not results:
        tree = _installed()
        results.append((tree, findings(hooks, tree)))
    if args.markdown:
        print(_markdown_table(release, results))
    else:
        for tree, found in results:
            print(_as_json(release, hooks, tree, found)) if args.json else _report(release, hooks, tree, found)
    return 1 if any(finding.state is not State.FITS for _, found in results for finding in found) else 0


def _check_installed(args: argparse.Namespace) -> int:
    tree = _installed()
    hooks = _hooks(args, tree.release)
    found = problems(hooks, tree.root)
    if args.json:
        shown = [vars(problem) for problem in found]
        print(json.dumps({"sglang": tree.release, "hooks": len(hooks), "problems": shown}))
    else:
        for problem in found:
            print(problem)
        misfits = {problem.hook_id for problem in found}
        print(f"SGLang {tree.release}: {len(hooks) - len(misfits)} of {len(hooks)} hooks fit")
    return 1 if found else 0


def _fitting(hooks: Sequence[Hook], found: Iterable[Finding]) -> int:
    return len(hooks) - len({finding.hook.id for finding in found if finding.state is not State.FITS})


def _as_json(release: str, hooks: Sequence[Hook], tree: Tree, found: Sequence[Finding]) -> str:
    return json.dumps(
        {
            "sglang": tree.release,
            "source": tree.name,
            "against": release,
            "hooks": len(hooks),
            "fitting": _fitting(hooks, found),
            "findings": [finding.as_json() for finding in found],
        }
    )


def _report(release: str, hooks: Sequence[Hook], tree: Tree, found: Sequence[Finding]) -> None:
    _say(f"{tree.name}: SGLang {tree.release} and the hooks of {release}", "bold")
    widths = [max((len(text) for text in column), default=0) for column in zip(*map(_cells, found), strict=True)]
    for finding in found:
        cells = [text.ljust(width) for text, width in zip(_cells(finding), widths, strict=True)]
        _say(f"  {'  '.join(cells)}  {finding.detail}".rstrip(), STYLE[finding.state])
    _say(f"SGLang {tree.release}: {_fitting(hooks, found)} of {len(hooks)} hooks fit", "bold")


def _cells(finding: Finding) -> tuple[str, str, str]:
    return finding.state.value, finding.label, finding.target


def _markdown_table(release: str, results: Sequence[tuple[Tree, Sequence[Finding]]]) -> str:
    lines = [
        f"| hook of {release} | {' | '.join(tree.release for tree, _ in results)} |",
        f"|---|{'---|' * len(results)}",
    ]
    for row in zip(*(found for _, found in results), strict=True):
        first = row[0]
        name = f"`{first.hook.id}`"
        if first.reads:
            name += f" reads `{'.'.join(first.target.split('.')[-2:])}`"
        lines.append(f"| {name} | {' | '.join(MARKDOWN_STATE[finding.state] for finding in row)} |")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------------- diff


def _diff(args: argparse.Namespace) -> int:
    with ExitStack() as stack:
        base = _installed() if args.base == INSTALLED else _open(Path(args.base), stack)
        new = tree_at(args.root) if args.root is not None else stack.enter_context(unpacked(args.wheel))
        release = args.against or (base.release if adapters.find(base.release) is not None else newest())
        hooks = _hooks(args, release)
        found = changes(hooks, base, new)
    if args.json:
        print(json.dumps([entry for change in found for entry in change.as_json()]))
        return 1 if found else 0
    for change in found:
        _show(change, base, new)
    everything = {target for hook in hooks for target, _, _ in _definitions(hook)}
    gone = sum(change.state is State.MISSING for change in found)
    _say(
        f"SGLang {base.release} -> {new.release}, hooks of {release}: {len(everything)} definitions,"
        f" {len(everything) - len(found)} same, {len(found) - gone} changed, {gone} gone",
        "bold",
    )
    return 1 if found else 0


def _show(change: Change, base: Tree, new: Tree) -> None:
    users = ", ".join(f"{hook} (reads it)" if reads else hook for hook, reads in change.hooks)
    _say(
        f"== {users}: {change.target}: {change.state.value}, {change.base or 'none'} -> {change.new or 'none'}", "bold"
    )
    for line in change.diff:
        _say(line, _diff_style(line))
    if change.state is State.MISSING:
        _say(f"no such definition in {new.release}" + ("" if change.base else f", nor in {base.release}"), "red")
        *_, owner, name = change.target.split(".")
        if change.bases is not None:
            _say(f"class {owner}({', '.join(change.bases)}) is still there; it may inherit {name}")
        if not change.candidates:
            _say(f"nothing else in {new.release} is named {name}")
        else:
            _say(f"candidates, definitions named {name}, nearest first:")
        for path, body in change.candidates[:6]:
            _say(f"  {path}  {body}" + (f"  same body as in {base.release}" if body == change.base else ""), "cyan")
        if change.namesakes > 6:
            _say(f"  and {change.namesakes - 6} more, --json lists the first {CANDIDATES}")
    _say("")


def _diff_style(line: str) -> str:
    if line.startswith(("---", "+++")):
        return "bold"
    return {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")
