"""`smoke --device cuda` without a GPU: options, plan, and a whole run with `stub_server.py` in the place of SGLang."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_dspark_cp.smoke import cuda, cuda_run, cuda_stock, prompts, servers, set_ups
from sglang_dspark_cp.smoke.checkpoint import INFO_FILE, CheckpointInfo
from sglang_dspark_cp.smoke.set_ups import Gpus, UsageError

STUB = Path(__file__).with_name("stub_server.py")
TWO = Gpus(("0", "1"), ("0", "1"))


def parse(*options: str) -> argparse.Namespace:
    """The options of `smoke` that the GPU run sees."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--inject-fault", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--mode")
    cuda.add_arguments(parser)
    return parser.parse_args(options)


# ------------------------------------------------------------------------------------------------------------ plan


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The release that is taken for the installed one."""
    name: str = request.param
    monkeypatch.setattr(set_ups, "sglang_release", lambda: name)
    return name


def on(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("release", names, indirect=True)


@on("0.5.17")
def test_set_ups_by_gpus(release: str) -> None:
    assert list(set_ups.possible(Gpus(("0",), ("0",)))) == ["plain", "dspark", "pd1"]
    assert list(set_ups.possible(TWO)) == ["plain", "dspark", "pd1", "pd-tp2", "cp2-tp2", "cp2-dp2"]
    eight = tuple("01234567")
    assert [each.name for each in set_ups.choose_set_ups(Gpus(eight, eight), None)][2:] == [
        "pd1", "pd-tp8", "cp8-tp8", "cp8-dp8",
    ]  # fmt: skip
    split = Gpus(("0", "1"), ("2",))
    assert [each.name for each in set_ups.choose_set_ups(split, None)][2:] == ["pd1", "pd-tp2", "cp2-tp1"]


@on("0.5.23")
def test_where_stock_serves_it_is_a_set_up(release: str) -> None:
    found = set_ups.possible(TWO)
    assert list(found)[-2:] == ["cp2-dp2", "stock-cp2-tp2"]
    stock = found["stock-cp2-tp2"]
    assert stock.is_stock
    assert not stock.is_cp
    assert stock.servers == ("prefill-stock2", "decode-tp2")
    assert set_ups.gpus_of("prefill-stock2", TWO) == TWO.prefill
    cp, ours = (set_ups.role_arguments(role, "mooncake_tcp", 1) for role in ("prefill-stock2", "prefill-cp2"))
    assert cp == ours
    assert "interleave" in cp
    assert "--skip-tokenizer-init" in set_ups.base_arguments(Path("m"), "bf16")
    reference = set_ups.reference_of(list(found.values()))
    assert reference is not None
    assert reference.name == "pd-tp2"


@on("0.5.99")
def test_a_release_that_gpu_runs_do_not_know(release: str) -> None:
    with pytest.raises(UsageError, match=r"SGLang 0\.5\.99: runs know 0\.5\.17, 0\.5\.23"):
        set_ups.possible(TWO)


@on("0.5.17", "0.5.23")
def test_rows_are_compared_with_a_prefill_that_adds_up_alike(release: str) -> None:
    everything = set_ups.choose_set_ups(TWO, None)
    reference = set_ups.row_reference_of(everything)
    assert reference is not None
    assert reference.name == "pd1"
    without = set_ups.row_reference_of(set_ups.choose_set_ups(TWO, "pd-tp2,cp2-tp2"))
    assert without is not None
    assert without.name == "pd-tp2"


def test_reference_is_the_pd_set_up_without_cp() -> None:
    chosen = set_ups.choose_set_ups(TWO, "plain,pd1,pd-tp2,cp2-tp2")
    reference = set_ups.reference_of(chosen)
    assert reference is not None
    assert reference.name == "pd-tp2"
    assert set_ups.reference_of(set_ups.choose_set_ups(TWO, "plain,cp2-tp2")) is None


@pytest.mark.parametrize(
    ("visible", "options", "word"),
    [
        ((), (None, None, None), "no GPU is visible"),
        (("0", "1", "2"), (None, None, None), "3 GPUs"),
        (("0", "1"), ("0,7", None, None), "GPU 7 is not visible"),
    ],
)
def test_gpus_that_do_not_fit(visible: tuple[str, ...], options: tuple[str | None, ...], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        set_ups.choose_gpus(visible, *options)


def test_split_gpus() -> None:
    assert set_ups.choose_gpus(("0", "1", "2", "3"), None, "0,1", "2,3") == Gpus(("0", "1"), ("2", "3"))
    assert set_ups.gpus_of("plain", TWO) == ("0",)
    assert set_ups.gpus_of("dspark", TWO) == ("1",)
    assert set_ups.gpus_of("prefill-cp2", TWO) == ("0", "1")


def test_ranks_that_share_a_gpu() -> None:
    shared = set_ups.choose_gpus(("0",), None, None, None, 4)
    assert shared == Gpus(("0",) * 4, ("0",) * 4)
    stock = ["stock-cp4-tp4"] if set_ups.flags().stock_serves else []  # 0.5.17 refuses it
    assert list(set_ups.possible(shared))[-2 - len(stock) :] == ["cp4-tp4", "cp4-dp4", *stock]
    assert set_ups.environment("bf16", "mooncake_tcp", shared.prefill)["CUDA_VISIBLE_DEVICES"] == "0"
    assert set_ups.launch_module(shared.prefill) == "sglang_dspark_cp.smoke.launch_shared"
    assert set_ups.launch_module(set_ups.gpus_of("prefill-tp1", shared)) == "sglang.launch_server"
    with pytest.raises(UsageError, match=r"3 GPUs x 2 ranks; allowed are 1, 2, 4, 8"):
        set_ups.choose_gpus(("0", "1", "2"), None, None, None, 2)


@on("0.5.17")
def test_role_arguments(release: str) -> None:
    cp = set_ups.role_arguments("prefill-cp2", "mooncake_tcp", 1234)
    assert cp[:2] == ["--tp", "2"]
    assert "round-robin-split" in cp
    assert cp[cp.index("--disaggregation-bootstrap-port") + 1] == "1234"
    dp = set_ups.role_arguments("decode-dp8", "mooncake", 1234)
    assert dp[:2] == ["--tp", "8"]
    assert dp[dp.index("--dp") + 1] == "8"
    assert "--disaggregation-bootstrap-port" not in dp
    assert set_ups.role_arguments("plain", "mooncake", 1) == []


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_prompts_exercise_what_they_should(cp_size: int) -> None:
    chosen = prompts.prompt_set(lambda length, seed: [8 + seed] * length, cp_size=cp_size, chunk=512, shortest=120)
    lengths = [len(prompt) for prompt in chosen.measured]
    assert len(lengths) >= 20
    assert min(lengths) >= 120
    assert {length % cp_size for length in lengths} == set(range(cp_size))
    assert {256, 257, 511, 512, 513} <= set(lengths)
    assert cp_size == 1 or any(0 < length % 512 < cp_size for length in lengths)
    assert chosen.measured[-1] == chosen.measured[-2]
    assert {len(prompt) for prompt in chosen.short} >= set(range(1, cp_size))
    assert len(chosen.controls) >= 5
    assert any(length > 512 for length in (lengths[index] for index in chosen.controls))


# --------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--pairs", "cp4-tp4"], "allowed are"),
        (["--inject-fault", "no-such"], "is not a fault"),
        (["--new-tokens", "1"], "at least 2"),
        (["--model-dir", "nowhere"], "no config.json"),
        (["--ports", "65000"], "outgoing connections"),
        (["--ports", "80"], "allowed is 1024 to"),
    ],
)
def test_usage_errors_exit_2(
    options: list[str], word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert cuda.run(parse(*options)) == 2
    assert word in capsys.readouterr().err


def test_no_gpu_exits_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cuda.run(parse()) == 2
    assert "no GPU is visible" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ a run with stubs


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    info = CheckpointInfo(str(folder), "oracle", "bf16", 0, 1024, 1024, 4, 128, (1, 3, 5), 120, 1, 1)
    (folder / INFO_FILE).write_text(json.dumps(vars(info)))
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def smoke(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def command(arguments: list[str], port: int, module: str = "") -> list[str]:
        return [sys.executable, str(STUB), "--port", str(port), *arguments]

    def run(*options: str) -> tuple[int, dict[str, Any], Path]:
        kept = tmp_path / "kept"
        given = ["--model-dir", str(model), "--keep", str(kept), "--ports", "23000", "--boot-timeout", "60", "--json"]
        status = cuda.run(parse(*given, *options))
        return status, json.loads(capsys.readouterr().out), kept

    monkeypatch.setattr(cuda_run, "launch_command", command)
    monkeypatch.setattr(cuda_run, "QUIET_S", 0.0)
    monkeypatch.setattr(set_ups, "sglang_release", lambda: "0.5.17")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    return run


def test_a_good_run_with_controls(smoke: Any) -> None:
    status, report, kept = smoke(
        "--fault-level", "both", "--inject-fault", "zero-rows", "--inject-fault", "skip-restore@0"
    )
    assert report["reasons"] == []
    assert status == 0
    assert list(report["set_ups"]) == ["plain", "dspark", "pd1", "pd-tp2", "cp2-tp2", "cp2-dp2"]
    cp = report["set_ups"]["cp2-dp2"]
    assert cp["mean_accept_length"] == 5.0
    assert cp["accept_length_vs_non_cp"] == 1.0
    assert cp["proposal_agreement"]["first_step"] == 1.0
    assert cp["rows_vs_non_cp"]["rows_byte_equal"] == cp["rows_vs_non_cp"]["rows"] > 0
    assert cp["rows_vs_cp1"]["rows_byte_equal"] == cp["rows_vs_cp1"]["rows"] > 0
    assert cp["answered"] == cp["asked"]
    assert report["controls"]["zero-rows"]["mean_accept_length"] == 1.0
    assert [each["fault"] for each in report["proof_on"]] == ["zero-rows@1#1", "skip-restore@0#1"]
    assert report["per_prompt"][0]["cp2-tp2"]["as_expected"] is True
    assert report["per_prompt"][0]["plain"]["worst_gap"] == 0
    assert json.loads((kept / "report.json").read_text())["ok"] is True
    assert (kept / "prefill-cp2.log").is_file()


def test_stock_beside_the_plugin_where_it_serves(smoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_ups, "sglang_release", lambda: "0.5.23")
    status, report, kept = smoke("--no-controls", "--pairs", "pd1,cp2-tp2,stock-cp2-tp2")
    assert report["reasons"] == []
    assert status == 0
    stock = report["set_ups"]["stock-cp2-tp2"]
    assert stock["rows_vs_plugin"]["rows_byte_equal"] == stock["rows_vs_plugin"]["rows"] > 0
    assert "rows_prefill_vs_decode" not in stock
    assert not list((kept / "dump" / "prefill-stock2").iterdir()), "it runs without this package"
    for server, counts in (("prefill-cp2", [3072]), ("prefill-stock2", [4096, 3072, 2048])):
        cost = report["chunk_cost"][server]["nccl"]
        assert cost["ranks"] == 2
        assert cost["same_on_all_ranks"]
        assert cost["calls"] == {"AllReduce": 1, "AllGather": len(counts)}
        assert cost["largest_gathers"] == counts
        assert cost["gather_received_bytes"] == sum(counts)
        assert report["chunk_cost"][server]["loaded_gb"] == {"DeepseekV4ForCausalLMDSpark": [0.04, 0.05]}


def test_stock_rows_that_differ_fail_the_run(smoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_ups, "sglang_release", lambda: "0.5.23")
    make = cuda_run.GpuRun.make_server

    def make_wrong(self: Any, name: str, *rest: Any) -> servers.Server:
        made = make(self, name, *rest)
        made.environment |= {"SGLANG_DSPARK_CP_FAULT": "zero-rows"} if name == "prefill-stock2" else {}
        return made

    monkeypatch.setattr(cuda_run.GpuRun, "make_server", make_wrong)
    monkeypatch.setenv("SGLANG_DSPARK_CP_ALIGN", "off")
    status, report, _ = smoke("--no-controls", "--pairs", "pd1,cp2-tp2,stock-cp2-tp2")
    assert status == 1
    assert any("stock's draft rows are not those of this package" in reason for reason in report["reasons"])


def test_stock_is_no_obstacle_course_where_it_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(set_ups, "sglang_release", lambda: "0.5.23")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert cuda.run(parse("--stock")) == 2
    assert "stock-cp2-tp2 of --pairs" in " ".join(capsys.readouterr().err.split())


def test_a_server_that_does_not_boot_does_not_hide_the_others(smoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make = cuda_run.GpuRun.make_server

    def make_one_bad(self: Any, name: str, role: str, *rest: Any) -> servers.Server:
        made = make(self, name, role, *rest)
        if name == "decode-dp2":
            made.environment["STUB_DIES"] = "boot"
        return made

    monkeypatch.setattr(cuda_run.GpuRun, "make_server", make_one_bad)
    status, report, _ = smoke("--no-controls", "--pairs", "pd-tp2,cp2-tp2,cp2-dp2")
    assert status == 1
    assert len(report["reasons"]) == 1
    assert "decode-dp2 ended with status 3" in report["reasons"][0]
    assert "ValueError: stub was told to die" in report["reasons"][0]
    assert list(report["set_ups"]) == ["pd-tp2", "cp2-tp2"]


def test_faults_that_do_not_show_fail_the_run(smoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make = cuda_run.GpuRun.make_server

    def make_harmless(self: Any, name: str, role: str, extra: Any = None, *rest: Any) -> servers.Server:
        return make(self, name, role, {}, *rest)

    monkeypatch.setattr(cuda_run.GpuRun, "make_server", make_harmless)
    monkeypatch.setattr(cuda_run.GpuRun, "_refusal", lambda *args: None)
    status, report, _ = smoke("--inject-fault", "zero-rows", "--pairs", "cp2-tp2")
    assert status == 1
    assert ["do not show" in reason for reason in report["reasons"]] == [True]


def test_stock_steps(smoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make = cuda_run.GpuRun.make_server
    seen: list[servers.Server] = []

    def make_dying(self: Any, name: str, *rest: Any) -> servers.Server:
        made = make(self, name, *rest)
        made.environment["STUB_DIES"] = "request" if name == "stock-5" else "boot"
        seen.append(made)
        return made

    monkeypatch.setattr(cuda_run.GpuRun, "make_server", make_dying)
    status, report, _ = smoke("--stock")
    assert status == 1, "the stub's words are not those of stock SGLang"
    assert [step["error"] for step in report["stock_refusals"]] == ["ValueError: stub was told to die"] * 5
    assert [step["where"] for step in report["stock_refusals"]] == ["at start"] * 4 + ["at the first request"]
    assert "interleave" in seen[0].command
    assert "round-robin-split" not in seen[0].command
    assert all("round-robin-split" in server.command for server in seen[1:])
    assert all(server.environment["SGLANG_DSPARK_CP"] == "0" for server in seen)
    assert len(cuda_stock.STEPS) == 5


def test_the_default_controls_are_the_ones_that_the_proof_must_catch() -> None:
    assert cuda.faults_of(parse()) == list(cuda.CONTROL_FAULTS)
