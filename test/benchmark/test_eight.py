"""`scripts/gpu/eight.sh` with a stand-in for Python: which programs it starts, what it keeps, what it says."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from gpu_script_cases import Run, value

pytestmark = pytest.mark.timeout(120)


def test_all_steps(tmp_path: Path) -> None:
    run = Run(tmp_path, "eight.sh")
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
    run = Run(tmp_path, "eight.sh", "gather", GPUS="8", GATHER_ARGS="--runs 3")
    sizes = [(value(call, "--cp"), value(call, "--tokens")) for call in run.calls]
    assert sizes == [(cp, tokens) for tokens in ("8K", "1K") for cp in ("8", "4", "2")]
    assert all(value(call, "--runs") == "3" for call in run.calls)
    assert {cell["cp"] for cell in run.json("gather.json")["cells"]} == {2, 4, 8}
    assert run.files() == {"gather.json", "steps.json", "logs.tar.xz"}


def test_one_gpu_emulates_the_link_and_shares(tmp_path: Path) -> None:
    run = Run(tmp_path, "eight.sh", "prefill", "gather", GPUS="1", PREFILL_ARGS="--modes kv")
    prefill, gather, _ = run.calls
    assert (value(prefill, "--ranks-per-gpu"), value(gather, "--emulate-cp")) == ("2", "8")
    assert prefill.index("window") < len(prefill) - 1 - prefill[::-1].index("--modes"), "one's own options come last"


@pytest.mark.parametrize("step", ["smoke", "cp_gather", "prefill_cost"])
def test_a_step_that_fails_loses_nothing(tmp_path: Path, step: str) -> None:
    run = Run(tmp_path, "eight.sh", FAILS=step)
    assert run.status == 1
    assert run.files() >= {"smoke.json", "gather.json", "prefill.json"}
    own = {"smoke": "smoke", "cp_gather": "gather", "prefill_cost": "prefill"}[step]
    assert {name for name, (_, status) in run.steps().items() if status} >= {own}
    assert len({"smoke", "gather", "prefill"} & {name for name, (_, status) in run.steps().items() if status}) == 1


def test_a_step_that_hangs_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    # The shortest limit that a step is started with.
    run = Run(tmp_path, "eight.sh", "smoke", "prefill", HANGS="smoke", SMOKE_LIMIT="60")
    assert run.status == 1
    assert run.steps()["smoke"][1] != 0
    assert run.steps()["prefill"] == ("ran", 0)
    assert "prefill.json" in run.files()


def test_what_the_overall_limit_leaves_no_time_for_is_left_out_and_said(tmp_path: Path) -> None:
    run = Run(tmp_path, "eight.sh", "gather", "smoke", LIMIT="59")
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
    run = Run(tmp_path, "eight.sh", *steps, **variables)
    assert run.status == 2
    assert said in run.errors
    assert run.calls == []
