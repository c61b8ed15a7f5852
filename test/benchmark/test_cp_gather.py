"""Gather benchmark: CPU mode on gloo ranks, its checks under sabotage, the GPU code on a stand-in for CUDA."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark" / "cp_gather"))

import cp_gather
import gather_designs
import gather_ranks

pytestmark = pytest.mark.timeout(90)

BENCHMARK = cp_gather.HERE
SCRIPT = BENCHMARK / "cp_gather.py"
NAMES = [design.name for design in gather_designs.DESIGNS]
FRAME = {
    "benchmark": str,
    "date": str,
    "command": str,
    "mode": str,
    "link": str,
    "torch": str,
    "python": str,
    "facts": dict,
    "rates": list,
    "cells": list,
    "ok": bool,
    "problems": list,
}
COUNTS = (
    "cp",
    "tokens",
    "hidden",
    "rows_per_rank",
    "collectives",
    "received_bytes",
    "formula_bytes",
    "tail_bytes",
    "flops",
)


def start(*arguments: object) -> subprocess.Popen[str]:
    """Python in a session of its own, so that what it leaves behind can be found."""
    command = [sys.executable, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Status, stdout, stderr; fails if a process of its session is left."""
    try:
        out, error = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return process.returncode, out, error


@pytest.fixture
def quiet_main(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """`main` in this process: (status, stderr)."""
    handler = signal.getsignal(signal.SIGTERM)

    def call(*arguments: object) -> tuple[int, str]:
        try:
            status = cp_gather.main([str(each) for each in arguments])
        except SystemExit as stop:
            status = int(str(stop.code))
        return status, capsys.readouterr().err

    yield call
    signal.signal(signal.SIGTERM, handler)


# --------------------------------------------------------------------------------------------------------------- CPU


@pytest.fixture(scope="module")
def cpu_result(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    path = tmp_path_factory.mktemp("gather") / "cpu.json"
    arguments = ("--device", "cpu", "--cp", 2, 4, "--tokens", 67, 803, "--hidden", 64)
    status, out, error = finish(start(SCRIPT, *arguments, "--json", path))
    assert status == 0, error
    return json.loads(path.read_text()), out, path


def test_all_designs_write_the_rows_and_move_the_bytes(cpu_result: tuple[dict[str, Any], str, Path]) -> None:
    result, out, _ = cpu_result
    assert result["ok"]
    assert result["problems"] == []
    cells = result["cells"]
    assert [(each["cp"], each["tokens"], each["design"]) for each in cells] == [
        (cp, tokens, name) for cp in (2, 4) for tokens in (67, 803) for name in NAMES
    ]
    for cell in cells:
        assert cell["check"] == {"wrong_rows": [0] * cell["cp"], "head_right": [True] * cell["cp"], "refused": []}
        assert cell["received_bytes"] == cell["formula_bytes"] + cell["tail_bytes"]
        assert cell["design"] in out
        assert f"{cell['received_bytes']:,}" in out


def test_schema(cpu_result: tuple[dict[str, Any], str, Path]) -> None:
    result = cpu_result[0]
    for name, kind in FRAME.items():
        assert isinstance(result[name], kind), name
    assert {"commit", "changed", "driver", "triton", "runs"} <= result.keys()
    assert str(BENCHMARK.parents[1]) not in json.dumps(result)
    for cell in result["cells"]:
        assert all(isinstance(cell[name], int) for name in COUNTS)


def test_bytes_by_hand() -> None:
    shape = gather_designs.Shape(8, 8192, 7168)
    received = {each.name: gather_designs.formula(each, shape).received_bytes for each in gather_designs.DESIGNS}
    assert received["stock-layers"] == 7 * 1024 * 7 * 7168 * 2
    assert received["stock-packed"] == 7 * 1024 * 8 * 7168 * 2
    assert received["packed"] == 7 * 1024 * (3 * 7168 * 2 + 16)
    assert received["kv"] == 7 * 1024 * (3 * 512 * 2 + 16)
    assert received["window"] == received["kv"] // 2
    assert received["window-noradix"] == received["kv"] // 64
    tails = {each.name: gather_designs.tail_bytes(each, shape) for each in gather_designs.DESIGNS}
    assert tails["packed"] == 7 * (3 * 7168 * 2 + 16)
    assert tails["kv"] == tails["window"] == 7 * 5 * (3 * 512 * 2 + 16)


SEVERAL = f"""
import json, sys
sys.path.insert(0, {str(BENCHMARK)!r})
import cp_gather, gather_ranks
for arguments in json.loads(sys.argv[1]):
    print("status", cp_gather.main(arguments), file=sys.stderr)
    print("end of run", file=sys.stderr)
assert not [name for name in sys.modules if name.split(".")[0] == "sglang"]
"""


@pytest.fixture(scope="module")
def failed_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, Any]]]:
    """Runs that must fail, one after the other in one process: stderr and result."""
    folder = tmp_path_factory.mktemp("failed")
    small = ["--device", "cpu", "--tokens", "300", "--hidden", "64"]
    runs = {
        "row": [*small, "--cp", "2", "--sabotage", "row"],
        "payload": [*small, "--cp", "4", "--sabotage", "payload"],
        "raise": [*small, "--cp", "4", "--sabotage", "raise"],
        "late": ["--device", "cpu", "--cp", "2", "--tokens", "16K", "--hidden", "1024", "--timeout", "1"],
    }
    arguments = json.dumps([[*each, "--json", str(folder / f"{name}.json")] for name, each in runs.items()])
    status, _, error = finish(start("-c", SEVERAL, arguments))
    assert status == 0, error
    texts = error.split("end of run\n")
    return {
        name: (text, json.loads((folder / f"{name}.json").read_text())) for name, text in zip(runs, texts, strict=False)
    }


