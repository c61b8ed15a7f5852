"""Cost of DSpark on prefill: figures, options, and whole runs against stub servers."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_stub import Stub, native

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark" / "draft_cost"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark" / "prefill_cost"))

import cost_rounds
import cost_servers
import prefill_cost
from cost_rounds import Load, Round
from cost_servers import Told
from draft_checkpoint import Written

from sglang_dspark_cp.smoke.checkpoint import Geometry
from sglang_dspark_cp.smoke.set_ups import Gpus, UsageError

pytestmark = pytest.mark.timeout(120)

LOAD = Load(64, 2, 3, 2, 1024, 20.0)


# ---------------------------------------------------------------------------------------------------------- figures


def rounds(*ttft: float, rate: float = 1000.0) -> list[dict[str, Any]]:
    return [
        {"round": number, "ttft_median_s": value, "input_tokens_per_s": rate / value}
        for number, value in enumerate(ttft, 1)
    ]


def test_cost_is_paired_by_round() -> None:
    base = rounds(1.0, 2.0, 4.0, 1.0)
    found = cost_rounds.cost_of(base, rounds(1.02, 2.04, 4.08, 1.02))
    for series in cost_rounds.SERIES:
        assert found[series]["percent"] == pytest.approx(2.0)
        assert found[series]["by_round"] == pytest.approx([2.0] * 4)
        assert found[series]["verdict"] == "missed"
    assert found["ttft"]["ms"] == pytest.approx(30.0)
    late = cost_rounds.cost_of(base, [figures | {"round": figures["round"] + 2} for figures in base])
    assert late == {"ttft": None, "throughput": None}


def test_rounds_with_failures_count_for_neither_side() -> None:
    one, two = rounds(1.0, 1.0, 1.0, 1.0), rounds(1.0, 1.0, 1.0, 1.0)
    two[0]["ttft_median_s"] = one[1]["input_tokens_per_s"] = None
    found = cost_rounds.cost_of(one, two)
    assert found["ttft"]["rounds"] == found["throughput"]["rounds"] == 3
    two[1]["ttft_median_s"] = None
    assert cost_rounds.cost_of(one, two)["ttft"] is None


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(-0.5, 0.9, "met"), (0.2, 1.8, "not settled"), (1.2, 1.5, "missed")]
)
def test_a_goal_is_settled_only_if_the_interval_says_so(low: float, high: float, verdict: str) -> None:
    assert cost_rounds.verdict_of(low, high) == verdict


def test_the_interval_holds_the_median_and_narrows() -> None:
    few = cost_rounds.interval_of([0.0, 1.0, 2.0, 3.0, 4.0])
    many = cost_rounds.interval_of([0.0, 1.0, 2.0, 3.0, 4.0] * 20)
    assert few[0] <= 2.0 <= few[1]
    assert many[1] - many[0] < few[1] - few[0]
    assert cost_rounds.interval_of([2.0] * 3) == (2.0, 2.0)


def test_every_side_takes_every_place() -> None:
    sides = ["a", "b", "c"]
    orders = [cost_rounds.order_of(sides, number) for number in range(1, 7)]
    assert orders[:2] == [["a", "b", "c"], ["c", "b", "a"]]
    for place in range(3):
        assert sorted(order[place] for order in orders) == sorted(sides * 2)


def test_prompts_are_the_same_for_all_sides_and_new_in_each_round() -> None:
    once = cost_rounds.prompts_of(0, 1, LOAD)
    assert once == cost_rounds.prompts_of(0, 1, LOAD) != cost_rounds.prompts_of(0, 2, LOAD)
    assert [len(prompt) for prompt in once] == [64] * 5
    assert all(8 <= token < 1024 for prompt in once for token in prompt)


def test_first_tokens_are_compared_prompt_by_prompt() -> None:
    base = [Round(1, 0, first={0: 5, 1: 6}), Round(2, 0, first={0: 7})]
    assert cost_rounds.agreement_of(base, [Round(1, 1, first={0: 5, 1: 9}), Round(3, 1, first={0: 1})]) == 0.5
    assert cost_rounds.agreement_of(base, [Round(1, 1)]) is None


def test_the_host_without_transfer_is_sglangs_own() -> None:
    (package,) = find_spec("sglang").submodule_search_locations  # type: ignore[union-attr, misc]
    text = Path(package, "srt", "disaggregation", "utils.py").read_text(encoding="utf-8")
    assert f'FAKE_BOOTSTRAP_HOST = "{cost_rounds.NO_TRANSFER_HOST}"' in text


async def one_round(answer: Any) -> Round:
    done = Round(1, 0)
    bodies = [cost_rounds.body_of([9] * 64, room) for room in range(5)]
    with Stub(answer) as stub:
        async with cost_rounds.http.open_client(20.0) as client:
            await cost_rounds.run_round(client, stub.url, done, bodies, LOAD)
        assert stub.most_at_once <= LOAD.concurrency
        assert [body["bootstrap_host"] for body in stub.bodies] == [cost_rounds.NO_TRANSFER_HOST] * 5
        assert not any("stream" in body for body in stub.bodies)
    return done


def test_a_round() -> None:
    done = cost_rounds.asyncio.run(one_round(lambda body: native("a", [5], prompt_tokens=64, cached_tokens=1)))
    assert (len(done.ttft_s), done.answered_together, done.cached_tokens, done.failures) == (2, 3, 5, [])
    figures = cost_rounds.figures_of(done, LOAD)
    assert figures["input_tokens_per_s"] == pytest.approx(3 * 64 / figures["together_s"])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda body: {"status": 500, "detail": "AlignmentError"}, "AlignmentError"),
        (lambda body: native("a", [5], prompt_tokens=63), "63 prompt tokens instead of 64"),
        (lambda body: native("a", [5], finish_reason={"type": "abort", "message": "too long"}), "too long"),
    ],
)
def test_a_round_with_failures_has_no_figures(answer: Any, said: str) -> None:
    done = cost_rounds.asyncio.run(one_round(answer))
    assert len(done.failures) == 5
    assert said in done.failures[0]
    figures = cost_rounds.figures_of(done, LOAD)
    assert (figures["ttft_median_s"], figures["input_tokens_per_s"]) == (None, None)


# ---------------------------------------------------------------------------------------------------------- servers

ACTIVE = (
    "[2026-11-30 10:00:00 ATTN_CP{rank} TP{rank}] sglang-dspark-cp: DSPARK on CP prefill is active, attn_cp_size=2,"
    " alignment proof=rows, gather={mode} (asked for)"
)


def test_the_log_tells_ranks_and_mode() -> None:
    log = "\n".join(ACTIVE.format(rank=rank, mode="kv") for rank in (0, 1, 1))
    assert cost_servers.told_by(log) == Told(2, ("kv",))
    assert cost_servers.told_by("nothing") == Told(0, ())


def test_the_line_is_one_that_the_plugin_writes() -> None:
    package = Path(cost_servers.config.__file__).parent
    for adapter in sorted((package / "adapters").glob("v0_*.py")):
        text = adapter.read_text(encoding="utf-8")
        assert "DSPARK on CP prefill is active, attn_cp_size=%d, alignment proof=%s, gather=%s (%s)" in text, adapter


@pytest.mark.parametrize(
    ("side", "told", "said"),
    [
        ("off", Told(0, ()), None),
        ("off-2", Told(2, ("kv",)), "wanted is none"),
        ("stock", Told(2, ("kv",)), "wanted is none"),
        ("kv", Told(2, ("kv",)), None),
        ("auto", Told(2, ("window",)), None),
        ("kv", Told(2, ("window",)), "wanted is kv"),
        ("kv", Told(1, ("kv",)), "1 of 2 ranks"),
        ("kv", Told(0, ()), "0 of 2 ranks"),
    ],
)
def test_a_server_that_is_not_what_it_is_called_is_left_out(side: str, told: Told, said: str | None) -> None:
    why = cost_servers.not_as_asked(side, told, 2)
    assert why is None if said is None else why is not None and said in why


def test_sides_differ_in_dspark_only() -> None:
    args = SimpleNamespace(input_len=8192, chunk=None, concurrency=4, server_args="--log-level info")
    gpus = Gpus(("0", "1"), ("0", "1"))
    off, kv = (cost_servers.arguments_of(side, args, gpus, Path("m"), 30000) for side in ("off", "kv"))
    assert [word for word in kv if word not in ("--speculative-algorithm", "DSPARK")] == off
    assert len(kv) == len(off) + 2
    last = {flag: kv[len(kv) - kv[::-1].index(flag)] for flag in ("--chunked-prefill-size", "--context-length")}
    assert last == {"--chunked-prefill-size": "8192", "--context-length": "9216"}


def test_the_estimate_of_a_ranks_weights_is_about_what_is_written() -> None:
    args = SimpleNamespace(hidden=4096, vocab=1024, layers=6, experts=256, moe_intermediate=256)
    geometry = cost_servers.geometry_of(args, 2)
    # Two H200, CP2: 3.97 GB allocated on a rank with the context-only draft (benchmark/draft_cost/README.md).
    assert cost_servers.rank_bytes(geometry, 2) == pytest.approx(3.6e9, rel=0.15)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_servers.cuda, "_nvidia_smi", lambda field: ["143771 MiB"])
    geometry = Geometry(hidden=4096, layers=16, q_lora=1024, o_lora=1024, experts=64, moe_intermediate=1024)
    cost_servers.check_fit(geometry, Gpus(("0", "1"), ("0", "1")), 6)
    with pytest.raises(UsageError, match="GiB"):
        cost_servers.check_fit(geometry, Gpus(("0", "0"), ("0", "0")), 6)


# -------------------------------------------------------------------------------------------------------- whole runs

STUB = """
    import http.server, json, os, sys, time
    mode = os.environ.get("SGLANG_DSPARK_CP_GATHER", "off")
    on = "--speculative-algorithm" in sys.argv
    if mode == os.environ.get("STUB_FAILS"):
        sys.exit("Traceback (most recent call last):\\n  x\\nValueError: the stub fails")
    told = os.environ.get("STUB_TELLS", mode)
    for rank in range(2 if on else 0):
        print(f"[x ATTN_CP{rank} TP{rank}] sglang-dspark-cp: DSPARK on CP prefill is active, attn_cp_size=2,"
              f" alignment proof=rows, gather={told} (asked for)", flush=True)
    served = 0
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        def log_message(self, *args): ...
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
        def do_POST(self):
            global served
            served += 1
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if mode == os.environ.get("STUB_DIES") and served > 8:
                os._exit(3)
            time.sleep(float(os.environ["STUB_ON"]) if on else 0.01)
            meta = {"prompt_tokens": len(body["input_ids"]), "cached_tokens": 0, "finish_reason": {"type": "length"}}
            answer = json.dumps({"text": "", "output_ids": [body["input_ids"][0]], "meta_info": meta}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
SMI = """\
#!/bin/sh
case "$1" in
  *memory.total*) echo "143771 MiB";;
  *index*) echo 0; echo 1;;
  *) echo stub;;
esac
"""
SMALL = (
    *("--input-len", "64", "--single", "2", "--together", "3", "--concurrency", "2", "--warmup", "1", "--rounds", "4"),
    *("--ports", "22000", "--limit", "100", "--measure", "40", "--modes", "off-2", "kv", "window"),
)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two stub GPUs, and servers that only answer."""
    (tmp_path / "stub.py").write_text(textwrap.dedent(STUB))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(SMI)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("STUB_ON", "0.01")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(
        cost_servers,
        "launch_command",
        lambda arguments, port, module: [sys.executable, str(tmp_path / "stub.py"), "--port", str(port), *arguments],
    )
    monkeypatch.setattr(cost_servers.large, "write_large", lambda *args: Written(1, 1, 1, 1, 1, 1, 1))
    return tmp_path


def run(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    path = folder / "result.json"
    status = prefill_cost.main([*SMALL, *options, "--json", str(path)])
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert result["ok"] == (status == 0) == (not result["problems"])
    return status, result


@pytest.mark.parametrize("alone", [(), ("--first-alone",)])
def test_sides_are_measured_in_turns(
    stub: Path, alone: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_CP_COMMIT", "abc")
    monkeypatch.setenv("STUB_ON", "0.3")  # far beyond what a busy machine adds by itself
    status, result = run(stub, *alone, "--keep", str(stub / "kept"))
    assert status == 0, result["problems"]
    assert (result["commit"], result["cp_size"], result["gpus_used"]) == ("abc", 2, 2)
    assert result.keys() >= {"date", "sglang", "torch", "driver", "cuda", "command", "checkpoint", "measured_by"}
    assert list(result["summary"]) == ["off", "off-2", "window", "kv"]
    for side, each in result["summary"].items():
        assert each["rounds"] == 4
        assert each["ttft_ms"] > 10
        if side != "off":
            assert each["first_tokens_as_off"] == 1.0
    for side in ("window", "kv"):
        cost = result["summary"][side]["cost"]
        assert cost["ttft"]["percent"] > 20
        assert cost["ttft"]["ms"] > 20
        assert cost["ttft"]["rounds"] == 4
        assert result["servers"][side]["gather"] == [side]
        assert "DSPARK" in result["servers"][side]["arguments"]
    assert "DSPARK" not in result["servers"]["off-2"]["arguments"]
    assert [len(each) for each in result["rounds"].values()] == [5] * 4  # the warm-up is told and not counted
    assert {path.name for path in (stub / "kept").iterdir()} >= {"prefill-off.log", "prefill-kv.log"}
    shown = capsys.readouterr().err
    assert "round 4 of 4: off" in shown
    assert "goal at most 1 %" in shown


def test_a_server_that_does_not_start_leaves_the_others(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_FAILS", "kv")
    status, result = run(stub)
    assert status == 1
    assert result["problems"] == ["kv: the server ended: ValueError: the stub fails"]
    assert result["summary"]["window"]["cost"]["ttft"]["rounds"] == 4
    assert result["summary"]["kv"]["cost"]["ttft"] is None


def test_a_server_that_dies_later_leaves_the_others(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_DIES", "kv")
    status, result = run(stub)
    assert status == 1
    assert any(problem.startswith("kv: the server ended") for problem in result["problems"])
    assert result["summary"]["window"]["cost"]["ttft"]["rounds"] == 4
    assert result["summary"]["kv"]["cost"]["ttft"] is None


def test_without_the_base_nothing_is_measured(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_FAILS", "off")
    status, result = run(stub)
    assert status == 1
    assert any("nothing was measured" in problem for problem in result["problems"])
    assert all(each == [] for each in result["rounds"].values())


def test_a_server_in_another_mode_is_left_out(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_TELLS", "window")
    status, result = run(stub)
    assert status == 1
    assert result["problems"] == ["kv: the log names gather mode window, wanted is kv"]
    assert result["rounds"]["kv"] == []


def test_rounds_end_with_the_time(stub: Path) -> None:
    status, result = run(stub, "--rounds", "1000", "--limit", "20", "--measure", "6")
    assert status == 0, result["problems"]
    assert 3 <= result["summary"]["kv"]["rounds"] < 1000
    assert result["seconds"] < 20


# -------------------------------------------------------------------------------------------------------------- plot


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cost = cost_rounds.cost_of(rounds(1.0, 1.0, 1.0), rounds(1.01, 1.02, 1.0))
    summary = {"off": {"cost": None}, "kv": {"cost": cost}, "window": {"cost": {"ttft": None, "throughput": None}}}
    about = {"benchmark": "prefill_cost", "date": "2026-11-30T10:00:00+00:00", "gpus": ["a GPU"], "gpus_used": 2}
    result = {**about, "ranks_per_gpu": 1, "cp_size": 2, "goal_percent": 1.0, "load": vars(LOAD), "summary": summary}
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert prefill_cost.main(["plot", str(tmp_path / "result.json"), str(tmp_path / "cost.png")]) == 0
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        ('{"benchmark": "other"}', "x.png", "allowed is a JSON result of prefill_cost.py"),
        ("{", "x.png", "Expecting"),
        ('{"benchmark": "prefill_cost", "summary": {"off": {"cost": null}}}', "x.png", "no side has a cost"),
        ("{}", "x.txt", "allowed is a name that ends in"),
    ],
)
def test_files_that_cannot_be_plotted(
    tmp_path: Path, content: str, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(SystemExit) as stopped:
        prefill_cost.main(["plot", str(tmp_path / "r.json"), str(tmp_path / name)])
    assert stopped.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


# ------------------------------------------------------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--modes", "off"), "nothing to compare"),
        (("--modes", "other"), "invalid choice"),
        (("--vocab", "8"), "lower ids are special"),
        (("--limit", "45"), "allowed is less than --limit"),
        (("--dir", "no-such-folder"), "no such folder"),
        (("--gpus", "7"), "not visible"),
        (("--gpus", "0"), "at least two ranks"),
        (("--moe-intermediate", "128"), "multiple of 256"),
        (("--layers", "5"), "at least 6 layers"),
        (("--hidden", "100"), "multiples of 128"),
        (("--input-len", "1"), "no prompt shorter than CP"),
        (("--layers", "200"), "GiB"),
        (("--ports", "65000"), "outgoing connections"),
        (("--rounds", "0"), "less than 1"),
        (("--json", "no-such-folder/x.json"), "does not exist"),
    ],
)
def test_usage_errors_end_with_2(
    stub: Path, options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = prefill_cost.main([*SMALL, *options])
    except SystemExit as error:
        status = int(str(error.code))
    assert status == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_no_gpu_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert prefill_cost.main([]) == 2


def test_the_script_runs_from_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, prefill_cost.__file__, "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--first-alone" in done.stdout
