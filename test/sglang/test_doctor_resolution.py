"""`doctor` with SGLang's own argument resolution; only GPUs and Mooncake's native library are made up.

Not named test_doctor.py: pytest wants file names that are unique over all test folders (test/unit/cli has that one).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from spawning import Spawn

from sglang_dspark_cp import config
from sglang_dspark_cp.cli import doctor
from sglang_dspark_cp.cli.doctor_check import Check, Done, Machine, Status
from sglang_dspark_cp.cli.doctor_resolve import OFFLINE, Answer, answer
from sglang_dspark_cp.hooks.check import sglang_release
from sglang_dspark_cp.smoke.arguments import write_model_folder
from sglang_dspark_cp.smoke.processes import RankConfig, RankPool, RankProcess, free_ports

pytestmark = pytest.mark.timeout(150)

CP = ["--enable-prefill-cp", "--cp-strategy", "interleave"]
DSPARK = ["--speculative-algorithm", "DSPARK"]
REFUSED_BY_STOCK = sglang_release() == "0.5.17"
"""Whether stock refuses the documented prefill line."""


class DoctorRank:
    """Answers each command line in a fork of a process that has imported SGLang."""

    def __init__(self, config: RankConfig, report: Callable[[Any], None]) -> None:
        pass

    def ask(self, launch: list[str], variables: dict[str, str]) -> Answer:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            os.environ.update(variables)
            try:
                told: Any = answer(launch)
            except BaseException:
                told = traceback.format_exc()
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(told, pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            told = pickle.load(pipe)
        os.waitpid(child, 0)
        if isinstance(told, str):
            raise RuntimeError(told)
        return told


class EightGpus(Machine):
    """This machine, where two commands say what they say on a GPU host."""

    def command(self, words: Sequence[str]) -> Done | None:
        if "--query-gpu=name" in words:
            return Done(0, "NVIDIA H200\n" * 8, "")
        return Done(0, "", "") if "import mooncake.engine" in words else None


@dataclasses.dataclass
class Doctor:
    """`doctor`, asked with command lines."""

    pool: RankPool
    rank: RankProcess
    model: Path

    def ask(self, launch: list[str], **variables: str) -> Answer:
        self.rank.start("ask", launch, {**OFFLINE, "SGLANG_PLUGINS": "dspark_cp", **variables})
        (told,) = self.pool.collect([self.rank], 60.0)
        assert isinstance(told, Answer)
        return told

    def checks(self, role: str | None, launch: list[str], **variables: str) -> tuple[Answer, list[Check]]:
        """On a machine with eight GPUs."""
        told = self.ask(launch, **variables)
        assert (told.gpus, told.pretended) == (0, True)
        seen = dataclasses.replace(told, gpus=8)
        return told, doctor.diagnose(role, launch, seen, EightGpus(environ=variables))

    def launch(self, mode: str, *flags: str, model: str | None = None) -> list[str]:
        http, bootstrap = free_ports(2)
        return [
            *("--model-path", model or str(self.model), "--tp", "8", "--port", str(http)),
            *("--disaggregation-mode", mode, "--disaggregation-bootstrap-port", str(bootstrap)),
            *flags,
        ]


@pytest.fixture(scope="module")
def host(pool: RankPool, spawn: Spawn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doctor]:
    (rank,) = spawn("test_doctor_resolution:DoctorRank")
    yield Doctor(pool, rank, write_model_folder(tmp_path_factory.mktemp("model")))
    rank.kill()
    pool.ranks.remove(rank)


def failures(checks: Sequence[Check]) -> list[tuple[str, str]]:
    return [(check.area, check.name) for check in checks if check.status is Status.FAILED]


def by_name(checks: Sequence[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_good_cp8_prefill_line(host: Doctor) -> None:
    told, checks = host.checks(None, host.launch("prefill", *CP, *DSPARK))
    assert failures(checks) == []
    assert told.hooks == [*["validate-cp"] * REFUSED_BY_STOCK, "admit", "create-worker"]
    assert told.resolved is not None
    assert (told.resolved["attn_cp_size"], told.resolved["page_size"]) == (8, 256)
    found = by_name(checks)
    assert found["plugin"].found.startswith("DSPARK on CP prefill: tp 8, attention CP 8, dp 1, pp 1")
    assert found["gather"].found == "window (with pages of 256 tokens no other row can be read), radix cache on"
    assert "MB arrive at each rank" in found["traffic"].found
    assert found["draft tensors"].status is Status.NOT_CHECKED, "that folder holds a config.json only"


def test_violations_are_named_one_by_one(
    host: Doctor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--disaggregation-transfer-backend", "nixl", "--pipeline-parallel-size", "2"]
    launch = host.launch("prefill", *CP, *DSPARK, *flags)
    told, checks = host.checks("prefill", launch)
    refused = [check for check in checks if check.name == "topology"]
    assert [check.found for check in refused] == ["pipeline parallel size 2", "transfer backend 'nixl'"]
    assert [check.allowed for check in refused] == ["1", "'mooncake' or 'mooncake_tcp'"]
    assert refused[0].fix == "--pipeline-parallel-size 1"
    elsewhere = [("Transfer", "backend"), ("GPUs", "number")]
    assert sorted(failures(checks)) == sorted([("Arguments", "topology")] * 2 + elsewhere), "pp 2 needs 16 GPUs"

    monkeypatch.setattr(doctor, "ask_sglang", lambda launch, timeout: told)
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.run(parser.parse_args(["--json", "--", *launch])) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["ready"], report["role"]) == (False, "prefill")
    assert [check.as_json() for check in refused] == [each for each in report["checks"] if each["name"] == "topology"]


def test_a_decode_line(host: Doctor) -> None:
    launch = host.launch("decode", *DSPARK, "--dp", "8", "--enable-dp-attention", "--enable-dp-lm-head")
    told, checks = host.checks("decode", launch)
    assert failures(checks) == []
    found = by_name(checks)
    assert found["sizes"].found == "tp 8, dp 8, attention TP 1"
    assert "Prefill" not in {check.area for check in checks}
    assert found["bootstrap"].found.endswith("not bound on decode")
    assert told.mode is None
    assert failures(host.checks("prefill", launch)[1]) == [("Arguments", "role")]


def test_what_stock_refuses(host: Doctor) -> None:
    no_lm_head = host.launch("decode", *DSPARK, "--dp", "8", "--enable-dp-attention", "--no-such-flag")
    _, checks = host.checks(None, no_lm_head)
    assert by_name(checks)["resolution"].found == "SystemExit: unrecognized arguments: --no-such-flag"
    _, checks = host.checks(None, no_lm_head[:-1])
    assert by_name(checks)["resolution"].found.startswith("ValueError: ")
    assert "--enable-dp-lm-head" in by_name(checks)["resolution"].found


def test_what_only_the_check_before_the_start_refuses(host: Doctor) -> None:
    _, checks = host.checks(None, host.launch("prefill", *CP, *DSPARK, "--chunked-prefill-size", "1000"))
    assert failures(checks) == [("Arguments", "resolution"), ("Prefill", "chunk")]
    assert by_name(checks)["chunk"].fix == "--chunked-prefill-size 1024"


def test_switched_off_is_what_stock_says(host: Doctor) -> None:
    told, checks = host.checks(None, host.launch("prefill", *CP, *DSPARK), **{config.ENABLED: "0"})
    assert (told.hooks, told.broke) == ([], False)
    assert failures(checks) == [("SGLang", "switch"), *[("Arguments", "resolution")] * REFUSED_BY_STOCK]


def test_a_bad_variable_stops_it(host: Doctor) -> None:
    told, checks = host.checks(None, host.launch("prefill", *CP, *DSPARK), **{config.ALIGN: "columns"})
    assert told.error.startswith("ActivationError: ")
    assert ("SGLang", "variables") in failures(checks)


def test_the_window_mode_where_it_is_not_proved(host: Doctor) -> None:
    launch = host.launch("prefill", *CP, *DSPARK, "--enable-streaming-session")
    _, checks = host.checks(None, launch, **{config.GATHER: "window"})
    assert failures(checks) == [("Prefill", "gather")]
    assert "--enable-streaming-session" in by_name(checks)["gather"].found


def test_a_model_that_is_not_here(host: Doctor) -> None:
    launch = host.launch("prefill", *CP, *DSPARK, "--disaggregation-transfer-backend", "mooncake_tcp", model="no/such")
    told, checks = host.checks(None, launch)
    assert (told.stand_in, told.model_folder, told.environment["MC_FORCE_TCP"]) == (True, None, "1")
    assert failures(checks) == []
    found = by_name(checks)
    assert "in place of no/such" in found["resolution"].found
    assert (found["draft tensors"].status, found["cost"].status) == (Status.NOT_CHECKED, Status.NOT_CHECKED)
    assert found["transport"].found == "TCP, by --disaggregation-transfer-backend mooncake_tcp"
    assert not list(Path(tempfile.gettempdir()).glob("sglang-dspark-cp-doctor-*"))
