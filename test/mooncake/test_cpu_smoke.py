"""The main job: real process groups, real Mooncake on loopback, SGLang's own scheduler methods, float64 oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dspark_cp import adapters
from sglang_dspark_cp.cli.main import build_parser
from sglang_dspark_cp.hooks.check import sglang_release
from sglang_dspark_cp.smoke import native
from sglang_dspark_cp.smoke.release import installed
from sglang_dspark_cp.smoke.set_ups import flags

pytestmark = pytest.mark.timeout(240)

RELEASE = sglang_release()


@pytest.fixture(scope="session", autouse=True)
def mooncake_loads() -> None:
    """Fail with the command to install what is missing, instead of in every rank."""
    native.prepare()


def smoke(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, JSON report and standard error of one run. The fork server stays between runs."""
    args = build_parser().parse_args(["smoke", "--json", *arguments])
    status = args.run(args)
    out, err = capsys.readouterr()
    return status, json.loads(out), err


def assert_right(status: int, report: dict[str, Any], err: str) -> None:
    assert status == 0, err
    assert report["ok"] is True
    assert report["rows_mismatched"] == 0
    assert report["rows_compared"] > 0
    assert report["state_senders"] == [0]
    assert report["aux_collectives"] == report["cp_forwards"]
    assert report["alignment_failures"] == 0
    assert report["leaked_pages"] == 0


@pytest.mark.parametrize("cp_size", [2, 8])
@pytest.mark.parametrize("all_ranks", [False, True], ids=["rank0-sends", "all-cp-ranks-send"])
def test_cp_prefill_to_dp8_decode(capsys: pytest.CaptureFixture[str], cp_size: int, all_ranks: bool) -> None:
    flags = ["--all-cp-ranks"] if all_ranks else []
    status, report, err = smoke(capsys, "--prefill-cp", str(cp_size), "--decode-dp", "8", *flags)
    assert_right(status, report, err)
    assert report["requests"] >= 16
    # Pages are dealt out to the ranks in order; the longest prompt has five.
    assert report["kv_senders"] == (list(range(min(cp_size, 5))) if all_ranks else [0])
    # Not even stock's gather of the streams before the head is left.
    assert report["cp_group_collectives"] == report["cp_forwards"]
    assert report["mode"] == "window"
    fired = {hook["id"]: hook["fired"] for hook in report["hooks"]}
    adapter = adapters.find(RELEASE)
    assert adapter is not None
    assert set(fired) == {hook.id for hook in (*adapter.EAGER_HOOKS, *adapter.WORKER_HOOKS)}
    # The smoke never drafts, loads from memory, has no room for the worker's constructor and in 0.5.17 makes no logits;
    # for these see test/sglang/test_draft.py and test_forward_*.py. No request fails.
    idle = {"context-forward", "context-read", "context-worker", "explain-failure"}
    idle |= set() if installed().HEADS else {"head-rows"}
    assert {name for name, count in fired.items() if count == 0} == idle & set(fired)
    assert 0 < report["draft_bytes"] < 0.5 * report["draft_bytes_stock"]
    assert fired["proof"] == cp_size * report["forwards"]
    by_name = {row["name"]: row for row in report["per_request"]}
    assert by_name["the same prefix, one token more"]["cached"] == 512
    assert by_name["the same prefix, one token more"]["captured"] == 1


def test_every_mode_writes_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    reports = {}
    for mode in ("packed", "context", "kv", "window"):
        result = smoke(capsys, "--prefill-cp", "2", "--decode-dp", "2", "--mode", mode)
        assert_right(*result)
        reports[mode] = result[1]
        assert reports[mode]["mode"] == mode
        assert reports[mode]["cp_group_collectives"] == reports[mode]["cp_forwards"]
    assert len({report["rows_compared"] for report in reports.values()}) == 1
    assert len({report["rows_byte_equal"] for report in reports.values()}) == 1
    for hidden in ("4096", "7168"):
        received = {mode: report["gather_bytes_at_hidden"][hidden] for mode, report in reports.items()}
        stock = {mode: report["gather_bytes_stock_at_hidden"][hidden] for mode, report in reports.items()}
        per_row = {mode: received[mode] / stock[mode] for mode in reports}  # batches differ a little between runs
        assert per_row["context"] < 0.34 * per_row["packed"]
        assert per_row["kv"] < per_row["packed"] / 7
        assert per_row["window"] < 0.8 * per_row["kv"]


