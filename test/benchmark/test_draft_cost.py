"""Cost of the draft: bytes and load seconds of a tiny one with SGLang itself, servers against stubs."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark" / "draft_cost"))

import draft_checkpoint
import draft_cost
import draft_ranks
import draft_servers
import launch_measured
from draft_checkpoint import Written

from sglang_dspark_cp.hooks.check import sglang_release
from sglang_dspark_cp.smoke.checkpoint import Geometry

pytestmark = pytest.mark.timeout(240)

ABOUT = {
    "benchmark",
    "date",
    "commit",
    "package_changed_since",
    "command",
    "sglang",
    "torch",
    "python",
    "ok",
    "problems",
}
SMALL = Geometry(hidden=256, vocab=512, experts=2, topk=2)


def run(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "result.json"
    status = draft_cost.main([*options, "--json", str(path)])
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert result.keys() >= ABOUT
    assert result["ok"] == (status == 0)
    return status, result


# ------------------------------------------------------------------------------------------------- with SGLang itself


def refused_here(capsys: pytest.CaptureFixture[str], *options: str) -> bool:
    """In another release than the one whose draft it builds, the program says so and ends."""
    if sglang_release().split("+", 1)[0] == draft_cost.BUILDS:
        return False
    assert draft_cost.main(options) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"bytes and load build the draft of {draft_cost.BUILDS}" in said
    assert f"make setup SGLANG={draft_cost.BUILDS}" in said
    return True


def test_bytes_of_a_tiny_draft_are_those_of_the_arithmetic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if refused_here(capsys, "bytes", "--shape", "tiny"):
        return
    status, result = run(tmp_path, "bytes", "--shape", "tiny", "--tp", "2", "--experts", "fp8")
    assert status == 0, result["problems"]
    found = result["shapes"]["tiny"]["experts"]["fp8"]
    assert found["settings"] | {"tp_size": 2, "attn_tp_size": 1, "attn_cp_size": 2} == found["settings"]
    for side in draft_cost.SIDES:
        assert found["built_over_arithmetic"][side] == pytest.approx(1, abs=1e-4)
        assert found["built"][side]["buffer_bytes"] == found["arithmetic"][side]["rope_table_bytes"]
    assert set(found["built"]["context"]["parts"]) == {"main_proj, main_norm", "wkv, kv_norm"}
    assert found["built"]["stock"]["parts"].keys() == found["arithmetic"]["stock"]["parts"].keys()
    assert 0.8 < found["parameters_gone"] < 0.95
    assert found["goal_met"] is False


def test_a_tiny_checkpoint_loads_whole_and_context_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if refused_here(capsys, "load"):
        return
    small = ("--hidden", "256", "--experts", "2", "--moe-intermediate", "256", "--vocab", "512", "--shard-mb", "30")
    status, result = run(tmp_path, "load", *small, "--runs", "1", "--dir", str(tmp_path))
    assert status == 0, result["problems"]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    written = result["checkpoint"]
    assert written["needed_bytes"] < written["draft_bytes"] < written["bytes"]
    assert [(run["side"], run["state"]) for run in result["runs"]] == [
        *[("stock", "first"), ("context", "first")],
        *[("stock", "cold"), ("context", "cold")],
        *[("stock", "warm"), ("context", "warm")],
    ]
    for state, found in result["summary"].items():
        stock, context = found["median"]["stock"], found["median"]["context"]
        assert context["parameter_bytes"] == written["needed_bytes"], state
        assert (stock["files_opened"], context["files_opened"]) == (written["files"], written["needed_files"])
        assert found["times_faster"] == stock["seconds"] / context["seconds"] > 1


# --------------------------------------------------------------------------------------------------------- checkpoint


def test_shards_hold_every_tensor_once_and_the_index_says_where(tmp_path: Path) -> None:
    total: list[int] = []
    done: list[int] = []
    written = draft_checkpoint.write_large(
        tmp_path, SMALL, shard_bytes=20_000_000, start=total.append, advance=done.append
    )
    assert total == [written.bytes] == [sum(done)]
    index = json.loads((tmp_path / draft_checkpoint.INDEX).read_text())
    found: dict[str, str] = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                assert name not in found
                found[name] = path.name
    assert found == index["weight_map"]
    assert len(set(found.values())) == written.files > 3
    assert written.needed_files <= written.draft_files < written.files
    with safe_open(tmp_path / found["mtp.0.attn.wkv.weight"], framework="pt") as tensors:
        weight, scale = (tensors.get_tensor(f"mtp.0.attn.wkv.{part}") for part in ("weight", "scale"))
    assert (weight.dtype, weight.shape, scale.shape) == (torch.float8_e4m3fn, (512, 256), (4, 2))
    assert weight.float().abs().max() > 1


def test_the_cache_of_a_file_can_be_filled(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1_000_000))
    draft_checkpoint.drop_cache([tmp_path / "a"])  # the kernel may refuse
    draft_checkpoint.fill_cache([tmp_path / "a"])
    assert draft_checkpoint.cached_share([tmp_path / "a"]) in (1.0, None)


def test_shared_storage_counts_once() -> None:
    base = torch.zeros(10)
    named = [("stages.0.mlp.experts.w13_weight", base), ("stages.0.main_norm.weight", base), ("x", torch.zeros(2))]
    assert draft_ranks.held_bytes(named, draft_ranks.part_of) == {"routed experts": 40, draft_ranks.REST: 8}


# --------------------------------------------------------------------------------------------------------------- logs

END = "Load weight end. elapsed={seconds} s, type={type}, quant=fp8, avail mem=90.00 GB, mem usage={memory} GB."
LOG = "\n".join(
    [
        "[2026-11-30 10:00:00 ATTN_CP1 TP1] Load weight begin. avail mem=99.00 GB",
        "[2026-11-30 10:00:01 ATTN_CP1 TP1] " + END.format(seconds=3.5, type="DeepseekV4ForCausalLM", memory=2.25),
        "[2026-11-30 10:00:02 ATTN_CP1 TP1] " + END.format(seconds=0.25, type=draft_servers.DRAFT_CLASS, memory=-0.5),
        "Load weight end. elapsed=broken",
        "[2026-11-30 10:00:03 ATTN_CP1 TP1] sglang-dspark-cp: the draft on this prefill worker holds 3 stages of"
        " main_proj, wkv: 56.6 MB. Left out: experts 1200.5 MB, query and output paths 400.0 MB",
    ]
)


def test_load_lines_are_read() -> None:
    assert draft_servers.loads(LOG) == [
        draft_servers.Loaded(1, "DeepseekV4ForCausalLM", 3.5, 2.25),
        draft_servers.Loaded(1, draft_servers.DRAFT_CLASS, 0.25, -0.5),
    ]
    (found,) = draft_servers.loads(END.format(seconds=1, type="X", memory=1).replace("quant=fp8, ", ""))
    assert found == draft_servers.Loaded(0, "X", 1.0, 1.0)


def test_the_plugins_line_is_read() -> None:
    (told,) = draft_servers.told_by_plugin(LOG).values()
    assert told["held_mb"] == 56.6
    assert told["left_out_mb"] == {"experts": 1200.5, "query and output paths": 400.0}
    assert told["text"].startswith(draft_servers.PHRASE)
    assert draft_servers.told_by_plugin("nothing") == {}


def test_the_plugins_line_is_one_that_the_plugin_writes() -> None:
    adapter = Path(draft_cost.config.__file__).parent / "adapters" / "draft.py"
    assert draft_servers.PHRASE in adapter.read_text(encoding="utf-8")


def test_nvidia_smi_lines_are_read() -> None:
    assert draft_servers.parse_apps("12, 500\n12, 20\n13, [N/A]\n\nNo devices\n14,7\n") == {12: 520, 14: 7}


def test_counters_take_the_drafts_own_load() -> None:
    def note(event: str, allocated: int) -> dict[str, Any]:
        return {"event": event, "allocated": allocated, "reserved": 2 * allocated, "peak": 3 * allocated}

    end = "Load weight end. elapsed=1 s, type={}, mem usage=1 GB."
    notes = [
        note("Load weight begin. avail mem=9 GB", 0),
        note(end.format("DeepseekV4ForCausalLM"), 100),
        note("", 120),
        note("Load weight begin. avail mem=9 GB", 120),
        note(end.format(draft_servers.DRAFT_CLASS), 150),
        note("", 140),
    ]
    assert draft_servers.counters(notes) == {
        "draft_allocated_bytes": 30,
        "draft_reserved_bytes": 60,
        "peak_reserved_bytes": 450,
        "steady_allocated_bytes": 140,
        "steady_reserved_bytes": 280,
    }
    assert set(draft_servers.counters([]).values()) == {None}


def test_ranks_note_nothing_before_cuda_is_in_use(tmp_path: Path) -> None:
    log = launch_measured.MemoryLog(tmp_path / "rank-0.jsonl", 0)
    log.note("x")
    assert draft_servers.read_notes(tmp_path / "rank-0.jsonl") == []
    (tmp_path / "rank-0.jsonl").write_text('{"event": ""}\n{"eve')
    assert draft_servers.read_notes(tmp_path / "rank-0.jsonl") == [{"event": ""}]


# ------------------------------------------------------------------------------------------------------------ servers

STUB = """
    import http.server, json, os, pathlib, sys
    name, side = os.environ["DRAFT_COST_MEMORY"], os.environ["SGLANG_DSPARK_CP_DRAFT"]
    if side == os.environ.get("STUB_FAILS"):
        sys.exit("Traceback (most recent call last):\\n  x\\nValueError: the stub fails")
    pathlib.Path(os.environ["STUB_PIDS"], str(os.getpid())).write_text("900" if side == "full" else "700")
    size = 1000 if side == "full" else 10
    for rank in range(2):
        end = f"Load weight end. elapsed={size / 100} s, type=DeepseekV4ForCausalLMDSpark, mem usage=1.00 GB."
        print(f"[2026-11-30 10:00:00 ATTN_CP{rank} TP{rank}] {end}", flush=True)
        notes = [("Load weight begin.", 50), (end, 50 + size), ("", 50 + size)]
        lines = [json.dumps({"event": e, "allocated": a, "reserved": a, "peak": a}) for e, a in notes]
        pathlib.Path(name, f"rank-{rank}.jsonl").write_text("\\n".join(lines))
    port = int(sys.argv[sys.argv.index("--port") + 1])
    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""
