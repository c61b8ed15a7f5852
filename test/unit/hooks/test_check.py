"""The stale-hook check, on small source trees."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from typing import Any

import pytest

from sglang_dspark_cp.hooks.check import Source, digest, parameters, problems, sglang_release, sglang_root
from sglang_dspark_cp.hooks.spec import Hook, ReliesOn, Tier

BASE = """
def f(a, b=1, *, c=None):
    total = a + b
    return total
"""

SAME = {
    "docstring": 'def f(a, b=1, *, c=None):\n    """Adds."""\n    total = a + b\n    return total\n',
    "comment": "def f(a, b=1, *, c=None):\n    # adds\n    total = a + b  # here\n    return total\n",
    "annotations": "def f(a: int, b: int = 1, *, c: str | None = None) -> int:\n    total = a + b\n    return total\n",
    "annotated assignment": "def f(a, b=1, *, c=None):\n    total: int = a + b\n    return total\n",
    "layout": "def f(\n    a,\n    b=1,\n    *,\n    c=None,\n):\n    total = (a + b)\n\n    return total\n",
}

CHANGED = {
    "operator": BASE.replace("a + b", "a - b"),
    "operands": BASE.replace("a + b", "b + a"),
    "constant": BASE.replace("b=1", "b=2"),
    "constant type": BASE.replace("b=1", "b=True"),
    "name of a parameter": BASE.replace("c=None", "d=None"),
    "keyword-only no more": BASE.replace("*, ", ""),
    "one more statement": BASE.replace("    return", "    log(total)\n    return"),
    "decorator": "@cached" + BASE,
    "returns nothing": BASE.replace("return total", "return"),
    "returns None": BASE.replace("return total", "return None"),
    "async": BASE.replace("def f", "async def f"),
}


def definition(source: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    (node,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return node


def hook(target: str, names: tuple[str, ...], reviewed: str) -> Hook:
    return Hook(
        id="h", target=target, handler=lambda original: original(), parameters=names, digest=reviewed,
        tier=Tier.EAGER, relies_on=ReliesOn.BODY, process="p", why="w", upstream="u", remove_when="r",
    )  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package `pkg` with a module, a class and nested packages."""
    files: dict[str, str] = {
        "__init__.py": "def top(): pass\n",
        "srt/__init__.py": "",
        "srt/mod.py": BASE + "\nclass K:\n    x = 1\n    def m(self, q, *rest, k, **kw): return q\n    class In:\n"
        "        async def deep(self): pass\n",
    }
    for name, text in files.items():
        path = tmp_path / "pkg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "pkg"


@pytest.mark.parametrize("name", SAME)
def test_digest_ignores(name: str) -> None:
    assert digest(definition(SAME[name])) == digest(definition(BASE))


@pytest.mark.parametrize("name", CHANGED)
def test_digest_sees(name: str) -> None:
    assert digest(definition(CHANGED[name])) != digest(definition(BASE))


def test_digest_tells_return_from_return_none() -> None:
    assert digest(definition(CHANGED["returns nothing"])) != digest(definition(CHANGED["returns None"]))


def test_digest_is_twelve_hex_digits_and_stable() -> None:
    assert len(digest(definition(BASE))) == 12
    assert int(digest(definition(BASE)), 16) >= 0
    assert digest(definition(BASE)) == digest(definition(BASE))


def test_a_string_that_is_no_docstring_counts() -> None:
    with_text = BASE.replace("    return", '    "text"\n    return')
    assert digest(definition(with_text)) != digest(definition(BASE))


@pytest.mark.parametrize(
    ("signature", "names"),
    [
        ("", ()),
        ("a, b", ("a", "b")),
        ("a, /, b", ("a", "b")),
        ("a, *, b=1", ("a", "b")),
        ("a, *rest, b, **kw", ("a", "*rest", "b", "**kw")),
    ],
)
def test_parameters(signature: str, names: tuple[str, ...]) -> None:
    assert parameters(definition(f"def f({signature}): pass")) == names


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("pkg.top", "top"),
        ("pkg.srt.mod.f", "f"),
        ("pkg.srt.mod.K.m", "m"),
        ("pkg.srt.mod.K.In.deep", "deep"),
    ],
)
def test_find(tree: Path, target: str, name: str) -> None:
    found = Source(tree).find(target)
    assert found is not None, target
    assert found.name == name


@pytest.mark.parametrize(
    "target", ["pkg.srt.mod.g", "pkg.srt.gone.f", "pkg.srt.mod.K", "pkg.srt.mod.K.x", "pkg.srt.mod.Q.m", "pkg.srt"]
)
def test_what_is_no_function_is_not_found(tree: Path, target: str) -> None:
    assert Source(tree).find(target) is None


def test_the_last_definition_of_a_name_counts_as_it_does_in_python(tree: Path) -> None:
    module = tree / "srt" / "mod.py"
    module.write_text(module.read_text() + "\ndef f(other): return 0\n")
    found = Source(tree).find("pkg.srt.mod.f")
    assert found is not None
    assert parameters(found) == ("other",)


def test_a_fitting_hook_has_no_problem(tree: Path) -> None:
    assert problems([hook("pkg.srt.mod.f", ("a", "c"), digest(definition(BASE)))], tree) == []


@pytest.mark.parametrize(
    ("target", "names", "reviewed", "text"),
    [
        (
            "pkg.srt.mod.g",
            (),
            "",
            "hook h on pkg.srt.mod.g: found no such definition, expected a function or method",
        ),
        (
            "pkg.srt.mod.f",
            ("a", "z", "y"),
            "",
            "hook h on pkg.srt.mod.f: found parameters (a, b, c), expected parameters z, y",
        ),
        (
            "pkg.srt.mod.f",
            ("a",),
            "0123456789ab",
            f"hook h on pkg.srt.mod.f: found body {digest(definition(BASE))}, expected reviewed body 0123456789ab",
        ),
    ],
    ids=["missing function", "missing parameter", "stale body"],
)
def test_each_problem_says_hook_target_found_and_expected(
    tree: Path, target: str, names: tuple[str, ...], reviewed: str, text: str
) -> None:
    assert [str(problem) for problem in problems([hook(target, names, reviewed)], tree)] == [text]


def test_every_problem_is_listed(tree: Path) -> None:
    hooks: list[Any] = [hook("pkg.srt.mod.f", (), ""), hook("pkg.gone", (), ""), hook("pkg.srt.mod.K.m", ("z",), "")]
    assert len(problems(hooks, tree)) == 3


def test_the_installed_sglang_is_found_without_running_it() -> None:
    assert (sglang_root() / "srt" / "plugins").is_dir()
    assert sglang_release()
