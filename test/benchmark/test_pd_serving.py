"""Prefill benchmark: figures, options, and whole runs against stub servers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_prefill
import pytest
from bench_prefill import Load, Pair, Round, Side
from bench_stub import Stub, native
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.timeout(60)

SMALL = ("--input-len", "16", "--num-prompts", "5", "--concurrency", "2", "--warmup", "2", "--timeout", "20")
LOAD = Load(16, 1, 5, 2, 1000, 2000, 20.0)


def one_token(body: dict[str, Any]) -> dict[str, Any]:
    return native("a", [5] * body["sampling_params"]["max_new_tokens"], cached_tokens=0)


def run(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "result.json"
    status = bench_prefill.main([*SMALL, "--json", str(path), *options])
    return status, json.loads(path.read_text(encoding="utf-8"))


# --------------------------------------------------------------------------------------------------------- figures


def test_percentiles_interpolate() -> None:
    assert bench_prefill.percentile([], 50) is None
    assert bench_prefill.percentile([4.0], 99) == 4.0
    assert bench_prefill.percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert bench_prefill.percentile([0.0, 10.0], 90) == pytest.approx(9.0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_percentiles_lie_between_the_extremes(values: list[float], share: float) -> None:
    found = bench_prefill.percentile(values, share)
    assert found is not None
    slack = 1e-9 * max(values)
    assert min(values) - slack <= found <= max(values) + slack


def test_a_round_without_answers_has_no_figures() -> None:
    figures = bench_prefill.figures_of(Round(1, seconds=1.0, failures=["x"]))
    assert [figures[name] for name in bench_prefill.FIGURES] == [None] * len(bench_prefill.FIGURES)
    assert (figures["answered"], figures["failed"]) == (0, 1)


def test_ratios_are_of_medians_and_by_round() -> None:
    def side(*values: float | None) -> dict[str, Any]:
        rounds = [dict.fromkeys(bench_prefill.FIGURES, value) for value in values]
        return {"rounds": rounds, "median": bench_prefill.medians(rounds)}

    found = bench_prefill.ratios(side(1.0, 2.0, 4.0), side(2.0, 3.0, None))["input_tokens_per_s"]
    assert found["of_medians"] == pytest.approx(2.5 / 2.0)
    assert found["by_round"] == [2.0, 1.5]
    assert bench_prefill.ratios(side(None), side(1.0))["ttft_p50_s"] == {"of_medians": None, "by_round": []}


def test_prompts_repeat_with_the_seed_and_never_between_rounds() -> None:
    once = bench_prefill.make_prompts(3, "round 1", 2, LOAD)
    assert once == bench_prefill.make_prompts(3, "round 1", 2, LOAD)
    assert once != bench_prefill.make_prompts(3, "round 2", 2, LOAD)
    assert once != bench_prefill.make_prompts(4, "round 1", 2, LOAD)
    assert [len(prompt) for prompt in once] == [16, 16]
    assert all(1000 <= token < 2000 for prompt in once for token in prompt)


def test_who_goes_first_alternates() -> None:
    sides = [Side("a", "http://a"), Side("b", "http://b")]
    assert [[side.name for side in bench_prefill.order(sides, number)] for number in (1, 2, 3)] == [
        ["a", "b"],
        ["b", "a"],
        ["a", "b"],
    ]


def test_sides_as_options() -> None:
    assert bench_prefill.named_side("tp8=http://h:1/") == Side("tp8", "http://h:1")
    pair = bench_prefill.named_side("cp8=http://p:1,https://d:2,9000")
    assert pair == Side("cp8", "http://p:1", Pair("https://d:2", "p", 9000))
    without_port = bench_prefill.named_side("cp8=http://p:1,http://d:2").pair
    assert without_port is not None
    assert without_port.bootstrap_port == 8998


# ------------------------------------------------------------------------------------------------------ whole runs


def test_one_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Stub(one_token, {"/server_info": {"version": "0.5.17"}}) as stub:
        status, result = run(tmp_path, "--base", f"cp8={stub.url}", "--rounds", "2", "--output-len", "3")
        assert len(stub.bodies) == 2 + 2 * 5
        assert stub.most_at_once <= 2
        assert all(body["stream"] and len(body["input_ids"]) == 16 for body in stub.bodies)
        assert len({tuple(body["input_ids"]) for body in stub.bodies}) == 12
        assert stub.bodies[0]["sampling_params"] == {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
    assert status == 0
    side = result["sides"]["cp8"]
    assert [figures["answered"] for figures in side["rounds"]] == [5, 5]
    assert all(len(figures["ttft_s"]) == 5 and min(figures["ttft_s"]) > 0 for figures in side["rounds"])
    for figures in side["rounds"]:
        assert figures["input_tokens_per_s"] == pytest.approx(5 * 16 / figures["seconds"])
    assert side["servers"][stub.url]["told"] == {"version": "0.5.17"}
    assert "ratio" not in result
    shown = capsys.readouterr().out
    assert "Input tokens/s" in shown
    assert "TTFT p99, ms" in shown


def test_two_servers_get_the_same_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Stub(one_token) as one, Stub(one_token) as two:
        status, result = run(tmp_path, "--base", f"tp8={one.url}", "--candidate", f"cp8={two.url}", "--rounds", "3")
        assert sorted(body["input_ids"] for body in one.bodies) == sorted(body["input_ids"] for body in two.bodies)
    assert status == 0
    ratio = result["ratio"]["input_tokens_per_s"]
    assert len(ratio["by_round"]) == 3
    medians = [result["sides"][name]["median"]["input_tokens_per_s"] for name in ("tp8", "cp8")]
    assert ratio["of_medians"] == pytest.approx(medians[1] / medians[0])
    assert f"{ratio['of_medians']:.3f}" in capsys.readouterr().out


def test_cached_tokens_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Stub(lambda body: native("a", [5], cached_tokens=4)) as stub:
        _, result = run(tmp_path, "--base", f"x={stub.url}", "--rounds", "1")
    assert result["sides"]["x"]["rounds"][0]["cached_tokens"] == 20
    assert "20 input tokens came from the prefix cache" in capsys.readouterr().out


def test_a_pair_gets_both_halves_of_a_request(tmp_path: Path) -> None:
    with Stub(one_token) as prefill, Stub(one_token) as decode:
        options = (
            "--prefill-url",
            prefill.url,
            "--decode-url",
            decode.url,
            "--bootstrap-port",
            "9123",
            "--rounds",
            "1",
        )
        status, result = run(tmp_path, *options)
        halves = [{body["bootstrap_room"]: body for body in stub.bodies} for stub in (prefill, decode)]
    assert status == 0
    assert result["sides"]["pd"]["pair"]["bootstrap_port"] == 9123
    assert len(halves[0]) == 7
    assert halves[0].keys() == halves[1].keys()
    for room, body in halves[0].items():
        assert room > 0
        assert (body["bootstrap_host"], body["bootstrap_port"]) == ("127.0.0.1", 9123)
        assert "stream" not in body
        assert halves[1][room] == body | {"stream": True}


def test_a_refused_half_ends_the_other(tmp_path: Path) -> None:
    gate = threading.Event()

    def refused(body: dict[str, Any]) -> dict[str, Any]:
        return {"error": {"message": "AlignmentError: rows"}, "status": 500}

    def waits(body: dict[str, Any]) -> dict[str, Any]:
        gate.wait(20)
        return one_token(body)

    with Stub(refused) as prefill, Stub(waits) as decode:
        pair = f"cp8={prefill.url},{decode.url}"
        options = ("--base", pair, "--rounds", "1", "--num-prompts", "2", "--warmup", "0")
        status, result = run(tmp_path, *options)
        gate.set()
    assert status == 1
    failures = result["sides"]["cp8"]["rounds"][0]["failures"]
    assert len(failures) == 2
    assert all("AlignmentError: rows" in text for text in failures)


def test_failed_requests_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    special: Iterator[dict[str, Any]] = iter(
        [
            {"status": 500, "detail": "out of memory"},
            {"error": {"message": "too long"}},
            {"output_ids": [5], "cut": True},
            native("", []),
            native("a", [5, 6]),
        ]
    )

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        return next(special, None) or one_token(body)

    with Stub(answer) as stub:
        options = ("--base", f"x={stub.url}", "--rounds", "2", "--warmup", "0", "--concurrency", "1")
        status, result = run(tmp_path, *options)
    assert status == 1
    one, two = result["sides"]["x"]["rounds"]
    assert (one["failed"], one["answered"], two["failed"], two["answered"]) == (5, 0, 0, 5)
    for text, said in zip(
        one["failures"],
        ("HTTP 500", "too long", "ended before [DONE]", "held no token", "2 output tokens instead of 1"),
        strict=True,
    ):
        assert said in text
    assert result["sides"]["x"]["median"]["input_tokens_per_s"] == two["input_tokens_per_s"]
    assert "failed: x, round 1, request 0: " in capsys.readouterr().err


def test_a_failed_warm_up_counts(tmp_path: Path) -> None:
    failing = iter([{"status": 500}])
    with Stub(lambda body: next(failing, None) or one_token(body)) as stub:
        status, result = run(tmp_path, "--base", f"x={stub.url}", "--rounds", "1")
    assert (status, result["sides"]["x"]["warmup"]["failed"]) == (1, 1)


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with Stub(one_token) as stub:
        url = stub.url
    assert bench_prefill.main([*SMALL, "--base", f"x={url}"]) == 1
    assert "is the server running?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "nothing to measure"),
        (["--base", "http://h:1"], "is not NAME=URL"),
        (["--base", "x"], "is not NAME=URL"),
        (["--base", "x=ftp://h"], "is not an address"),
        (["--base", "x=http://h:99999"], "is not an address"),
        (["--base", "x=http://h,http://d,1,2"], "is not NAME=URL"),
        (["--base", "x=http://h,http://h/"], "prefill and decode are two servers"),
        (["--candidate", "x=http://h"], "--candidate needs --base"),
        (["--base", "x=http://h", "--candidate", "x=http://i"], "both sides are called x"),
        (["--prefill-url", "http://h"], "belong together"),
        (["--prefill-url", "http://h", "--decode-url", "http://h"], "are the same server"),
        (["--base", "x=http://h", "--bootstrap-port", "1"], "need --prefill-url"),
        (["--base", "x=http://h", "--min-id", "5", "--max-id", "5"], "must be greater than --min-id"),
        (["--base", "x=http://h", "--rounds", "0"], "0 is less than 1"),
        (["--base", "x=http://h", "--json", "."], ". is a folder"),
    ],
)
def test_usage_errors(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_prefill.main(options)
    assert stopped.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_script_runs_from_anywhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, bench_prefill.__file__, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0
    assert "--bootstrap-port" in done.stdout
