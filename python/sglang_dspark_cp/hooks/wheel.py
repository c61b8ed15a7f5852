"""SGLang source trees that are not installed: wheels and unpacked folders. They are read, never imported."""

from __future__ import annotations

import ast
import difflib
import email.parser
import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

Definition = ast.FunctionDef | ast.AsyncFunctionDef

UNKNOWN_RELEASE = "unknown"
"""Release of a folder that does not say which one it is."""


class TreeError(ValueError):
    """What was given is not a wheel or folder with SGLang's sources in it."""


@dataclass(frozen=True)
class Tree:
    """One SGLang source tree: the folder of its `sglang` package, its release, and what the user called it."""

    root: Path
    release: str
    name: str


@dataclass(frozen=True)
class Excerpt:
    """Source lines of one definition, decorators included; `file` is relative to the folder above the package."""

    file: str
    line: int
    lines: tuple[str, ...]


@contextmanager
def unpacked(wheel: Path, targets: Iterable[str] | None = None) -> Iterator[Tree]:
    """The Python files of an SGLang wheel, in a temporary folder that lives as long as the context.

    With `targets` (dotted paths) only the files that those may be defined in: a release has thousands.

    Raises:
        TreeError: the file is missing, is not a wheel, or has no `sglang` package in it.
    """
    if not wheel.is_file():
        found = "a folder, which --root takes" if wheel.is_dir() else "no such file"
        raise TreeError(f"{wheel}: found {found}, expected a wheel of SGLang (python3 -m pip download sglang==X)")
    with tempfile.TemporaryDirectory(prefix="sglang-wheel-") as folder:
        try:
            with zipfile.ZipFile(wheel) as archive:
                release = _metadata_release(wheel, archive)
                _extract(archive, Path(folder), None if targets is None else list(targets))
        except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
            raise TreeError(f"{wheel}: not a readable wheel ({error}); download it again") from error
        root = Path(folder) / "sglang"
        if not (root / "__init__.py").is_file():
            raise TreeError(f"{wheel}: the wheel has no sglang/__init__.py in it, so it is not one of SGLang")
        yield Tree(root, release, wheel.name)


def _extract(archive: zipfile.ZipFile, folder: Path, targets: list[str] | None) -> None:
    paths = [PurePosixPath(name) for name in archive.namelist()]
    members = [path for path in paths if path.suffix == ".py" and path.parts[0] == "sglang" and ".." not in path.parts]
    if targets is not None:
        wanted = {tuple(target.split(".")[:count]) for target in targets for count in range(1, target.count(".") + 2)}
        # Which folders there are decides where a path leads, so those are made even if nothing in them is needed.
        for parent in {parent for path in members for parent in path.parents if parent.parts in wanted}:
            (folder / parent).mkdir(parents=True, exist_ok=True)
        members = [
            path
            for path in members
            if (path.parent.parts if path.stem == "__init__" else path.with_suffix("").parts) in wanted
            or path == PurePosixPath("sglang/__init__.py")
        ]
    archive.extractall(folder, map(str, members))


def _metadata_release(wheel: Path, archive: zipfile.ZipFile) -> str:
    names = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
    if len(names) != 1:
        raise TreeError(f"{wheel}: a zip file with {len(names)} *.dist-info/METADATA, a wheel has one")
    return _version(archive.read(names[0])) or UNKNOWN_RELEASE


def _version(metadata: bytes) -> str | None:
    message = email.parser.BytesHeaderParser().parsebytes(metadata)
    version = message["Version"]
    return None if version is None else str(version).strip()


def tree_at(folder: Path) -> Tree:
    """The tree in a folder: the `sglang` package itself, the folder above it, or a checkout of SGLang.

    Raises:
        TreeError: there is no `sglang` package in it.
    """
    for root in (folder, folder / "sglang", folder / "python" / "sglang"):
        if (root / "__init__.py").is_file() and (root / "srt").is_dir():
            return Tree(root, _folder_release(root), str(folder))
    found = "no SGLang" if folder.is_dir() else "no such folder"
    raise TreeError(
        f"{folder}: found {found}, expected __init__.py and srt/ in it, in its sglang/ or in its python/sglang/"
    )


