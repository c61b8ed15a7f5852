"""Do the hooks still fit the installed SGLang? Answered from its source files, without importing it."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .spec import Hook

Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Problem:
    """One hook that does not fit."""

    hook_id: str
    target: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"hook {self.hook_id} on {self.target}: found {self.found}, expected {self.expected}"


def sglang_release() -> str:
    """Version of the installed SGLang distribution."""
    return importlib.metadata.version("sglang")


def sglang_root() -> Path:
    """Folder of the installed `sglang` package; the package itself is not executed."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("sglang is not installed in this environment")
    return Path(next(iter(spec.submodule_search_locations)))


_IGNORED = frozenset({"annotation", "returns", "type_comment", "type_params", "kind", "ctx"})
"""Node fields that change without changing what the code does, or that only some Python releases have."""


def _canonical(node: object) -> object:
    """A nested tuple of what an AST says, the same under Python 3.11 and every later release."""
    if isinstance(node, list):
        return [_canonical(item) for item in node]
    if not isinstance(node, ast.AST):
        return node
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        node = ast.Assign(targets=[node.target], value=node.value)
    fields = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list) and value and _is_docstring(value[0]):
            value = value[1:]
        if name not in _IGNORED and value is not None and value != []:
            fields.append((name, _canonical(value)))
    return (type(node).__name__, fields)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def digest(definition: Definition) -> str:
    """Twelve hex digits over the structure of a definition."""
    return hashlib.sha256(repr(_canonical(definition)).encode()).hexdigest()[:12]


def parameters(definition: Definition) -> tuple[str, ...]:
    """Names of all parameters, in order of appearance; `*args` and `**kwargs` with their stars."""
    a = definition.args
    names = [arg.arg for arg in (*a.posonlyargs, *a.args)]
    names += [f"*{a.vararg.arg}"] if a.vararg else []
    names += [arg.arg for arg in a.kwonlyargs]
    names += [f"**{a.kwarg.arg}"] if a.kwarg else []
    return tuple(names)


class Source:
    """Definitions of one SGLang source tree, each file parsed once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._trees: dict[Path, ast.Module] = {}

    def find(self, target: str) -> Definition | None:
        """The definition that a dotted path names, or None if module, class or function is not there."""
        parts = target.split(".")[1:]
        path = self._root
        while parts and (path / parts[0]).is_dir():
            path = path / parts.pop(0)
        file = path / f"{parts[0]}.py" if parts else path / "__init__.py"
        if file.is_file():
            parts = parts[1:]
        else:
            file = path / "__init__.py"
        if not file.is_file():
            return None
        scope: ast.Module | ast.ClassDef | Definition = self._tree(file)
        for name in parts:
            found = next(
                (
                    node
                    for node in reversed(scope.body)  # the last definition of a name is the one that counts
                    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
                ),
                None,
            )
            if found is None:
                return None
            scope = found
        return scope if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) else None

    def _tree(self, file: Path) -> ast.Module:
        if file not in self._trees:
            self._trees[file] = ast.parse(file.read_text(encoding="utf-8"))
        return self._trees[file]


def problems(hooks: Iterable[Hook], root: Path) -> list[Problem]:
    """Every hook whose target is gone, has other parameters or another body than the one that was reviewed."""
    source = Source(root)
    found: list[Problem] = []
    for hook in hooks:
        definition = source.find(hook.target)
        if definition is None:
            found.append(Problem(hook.id, hook.target, "no such definition", "a function or method"))
            continue
        names = parameters(definition)
        missing = [name for name in hook.parameters if name not in names]
        if missing:
            found.append(
                Problem(hook.id, hook.target, f"parameters ({', '.join(names)})", f"parameters {', '.join(missing)}")
            )
        elif digest(definition) != hook.digest:
            found.append(Problem(hook.id, hook.target, f"body {digest(definition)}", f"reviewed body {hook.digest}"))
        for target, reviewed in hook.reads:
            other = source.find(target)
            if other is None:
                found.append(Problem(hook.id, target, "no such definition", "a function or method"))
            elif digest(other) != reviewed:
                found.append(Problem(hook.id, target, f"body {digest(other)}", f"reviewed body {reviewed}"))
    return found
