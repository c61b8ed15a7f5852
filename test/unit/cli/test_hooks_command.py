"""`hooks check` and `hooks diff` on small wheels and folders, and on the installed SGLang."""

from __future__ import annotations

import ast
import json
import re
import shlex
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dspark_cp import adapters
from sglang_dspark_cp.cli import hooks as command
from sglang_dspark_cp.cli.main import build_parser, main
from sglang_dspark_cp.hooks.check import Source, digest, problems, sglang_release, sglang_root
from sglang_dspark_cp.hooks.spec import Hook, ReliesOn, Tier
from sglang_dspark_cp.hooks.wheel import TreeError, excerpt, namesakes, tree_at, unpacked

BASE = {
    "sglang/__init__.py": "",
    "sglang/_version.py": "__version__ = version = '9.9.0'\n",
    "sglang/srt/__init__.py": "",
    "sglang/srt/mod.py": (
        "import functools\n\n\n"
        "class K:\n    @functools.cache\n    def m(self, a, b):\n        return a + b\n\n\n"
        "def f(a):\n    return a\n\n\n"
        "def read(a):\n    return -a\n"
    ),
}
"""Members of the wheel that the hook table below was reviewed for."""


def wheel(folder: Path, release: str = "9.9.0", name: str = "sglang", **changed: str | None) -> Path:
    """A wheel of `BASE`, with other text for `mod` (the module) and the like, None for no such file."""
    files: dict[str, str | None] = dict(BASE)
    files |= {f"sglang/srt/{key}.py": text for key, text in changed.items()}
    files[f"{name}-{release}.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n\nx\n"
    path = folder / f"{name}-{release}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in files.items():
            if text is not None:
                archive.writestr(member, text)
    return path


def edited(old: str, new: str) -> str:
    """The text of the hooked module with one place changed."""
    assert BASE["sglang/srt/mod.py"].count(old) == 1
    return BASE["sglang/srt/mod.py"].replace(old, new)


def body(path: str) -> str:
    """Digest of a definition of `BASE`."""
    scope: Any = ast.parse(BASE["sglang/srt/mod.py"])
    for name in path.split("."):
        scope = next(node for node in scope.body if getattr(node, "name", None) == name)
    return digest(scope)


def hook(id: str, path: str, parameters: tuple[str, ...], **more: Any) -> Hook:
    return Hook(
        id=id, target=f"sglang.srt.mod.{path}", handler=lambda original: original(), parameters=parameters,
        digest=body(path), tier=Tier.EAGER, process="p", why="w", upstream="u", remove_when="r",
        **{"relies_on": ReliesOn.BODY, **more},
    )  # fmt: skip


HOOKS = (
    hook("method", "K.m", ("self", "a")),
    hook("function", "f", ("a",), relies_on=ReliesOn.SIGNATURE, reads=(("sglang.srt.mod.read", body("read")),)),
)


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Three reviewed releases; the newest is the last neither in the dictionary nor in the alphabet."""
    if "real_table" in request.fixturenames:
        return
    known = {"9.10.0": HOOKS[:1], "9.9.0": HOOKS, "9.2.0": ()}
    found = {release: SimpleNamespace(EAGER_HOOKS=hooks, WORKER_HOOKS=()) for release, hooks in known.items()}
    monkeypatch.setattr(adapters, "REVIEWED", dict.fromkeys(known, "module"))
    monkeypatch.setattr(adapters, "find", found.get)


@pytest.fixture
def real_table() -> None:
    """Ask for this to keep the hook tables of the package."""


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run the command line; argparse's own exits count too."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main(["hooks", *map(str, arguments)])
        except SystemExit as exit:
            code = int(exit.code or 0)
        return code, *capsys.readouterr()

    return run


def states(out: str) -> dict[tuple[str, bool], str]:
    return {(one["hook"], one["reads"]): one["state"] for one in json.loads(out)["findings"]}


# ------------------------------------------------------------------------------------------------------------- check


def test_a_wheel_that_fits(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("check", "--wheel", wheel(tmp_path, "9.9.7"), "--against", "9.9.0")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "sglang-9.9.7-py3-none-any.whl: SGLang 9.9.7 and the hooks of 9.9.0"
    assert [line.split() for line in out.splitlines()[1:-1]] == [
        ["fits", "method", "sglang.srt.mod.K.m"],
        ["fits", "function", "sglang.srt.mod.f"],
        ["fits", "function", "reads", "sglang.srt.mod.read"],
    ]
    assert out.splitlines()[-1] == "SGLang 9.9.7: 2 of 2 hooks fit"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (edited("a + b", "a - b"), {("method", False): "body changed"}),
        (edited("(self, a, b)", "(self, q, b)"), {("method", False): "parameters changed"}),
        (edited("(self, a, b)", "(self, a, b, c)"), {("method", False): "body changed"}),
        (edited("class K", "class L"), {("method", False): "missing"}),
        (edited("-a", "+a"), {("function", True): "body changed"}),
        (edited("def read", "def moved"), {("function", True): "missing"}),
        (edited("return a\n", "return a  # same\n"), {}),
        (None, {("method", False): "missing", ("function", False): "missing", ("function", True): "missing"}),
    ],
)
def test_states(cli: Cli, tmp_path: Path, text: str | None, expected: dict[tuple[str, bool], str]) -> None:
    file = wheel(tmp_path, mod=text)
    code, out, _ = cli("check", "--wheel", file, "--against", "9.9.0", "--json")
    assert {key: state for key, state in states(out).items() if state != "fits"} == expected
    assert code == (1 if expected else 0)
    with unpacked(file) as tree:  # the plugin itself judges the same way
        misfits = {found.hook_id for found in problems(HOOKS, tree.root)}
    assert misfits == {one["hook"] for one in json.loads(out)["findings"] if one["state"] != "fits"}


def test_each_misfit_says_what_was_found_and_what_was_reviewed(cli: Cli, tmp_path: Path) -> None:
    text = edited("a + b", "a - b").replace("def f(a)", "def f(q)").replace("def read", "def moved")
    code, out, _ = cli("check", "--wheel", wheel(tmp_path, mod=text), "--against", "9.9.0")
    lines = {tuple(line.split("sglang.srt")[0].split()): line for line in out.splitlines()[1:-1]}
    with unpacked(wheel(tmp_path, mod=text)) as tree:
        source = Source(tree.root)
        new = {name: digest(node) for name in ("K.m", "f") if (node := source.find(f"sglang.srt.mod.{name}"))}
    assert f"found {new['K.m']}, reviewed {body('K.m')}, relies on the body" in lines["body", "changed", "method"]
    line = lines["parameters", "changed", "function"]
    assert f"found {new['f']}, reviewed {body('f')}, parameters (q), needed (a), relies on the signature" in line
    assert f"no such definition, reviewed {body('read')}" in lines["missing", "function", "reads"]
    assert (code, out.splitlines()[-1]) == (1, "SGLang 9.9.0: 0 of 2 hooks fit")


def test_json_has_the_release_the_table_and_both_digests(cli: Cli, tmp_path: Path) -> None:
    file = wheel(tmp_path, "9.9.1", mod=edited("a + b", "a - b"))
    told = json.loads(cli("check", "--wheel", file, "--against", "9.9.0", "--json")[1])
    assert (told["sglang"], told["against"], told["hooks"], told["fitting"]) == ("9.9.1", "9.9.0", 2, 1)
    first = told["findings"][0]
    assert (first["target"], first["reviewed"], first["needed"]) == ("sglang.srt.mod.K.m", body("K.m"), ["self", "a"])
    assert re.fullmatch("[0-9a-f]{12}", first["found"])
    assert first["found"] != first["reviewed"]


def test_the_default_table_is_that_of_the_newest_release(cli: Cli, tmp_path: Path) -> None:
    told = json.loads(cli("check", "--wheel", wheel(tmp_path), "--json")[1])
    assert (told["against"], told["hooks"]) == ("9.10.0", 1)


def test_several_wheels_make_a_json_line_each(cli: Cli, tmp_path: Path) -> None:
    old, new = wheel(tmp_path, "9.9.1"), wheel(tmp_path, "9.9.2", mod=None)
    code, out, _ = cli("check", "--wheel", old, "--wheel", new, "--json")
    assert [(line["sglang"], line["fitting"]) for line in map(json.loads, out.splitlines())] == [
        ("9.9.1", 1),
        ("9.9.2", 0),
    ]
    assert code == 1


def test_the_markdown_table(cli: Cli, tmp_path: Path) -> None:
    same = wheel(tmp_path, "9.9.1")
    other = wheel(tmp_path, "9.9.2", mod=edited("a + b", "a - b").replace("def read", "def moved"))
    third = wheel(tmp_path, "9.9.3", mod=edited("(self, a, b)", "(self)"))
    arguments = [word for file in (same, other, third) for word in ("--wheel", file)]
    code, out, _ = cli("check", *arguments, "--markdown", "--against", "9.9.0")
    assert code == 1
    assert out.splitlines() == [
        "| hook of 9.9.0 | 9.9.1 | 9.9.2 | 9.9.3 |",
        "|---|---|---|---|",
        "| `method` | same | changed | changed |",
        "| `function` | same | same | same |",
        "| `function` reads `mod.read` | same | gone | same |",
    ]


@pytest.mark.parametrize("below", ["", "sglang", "python"])
def test_a_folder(cli: Cli, tmp_path: Path, below: str) -> None:
    with zipfile.ZipFile(wheel(tmp_path)) as archive:
        archive.extractall(tmp_path / "tree" / ("python" if below == "python" else ""))
    root = tmp_path / "tree" / (below if below == "sglang" else "")
    code, out, _ = cli("check", "--root", root, "--against", "9.9.0", "--json")
    assert (code, json.loads(out)["sglang"]) == (0, "9.9.0")


def test_the_release_of_a_folder_without_a_generated_version(tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel(tmp_path, "9.9.4")) as archive:
        archive.extractall(tmp_path / "tree")
    (tmp_path / "tree" / "sglang" / "_version.py").unlink()
    assert tree_at(tmp_path / "tree").release == "9.9.4"
    (tmp_path / "tree" / "sglang-9.9.4.dist-info" / "METADATA").unlink()
    assert tree_at(tmp_path / "tree").release == "unknown"


def test_only_what_a_hook_may_be_in_is_unpacked_and_the_rest_stays_decisive(tmp_path: Path) -> None:
    # A folder `mod/` beside `mod.py` is what Python would import, so the function of mod.py does not count.
    files = {"mod/other": "", "other": "", "mod/__init__": "def g(): pass\n"}
    file = wheel(tmp_path, **files)
    found = {}
    for targets in (None, ["sglang.srt.mod.g", "sglang.srt.mod.f"]):
        with unpacked(file, targets) as tree:
            source = Source(tree.root)
            found[targets is None] = [source.find(f"sglang.srt.mod.{name}") is not None for name in "gf"]
            assert (tree.root / "srt" / "other.py").exists() is (targets is None)
    assert found[True] == found[False]
    assert not tree.root.exists()


# ------------------------------------------------------------------------------------------------------------- usage


def test_what_is_not_a_wheel_of_sglang_is_usage(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "text.whl").write_text("no zip")
    with zipfile.ZipFile(tmp_path / "plain.whl", "w") as archive:
        archive.writestr("sglang/__init__.py", "")
    other = tmp_path / "other"
    other.mkdir()
    with zipfile.ZipFile(other / "other.whl", "w") as archive:
        archive.writestr("other-1.dist-info/METADATA", "Name: other\nVersion: 1\n")
        archive.writestr("other/__init__.py", "")
    cut = wheel(tmp_path, "9.9.8")
    cut.write_bytes(cut.read_bytes()[:-40])
    for path, text in (
        (tmp_path / "gone.whl", "no such file"),
        (tmp_path / "text.whl", "not a readable wheel"),
        (tmp_path / "plain.whl", "0 *.dist-info/METADATA"),
        (other / "other.whl", "no sglang/__init__.py"),
        (other, "--root"),
        (cut, "not a readable wheel"),
    ):
        for action in ("check", "diff"):
            code, out, err = cli(action, "--wheel", path)
            assert (code, out) == (2, ""), path
            assert str(path) in err
            assert text in err


def test_a_folder_without_sglang_is_usage(cli: Cli, tmp_path: Path) -> None:
    for path, text in ((tmp_path, "no SGLang"), (tmp_path / "gone", "no such folder")):
        code, out, err = cli("check", "--root", path)
        assert (code, out) == (2, "")
        assert f"{path}: found {text}, expected" in err


def test_a_table_that_does_not_exist_is_usage(cli: Cli, tmp_path: Path) -> None:
    for action in ("check", "diff"):
        code, _, err = cli(action, "--wheel", wheel(tmp_path), "--against", "1.0")
        assert code == 2
        assert "SGLang 1.0 was not reviewed; reviewed: 9.10.0, 9.9.0, 9.2.0" in err


def test_sources_of_a_later_python_are_usage(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli("check", "--wheel", wheel(tmp_path, mod="def f(a): return a ? b\n"))
    assert code == 2
    assert "cannot parse the module of sglang.srt.mod.K.m" in err


@pytest.mark.parametrize(
    "arguments", [["diff"], ["diff", "--wheel", "a", "--root", "b"], ["check", "--json", "--markdown"], []]
)
def test_arguments_that_do_not_go_together(cli: Cli, arguments: list[str]) -> None:
    assert cli(*arguments)[0] == 2


def test_members_outside_the_package_are_not_unpacked(tmp_path: Path) -> None:
    file = wheel(tmp_path)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("sglang/../../escaped.py", "")
        archive.writestr("/sglang/absolute.py", "")
        archive.writestr("elsewhere/x.py", "")
    with unpacked(file) as tree:
        names = {path.relative_to(tree.root.parent).as_posix() for path in tree.root.parent.rglob("*.py")}
        assert names == set(BASE)
        assert not (tree.root.parent.parent / "escaped.py").exists()


# -------------------------------------------------------------------------------------------------------------- diff


def test_two_equal_wheels_have_no_diff(cli: Cli, tmp_path: Path) -> None:
    one, other = wheel(tmp_path), wheel(tmp_path, "9.9.1")
    code, out, _ = cli("diff", "--wheel", other, "--base", one)
    assert code == 0
    assert out == "SGLang 9.9.0 -> 9.9.1, hooks of 9.9.0: 3 definitions, 3 same, 0 changed, 0 gone\n"
    assert json.loads(cli("diff", "--wheel", other, "--base", one, "--json")[1]) == []


def test_a_diff_shows_the_lines_of_the_definition_with_its_decorators(cli: Cli, tmp_path: Path) -> None:
    new = wheel(tmp_path, "9.9.1", mod="# one more line\n" + edited("a + b", "a - b"))
    code, out, _ = cli("diff", "--wheel", new, "--base", wheel(tmp_path))
    header, *lines = out.splitlines()
    assert code == 1
    assert header.startswith(f"== method: sglang.srt.mod.K.m: body changed, {body('K.m')} -> ")
    assert lines[:7] == [
        "--- 9.9.0 sglang/srt/mod.py:5",
        "+++ 9.9.1 sglang/srt/mod.py:6",
        "@@ -1,3 +1,3 @@",
        "     @functools.cache",
        "     def m(self, a, b):",
        "-        return a + b",
        "+        return a - b",
    ]
    assert lines[-1].endswith("3 definitions, 2 same, 1 changed, 0 gone")


def test_json_of_a_diff(cli: Cli, tmp_path: Path) -> None:
    text = edited("(self, a, b)", "(self, b)").replace("def read", "def moved")
    base, new = wheel(tmp_path), wheel(tmp_path, "9.9.1", mod=text, other="class A:\n    async def read(self): pass\n")
    code, out, _ = cli("diff", "--wheel", new, "--base", base, "--json")
    method, read = json.loads(out)
    assert code == 1
    assert (method["hook"], method["target"], method["state"]) == ("method", "sglang.srt.mod.K.m", "parameters changed")
    assert "-    def m(self, a, b):\n+    def m(self, b):" in method["diff"]
    assert method["candidates"] == []
    assert (read["hook"], read["reads"], read["state"], read["diff"]) == ("function", True, "missing", "")
    assert [candidate["target"] for candidate in read["candidates"]] == ["sglang.srt.other.A.read"]


def test_a_definition_that_moved_is_found_in_its_new_place(cli: Cli, tmp_path: Path) -> None:
    moved = BASE["sglang/srt/mod.py"].replace("def f", "def g").replace("def read", "def r")
    new = wheel(tmp_path, "9.9.1", mod="class K(Base, Other):\n    pass\n", new_mod=moved, far="def f(q): pass\n")
    _, out, _ = cli("diff", "--wheel", new, "--base", wheel(tmp_path))
    method, function, read = out.split("\n\n")[:3]
    assert "no such definition in 9.9.1" in method
    assert "class K(Base, Other) is still there; it may inherit m" in method
    assert f"  sglang.srt.new_mod.K.m  {body('K.m')}  same body as in 9.9.0" in method
    assert re.search(r"^  sglang\.srt\.far\.f  [0-9a-f]{12}$", function, re.MULTILINE)
    assert "nothing else in 9.9.1 is named read" in read
    assert "3 definitions, 0 same, 0 changed, 3 gone" in out


def test_candidates_nearest_first_and_unreadable_modules_passed_over(tmp_path: Path) -> None:
    text = "if True:\n    class K:\n        def m(self):\n            def m(): pass\n"
    broken = "def m(: pass"
    far = "class Z:\n    def m(self): pass\ndef m(): pass\n"
    with unpacked(wheel(tmp_path, mod="", mod2=text, broken=broken, far=far)) as tree:
        found = [path for path, _ in namesakes(tree.root, "sglang.srt.mod.K.m")]
    assert found[0] == "sglang.srt.mod2.K.m"
    assert set(found[1:]) == {"sglang.srt.far.Z.m", "sglang.srt.far.m"}


def test_special_methods_are_looked_for_near_only(tmp_path: Path) -> None:
    init = "class {}:\n    def __init__(self): pass\n"
    with unpacked(wheel(tmp_path, mod=init.format("L"), far=init.format("K"), other=init.format("Q"))) as tree:
        found = [path for path, _ in namesakes(tree.root, "sglang.srt.mod.K.__init__")]
    assert found == ["sglang.srt.far.K.__init__", "sglang.srt.mod.L.__init__"]


def test_what_the_base_does_not_have_is_all_new(cli: Cli, tmp_path: Path) -> None:
    base = wheel(tmp_path, mod=edited("def read", "def other"))
    _, out, _ = cli("diff", "--wheel", wheel(tmp_path, "9.9.1"), "--base", base, "--json")
    (read,) = json.loads(out)
    assert (read["state"], read["base"]) == ("not in base", None)
    assert "+def read(a):" in read["diff"]


def test_a_definition_that_two_hooks_read_is_shown_once(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    also = hook("also", "f", ("a",), reads=(("sglang.srt.mod.read", body("read")),))
    monkeypatch.setattr(command, "table", lambda release: (HOOKS[1], also))
    base, new = wheel(tmp_path), wheel(tmp_path, "9.9.1", mod=edited("-a", "+a"))
    _, out, _ = cli("diff", "--wheel", new, "--base", base)
    (header,) = [line for line in out.splitlines() if line.startswith("==")]
    assert header.startswith("== function (reads it), also (reads it): sglang.srt.mod.read: body changed")
    assert out.count("@@ -1") == 1
    told = json.loads(cli("diff", "--wheel", new, "--base", base, "--json")[1])
    assert [one["hook"] for one in told] == ["function", "also"]


def test_colour_on_a_terminal_only_and_markup_is_left_alone(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = wheel(tmp_path, "9.9.1", mod=edited("a + b", f"a['[red]'] + '{'long ' * 60}' + ':smile:'"))
    arguments = ("diff", "--wheel", new, "--base", wheel(tmp_path))
    plain = cli(*arguments)[1]
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = cli(*arguments)[1]
    assert "\x1b[32m+" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_excerpt_reads_the_file_that_the_definition_was_found_in(tmp_path: Path) -> None:
    with unpacked(wheel(tmp_path, **{"mod/__init__": "\ndef g():\n    pass\n"})) as tree:
        found = Source(tree.root).find("sglang.srt.mod.g")
        assert found is not None
        place = excerpt(tree.root, "sglang.srt.mod.g", found)
    assert (place.file, place.line, place.lines) == ("sglang/srt/mod/__init__.py", 2, ("def g():", "    pass"))


def test_a_wheel_that_is_missing_raises_the_error_of_the_module(tmp_path: Path) -> None:
    with pytest.raises(TreeError, match="no such file"), unpacked(tmp_path / "x.whl"):
        pass


# ------------------------------------------------------------------------------------------------------- real tables


@pytest.mark.usefixtures("real_table")
def test_the_installed_sglang_as_before(cli: Cli) -> None:
    count = len(command.table(sglang_release()))
    code, out, _ = cli("check")
    assert (code, out) == (0, f"SGLang {sglang_release()}: {count} of {count} hooks fit\n")
    told = json.loads(cli("check", "--json")[1])
    assert told == {"sglang": sglang_release(), "hooks": count, "problems": []}


@pytest.mark.usefixtures("real_table")
def test_the_installed_sglang_as_a_folder_and_with_the_debug_hooks(cli: Cli) -> None:
    release = sglang_release()
    told = json.loads(cli("check", "--root", sglang_root(), "--against", release, "--debug-hooks", "--json")[1])
    assert {one["state"] for one in told["findings"]} == {"fits"}
    assert told["hooks"] == len(command.table(release)) + len(adapters.debug_hooks(release))
    assert told["sglang"] == release


@pytest.mark.usefixtures("real_table")
def test_the_installed_sglang_has_no_diff_to_itself(cli: Cli) -> None:
    code, out, _ = cli("diff", "--root", sglang_root())
    assert code == 0
    assert " 0 changed, 0 gone" in out


@pytest.mark.usefixtures("real_table")
def test_the_newest_reviewed_release_is_one_of_them() -> None:
    assert command.newest() in adapters.REVIEWED


def test_markdown_lists_what_is_read_only_where_something_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "REVIEWED", {"9.9.0": "module"})
    method, function = command.markdown().split("### `")[1:]
    assert "- reads:" not in method
    assert f"- reads: `sglang.srt.mod.read`, digest `{body('read')}`" in function


# ---------------------------------------------------------------------------------------------------------- document


@pytest.mark.usefixtures("real_table")
def test_every_command_of_the_review_document_is_one() -> None:
    document = Path(__file__).resolve().parents[3] / "docs" / "adding-a-release.md"
    text = "\n".join(re.findall(r"^```bash\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))
    commands = [line for line in text.splitlines() if line.startswith("sglang-dspark-cp")]
    assert len(commands) > 5
    for line in commands:
        words = shlex.split(line.replace("$(printf -- '--wheel %s ' ", "--wheel ").replace(")", ""), comments=True)[1:]
        assert build_parser().parse_args(words).command == "hooks"
