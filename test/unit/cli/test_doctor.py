"""The `doctor` sub-command: each check's good and bad side, on a machine and an SGLang that are made up here."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata as metadata
import json
import socket
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_dspark_cp import config
from sglang_dspark_cp.cli import doctor, doctor_machine
from sglang_dspark_cp.cli.doctor_arguments import argument_checks, role_of, work_checks
from sglang_dspark_cp.cli.doctor_check import Check, Done, Machine, Status
from sglang_dspark_cp.cli.doctor_draft import INDEX, draft_checks, expected_tensors, shape_of
from sglang_dspark_cp.cli.doctor_machine import (
    gpu_checks,
    ib_names,
    link_matrix,
    needed_gpus,
    port_checks,
    release_checks,
    transfer_checks,
)
from sglang_dspark_cp.cli.doctor_resolve import Answer, first_traceback, resolve
from sglang_dspark_cp.core import costs
from sglang_dspark_cp.hooks.check import Problem
from sglang_dspark_cp.smoke.checkpoint import write_checkpoint
from sglang_dspark_cp.smoke.processes import free_ports

RAW: dict[str, Any] = {
    "model_path": "org/model",
    "revision": None,
    "load_format": "auto",
    "tp_size": 8,
    "dp_size": 1,
    "pp_size": 1,
    "nnodes": 1,
    "base_gpu_id": 0,
    "gpu_id_step": 1,
    "enable_dp_attention": False,
    "speculative_algorithm": "DSPARK",
    "speculative_draft_model_path": None,
    "disaggregation_mode": "prefill",
    "disaggregation_transfer_backend": "mooncake",
    "disaggregation_bootstrap_port": 8998,
    "disaggregation_ib_device": None,
    "chunked_prefill_size": 8192,
    "page_size": None,
    "port": 30000,
}
LAUNCH = ["--model-path", "org/model", "--tp", "8", "--disaggregation-bootstrap-port", "8998"]


def prefill(**other: Any) -> Answer:
    """What SGLang says to the documented prefill arguments."""
    resolved = {
        **RAW,
        "page_size": 256,
        "attn_cp_size": 8,
        "enable_prefill_cp": True,
        "disable_radix_cache": False,
        "moe_a2a_backend": "none",
        **other,
    }
    return Answer(
        raw={name: resolved[name] for name in RAW},
        resolved=resolved,
        gpus=8,
        architecture="DeepseekV4ForCausalLM",
        hooks=["validate-cp", "admit", "create-worker"],
        mode="window",
        mode_why="a reason",
        page=256,
    )


def decode(**other: Any) -> Answer:
    sizes = {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True, "attn_cp_size": 1}
    return prefill(disaggregation_mode="decode", **{**sizes, **other})


def refused(error: str, **other: Any) -> Answer:
    return Answer(raw=dict(RAW), error=error, gpus=8, **other)


TOPO = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\t{kind}\tPIX\t0-95
GPU1\tNV18\t X \tNV18\tSYS\t0-95
GPU2\t{kind}\tNV18\t X \tSYS\t0-95
NIC0\tPIX\tSYS\tSYS\t X \t

Legend:
"""


class FakeMachine(Machine):
    """A machine of files and answers that a test writes down."""

    def __init__(self, sys_: Path, environ: dict[str, str] | None = None) -> None:
        super().__init__(environ or {}, sys_)
        self.answers: dict[str, Done | None] = {
            "import mooncake.engine": Done(0, "", ""),
            "--query-gpu=name": Done(0, "NVIDIA H200\n" * 8, ""),
            "topo": Done(0, TOPO.format(kind="NV18"), ""),
        }

    def command(self, words: Sequence[str]) -> Done | None:
        return next((done for key, done in self.answers.items() if key in words), None)

    def put(self, text: str, *parts: str) -> None:
        file = self.sys.joinpath(*parts)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def add_rdma(self, name: str, state: str = "4: ACTIVE") -> None:
        self.put(state, "class", "infiniband", name, "ports", "1", "state")


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    """Eight linked GPUs, one active RDMA device, one interface."""
    made = FakeMachine(tmp_path / "sys")
    made.add_rdma("mlx5_0")
    made.put("up", "class", "net", "eth0", "operstate")
    made.put("400000", "class", "net", "eth0", "speed")
    made.put("unknown", "class", "net", "lo", "operstate")
    return made


