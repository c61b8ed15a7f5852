"""`scripts/gpu/eight.sh` with a stand-in for Python: which programs it starts, what it keeps, what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "gpu" / "eight.sh"
RESULTS = REPOSITORY / "benchmark" / "results"
SMOKE = RESULTS / "smoke-cuda-2xh200-bf16-window-2026-11-30.json"
GATHER = RESULTS / "cp_gather-emulated-cp8-1xh200-2026-11-30.json"

pytestmark = pytest.mark.timeout(120)

STAND_IN = f"""
    import json, os, pathlib, sys, time
    given = sys.argv[1:]
    value = lambda name: given[given.index(name) + 1]
    program = pathlib.Path(given[0]).name if given else ""
    step = "smoke" if "smoke" in given[:3] else program.removesuffix(".py")
    if step not in ("smoke", "cp_gather", "prefill_cost"):
        os.execv({sys.executable!r}, [{sys.executable!r}, *given])
    with open(os.environ["RECORD"], "a") as out:
        out.write(json.dumps(given) + "\\n")
    if step in os.environ.get("HANGS", "").split():
        time.sleep(600)
    if step == "smoke":
        folder = pathlib.Path(value("--keep"))
        folder.mkdir(parents=True)
        (folder / "prefill-cp2.log").write_text("a log")
        (folder / "report.json").write_text(pathlib.Path({str(SMOKE)!r}).read_text())
    elif step == "cp_gather":
        result = json.loads(pathlib.Path({str(GATHER)!r}).read_text())
        option = "--cp" if "--cp" in given else "--emulate-cp"
        tokens = given[given.index("--tokens") + 1 : given.index("--timeout")]
        result["cells"] = [
            {{**cell, "cp": int(value(option)), "tokens": int(each[:-1]) * 1024}}
            for each in tokens for cell in result["cells"]
        ]
        pathlib.Path(value("--json")).write_text(json.dumps(result))
    else:
        pathlib.Path(value("--keep")).mkdir(parents=True)
        pathlib.Path(value("--keep"), "prefill-off.log").write_text("a log")
        about = {{"benchmark": "prefill_cost", "date": "2026-11-30", "summary": {{}}, "goal_percent": 1.0}}
        about |= {{"cp_size": 2, "ranks_per_gpu": 1, "load": {{"input_len": 8192}}, "ok": True, "problems": []}}
        pathlib.Path(value("--json")).write_text(json.dumps(about))
    sys.exit(1 if step in os.environ.get("FAILS", "").split() else 0)
