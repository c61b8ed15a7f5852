"""Rule 1 of the architecture: who may import whom; and what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "python" / "sglang_dspark_cp"
NAME = PACKAGE.name
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module that a file imports, absolute, and whether it does so inside a function."""
    package = path.relative_to(PACKAGE.parent).parts[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node in inside
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            for alias in node.names:
                full = ".".join(part for part in (base, node.module, alias.name) if part)
                yield full, node in inside


def area(module: str) -> str:
    """`stdlib`, `torch`, `sglang`, or the area of this package (`core`, `hooks.spec`, `errors`, ...)."""
    top = module.split(".")[0]
    if top != NAME:
        return "stdlib" if top in sys.stdlib_module_names else top
    rest = module.split(".")[1:]
    return ".".join(rest[:2]) if rest and rest[0] in ("hooks", "adapters") else (rest[0] if rest else "")


def areas(folder_or_module: str) -> set[str]:
    """All areas that a folder or module of the package imports from."""
    path = PACKAGE / folder_or_module
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return {area(module) for file in files for module, _ in imports(file)}


def test_the_walk_sees_imports_of_every_form() -> None:
    found = dict(imports(PACKAGE / "adapters" / "forward_v0_5_17.py"))
    assert found["torch"] is False
    assert found[f"{NAME}.core.capture.AuxCapture"] is False
    assert found["sglang.srt.layers.attention.dsa.utils.dsa_use_prefill_cp"] is True


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("errors", {"stdlib"}),
        ("config", {"stdlib", "errors"}),
        ("hooks/spec", {"stdlib"}),
        ("core/topology", {"stdlib", "errors"}),
        ("core/layout", {"stdlib", "torch"}),
        ("core", {"stdlib", "torch", "triton", "errors", "core"}),
        ("hooks", {"stdlib", "errors", "hooks.spec", "sglang"}),
    ],
)
def test_imports_only(module: str, allowed: set[str]) -> None:
    assert areas(module) <= allowed


def test_triton_is_imported_by_the_kernels_only() -> None:
    """`core.rows` imports them where rows are on a GPU; without one, torch is enough."""
    users = [path.name for path in (PACKAGE / "core").rglob("*.py") if "triton" in {area(m) for m, _ in imports(path)}]
    assert users == ["triton_rows.py"]
    importers = [
        path.name
        for path in PACKAGE.rglob("*.py")
        if f"{NAME}.core.triton_rows" in {module.rpartition(".")[0] for module, _ in imports(path)}
    ]
    assert importers == []


def test_hooks_reach_sglang_in_functions_of_install_only() -> None:
    for path in sorted((PACKAGE / "hooks").rglob("*.py")):
        found = [inside for module, inside in imports(path) if area(module) == "sglang"]
        assert all(found), path
        assert not found or path.name == "install.py"


def test_adapters_reach_sglang_in_functions_only() -> None:
    for path in sorted((PACKAGE / "adapters").rglob("*.py")):
        assert [module for module, inside in imports(path) if area(module) == "sglang" and not inside] == []


def test_adapters_use_neither_cli_nor_smoke_nor_guard() -> None:
    assert areas("adapters").isdisjoint({"cli", "smoke", "plugin", "guard"})


def test_nothing_imports_plugin_or_cli() -> None:
    importers = [
        (module_name(path), module)
        for path in MODULES
        for module, _ in imports(path)
        if area(module) in ("plugin", "cli") and not module_name(path).startswith(f"{NAME}.cli")
    ]
    assert importers == []


def test_only_config_reads_this_packages_variables_from_the_environment() -> None:
    serving = [path for path in MODULES if path.relative_to(PACKAGE).parts[0] not in ("smoke", "cli")]
    readers = [
        module_name(path)
        for path in serving
        if any(
            isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and isinstance(node.value, ast.Name)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if not isinstance(node, ast.Import)
        )
    ]
    assert readers == [f"{NAME}.config"]


@pytest.mark.parametrize("module", [NAME, f"{NAME}.plugin", f"{NAME}.config", f"{NAME}.hooks.check"])
def test_import_pulls_in_neither_torch_nor_sglang(module: str) -> None:
    script = f"import sys, {module}; print(sorted({{'torch', 'sglang'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_off_does_not_even_look_at_sglang() -> None:
    script = f"import sys; from {NAME}.plugin import register; register(); print('sglang' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env={"SGLANG_DSPARK_CP": "0"}
    )
    assert (done.stdout.strip(), done.stderr) == ("False", "")


def test_no_test_imports_a_conftest() -> None:
    """Which of several files of that name is found depends on the folders that a run was asked for."""
    folder = REPOSITORY / "test"
    wrong = [
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom | ast.Import)
        and "conftest" in [getattr(node, "module", None), *(alias.name for alias in node.names)]
    ]
    assert not wrong