def by_name(checks: Sequence[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def assert_advice(check: Check) -> None:
    """Who has to act is told what was found, what is allowed, why and how."""
    assert check.found
    assert check.allowed
    assert check.why
    assert check.fix


# -------------------------------------------------------------------------------------------------------------- SGLang


def test_the_installed_sglang_fits(machine: FakeMachine) -> None:
    checks = release_checks("prefill", machine)
    assert {check.name for check in checks} == {"release", "hooks", "variables", "switch", "entry point"}
    assert {check.status for check in checks} == {Status.OK}


@pytest.mark.parametrize(("role", "status"), [("prefill", Status.FAILED), ("decode", Status.WARNING)])
def test_a_release_that_was_not_reviewed(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, role: str, status: Status
) -> None:
    monkeypatch.setattr(doctor_machine, "sglang_release", lambda: "0.5.99")
    check = by_name(release_checks(role, machine))["release"]
    assert (check.status, check.found, check.allowed) == (status, "SGLang 0.5.99", "0.5.17, 0.5.23")
    assert check.fix == "pip install sglang==0.5.23"


def test_a_release_that_is_refused_by_name(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "sglang_release", lambda: "0.5.20")
    check = by_name(release_checks("prefill", machine))["release"]
    assert (check.status, check.found) == (Status.FAILED, "SGLang 0.5.20")
    assert "SGLang 0.5.20 is not supported: " in check.why


def test_no_sglang(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise metadata.PackageNotFoundError("sglang")

    monkeypatch.setattr(doctor_machine, "sglang_release", missing)
    monkeypatch.setattr(doctor, "sglang_release", missing)
    check = by_name(release_checks(None, machine))["release"]
    assert check.status is Status.FAILED
    assert "pip install sglang==0.5.23" in check.fix
    assert doctor.ask_sglang(LAUNCH, 1.0).error == "SGLang is not installed"


def test_hooks_that_do_not_fit(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Problem("admit", "sglang.x", "body 1", "body 2")]
    monkeypatch.setattr(doctor_machine, "problems", lambda hooks, root: found)
    for role, status in (("prefill", Status.FAILED), (None, Status.FAILED), ("decode", Status.WARNING)):
        check = by_name(release_checks(role, machine))["hooks"]
        assert check.status is status
        assert "hook admit on sglang.x: found body 1" in check.found
        assert_advice(check)


def test_debug_hooks_count_when_they_are_used(machine: FakeMachine) -> None:
    usual = by_name(release_checks("prefill", machine))["hooks"].found
    machine.environ = {config.DUMP_DIR: "/nowhere"}
    assert by_name(release_checks("prefill", machine))["hooks"].found != usual


def test_switched_off(machine: FakeMachine) -> None:
    machine.environ = {config.ENABLED: "0"}
    check = by_name(release_checks("prefill", machine))["switch"]
    assert (check.status, check.fix) == (Status.FAILED, "unset SGLANG_DSPARK_CP")
    assert by_name(release_checks("decode", machine))["switch"].status is Status.OK


def test_a_filter_without_the_plugin(machine: FakeMachine) -> None:
    machine.environ = {"SGLANG_PLUGINS": "other"}
    check = by_name(release_checks("prefill", machine))["entry point"]
    assert (check.status, check.fix) == (Status.FAILED, "SGLANG_PLUGINS=other,dspark_cp")
    assert by_name(release_checks("decode", machine))["entry point"].status is Status.OK
    machine.environ = {"SGLANG_PLUGINS": "other, dspark_cp"}
    assert by_name(release_checks("prefill", machine))["entry point"].status is Status.OK


@pytest.mark.parametrize("entries", [[], [metadata.EntryPoint("dspark_cp", "other:register", doctor_machine.GROUP)]])
def test_no_entry_point_of_this_package(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, entries: list[metadata.EntryPoint]
) -> None:
    monkeypatch.setattr(doctor_machine.metadata, "entry_points", lambda group: entries)
    check = by_name(release_checks("prefill", machine))["entry point"]
    assert check.status is Status.FAILED
    assert "pip install" in check.fix
    assert_advice(check)


def test_variables(machine: FakeMachine) -> None:
    machine.environ = {config.GATHER: "everything"}
    check = by_name(release_checks("decode", machine))["variables"]
    assert (check.status, check.fix) == (Status.FAILED, f"unset {config.GATHER}")
    assert "allowed are auto, window, kv" in check.found
    machine.environ = {config.FAULT: "swap-rows", config.ALIGN: "off"}
    check = by_name(release_checks("prefill", machine))["variables"]
    assert (check.status, check.fix) == (Status.WARNING, f"unset {config.FAULT} {config.ALIGN}")
    machine.environ = {config.GATHER: "kv"}
    check = by_name(release_checks("prefill", machine))["variables"]
    assert (check.status, check.found) == (Status.OK, f"{config.GATHER}=kv")


# ------------------------------------------------------------------------------------------------------------ Mooncake


def transfer(machine: FakeMachine, **raw: Any) -> dict[str, Check]:
    return by_name(transfer_checks("prefill", prefill(**raw), machine))


def test_a_good_transfer_side(machine: FakeMachine) -> None:
    checks = transfer(machine, disaggregation_ib_device="mlx5_0")
    assert {check.status for check in checks.values()} == {Status.OK}
    assert "mooncake-transfer-engine" in checks["mooncake"].found
    assert checks["transport"].found == "RDMA, mlx5_0 (active)"
    assert checks["interfaces"].found == "eth0 (400000 Mbit/s)"


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        ("ImportError: libcuda.so.1: cannot open shared object file", "NVIDIA driver"),
        ("ImportError: libibverbs.so.1: cannot open shared object file", "apt-get install libibverbs1"),
        ("ImportError: libother.so.3: cannot open shared object file", "libother.so.3"),
        ("ImportError: undefined symbol: x", "--force-reinstall"),
    ],
)
def test_mooncake_that_does_not_import(machine: FakeMachine, error: str, fix: str) -> None:
    machine.answers["import mooncake.engine"] = Done(1, "", f"Traceback ...\n{error}\n")
    check = transfer(machine)["mooncake"]
    assert (check.status, check.found) == (Status.FAILED, error)
    assert fix in check.fix


def test_no_mooncake(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "mooncake_package", lambda: None)
    machine.answers["import mooncake.engine"] = Done(1, "", "ModuleNotFoundError: No module named 'mooncake'")
    assert "pip install mooncake-transfer-engine" in transfer(machine)["mooncake"].fix
    machine.answers["import mooncake.engine"] = None
    assert transfer(machine)["mooncake"].status is Status.FAILED


def test_no_rdma_device(tmp_path: Path) -> None:
    bare = FakeMachine(tmp_path / "sys")
    check = transfer(bare)["transport"]
    assert check.status is Status.WARNING
    assert "mooncake_tcp or MC_FORCE_TCP=1" in check.fix
    assert_advice(check)
    bare.environ = {"MC_FORCE_HCA": "1"}
    assert transfer(bare)["transport"].status is Status.FAILED
    for environ in ({"MC_FORCE_TCP": "1"}, {"MOONCAKE_PROTOCOL": "tcp"}):
        bare.environ = environ
        assert transfer(bare)["transport"].status is Status.OK
    bare.environ = {}
    assert transfer(bare, disaggregation_transfer_backend="mooncake_tcp")["transport"].status is Status.OK
    interfaces = transfer(bare)["interfaces"]
    assert (interfaces.status, interfaces.found) == (Status.WARNING, "none beside loopback")


@pytest.mark.parametrize(
    "environ", [{"MC_FORCE_TCP": "0"}, {"MC_FORCE_TCP": ""}, {"MOONCAKE_PROTOCOL": "tcp"}], ids=str
)
def test_tcp_asked_for_in_a_way_that_is_not_what_it_seems(machine: FakeMachine, environ: dict[str, str]) -> None:
    machine.environ = environ
    check = transfer(machine)["transport"]
    assert check.status is Status.WARNING
    assert "MC_FORCE_TCP=1" in check.fix


def test_another_protocol_is_not_judged(machine: FakeMachine) -> None:
    machine.environ = {"MOONCAKE_PROTOCOL": "efa"}
    assert transfer(machine)["transport"].status is Status.NOT_CHECKED


def test_links_that_are_down(machine: FakeMachine) -> None:
    machine.add_rdma("mlx5_1", "1: DOWN")
    check = transfer(machine)["transport"]
    assert (check.status, check.fix) == (Status.WARNING, "--disaggregation-ib-device mlx5_0")
    checks = transfer(machine, disaggregation_ib_device="mlx5_0, mlx5_1,mlx5_9")
    assert checks["transport"].status is Status.OK
    named = checks["--disaggregation-ib-device"]
    assert (named.status, named.found) == (Status.FAILED, "mlx5_1 (link down), mlx5_9 (no such device)")
    assert named.allowed == "mlx5_0"
    machine.add_rdma("mlx5_0", "2: INIT")
    assert transfer(machine)["transport"].status is Status.FAILED


def test_device_names_in_every_form(tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text('{"0": "a, b", "1": "c"}')
    assert ib_names("a,b, a") == ["a", "b"]
    assert ib_names('{"0": "a", "1": "b"}') == ib_names("a,b")
    assert ib_names(str(file)) == ["a", "b", "c"]
    for bad in ("{", '{"0": 1}', str(tmp_path / "none.json")):
        with pytest.raises(ValueError, match=r"."):
            ib_names(bad)


def test_device_names_that_cannot_be_read_or_are_not_used(machine: FakeMachine) -> None:
    name = "--disaggregation-ib-device"
    assert transfer(machine, disaggregation_ib_device="{")[name].status is Status.FAILED
    assert transfer(machine, disaggregation_ib_device=" ")[name].status is Status.FAILED
    tcp = transfer(machine, disaggregation_ib_device="mlx5_0", disaggregation_transfer_backend="mooncake_tcp")
    assert tcp[name].status is Status.WARNING


def test_another_backend(machine: FakeMachine) -> None:
    checks = transfer(machine, disaggregation_transfer_backend="nixl")
    assert set(checks) == {"backend"}
    assert checks["backend"].status is Status.FAILED


# ---------------------------------------------------------------------------------------------------------------- GPUs


def test_enough_linked_gpus(machine: FakeMachine) -> None:
    checks = by_name(gpu_checks(prefill(), machine))
    assert checks["number"].found == "8 visible (NVIDIA H200), needed 8 (tp 8, dp 1, pp 1, nodes 1)"
    assert checks["links"].found == "NVLink: 3 pairs NV18"
    assert {check.status for check in checks.values()} == {Status.OK}


def test_too_few_gpus(machine: FakeMachine) -> None:
    few = dataclasses.replace(prefill(), gpus=4)
    (check,) = gpu_checks(few, machine)
    assert check.status is Status.FAILED
    assert "nvidia-smi lists 8, torch sees 4" in check.found
    assert check.allowed.startswith("at least 8 ")
    (check,) = gpu_checks(prefill(base_gpu_id=4), machine)
    assert check.allowed.startswith("at least 12 ")


def test_without_nvidia_smi(machine: FakeMachine) -> None:
    machine.answers.clear()
    checks = by_name(gpu_checks(prefill(), machine))
    assert (checks["number"].status, checks["links"].status) == (Status.OK, Status.NOT_CHECKED)
    (check,) = gpu_checks(Answer(), machine)
    assert (check.status, check.found) == (Status.NOT_CHECKED, "0 visible (nvidia-smi lists none)")


def test_pcie_between_gpus(machine: FakeMachine) -> None:
    machine.answers["topo"] = Done(0, TOPO.format(kind="SYS"), "")
    check = by_name(gpu_checks(prefill(), machine))["links"]
    assert (check.status, check.found) == (Status.WARNING, "2 pairs NV18, 1 pairs SYS")
    machine.environ = {"CUDA_VISIBLE_DEVICES": "1,2"}
    two = dataclasses.replace(prefill(tp_size=2, attn_cp_size=2), gpus=2)
    assert by_name(gpu_checks(two, machine))["links"].found == "NVLink: 1 pairs NV18"
    assert len(link_matrix(TOPO.format(kind="SYS"))) == 6


def test_how_many_gpus_a_node_needs() -> None:
    assert needed_gpus({**RAW, "tp_size": 8, "dp_size": 8, "enable_dp_attention": True}) == 8
    assert needed_gpus({**RAW, "tp_size": 2, "dp_size": 4}) == 8
    assert needed_gpus({**RAW, "tp_size": 16, "pp_size": 2, "nnodes": 4}) == 8


# ----------------------------------------------------------------------------------------------------------- arguments


def arguments(answer: Answer, asked: str | None = None) -> dict[str, Check]:
    return by_name(argument_checks(asked, answer))


def test_good_arguments() -> None:
    checks = arguments(prefill())
    assert {check.status for check in checks.values()} == {Status.OK}
    assert "attention CP 8" in checks["plugin"].found
    checks = arguments(decode(), "decode")
    assert {check.status for check in checks.values()} == {Status.OK}
    assert checks["sizes"].found == "tp 8, dp 8, attention TP 1"
    assert "does nothing on decode" in checks["plugin"].found


def test_what_stands_in_is_said() -> None:
    answer = dataclasses.replace(prefill(), pretended=True, stand_in=True)
    check = arguments(answer)["resolution"]
    assert check.status is Status.WARNING
    assert "as if 8 H200 were here" in check.found
    assert "in place of org/model" in check.found


@pytest.mark.parametrize(("asked", "mode"), [("decode", "prefill"), ("prefill", "decode"), (None, "null")])
def test_role_mismatch(asked: str | None, mode: str) -> None:
    check = arguments(prefill(disaggregation_mode=mode), asked)["role"]
    assert check.status is Status.FAILED
    assert check.fix.startswith("--disaggregation-mode ")
    assert_advice(check)


def test_each_violation_is_a_check() -> None:
    from sglang_dspark_cp.core.topology import PrefillTopology, require_supported, violations

    topology = PrefillTopology(9, 2, 2, 4, "zigzag", "nixl", 2, True, True, True, True, True, True)
    with pytest.raises(ValueError, match="refused before weights load") as stopped:
        require_supported(topology)
    checks = argument_checks(None, refused(f"TopologyError: {stopped.value}"))
    found = [(check.found, check.allowed, check.why, check.fix) for check in checks if check.name == "topology"]
    assert found == [(each.found, each.allowed, each.why, each.fix) for each in violations(topology)]
    assert len(found) == 13


def test_another_refusal_and_a_break() -> None:
    check = arguments(refused("ValueError: no", where="sglang/srt/x.py:1"))["resolution"]
    assert (check.status, check.found, check.log) == (Status.FAILED, "ValueError: no", "")
    assert "sglang/srt/x.py:1" in check.why
    check = arguments(refused("KeyError: 'x'", broke=True, traceback="Traceback\nKeyError"))["resolution"]
    assert check.log == "Traceback\nKeyError"
    assert check.as_json()["found"] == "KeyError: 'x'\nTraceback\nKeyError"


def test_speculation_or_cp_missing() -> None:
    for answer in (prefill(speculative_algorithm=None), decode(speculative_algorithm=None)):
        check = arguments(answer)["speculation"]
        assert check.status is Status.WARNING
        assert "--speculative-algorithm DSPARK" in check.fix
    check = arguments(prefill(attn_cp_size=1))["plugin"]
    assert (check.status, check.fix) == (Status.WARNING, "--enable-prefill-cp --cp-strategy interleave")
    other = dataclasses.replace(prefill(), architecture="LlamaForCausalLM")
    assert arguments(other)["plugin"].status is Status.WARNING


# -------------------------------------------------------------------------------------------------- the prefill worker


def work(answer: Answer, machine: FakeMachine, role: str = "prefill") -> dict[str, Check]:
    return by_name(work_checks(role, answer, machine))


def test_work_of_a_prefill_worker(machine: FakeMachine, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(costs.PRO))
    answer = dataclasses.replace(prefill(), model_folder=str(tmp_path))
    checks = work(answer, machine)
    assert {check.status for check in checks.values()} == {Status.OK}
    assert checks["chunk"].found == "8192 tokens, 32 pages"
    assert checks["gather"].found == "window (a reason), radix cache on"
    # 7 ranks x 512 rows (half of each page) x (3 x 512 bf16 + 16 bytes); packed: 7 x 1024 x (3 x 7168 bf16 + 16)
    assert checks["traffic"].found.startswith("11.1 MB arrive at each rank per forward of 8192 tokens, 3.6% of packed")
    parts = costs.draft_parts(costs.built_in("pro"), 8)
    context, saved = sum(part.context for part in parts), sum(part.saved for part in parts)
    assert f"{context / 1e6:,.1f} MB per GPU, {saved / 1e6:,.1f} MB less" in checks["draft memory"].found
    machine.environ = {config.DRAFT: "full"}
    assert "the whole draft" in work(answer, machine)["draft memory"].found


@pytest.mark.parametrize(
    ("size", "status", "fix"),
    [
        (4, Status.FAILED, "--chunked-prefill-size 256"),
        (1000, Status.FAILED, "--chunked-prefill-size 1024"),
        (-1, Status.OK, ""),
        (256, Status.OK, ""),
    ],
)
def test_chunks(machine: FakeMachine, size: int, status: Status, fix: str) -> None:
    check = work(prefill(chunked_prefill_size=size), machine)["chunk"]
    assert (check.status, check.fix) == (status, fix)
    assert ("without CP" in check.why) == (size in (4, 256))


def test_a_page_that_was_not_tried(machine: FakeMachine) -> None:
    assert work(prefill(page_size=128), machine)["page"].status is Status.WARNING


def test_a_gather_mode_that_is_refused(machine: FakeMachine) -> None:
    error = "found X=window together with Y; allowed is window alone, because of Z; fix: X=auto"
    check = work(dataclasses.replace(prefill(), mode=None, mode_error=error), machine)["gather"]
    assert (check.status, check.fix, check.allowed) == (Status.FAILED, "X=auto", "window alone")


def test_work_that_is_not_known(machine: FakeMachine, tmp_path: Path) -> None:
    assert work(prefill(), machine)["cost"].status is Status.NOT_CHECKED
    (tmp_path / "config.json").write_text("{}")
    bad = dataclasses.replace(prefill(), model_folder=str(tmp_path))
    assert work(bad, machine)["cost"].status is Status.NOT_CHECKED
    checks = work(refused("ValueError: no"), machine)
    assert (checks["chunk"].status, checks["gather"].status) == (Status.OK, Status.NOT_CHECKED)
    assert work(Answer(), machine) == {}
    assert work(decode(), machine, "decode") == {}


# ---------------------------------------------------------------------------------------------------------- checkpoint


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, kind="random", quant="fp8", hidden=256, experts=2)
    return folder


def draft(folder: Path, **other: Any) -> dict[str, Check]:
    answer = dataclasses.replace(prefill(**other), model_folder=str(folder), draft_folder=str(folder))
    return by_name(draft_checks(answer))


def changed(whole: Path, folder: Path, leave_out: str = "", index: bool = True) -> Path:
    """The checkpoint in another folder, its draft tensors in files of their own, one tensor less."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_bytes((whole / "config.json").read_bytes())
    weight_map = {}
    with safe_open(next(whole.glob("*.safetensors")), framework="pt") as tensors:
        for stage in range(3):
            wanted = (f"mtp.{stage}.attn.", f"mtp.{stage}.main")
            names = [name for name in tensors.keys() if name.startswith(wanted) and name != leave_out]  # noqa: SIM118
            save_file({name: tensors.get_tensor(name) for name in names}, folder / f"draft-{stage}.safetensors")
            weight_map |= dict.fromkeys(names, f"draft-{stage}.safetensors")
    if index:
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_a_whole_checkpoint(whole: Path, tmp_path: Path) -> None:
    for folder, files in (
        (whole, "model-00001-of-00001.safetensors"),
        (changed(whole, tmp_path / "split"), "draft-0.safetensors, draft-1.safetensors, draft-2.safetensors"),
        (changed(whole, tmp_path / "bare", index=False), "draft-0.safetensors, draft-1.safetensors"),
    ):
        checks = draft(folder)
        assert {check.status for check in checks.values()} == {Status.OK}
        assert checks["draft tensors"].found.startswith(f"all 12 in {files}")
        assert checks["config.json"].found.startswith("3 draft stages, fp8 weights")


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_tensor_is_named(whole: Path, tmp_path: Path, index: bool) -> None:
    check = draft(changed(whole, tmp_path / "less", "mtp.1.attn.wkv.scale", index))["draft tensors"]
    assert (check.status, check.found) == (Status.FAILED, "1 of 12 missing: mtp.1.attn.wkv.scale")
    assert_advice(check)


def test_missing_cut_and_other_files(whole: Path, tmp_path: Path) -> None:
    folder = changed(whole, tmp_path / "less")
    file = folder / "draft-2.safetensors"
    content = file.read_bytes()
    for bad, text in (
        (content[:-1], f"{len(content) - 1:,} of {len(content):,} bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (content[:100], "header is cut off"),
    ):
        file.write_bytes(bad)
        check = draft(folder)["files"]
        assert check.status is Status.FAILED
        assert check.found.startswith("draft-2.safetensors: ")
        assert text in check.found
    file.unlink()
    checks = draft(folder)
    assert checks["files"].found == "1 of 3 files of the index are missing: draft-2.safetensors"
    assert "mtp.2.attn.wkv.weight" in checks["draft tensors"].found
    (folder / INDEX).write_text("{}")
    assert draft(folder)["index"].status is Status.FAILED


def test_shapes_of_another_model(whole: Path, tmp_path: Path) -> None:
    folder = changed(whole, tmp_path / "other")
    model = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**model, "hidden_size": 512}))
    check = draft(folder)["draft tensors"]
    assert check.status is Status.FAILED
    assert "mtp.0.main_norm.weight [256] instead of [512]" in check.found


def test_bf16_has_no_scales(whole: Path, tmp_path: Path) -> None:
    model = json.loads((whole / "config.json").read_text())
    del model["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(model))
    shape = shape_of(tmp_path)
    assert not isinstance(shape, str)
    assert len(expected_tensors(shape)) == 8


def test_no_draft_at_all(tmp_path: Path) -> None:
    assert draft(tmp_path)["config.json"].status is Status.FAILED
    for text in ("[]", "{", json.dumps({**costs.PRO, "dspark_target_layer_ids": None})):
        (tmp_path / "config.json").write_text(text)
        assert draft(tmp_path)["config.json"].status is Status.FAILED
    (tmp_path / "config.json").write_text(json.dumps(costs.PRO))
    assert draft(tmp_path)["draft tensors"].status is Status.NOT_CHECKED


def test_a_model_that_is_not_here(whole: Path) -> None:
    (check,) = draft_checks(prefill())
    assert (check.status, check.found) == (Status.NOT_CHECKED, "org/model")
    (check,) = draft_checks(Answer())
    assert check.status is Status.NOT_CHECKED
    assert draft(whole, load_format="dummy")["draft tensors"].status is Status.NOT_CHECKED


# --------------------------------------------------------------------------------------------------------------- ports


def test_ports() -> None:
    free, bootstrap = free_ports(2)
    answer = prefill(port=free, disaggregation_bootstrap_port=bootstrap)
    assert {check.status for check in port_checks("prefill", answer, True)} == {Status.OK}
    checks = by_name(port_checks("prefill", answer, False))
    assert checks["--disaggregation-bootstrap-port"].status is Status.WARNING
    same = by_name(port_checks("prefill", prefill(port=free, disaggregation_bootstrap_port=free), True))
    assert (same["bootstrap"].status, same["HTTP"].status) == (Status.FAILED, Status.OK)
    (check,) = port_checks("prefill", Answer(), True)
    assert check.status is Status.NOT_CHECKED


def test_a_port_that_is_taken() -> None:
    (free,) = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        answer = prefill(port=taken, disaggregation_bootstrap_port=taken)
        assert by_name(port_checks("decode", answer, False))["bootstrap"].status is Status.OK
        check = by_name(port_checks("prefill", prefill(port=free, disaggregation_bootstrap_port=taken), True))
        assert check["bootstrap"].status is Status.FAILED
        assert check["bootstrap"].fix.startswith("--disaggregation-bootstrap-port")
        assert by_name(port_checks("prefill", answer, True))["HTTP"].fix.startswith("--port")
    assert by_name(port_checks("decode", prefill(port=70000), True))["HTTP"].status is Status.FAILED


# --------------------------------------------------------------------------------------------------------- the process


def script(text: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(text)]


def test_an_answer_comes_back() -> None:
    found = resolve(
        ["--x"],
        30,
        command=script("""\
        import json, os, sys
        print(json.dumps({"raw": {"launch": json.load(sys.stdin), "offline": os.environ["HF_HUB_OFFLINE"]}}))
        """),
    )
    assert found == Answer(raw={"launch": ["--x"], "offline": "1"})


def test_the_first_traceback_of_a_process_that_broke() -> None:
    found = resolve(
        [],
        30,
        command=script("""\
        import sys
        sys.stdin.read()
        print("noise")
        try:
            raise KeyError("first")
        except KeyError as error:
            raise OSError("second") from error
        """),
    )
    assert found.broke
    assert "status 1" in found.error
    assert found.traceback.startswith("Traceback (most recent call last):")
    assert found.traceback.endswith("KeyError: 'first'")


def test_a_process_that_does_not_end() -> None:
    start = time.monotonic()
    found = resolve(
        [],
        1.0,
        command=script("""\
        import subprocess, sys, time
        print("still busy", file=sys.stderr, flush=True)
        subprocess.Popen(["sleep", "60"])
        time.sleep(60)
        """),
    )
    assert time.monotonic() - start < 20
    assert (found.broke, found.error, found.traceback) == (True, "no answer within 1 s", "still busy")


def test_the_real_process_with_an_sglang_that_breaks(tmp_path: Path) -> None:
    for package in ("sglang", "sglang/srt", "sglang/srt/plugins"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "sglang/srt/plugins/__init__.py").write_text("raise ImportError('a library is gone')\n")
    (tmp_path / "torch.py").write_text("import types\ncuda = types.SimpleNamespace(is_available=lambda: False)\n")
    found = resolve(LAUNCH, 60, {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"})
    assert (found.broke, found.error, found.gpus) == (True, "ImportError: a library is gone", 0)
    assert found.where.endswith("plugins/__init__.py:1")
    assert found.traceback.endswith("ImportError: a library is gone")


def test_a_log_without_a_traceback() -> None:
    assert first_traceback("one\ntwo") == ""
    assert first_traceback("Traceback (most recent call last):\n  cut") == "Traceback (most recent call last):\n  cut"


# ------------------------------------------------------------------------------------------------------ the whole thing


def call(*words: str) -> int:
    """Exit status of the command inside a program with sub-commands."""
    parser = argparse.ArgumentParser(prog="sglang-dspark-cp")
    sub = parser.add_subparsers(required=True).add_parser("doctor")
    doctor.add_arguments(sub)
    sub.set_defaults(run=doctor.run)
    try:
        args = parser.parse_args(["doctor", *words])
        return int(args.run(args))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else -1


@pytest.fixture
def asked(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """`doctor` on the made-up machine; collects what SGLang was asked."""
    lines: list[list[str]] = []
    free, bootstrap = free_ports(2)

    def ask(launch: Sequence[str], timeout: float) -> Answer:
        lines.append(list(launch))
        if "--bad" in launch:
            return refused("KeyError: 'x'", broke=True, traceback="Traceback of it")
        made = decode if "decode" in launch else prefill
        return made(port=free, disaggregation_bootstrap_port=bootstrap)

    monkeypatch.setattr(doctor, "ask_sglang", ask)
    monkeypatch.setattr(doctor, "Machine", lambda: machine)
    monkeypatch.setattr(doctor_machine, "problems", lambda hooks, root: [])
    return lines


def test_ready(asked: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--", *LAUNCH) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ready"
    assert lines[-2] == "prefill: 18 ok, 0 warnings, 2 not checked, 0 failed"
    for area in ("SGLang", "Arguments", "Prefill", "Checkpoint", "Transfer", "GPUs", "Ports"):
        assert area in [line.strip() for line in lines]
    assert asked == [LAUNCH]


def test_not_ready(asked: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--role", "decode", "--", *LAUNCH) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "not ready: 1 problem(s)"
    assert any("fix: --disaggregation-mode decode" in line for line in lines)
    assert call("--", "--bad") == 1
    assert "Arguments, resolution:\nTraceback of it\n" in capsys.readouterr().out


@pytest.mark.parametrize("words", [("--disaggregation-mode", "decode"), ("--disaggregation-mode=decode",)], ids=str)
def test_the_role_of_arguments_that_sglang_could_not_read(words: tuple[str, ...]) -> None:
    broken = Answer(error="SystemExit: unrecognized arguments")
    assert role_of(None, broken, words) == "decode"
    assert role_of("prefill", broken, words) == "prefill"
    assert role_of(None, broken, LAUNCH) is None
    assert role_of(None, prefill(), words) == "prefill"


def test_json(asked: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--json", "--", "decode", *LAUNCH) == 0
    found = json.loads(capsys.readouterr().out)
    assert (set(found), found["ready"], found["role"]) == ({"ready", "role", "checks"}, True, "decode")
    for check in found["checks"]:
        assert set(check) == {"area", "name", "status", "found", "allowed", "why", "fix"}
        assert check["status"] in ("ok", "warning", "failed", "not-checked")
    assert "Prefill" not in {check["area"] for check in found["checks"]}
    assert call("--json", "--", "--bad") == 1
    assert json.loads(capsys.readouterr().out)["ready"] is False


def test_a_pasted_command(asked: list[list[str]]) -> None:
    assert call("--", "python", "-m", "sglang.launch_server", *LAUNCH) == 0
    assert call("--", "sglang", "serve", *LAUNCH) == 0
    assert asked == [LAUNCH, LAUNCH]


@pytest.mark.parametrize(
    "words",
    [(), ("--",), ("--role", "router", "--", "--tp", "8"), ("--timeout", "0", "--", "--tp", "8"), ("--tp", "8")],
    ids=str,
)
def test_usage(asked: list[list[str]], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err
    assert asked == []