@pytest.mark.parametrize(("kind", "cp"), [("row", 2), ("payload", 4)])
def test_a_wrong_row_fails_every_design_on_its_rank(
    kind: str, cp: int, failed_runs: dict[str, tuple[str, dict[str, Any]]]
) -> None:
    error, result = failed_runs[kind]
    assert "status 1\n" in error
    assert not result["ok"]
    assert [cell["design"] for cell in result["cells"]] == NAMES
    for cell in result["cells"]:
        *right, wrong = cell["check"]["wrong_rows"]
        assert right == [0] * (cp - 1)
        ours = not cell["design"].startswith("stock")
        after_wkv = ours and cell["design"] not in ("packed", "context")  # a spoilt element is one stage's then
        stages = 1 if after_wkv and kind == "payload" else gather_designs.STAGES
        assert wrong == stages * (2 if kind == "row" else 1), cell["design"]
        proved = ours and cell["design"] != "kv-unproved"
        assert len(cell["check"]["refused"]) == (1 if proved and kind == "row" else 0)
        assert f"{cell['design']}: wrong pool rows: {wrong} on rank {cp - 1}\n" in error


def test_the_first_traceback_is_shown(failed_runs: dict[str, tuple[str, dict[str, Any]]]) -> None:
    error, result = failed_runs["raise"]
    assert "status 1\n" in error
    assert "rank 3 of 4" in error
    assert "RuntimeError: sabotaged before gather 'layer 0'" in error
    assert error.count("Traceback") == 1
    assert len(result["problems"]) == 1


def test_it_is_bounded_in_time(failed_runs: dict[str, tuple[str, dict[str, Any]]]) -> None:
    error, result = failed_runs["late"]
    assert "status 1\n" in error
    assert "the time is up; rank 0 was at: " in result["problems"][0]


def test_no_rank_is_left_when_it_is_terminated() -> None:
    process = start(SCRIPT, "--device", "cpu", "--cp", 2, "--tokens", "16K", "--hidden", 1024)
    assert process.stderr is not None
    process.stderr.readline()  # a rank is at work
    process.terminate()
    assert finish(process)[0] == 143


# --------------------------------------------------------------------------------------------------------------- GPU


class StandInEvent:
    """Wall clock in place of a CUDA event."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: StandInEvent) -> float:
        return 1e3 * (later.at - self.at) + 1e-6


def stand_in_for_cuda(patch: pytest.MonkeyPatch) -> None:
    """CUDA's part of the GPU path on a CPU, and small sizes."""
    patch.setattr(torch.cuda, "Event", StandInEvent)
    patch.setattr(torch.cuda, "max_memory_allocated", lambda: 7)
    patch.setattr(torch.cuda, "memory_allocated", lambda: 3)
    patch.setattr(torch.cuda, "get_device_name", lambda: "stand-in")
    patch.setattr(torch.cuda, "get_device_properties", lambda _: type("Properties", (), {"total_memory": 1}))
    patch.setattr(torch.cuda.nccl, "version", lambda: (1, 2))
    for name in ("synchronize", "_sleep", "reset_peak_memory_stats", "empty_cache"):
        patch.setattr(torch.cuda, name, lambda *_: None)
    patch.setattr(gather_ranks, "check_writer", lambda _: (0.0, 1.0))
    for name, value in {"LINK_PROBE_BYTES": 1 << 20, "MATMUL_SIZE": 64, "L2_BYTES": 1000, "PART_RUNS": 2}.items():
        patch.setattr(gather_ranks, name, value)


