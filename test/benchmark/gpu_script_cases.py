"""A script of `scripts/gpu` with a stand-in for Python, which records the programs that it is asked to run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "scripts" / "gpu"
RESULTS = REPOSITORY / "benchmark" / "results"
SMOKE = RESULTS / "smoke-cuda-2xh200-bf16-window-2026-11-30.json"
GATHER = RESULTS / "cp_gather-emulated-cp8-1xh200-2026-11-30.json"

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
    # A run of smoke is told from another by the last part of its folder.
    names = {{step, pathlib.Path(value("--keep")).name if "--keep" in given else step}}
    if names & set(os.environ.get("HANGS", "").split()):
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
            for each in tokens for cell in result["cells"] if cell["tokens"] == 8192
        ]
        pathlib.Path(value("--json")).write_text(json.dumps(result))
    else:
        pathlib.Path(value("--keep")).mkdir(parents=True)
        pathlib.Path(value("--keep"), "prefill-off.log").write_text("a log")
        about = {{"benchmark": "prefill_cost", "date": "2026-11-30", "summary": {{}}, "goal_percent": 1.0}}
        about |= {{"cp_size": 2, "ranks_per_gpu": 1, "load": {{"input_len": 8192}}, "ok": True, "problems": []}}
        pathlib.Path(value("--json")).write_text(json.dumps(about))
    if names & set(os.environ.get("FAILS", "").split()):
        sys.exit("the reason")
"""


class Run:
    """One call of a script, with programs of our own first on its path."""

    def __init__(self, folder: Path, script: str, *steps: str, **variables: str) -> None:
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
            [SCRIPTS / script, *steps],
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
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
