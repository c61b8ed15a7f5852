"""The table of goals, from result files that are here and from made-up ones."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark" / "goals"))

import goals

RESULTS = Path(__file__).resolve().parents[2] / "benchmark" / "results"
SMOKE = RESULTS / "smoke-cuda-2xh200-bf16-window-2026-11-30.json"
GATHER = RESULTS / "cp_gather-emulated-cp8-1xh200-2026-11-30.json"


def verdicts(found: list[goals.Goal]) -> dict[str, str]:
    return {goal.what: goal.verdict for goal in found}


@pytest.fixture
def smoke() -> dict[str, Any]:
    return goals.read(SMOKE)


@pytest.fixture
def gather() -> dict[str, Any]:
    """A result of eight GPUs in form; its times are those of an emulated link."""
    return goals.read(GATHER) | {"mode": "gpu", "link": "NCCL"}


def prefill(*, low: float, high: float, **more: Any) -> dict[str, Any]:
    percent = (low + high) / 2
    verdict = "met" if high <= 1 else "missed" if low > 1 else "not settled"
    cost = {"percent": percent, "low": low, "high": high, "rounds": 3, "by_round": [low, high], "verdict": verdict}
    sides = {"off": {"cost": None}}
    sides |= {side: {"cost": {"ttft": cost | {"ms": 1.0}, "throughput": cost}} for side in ("off-2", "window")}
    about = {"benchmark": "prefill_cost", "date": "2026-11-30", "commit": "abc", "gpus": ["a GPU"], "gpus_used": 8}
    about |= {"cp_size": 8, "ranks_per_gpu": 1, "goal_percent": 1.0, "load": {"input_len": 8192}, "summary": sides}
    return {**about, "ok": True, "problems": [], **more}


# ------------------------------------------------------------------------------------------------------------- smoke


def test_a_good_gpu_run_meets_every_goal(smoke: dict[str, Any]) -> None:
    found = goals.goals_of_smoke(smoke, "x")
    assert len(found) == 2 * 3 + 4 + 4 + 1 + 1
    assert {goal.verdict for goal in found} == {goals.MET}


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        (("set_ups", "cp2-dp2", "accept_length_vs_non_cp"), 0.9, "cp2-dp2: accept length"),
        (("set_ups", "cp2-tp2", "rows_vs_cp1", "max_rel_err"), 0.5, "cp2-tp2: draft rows against CP 1"),
        (("set_ups", "cp2-tp2", "rows_prefill_vs_decode", "rows_byte_equal"), 1, "cp2-tp2: draft rows on decode"),
        (("counters", "prefill-cp2", "counters", "aux_collectives"), 1, "prefill-cp2: collectives"),
        (("proof_on", 0, "ranks_with_alignment_error"), 1, "control zero-rows, proof on"),
        (("ok",), False, "smoke: the run as a whole"),
    ],
)
def test_what_is_wrong_in_a_gpu_run_is_missed(
    smoke: dict[str, Any], path: tuple[Any, ...], value: Any, what: str
) -> None:
    at: Any = smoke
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    missed = [goal.what for goal in goals.goals_of_smoke(smoke, "x") if goal.verdict == goals.MISSED]
    assert len(missed) == 1
    assert missed[0].startswith(what)


def test_a_control_that_does_not_show_is_missed(smoke: dict[str, Any]) -> None:
    smoke["controls"]["zero-rows"] |= {"mean_accept_length": 4.9, "proposal_agreement": {"first_step": 0.99}}
    assert verdicts(goals.goals_of_smoke(smoke, "x"))["control zero-rows, proof off"] == goals.MISSED


def test_what_a_broken_run_did_not_measure_is_not_met(smoke: dict[str, Any]) -> None:
    broken = {key: smoke[key] for key in ("device", "date", "prefill_gpus", "ranks_per_gpu")}
    broken |= {"ok": False, "reasons": ["ServerFailed: x\ny"], "set_ups": {"cp2-tp2": {"mean_accept_length": None}}}
    found = goals.goals_of_smoke(broken, "x")
    assert [goal.verdict for goal in found] == [goals.NONE] * 3 + [goals.MISSED]
    assert "ServerFailed: x" in found[-1].measured


# ------------------------------------------------------------------------------------------------------------- gather


def test_the_gather_is_judged_at_cp_8_on_a_real_link_only(gather: dict[str, Any]) -> None:
    judged = [goal for goal in goals.goals_of_gather(gather, "x") if goal.what.startswith("gather ")]
    assert len(judged) == 2 * 2 * 2
    assert goals.INFO not in {goal.verdict for goal in judged}
    for changed in (gather | {"mode": "emulate"}, {**gather, "cells": [cell | {"cp": 4} for cell in gather["cells"]]}):
        found = [goal for goal in goals.goals_of_gather(changed, "x") if goal.what.startswith("gather ")]
        assert {goal.verdict for goal in found} == {goals.INFO}


def test_times_faster_are_those_of_a_busy_gpu(gather: dict[str, Any]) -> None:
    for cell in gather["cells"]:
        if cell["design"] == "kv":
            shape = cell["hidden"], cell["tokens"]
            stock = next(
                each
                for each in gather["cells"]
                if each["design"] == goals.STOCK and (each["hidden"], each["tokens"]) == shape
            )
            cell["queued_ms"] |= {"median": stock["queued_ms"]["median"] / 8.5, "of_limit": 1.4}
    found = [goal for goal in goals.goals_of_gather(gather, "x") if goal.what.startswith("gather kv")]
    assert len(found) == 4
    assert {goal.verdict for goal in found} == {goals.MET}
    assert "8.5 times" in found[0].measured


def split(gather: dict[str, Any]) -> list[dict[str, Any]]:
    parts = []
    for hidden in (4096, 7168):
        part = copy.deepcopy(gather)
        part["cells"] = [cell for cell in part["cells"] if cell["hidden"] == hidden]
        parts.append(part)
    return parts


def test_merged_results_are_the_whole_one(gather: dict[str, Any], tmp_path: Path) -> None:
    names = []
    for number, part in enumerate(reversed(split(gather))):
        names.append(str(tmp_path / f"{number}.json"))
        Path(names[-1]).write_text(json.dumps(part))
    assert goals.main(["merge", str(tmp_path / "whole.json"), *names]) == 0
    whole = goals.read(tmp_path / "whole.json")
    assert whole["cells"] == gather["cells"]
    assert goals.goals_of_gather(whole, "x") == goals.goals_of_gather(gather, "x")


def test_results_that_do_not_belong_together_are_not_merged(gather: dict[str, Any]) -> None:
    one, two = split(gather)
    with pytest.raises(goals.Usage, match="commit"):
        goals.merged([one, two | {"commit": "other"}])
    with pytest.raises(goals.Usage, match="the same size"):
        goals.merged([one, one])
    with pytest.raises(goals.Usage, match="cp_gather"):
        goals.merged([prefill(low=0, high=0)])
    assert not goals.merged([one, two | {"ok": False, "problems": ["a"]}])["ok"]


# ------------------------------------------------------------------------------------------------------------ prefill


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(0.1, 0.5, goals.MET), (0.5, 1.5, goals.OPEN), (1.5, 2.5, goals.MISSED)]
)
def test_prefill_cost(low: float, high: float, verdict: str) -> None:
    found = verdicts(goals.goals_of_prefill(prefill(low=low, high=high), "x"))
    assert found["prefill window, CP8, 8192 tokens: cost in TTFT"] == verdict
    assert found["prefill window, CP8, 8192 tokens: cost in input tokens/s"] == verdict
    assert found["prefill off-2, CP8, 8192 tokens: cost in TTFT"] == goals.INFO


def test_ranks_that_share_a_gpu_are_not_judged() -> None:
    found = goals.goals_of_prefill(prefill(low=2, high=3, ranks_per_gpu=2), "x")
    assert {goal.verdict for goal in found[:-1]} == {goals.INFO}


# -------------------------------------------------------------------------------------------------------- whole runs


def test_the_table_names_what_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert goals.main([str(SMOKE), str(GATHER), "--markdown", str(tmp_path / "goals.md")]) == 0
    shown = capsys.readouterr().out
    assert "2 x NVIDIA H200" in shown
    text = (tmp_path / "goals.md").read_text(encoding="utf-8")
    missing = [line for line in text.splitlines() if f"| {goals.NONE} |" in line]
    assert [line.split("|")[1].strip() for line in missing] == [
        goals.MISSING["cp_gather"],
        goals.MISSING["prefill_cost"],
    ]


def test_a_missed_goal_is_status_1(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(prefill(low=2, high=3)))
    assert goals.main([str(tmp_path / "p.json")]) == 1


def test_plots(tmp_path: Path, gather: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "gather.json").write_text(json.dumps(gather))
    (tmp_path / "prefill.json").write_text(json.dumps(prefill(low=0.2, high=0.4)))
    files = [str(tmp_path / name) for name in ("gather.json", "prefill.json")]
    goals.main([*files, "--plot", str(tmp_path)])
    plots = sorted(path.name for path in tmp_path.glob("*.png"))
    assert plots == ["goals-gather.png", "goals-prefill.png"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["no-such.json"], "No such file"),
        ([str(RESULTS / "draft_cost-load-2026-11-30.json")], "allowed is a JSON result"),
        ([str(SMOKE), str(SMOKE)], "the same name"),
        ([str(SMOKE), "--plot", "no-such-folder"], "no such folder"),
        ([str(SMOKE), "--markdown", "no-such-folder/x"], "does not exist"),
        (["merge", "no-such-folder/x", str(GATHER)], "does not exist"),
    ],
)
def test_usage_errors_end_with_2(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert goals.main(options) == 2
    assert said in capsys.readouterr().err