@pytest.fixture(scope="module")
def emulated() -> dict[str, Any]:
    """A result of `--emulate-cp 4` whose times mean nothing."""
    job = gather_ranks.Job("emulate", 4, (67, 300), (64,), 3)
    args = cp_gather.build_parser().parse_args(["--emulate-cp", "4"])
    result = cp_gather.frame(["--emulate-cp", "4"], args, "emulate")

    def tell(kind: str, value: Any) -> None:
        if kind == "facts":
            result["facts"] = value
        elif kind != "say":
            result["cells" if kind == "cell" else kind].append(value)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        stand_in_for_cuda(patch)
        gather_ranks._on_gpus(gather_ranks.Crew(job, 0, torch.device("cpu"), tell))
    torch.set_num_threads(threads)
    cp_gather.complete(result)
    return result


def test_the_emulated_link_brings_every_ranks_rows(emulated: dict[str, Any]) -> None:
    assert emulated["problems"] == []
    assert len(emulated["cells"]) == 2 * len(NAMES)
    for cell in emulated["cells"]:
        check = cell["check"]
        assert check["misplaced_rows"] == [0]
        assert check["byte_equal_rows"] == [check["rows"]]
        assert cell["peak_bytes"] == 4
        assert cell["ms"]["runs"] == 3
        assert cell["ms"]["p10"] <= cell["ms"]["median"] <= cell["ms"]["p90"]
        assert cell["limit_ms"] > 0
        assert set(cell["parts"]) <= set(cp_gather.PARTS)
        assert {"mean", "project", "gather", "write"} <= set(cell["parts"])
        assert ("proof" in cell["parts"]) == (not cell["design"].startswith("stock"))


def test_proof_and_kernels_have_figures_of_their_own(emulated: dict[str, Any]) -> None:
    kernels = [cell["kernels"] for cell in emulated["cells"] if "kernels" in cell]
    assert [set(each) for each in kernels] == [{"mean", "fill", "addresses", "place"}] * 2
    assert all(each["of_torch"] > 0 for passes in kernels for each in passes.values())
    by_name = {(cell["tokens"], cell["design"]): cell for cell in emulated["cells"]}
    for tokens in (67, 300):
        kv, bare = (by_name[tokens, name] for name in ("kv", "kv-unproved"))
        assert kv["proof"]["queued_ms"] == kv["queued_ms"]["median"] - bare["queued_ms"]["median"]
        assert kv["received_bytes"] > bare["received_bytes"]
        assert kv["peak_of_stock"] == 1.0
    assert sum("proof" in cell for cell in emulated["cells"]) == 2


