"""`scripts/gpu/two.sh` and `plugin.sh` with a stand-in for Python: what runs side by side, what is kept and said."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from gpu_script_cases import REPOSITORY, Run, value

pytestmark = pytest.mark.timeout(120)


def by_name(run: Run) -> dict[str, list[str]]:
    return {Path(value(call, "--keep")).name: call for call in run.calls}


def test_servers(tmp_path: Path) -> None:
    run = Run(tmp_path, "two.sh", "servers")
    assert run.status == 0, run.shown + run.errors
    calls = by_name(run)
    assert set(calls) == {"bf16", "stock", "fp8"}
    assert {value(call, "--gpus") for call in run.calls} == {"0,1"}
    assert len({value(call, "--ports") for call in run.calls}) == 3
    assert "--no-controls" not in calls["bf16"]
    assert "--stock" in calls["stock"]
    assert (value(calls["fp8"], "--quant"), "--no-controls" in calls["fp8"]) == ("fp8", True)
    # One and the same pair of GPUs, but fp8 waits for stock.
    order = [Path(value(call, "--keep")).name for call in run.calls]
    assert order.index("stock") < order.index("fp8")
    kinds = (".json", "-logs.tar.xz", ".txt")
    assert run.files() == {f"{name}{kind}" for name in calls for kind in kinds}


def test_modes_and_gather(tmp_path: Path) -> None:
    run = Run(tmp_path, "two.sh", "modes", "gather")
    assert run.status == 0, run.shown + run.errors
    *modes, gather = run.calls
    assert {value(call, "--mode") for call in modes} == {"kv", "context", "packed"}
    assert {value(call, "--pairs") for call in modes} == {"pd1,cp2-tp2"}
    ports = sorted(int(value(call, "--ports")) for call in modes)
    assert min(b - a for a, b in itertools.pairwise(ports)) >= 3000
    assert Path(gather[0]).name == "cp_gather.py"
    assert value(gather, "--cp") == "2"
    assert run.files() >= {"mode-kv.json", "mode-context.json", "mode-packed.json", "gather.json"}


@pytest.mark.parametrize("name", ["bf16", "stock", "fp8"])
def test_a_run_that_fails_is_shown_and_the_others_go_on(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path, "two.sh", "servers", FAILS=name)
    assert run.status == 1
    assert f"== {name}: status 1" in run.shown
    assert "the reason" in run.shown
    assert run.files() >= {"bf16.json", "stock.json", "fp8.json"}
    assert run.shown.count("status 0") == 2


def test_no_run_begins_with_too_few_seconds(tmp_path: Path) -> None:
    run = Run(tmp_path, "two.sh", "modes", "gather", LIMIT="50")
    assert run.status == 1
    assert run.calls == []
    assert run.shown.count("left out") == 4


@pytest.mark.parametrize(
    ("steps", "variables", "said"),
    [
        ((), {}, "name the steps"),
        (("modes", "other"), {}, "unknown step other"),
        (("modes",), {"LIMIT": "soon"}, "LIMIT=soon"),
    ],
)
def test_usage_errors_end_with_2(tmp_path: Path, steps: tuple[str, ...], variables: dict[str, str], said: str) -> None:
    run = Run(tmp_path, "two.sh", *steps, **variables)
    assert run.status == 2
    assert said in run.errors
    assert run.calls == []


def test_the_plugin_is_replaced_only_where_it_differs(tmp_path: Path) -> None:
    """Servers of one run read it while the next run begins."""
    checkout = tmp_path / "checkout"
    shutil.copytree(REPOSITORY / "scripts" / "gpu", checkout / "scripts" / "gpu")
    package = checkout / "python" / "sglang_dspark_cp"
    package.mkdir(parents=True)
    (package / "a.py").write_text("A = 1")
    home = tmp_path / "home"

    def install() -> Path:
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "DSPARK_CP_HOME": str(home)}
        subprocess.run([checkout / "scripts" / "gpu" / "plugin.sh"], env=environment, timeout=30, check=True)
        return home / "plugin" / "sglang_dspark_cp" / "a.py"

    first = install().stat().st_ino
    (home / "plugin" / "sglang_dspark_cp" / "__pycache__").mkdir()
    assert install().stat().st_ino == first
    (package / "a.py").write_text("A = 2")
    assert install().read_text() == "A = 2"
    (package / "b.py").write_text("B = 1")
    install()
    assert (home / "plugin" / "sglang_dspark_cp" / "b.py").exists()
    assert (home / "plugin" / "sglang_dspark_cp-0.dist-info" / "entry_points.txt").exists()