SMI = """\
#!/bin/sh
case "$1" in
  *compute-apps*) for each in "$STUB_PIDS"/*; do [ -f "$each" ] && echo "${each##*/}, $(cat "$each")"; done;;
  *memory.total*) echo "143771 MiB";;
  *index*) echo 0;;
  *) echo stub;;
esac
"""
WIDE = ("servers", "--hidden", "256", "--experts", "2", "--ports", "21000", "--limit", "60")


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with one stub GPU, and servers that only say what real ones would."""
    (tmp_path / "stub.py").write_text(textwrap.dedent(STUB))
    (tmp_path / "bin").mkdir()
    (tmp_path / "pids").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(SMI)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("STUB_PIDS", str(tmp_path / "pids"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(draft_servers, "LAUNCH", tmp_path / "stub.py")
    monkeypatch.setattr(draft_servers, "SETTLE", 0.6)
    info = SimpleNamespace(num_bytes=1, num_tensors=1, hidden=1)
    monkeypatch.setattr(draft_servers, "write_checkpoint", lambda *args, **kwargs: info)
    monkeypatch.setattr(draft_servers.large, "write_large", lambda *args: Written(1, 1, 1, 1, 1, 1, 1))
    return tmp_path


@pytest.mark.parametrize("pairs", [(), ("--pairs",)])
def test_servers_are_measured_and_ended(stub: Path, pairs: tuple[str, ...]) -> None:
    status, result = run(stub, *WIDE, *pairs, "--keep", str(stub / "kept"))
    assert status == 0, result["problems"]
    assert (result["gpus"], result["cp_size"], result["ranks_per_gpu"]) == (["stub"], 2, 2)
    assert set(result["servers"]) == {"tiny", "wide"}
    for model, found in result["summary"].items():
        assert found["times_faster"] == pytest.approx(100)
        assert found["draft_bytes_gone"] == pytest.approx(0.99)
        assert found["steady_reserved_saved_bytes_per_rank"] == 990
        assert found["nvidia_smi_steady_saved_mib"] == 200
        full = result["servers"][model]["full"]
        assert full["ready"]
        assert full["nvidia_smi"]["peak_mib"] == full["nvidia_smi"]["steady_mib"] == 900
        assert [rank["draft_load_s"] for rank in full["ranks"]] == [10, 10]
    assert {path.name for path in (stub / "kept").iterdir()} >= {"wide-full.log", "wide-context-rank-1.jsonl"}
    for path in (stub / "pids").iterdir():
        assert not Path("/proc", path.name).exists()


def test_a_server_that_ends_is_reported(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_FAILS", "context")
    status, result = run(stub, *WIDE)
    assert status == 1
    assert "wide-context ended: ValueError: the stub fails" in result["problems"]
    assert result["servers"]["wide"]["full"]["ready"]
    assert result["summary"]["wide"]["times_faster"] is None


# -------------------------------------------------------------------------------------------------------------- usage


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("bytes",),
        ("bytes", "--shape", "unknown"),
        ("bytes", "--shape", "flash", "--tp", "3"),
        ("load", "--runs", "0"),
        ("load", "--hidden", "many"),
        ("load", "--moe-intermediate", "128"),
        ("load", "--layers", "5"),
        ("load", "--hidden", "200"),
        ("load", "--dir", "no-such-folder"),
        ("load", "--json", "no-such-folder/x.json"),
        ("servers", "--ranks-per-gpu", "3"),
        ("servers", "--gpus", "7"),
        ("servers", "--ranks-per-gpu", "1"),
        ("servers", "--hidden", "100"),
    ],
)
def test_usage_errors_end_with_2(stub: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = draft_cost.main(list(options))
    except SystemExit as error:
        status = int(str(error.code))
    assert status == 2
    assert capsys.readouterr().err.strip()


def test_no_gpu_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert draft_cost.main(["servers"]) == 2