def test_the_report_says_that_the_link_is_emulated(
    emulated: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cp_gather.report(emulated)
    shown = capsys.readouterr().out
    assert shown.count(cp_gather.EMULATED) >= 3
    assert all(name in shown for name in NAMES)
    monkeypatch.setitem(sys.modules, "rich.console", None)  # not installed: a plain table
    cp_gather.report(emulated)
    shown = capsys.readouterr().out
    assert all(name in shown for name in NAMES)


def test_a_wrong_row_on_a_gpu_is_a_problem(emulated: dict[str, Any]) -> None:
    cell = dict(emulated["cells"][3])
    for name, value in {"misplaced_rows": [0, 2], "worst_relative_error": [0.0, 1.4], "refused": ["row 5"]}.items():
        broken = cell | {"check": cell["check"] | {name: value}}
        assert len(cp_gather.problems_of(broken)) == 1
    assert len(cp_gather.problems_of(cell | {"check": cell["check"] | {"worst_relative_error": [float("nan")]}})) == 1
    assert len(cp_gather.problems_of(cell | {"received_bytes": cell["received_bytes"] + 2})) == 1


INTERPRETED = """
import torch
from pool_kernel import write
from sglang_dspark_cp.core import reference
rows = 40
generator = torch.Generator().manual_seed(5)
kv = torch.randn(rows, 520, generator=generator).to(torch.bfloat16)[:, :512]
kv[0] = 0
weight = (torch.rand(512, generator=generator) + 0.5).to(torch.bfloat16)
positions, slots = torch.arange(9, 9 + rows), torch.randperm(512, generator=generator)[:rows].int()
slots[7] = -1
angle = torch.arange(64)[:, None] * 10000.0 ** (-torch.arange(0, 64, 2).double() / 64)
freqs = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)
pools = [torch.zeros(2, reference.page_bytes(256), dtype=torch.uint8) for _ in range(2)]
write(pools[0], 256, kv, weight, 1e-6, freqs, positions, slots)
reference.write_rows(pools[1], 256, slots, reference.make_rows(kv, weight, 1e-6, freqs, positions))
ours, right = (reference.read_rows(pool, 256, torch.arange(512)) for pool in pools)
assert torch.equal(ours.scale, right.scale)
# The interpreter loses the carry of a mantissa that rounds up to the next power of two, and cuts bf16 off.
other = (ours.nope != right.nope).nonzero(as_tuple=True)
assert len(other[0]) < 0.05 * right.nope.numel()
assert bool((right.nope[other].int() - ours.nope[other].int() == 8).all()) and not (ours.nope[other] & 7).any()
assert int((ours.rope.view(torch.int16).int() - right.rope.view(torch.int16).int()).abs().max()) <= 1
"""


def test_the_pool_kernel_interpreted() -> None:
    pytest.importorskip("triton")
    paths = f"import sys\nsys.path[:0] = {[str(BENCHMARK), str(BENCHMARK.parents[1] / 'python')]}\n"
    done = subprocess.run(
        [sys.executable, "-c", paths + INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_the_pool_kernel_compiles_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pool_kernel import _write_row
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = [*["*bf16", "i64", "*bf16", "*fp32", "*i64", "*i32", "*u8", "*bf16", "fp32"], *["constexpr"] * 5]
    constants = {"PAGE": 256, "PAGE_BYTES": 149760, "ROW": 576, "SCALES": 8, "FLAT": 448}
    source = ASTSource(_write_row, dict(zip(_write_row.arg_names, types, strict=True)), constants)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2})
    assert "cvt.rn.satfinite.e4m3x2.f32" in found.asm["ptx"]
    assert found.asm["cubin"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible")
def test_the_pool_kernel_on_a_gpu() -> None:
    worst, equal = gather_designs.check_writer(torch.device("cuda"))
    assert worst <= cp_gather.WRITER_ERROR
    assert equal >= cp_gather.WRITER_EQUAL


# --------------------------------------------------------------------------------------------------------------- plot


def test_the_plot_has_a_panel_per_hidden_size(emulated: dict[str, Any]) -> None:
    other = [cell | {"hidden": 96} for cell in emulated["cells"]]
    times, received = cp_gather.panels(emulated | {"cells": [*emulated["cells"], *other]})
    assert [title for title, _, _ in times] == ["cp 4, H 64, link emulated", "cp 4, H 96, link emulated"]
    assert [unit for _, unit, _ in times + received] == [cp_gather.BUSY] * 2 + ["MB received per rank"] * 2
    assert [tokens for tokens, _ in times[0][2]["kv"]] == [67, 300]


@pytest.mark.parametrize("name", ["plot.png", "plot.svg"])
def test_plot_from_json(emulated: dict[str, Any], quiet_main: Any, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    source, out = tmp_path / "result.json", tmp_path / name
    source.write_text(json.dumps(emulated))
    assert quiet_main("plot", source, out) == (0, "")
    assert out.read_bytes().startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")


def test_a_plot_of_bytes_only(cpu_result: tuple[dict[str, Any], str, Path], quiet_main: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert quiet_main("plot", cpu_result[2], tmp_path / "cpu.png") == (0, "")
    assert (tmp_path / "cpu.png").stat().st_size > 1000


# -------------------------------------------------------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("arguments", "gpus", "text"),
    [
        (["--cp", 3], 0, "invalid choice"),
        (["--tokens", "0"], 0, "whole number"),
        (["--nonsense"], 0, "unrecognized"),
        ([], 0, "no GPU is visible"),
        ([], 1, "--emulate-cp"),
        (["--cp", 4], 2, "one rank per GPU"),
        (["--cp", 2, "--emulate-cp", 2], 2, "not both"),
        (["--sabotage", "row"], 2, "--device cpu"),
        (["--device", "cpu", "--emulate-cp", 2], 0, "for a GPU"),
        (["--device", "cpu", "--cp", 8, "--tokens", 7], 0, "fewer tokens"),
        (["--device", "cpu", "--hidden", 62], 0, "multiple of 4"),
        (["--device", "cpu", "--json", "no/such/folder.json"], 0, "folder that exists"),
        (["--device", "cpu", "--plot", "x.jpeg"], 0, ".png"),
        (["plot", "no-such.json", "x.svg"], 0, "no-such.json"),
        (["plot"], 0, "required"),
    ],
)
def test_usage(arguments: list[object], gpus: int, text: str, quiet_main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    find = cp_gather.importlib.util.find_spec
    monkeypatch.setattr(cp_gather.importlib.util, "find_spec", lambda name: find("json" if "plot" in name else name))
    status, error = quiet_main(*arguments)
    assert status == 2
    assert text in error
    assert "Traceback" not in error


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    quiet_main: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cp_gather.importlib.util, "find_spec", lambda name: None)
    status, error = quiet_main("--device", "cpu", "--plot", "x.png")
    assert status == 2
    assert "matplotlib" in error
