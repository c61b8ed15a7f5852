"""The `plan` sub-command: exit codes, JSON, text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dspark_cp.cli import plan
from sglang_dspark_cp.core import costs


def call(*arguments: str) -> int:
    """Exit status, whether argparse or `run` refuses."""
    parser = argparse.ArgumentParser(prog="plan")
    plan.add_arguments(parser)
    try:
        return plan.run(parser.parse_args(arguments))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else -1


def result(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert call(*arguments, "--json") == 0
    output = capsys.readouterr()
    assert output.err == ""
    found = json.loads(output.out)
    assert isinstance(found, dict)
    return found


DESIGN_KEYS = {
    "id": str,
    "title": str,
    "gathers": list,
    "collectives": int,
    "rows": int,
    "rows_per_rank": int,
    "all_rows_bytes": int,
    "received_bytes": int,
    "peak_bytes": int,
    "flops": int,
    "milliseconds": float,
    "received_ratio": float,
    "milliseconds_ratio": float,
}


def test_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, "--model", "pro", "--nodes", "1", "4", "16")
    assert set(found) == {"schema", "model", "forward", "rates", "designs", "ratio_to", "draft", "nodes", "notes"}
    assert found["schema"] == 1
    assert [row["id"] for row in found["designs"]] == [
        "stock-0.5.18",
        "stock-0.5.23",
        "packed",
        "context",
        "kv",
        "window",
    ]
    for row in found["designs"]:
        assert {key: type(value) for key, value in row.items()} == DESIGN_KEYS
    assert set(found["draft"]) == {
        "parts",
        "stock_bytes",
        "context_bytes",
        "saved_bytes",
        "kv_bytes_per_token",
        "kv_tokens",
    }
    assert all(set(part) == {"name", "stock", "context", "saved"} for part in found["draft"]["parts"])
    assert set(found["rates"]) == {"link_gb_s", "matmul_tflop_s", "launch_us"}
    assert all(set(rate) == {"value", "source"} for rate in found["rates"].values())


def test_defaults_are_tp8_cp8_8192_tokens_of_one_request(capsys: pytest.CaptureFixture[str]) -> None:
    forward = result(capsys, "--model", "flash")["forward"]
    assert forward == {
        "tokens": 8192,
        "cp": 8,
        "requests": 1,
        "prefix": 0,
        "page": 256,
        "radix": True,
        "tp": 8,
        "split": True,
        "boundary": "dropped",
    }


def test_ratios_are_to_the_newest_stock_design(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, "--model", "flash")
    rows = {row["id"]: row for row in found["designs"]}
    assert found["ratio_to"] == "stock-0.5.23"
    assert (rows["stock-0.5.23"]["received_ratio"], rows["stock-0.5.23"]["milliseconds_ratio"]) == (1.0, 1.0)
    assert rows["stock-0.5.18"]["received_ratio"] == 7 / 8  # 3H + 4H of H + 4H + 3H


def test_nodes_multiply_the_totals_only(capsys: pytest.CaptureFixture[str]) -> None:
    one, many = result(capsys, "--model", "flash"), result(capsys, "--model", "flash", "--nodes", "1", "4", "16")
    assert one["designs"] == many["designs"]
    assert one["draft"] == many["draft"]
    saved = many["draft"]["saved_bytes"]
    assert saved == 1_856_626_332
    tokens = many["draft"]["kv_tokens"]
    assert tokens == 200_501  # 1856626332 / (9049.45 * 44 / 43)
    assert many["nodes"] == [
        {"nodes": n, "gpus": 8 * n, "saved_bytes": 8 * n * saved, "kv_tokens": n * tokens} for n in (1, 4, 16)
    ]


def test_rates_say_where_they_are_from(capsys: pytest.CaptureFixture[str]) -> None:
    rates = result(capsys, "--model", "flash", "--link", "400")["rates"]
    assert rates["link_gb_s"] == {"value": 400.0, "source": "given"}
    assert rates["launch_us"] == {"value": 20.0, "source": "assumed"}


def test_rates_change_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    fast = result(capsys, "--model", "pro", "--link", "1", "--matmul", "1e9", "--launch-us", "1000")
    packed = next(row for row in fast["designs"] if row["id"] == "packed")
    # 308.396032 MB at 1 GB/s and one collective of 1 ms
    assert packed["milliseconds"] == pytest.approx(309.396, abs=0.01)


def test_options_reach_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, "--model", "flash", "--radix", "off", "--requests", "4", "--boundary", "kept")
    rows = {row["id"]: row for row in found["designs"]}
    assert (rows["window"]["rows"], rows["window"]["collectives"]) == (4 * 128, 2)
    bf16 = result(capsys, "--model", "flash", "--experts", "bf16", "--shared-expert", "replicated")["draft"]["parts"]
    assert bf16[0]["stock"] == 3 * 256 * 3 * 2048 * 4096 * 2 // 8
    assert bf16[1]["stock"] == 8 * 9_439_488


def test_a_forward_without_cp_has_no_received_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, "--model", "flash", "--chunk", "7")
    assert {row["received_ratio"] for row in found["designs"]} == {None}
    assert any("without CP" in note for note in found["notes"])


def test_a_folder_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(costs.PRO))
    folder, built_in = result(capsys, "--model", str(tmp_path)), result(capsys, "--model", "pro")
    assert folder["designs"] == built_in["designs"]
    assert folder["draft"] == built_in["draft"]
    assert folder["model"]["source"] == str(tmp_path / "config.json")


def test_what_a_folder_does_not_say_is_marked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    some = {key: value for key, value in costs.PRO.items() if key not in ("expert_dtype", "compress_ratios")}
    (tmp_path / "config.json").write_text(json.dumps(some))
    found = result(capsys, "--model", str(tmp_path))
    assert found["draft"]["kv_tokens"] is None
    assert found["nodes"][0]["kv_tokens"] is None
    assert any(note.startswith("assumed: routed experts are fp8") for note in found["notes"])
    assert call("--model", str(tmp_path)) == 0


def test_the_text_has_every_design_and_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--model", "pro", "--nodes", "1", "4") == 0
    text = capsys.readouterr().out
    for words in ("stock 0.5.18-style per layer", "stock 0.5.23", "packed", "window", "[T,3H]+addr", "Markov head"):
        assert words in text
    for number in ("308.4", "704.9", "5,053.6", "assumed"):
        assert number in text
    assert "before the head" not in text
    assert call("--model", "pro", "--boundary", "kept") == 0
    assert "with SGLang's own gather [T,4H] before the head" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "flash", "--tp", "8", "--cp", "4"], "--cp 8 or --tp 4"),
        (["--model", "flash", "--tp", "16"], "--cp"),
        (["--model", "flash", "--requests", "9000"], "--requests"),
        (["--model", "flash", "--page", "100"], "--page"),
        (["--model", "flash", "--prefix", "1048576"], "--prefix"),
        (["--model", "/nowhere"], "--model"),
        (["--model", "flash", "--tp", "zero"], "--tp"),
        (["--model", "flash", "--chunk", "0"], "--chunk"),
        (["--model", "flash", "--prefix", "-1"], "--prefix"),
        (["--model", "flash", "--link", "0"], "--link"),
        (["--model", "flash", "--matmul", "nan"], "--matmul"),
        (["--model", "flash", "--launch-us", "-1"], "--launch-us"),
        (["--model", "flash", "--nodes", "0"], "--nodes"),
    ],
    ids=str,
)
def test_bad_input_exits_2_and_says_found_allowed_why_and_flag(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert call(*arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    for words in ("found", "allowed", "because", named):
        assert words in output.err


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": 4096}'])
def test_a_bad_config_exits_2(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert call("--model", str(tmp_path)) == 2
    assert "config.json" in capsys.readouterr().err


def test_the_model_is_required() -> None:
    assert call() == 2