def test_a_long_prompt_without_prefix_cache_sends_its_last_rows_only(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = tmp_path / "long.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{word} " * 1400}) + "\n" for word in ("rain", "wind")))
    received = {}
    for mode in ("kv", "window"):
        flags = ("--prompts", str(prompts), "--only-prompts", "--chunk", "8192", "--no-radix", "--mode", mode)
        status, report, err = smoke(capsys, "--prefill-cp", "4", "--decode-dp", "2", *flags)
        assert_right(status, report, err)
        assert [row["tokens"] for row in report["per_request"]] == [7000, 7000]
        received[mode] = report["gather_bytes_at_hidden"]["4096"] / report["gather_bytes_stock_at_hidden"]["4096"]
    assert received["window"] < received["kv"] / 20


@pytest.mark.parametrize(
    "flags",
    [
        ["--prefill-cp", "4", "--no-overlap"],
        ["--prefill-cp", "4", "--mode", "context"],
        ["--prefill-cp", "8", "--mode", "packed", "--max-tokens", "600"],
        ["--prefill-cp", "8", "--mode", "kv"],
        ["--prefill-cp", "4", "--no-radix", "--no-fused"],
        ["--prefill-cp", "2", "--chunk", "255"],
        ["--prefill-cp", "2", "--chunk", "257"],
        ["--prefill-cp", "8", "--chunk", "127", "--max-tokens", "600"],
        ["--prefill-cp", "8", "--chunk", "128", "--max-tokens", "300"],
        ["--prefill-cp", "8", "--chunk", "129", "--max-tokens", "300"],
        ["--prefill-cp", "2", "--chunk", "1", "--max-tokens", "24"],
    ],
    ids=" ".join,
)
def test_other_schedules(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    assert_right(*smoke(capsys, "--decode-dp", "2", *flags))


@pytest.mark.parametrize("fault", ["drop-row", "swap-rows", "wrong-loc", "zero-rows", "skip-restore"])
def test_a_fault_on_one_rank_fails_on_all_ranks(capsys: pytest.CaptureFixture[str], fault: str) -> None:
    status, report, err = smoke(
        capsys, "--prefill-cp", "4", "--decode-dp", "2", "--max-tokens", "300", "--inject-fault", fault
    )
    assert status == 1
    assert report["ok"] is False
    assert min(report["alignment_errors_by_rank"]) > 0, err
    assert len(set(report["alignment_errors_by_rank"])) == 1
    texts = [reason for reason in report["reasons"] if reason.startswith("attn_cp_rank")]
    assert len(texts) == 4
    assert all("AlignmentError" in text and "request ids room-1" in text for text in texts)
    assert report["rows_mismatched"] == 0, "a row that failed its proof was sent"
    assert report["phase_seconds"]["serve"] < 30
    assert report["leaked_pages"] == 0


def test_requests_after_a_fault_are_served(capsys: pytest.CaptureFixture[str]) -> None:
    status, report, err = smoke(capsys, "--prefill-cp", "2", "--decode-dp", "2", "--inject-fault", "swap-rows@1#1")
    assert status == 1, err
    failed = [row for row in report["per_request"] if row["failure"]]
    # The first batch holds the questions whose bootstrap was done first; which ones is a matter of timing.
    assert 0 < len(failed) < 8
    assert all(f"room-{row['room']}" in row["failure"] and "AlignmentError" in row["failure"] for row in failed)
    assert report["alignment_failures"] == 1
    assert report["rows_mismatched"] == 0
    assert report["leaked_pages"] == 0


def test_a_chunked_request_with_a_fault_is_refused_whole(capsys: pytest.CaptureFixture[str]) -> None:
    status, report, err = smoke(
        capsys, "--prefill-cp", "2", "--decode-dp", "2", "--chunk", "100", "--inject-fault", "drop-row@0#1"
    )
    assert status == 1, err
    failed = [row for row in report["per_request"] if row["failure"]]
    # A first batch of 100 tokens ends inside a question: that one goes on to its last chunk and is refused there.
    assert 1 <= len(failed) <= 2
    assert any(row["chunks"] > 1 for row in failed)
    assert report["leaked_pages"] == 0


def test_stock(capsys: pytest.CaptureFixture[str]) -> None:
    """0.5.17 refuses the deployment in five places; 0.5.23 serves it, with three collectives at a forward's end."""
    status, report, err = smoke(capsys, "--prefill-cp", "2", "--decode-dp", "2", "--stock")
    assert status == 0, (report["reasons"], err)
    if flags().stock_serves:
        return assert_stock_beside_ours(report, err)
    errors = [refusal["error"] for refusal in report["stock_refusals"]]
    assert len(errors) == 5
    for error, words in zip(
        errors,
        [
            "mutually exclusive",
            "requires --enable-dp-lm-head",
            "does not support context parallel",
            "markov_w2 TP-shard",
            "NotImplementedError",
        ],
        strict=True,
    ):
        assert words in error


def assert_stock_beside_ours(report: dict[str, Any], err: str) -> None:
    runs, found = {"stock": report["stock_run"], "ours": report["our_run"]}, report["end_of_forward"]
    for run in runs.values():
        assert run["rows_mismatched"] == 0
        assert run["leaked_pages"] == 0
        assert run["state_senders"] == [0]
        assert run["rows_compared"] == runs["stock"]["rows_compared"] > 0
        assert run["rows_byte_equal"] == runs["stock"]["rows_byte_equal"]
    assert [hook["fired"] for hook in runs["ours"]["hooks"] if hook["id"] == "proof"] == [2 * runs["ours"]["forwards"]]
    assert "hooks" not in runs["stock"]
    stock, ours = found["stock"], found["ours"]
    assert [part["collectives"] for part in stock["parts"]] == [stock["cp_forwards"]] * 3
    assert [part["collectives"] for part in ours["parts"]] == [ours["cp_forwards"]]
    # [rows, H] for the head, [rows, 4 H] of streams, [rows, 3 H] of captured layers, all in bf16 and padded by stock.
    for hidden in (512, 4096, 7168):
        received = [part["bytes_at_hidden"][str(hidden)] for part in stock["parts"]]
        assert received[1:] == [4 * received[0], 3 * received[0]]
        assert stock["tokens"] * hidden <= received[0] < 1.1 * stock["tokens"] * hidden
    assert found["ours_to_stock"]["4096"] < 0.05
    assert runs["ours"]["draft_bytes"] < 0.2 * runs["stock"]["draft_bytes"]
    for words in ("stock: streams before it", "ours: draft rows (window) and head rows", "ours / stock"):
        assert words in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prefill-cp", "3"], "allowed are 2, 4, 8"),
        (["--decode-dp", "9"], "allowed are 1 to 8"),
        (["--chunk", "0"], "allowed are 1 to 8192"),
        (["--chunk", "8193"], "allowed are 1 to 8192"),
        (["--chunk", "8192"], "--max-tokens 8191 leaves such prompts out"),
        (["--inject-fault", "typo"], "is not a fault"),
        (["--prompts", "does-not-exist.jsonl"], "cannot read the prompts file"),
        (["--max-tokens", "0"], "larger --max-tokens"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    args = build_parser().parse_args(["smoke", *arguments])
    assert args.run(args) == 2
    assert words in capsys.readouterr().err.replace("\n", " ")