def _folder_release(root: Path) -> str:
    generated = root / "_version.py"
    if generated.is_file():
        told = re.search(r"^__version__\s*=.*?['\"]([^'\"]+)['\"]", generated.read_text(encoding="utf-8"), re.MULTILINE)
        if told:
            return told[1]
    files = list(root.parent.glob("sglang-*.dist-info/METADATA"))
    return (_version(files[0].read_bytes()) if len(files) == 1 else None) or UNKNOWN_RELEASE


def excerpt(root: Path, target: str, definition: Definition) -> Excerpt:
    """The source lines of a definition that `hooks.check.Source(root)` found under a dotted path."""
    file = _module_file(root, target.split(".")[1:])
    first = min(node.lineno for node in (definition, *definition.decorator_list))
    lines = file.read_text(encoding="utf-8").splitlines()[first - 1 : definition.end_lineno]
    return Excerpt(file.relative_to(root.parent).as_posix(), first, tuple(lines))


def _module_file(root: Path, parts: list[str]) -> Path:
    """The file of the module that a path begins with, folders before files, as `hooks.check.Source` looks."""
    path = root
    while parts and (path / parts[0]).is_dir():
        path, parts = path / parts[0], parts[1:]
    file = path / f"{parts[0]}.py" if parts else path
    return file if file.is_file() else path / "__init__.py"


def namesakes(root: Path, target: str) -> list[tuple[str, Definition]]:
    """Every function or method of a tree that has the last name of a dotted path, nearest to the path first.

    Every class has its `__init__`, so special methods are looked for only in the path's own module and in modules that
    have a class of the same name. Modules that cannot be parsed are passed over.
    """
    *_, owner, name = target.split(".")
    mention = re.compile(rf"\bdef\s+{re.escape(name)}\b")
    class_mention = re.compile(rf"\bclass\s+{re.escape(owner)}\b") if name.startswith("__") else None
    own = _module_file(root, target.split(".")[1:])
    found: list[tuple[str, Definition]] = []
    for file in sorted(root.rglob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if not mention.search(text) or (class_mention and file != own and not class_mention.search(text)):
            continue
        try:
            module = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        parts = file.relative_to(root.parent).with_suffix("").parts
        prefix = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found += [(f"{prefix}.{path}", node) for path, node in _functions(module.body, "") if node.name == name]
    return sorted(found, key=lambda item: (*_distance(item[0], target), item[0]))


def bases_of_owner(root: Path, target: str) -> tuple[str, ...] | None:
    """Base classes of the class that a dotted path's method belongs to, None if its module has no such class."""
    parts = target.split(".")
    file = _module_file(root, parts[1:])
    if not file.is_file():
        return None
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == parts[-2]:
            return tuple(ast.unparse(base) for base in node.bases)
    return None


def _functions(body: Iterable[ast.AST], prefix: str) -> Iterator[tuple[str, Definition]]:
    """Functions and methods below a body with their path in the module; what stands inside functions is left out."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.stmt | ast.ExceptHandler):  # `if`, `try` and the like open no scope
            yield from _functions(ast.iter_child_nodes(node), prefix)


def _distance(path: str, target: str) -> tuple[int, float]:
    """Smaller is nearer: first the names that agree from the end, then the likeness of the whole path."""
    pairs = zip(reversed(path.split(".")), reversed(target.split(".")), strict=False)
    agree = next(
        (count for count, (one, other) in enumerate(pairs) if one != other), min(path.count("."), target.count("."))
    )
    return -agree, -difflib.SequenceMatcher(None, path, target, autojunk=False).ratio()