"""


class Run:
    """One call of the script."""

    def __init__(self, folder: Path, *steps: str, **variables: str) -> None:
        (folder / "bin").mkdir()
        (folder / "stand_in.py").write_text(textwrap.dedent(STAND_IN))
        for name, text in {
            "python3": f'exec {sys.executable} {folder / "stand_in.py"} "$@"',
            "nvidia-smi": "echo 0; echo 1",
        }.items():
            (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / "bin" / name).chmod(0o755)
        self.out, record = folder / "out", folder / "record"
        record.touch()
        environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder), "RECORD": str(record)}
        environment |= {"DSPARK_CP_HOME": str(folder / "home"), "OUT": str(self.out), "DSPARK_CP_COMMIT": "abc"}
        done = subprocess.run(
            [SCRIPT, *steps], env=environment | variables, capture_output=True, text=True, timeout=110, check=False
        )
        self.status, self.shown, self.errors = done.returncode, done.stdout, done.stderr
        self.calls = [json.loads(line) for line in record.read_text().splitlines()]

    def files(self) -> set[str]:
        return {path.name for path in self.out.iterdir()}

    def json(self, name: str) -> Any:
        return json.loads((self.out / name).read_text(encoding="utf-8"))

    def steps(self) -> dict[str, tuple[str, int]]:
        return {each["step"]: (each["state"], each["status"]) for each in self.json("steps.json")["steps"]}


def value(call: list[str], option: str) -> str:
    return call[call.index(option) + 1]


def test_all_steps(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.status == 0, run.shown + run.errors
    assert run.files() == {"smoke.json", "gather.json", "prefill.json", "steps.json", "logs.tar.xz"}
    smoke, *gather, prefill = run.calls
    assert value(smoke, "--device") == "cuda"
    assert [value(call, "--gpus") for call in (smoke, prefill)] == ["0,1"] * 2
    assert [value(call, "--ranks-per-gpu") for call in (smoke, prefill)] == ["1"] * 2
    assert [(value(call, "--cp"), value(call, "--tokens")) for call in gather] == [("2", "8K"), ("2", "1K")]
    assert run.steps() == dict.fromkeys(["smoke", "gather-cp2-8K", "gather-cp2-rest", "gather", "prefill"], ("ran", 0))
    about = run.json("steps.json")
    assert (about["gpus"], about["ranks_per_gpu"], about["commit"]) == (2, 1, "abc")
    tokens = {cell["tokens"] for cell in run.json("gather.json")["cells"]}
    assert tokens == {1024 << power for power in range(7)}
    with tarfile.open(run.out / "logs.tar.xz") as archive:
        names = set(archive.getnames())
    assert names >= {"./smoke.txt", "./eight-smoke-logs.tar.xz", "./gather.txt", "./prefill/prefill-off.log"}
    assert "verdict" in run.shown


def test_eight_gpus_have_all_sizes_the_one_of_the_goals_first(tmp_path: Path) -> None:
    run = Run(tmp_path, "gather", GPUS="8", GATHER_ARGS="--runs 3")
    sizes = [(value(call, "--cp"), value(call, "--tokens")) for call in run.calls]
    assert sizes == [(cp, tokens) for tokens in ("8K", "1K") for cp in ("8", "4", "2")]
    assert all(value(call, "--runs") == "3" for call in run.calls)
    assert {cell["cp"] for cell in run.json("gather.json")["cells"]} == {2, 4, 8}
    assert run.files() == {"gather.json", "steps.json", "logs.tar.xz"}


def test_one_gpu_emulates_the_link_and_shares(tmp_path: Path) -> None:
    run = Run(tmp_path, "prefill", "gather", GPUS="1", PREFILL_ARGS="--modes kv")
    prefill, gather, _ = run.calls
    assert (value(prefill, "--ranks-per-gpu"), value(gather, "--emulate-cp")) == ("2", "8")
    assert prefill.index("window") < len(prefill) - 1 - prefill[::-1].index("--modes"), "one's own options come last"


@pytest.mark.parametrize("step", ["smoke", "cp_gather", "prefill_cost"])
def test_a_step_that_fails_loses_nothing(tmp_path: Path, step: str) -> None:
    run = Run(tmp_path, FAILS=step)
    assert run.status == 1
    assert run.files() >= {"smoke.json", "gather.json", "prefill.json"}
    own = {"smoke": "smoke", "cp_gather": "gather", "prefill_cost": "prefill"}[step]
    assert {name for name, (_, status) in run.steps().items() if status} >= {own}
    assert len({"smoke", "gather", "prefill"} & {name for name, (_, status) in run.steps().items() if status}) == 1


def test_a_step_that_hangs_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    # The shortest limit that a step is started with.
    run = Run(tmp_path, "smoke", "prefill", HANGS="smoke", SMOKE_LIMIT="60")
    assert run.status == 1
    assert run.steps()["smoke"][1] != 0
    assert run.steps()["prefill"] == ("ran", 0)
    assert "prefill.json" in run.files()


def test_what_the_overall_limit_leaves_no_time_for_is_left_out_and_said(tmp_path: Path) -> None:
    run = Run(tmp_path, "gather", "smoke", LIMIT="59")
    assert run.status == 1
    assert run.calls == []
    assert run.steps() == dict.fromkeys(["gather", "smoke"], ("skipped", 0))
    assert "gather: left out" in run.shown


@pytest.mark.parametrize(
    ("steps", "variables", "said"),
    [
        (("other",), {}, "unknown step other"),
        ((), {"GPUS": "3"}, "GPUS=3"),
        ((), {"GPUS": "8", "RANKS_PER_GPU": "2"}, "2 to 8 ranks"),
        ((), {"GPUS": "1", "RANKS_PER_GPU": "1"}, "2 to 8 ranks"),
        ((), {"RANKS_PER_GPU": "x"}, "RANKS_PER_GPU=x"),
        ((), {"LIMIT": "soon"}, "LIMIT=soon"),
        ((), {"SMOKE_LIMIT": "0"}, "SMOKE_LIMIT=0"),
    ],
)
def test_usage_errors_end_with_2(tmp_path: Path, steps: tuple[str, ...], variables: dict[str, str], said: str) -> None:
    run = Run(tmp_path, *steps, **variables)
    assert run.status == 2
    assert said in run.errors
    assert run.calls == []
