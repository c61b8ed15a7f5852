"""The soak: 20 s of requests, client aborts and decode ranks that are killed; and its command line."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
from typing import Any

import pytest

from sglang_dspark_cp.cli.main import build_parser
from sglang_dspark_cp.smoke import native
from sglang_dspark_cp.smoke.soak import ABORTS, LOST_AFTER_S, Fleet, Memory, duration

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", autouse=True)
def mooncake_loads() -> None:
    native.prepare()


def test_twenty_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    args = build_parser().parse_args(
        ["smoke", "--json", "--soak", "20s", "--prefill-cp", "2", "--decode-dp", "2", "--seed", "5"]
    )
    status = args.run(args)
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert status == 0, (report["reasons"], err)
    assert report["ok"] is True
    assert report["lost"] == report["failed_unexplained"] == report["rows_wrong"] == 0
    assert report["restarts"] >= 1
    assert report["finished"] > 32
    assert report["rows_compared"] > 3 * report["finished"]
    assert set(report["aborted_where"]) >= set(ABORTS) - {"chunks"}, "chunks are rare in so short a time"
    ended = report["finished"] + report["aborted"] + report["failed_by_kill"]
    assert ended == report["requests"]
    assert not any(report["leaked"].values())
    assert report["memory_judged"] is False
    assert report["longest_s"] < LOST_AFTER_S / 2
    for words in ("finished", "wrong 0", "lost 0", "longest time to an end"):
        assert words in " ".join(err.split())


def test_ctrl_c_ends_with_a_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    submit, count = Fleet.submit, itertools.count(1)

    def submit_and_interrupt(*arguments: Any) -> Any:
        if next(count) == 50:
            os.kill(os.getpid(), signal.SIGINT)
        return submit(*arguments)

    monkeypatch.setattr(Fleet, "submit", submit_and_interrupt)
    before = signal.getsignal(signal.SIGINT)
    args = build_parser().parse_args(["smoke", "--json", "--soak", "10m", "--prefill-cp", "2", "--decode-dp", "1"])
    status = args.run(args)
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert status == 0, (report["reasons"], err)
    assert report["interrupted"] is True
    assert report["soak_seconds"] < 60
    assert report["finished"] > 0
    assert report["lost"] == 0
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1h", 3600), ("0.5m", 30)])
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["90", "0s", "-1m", "1d", "", "m"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="such as 90s or 10m"):
        duration(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stock"], "--stock does not go together with --soak"),
        (["--inject-fault", "zero-rows"], "--inject-fault does not go together with --soak"),
        (["--prompts", "some.jsonl"], "--prompts does not go together with --soak"),
        (["--max-tokens", "5000"], "allowed with --soak are 1 to 4095"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    args = build_parser().parse_args(["smoke", "--soak", "1m", *arguments])
    assert args.run(args) == 2
    assert words in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(("step", "growth"), [(0, 0.0), (1_000_000, 0.2)])
def test_memory_that_grows_is_told_from_memory_that_does_not(step: int, growth: float) -> None:
    memory = Memory([(float(second), 10**8 + second * step, 2 * 10**8) for second in range(0, 90, 3)])
    used = memory.report()
    assert used["prefill"]["growth"] == pytest.approx(growth, abs=0.05)
    assert used["prefill"]["slope_mb_per_min"] == pytest.approx(60 * step / 1e6)
    assert used["all"]["growth"] == 0
