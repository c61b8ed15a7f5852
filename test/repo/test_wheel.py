"""The wheel, installed beside a plain SGLang without this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")
pytestmark = pytest.mark.timeout(180)


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Standard output and error of a command that must succeed."""
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SGLANG_PLUGINS")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=150,
        env={**plain, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make wheel` builds it."""
    out = tmp_path_factory.mktemp("dist")
    run(UV, "build", "--quiet", "--wheel", "--out-dir", out, cwd=REPOSITORY)
    (built,) = out.glob("sglang_dspark_cp-*.whl")
    return built


def test_it_holds_the_package_its_data_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    folder = REPOSITORY / "python" / "sglang_dspark_cp"
    modules = {f"sglang_dspark_cp/{path.relative_to(folder)}" for path in folder.rglob("*.py")}
    assert modules <= set(names)
    assert "sglang_dspark_cp/smoke/data/questions.jsonl" in names
    assert "sglang_dspark_cp/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"sglang_dspark_cp", f"{wheel.name.rsplit('-', 3)[0]}.dist-info"}


def test_installed_without_this_checkout(wheel: Path, tmp_path: Path) -> None:
    """No editable install: SGLang's plugin loader finds the entry point in the wheel's own metadata."""
    target = tmp_path / "site"
    run(UV, "pip", "install", "--quiet", "--no-deps", "--target", target, wheel, cwd=tmp_path)
    script = (
        "import importlib.metadata as m, sglang_dspark_cp, sys; "
        "print(sglang_dspark_cp.__file__); "
        "print([e.value for e in m.entry_points(group='sglang.srt.plugins') if e.name == 'dspark_cp'][0]); "
        "from sglang_dspark_cp.cli.main import main; sys.exit(main(['hooks', 'check']))"
    )
    answer = run(sys.executable, "-c", script, cwd=tmp_path, PYTHONPATH=str(target))
    assert str(target / "sglang_dspark_cp") in answer
    assert "sglang_dspark_cp.plugin:register" in answer
    assert "hooks fit" in answer


def test_it_moves_neither_torch_nor_sglang(wheel: Path, tmp_path: Path) -> None:
    """What installing it with its dependencies would do to this environment, which holds SGLang and torch."""
    answer = run(*(UV, "pip", "install", "--dry-run", "--offline", "--python", sys.executable, wheel), cwd=tmp_path)
    touched = [
        line.split()[1].split("==")[0] for line in answer.splitlines() if line.strip().startswith(("+ ", "- ", "~ "))
    ]
    assert set(touched) <= {"sglang-dspark-cp"}, answer
