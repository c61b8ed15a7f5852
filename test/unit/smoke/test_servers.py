"""Starting, asking and ending servers, with `stub_server.py` in the place of `sglang.launch_server`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sglang_dspark_cp.smoke.servers import (
    HOST,
    Ports,
    Server,
    ServerFailed,
    ServerSet,
    all_at_once,
    error_of,
    first_traceback,
    group_members,
)

STUB = Path(__file__).with_name("stub_server.py")
PROMPT = {"input_ids": [8] * 5, "sampling_params": {"max_new_tokens": 3}}
PORTS = Ports(21000)
TRACE = "Traceback (most recent call last):\n  File x"


def stub(folder: Path, name: str = "stub", **environment: str) -> Server:
    port = PORTS.take()
    return Server(name, port, [sys.executable, str(STUB), "--port", str(port)], environment, folder)


def test_a_server_answers_and_is_gone_with_its_children(tmp_path: Path) -> None:
    server = stub(tmp_path, STUB_CHILD="1")
    with ServerSet() as group:
        group.start([server], 30)
        assert server.process is not None
        members = group_members(server.process.pid)
        streamed = server.generate(PROMPT)
        plain = server.generate(PROMPT, stream=False)
    assert len(members) == 2
    assert streamed.tokens == plain.tokens == [9, 9, 9]
    assert streamed.first_token_s is not None
    assert plain.first_token_s is None
    assert group_members(server.process.pid) == []
    assert "stub serves" in server.log()


def test_a_server_that_dies_while_booting_is_shown_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    other = stub(tmp_path, "other")
    with pytest.raises(ServerFailed, match=r"bad ended with status 3:\n[^\x00]*ValueError: stub was told to die$"):  # noqa: SIM117
        with ServerSet() as group:
            group.start([other, stub(tmp_path, "bad", STUB_DIES="boot", STUB_DEAF="1")], 60)
    assert time.monotonic() - started < 20
    assert other.process is not None
    assert group_members(other.process.pid) == []


def test_others_go_on_when_asked_to(tmp_path: Path) -> None:
    good, bad = stub(tmp_path, "good"), stub(tmp_path, "bad", STUB_DIES="boot")
    with ServerSet() as group:
        failures = group.start_each([bad, good], 30)
        assert list(failures) == ["bad"]
        assert good.generate(PROMPT).tokens is not None


def test_a_server_that_never_gets_ready(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="not ready within 2 s"), ServerSet() as group:
        group.start([stub(tmp_path, STUB_DEAF="1")], 2)


def test_death_during_a_request_ends_the_wait(tmp_path: Path) -> None:
    dying, waiting = stub(tmp_path, "dying", STUB_DIES="request"), stub(tmp_path, "waiting")
    started = time.monotonic()
    with ServerSet() as group:
        group.start([dying, waiting], 30)
        calls = [lambda: waiting.generate({**PROMPT, "hang": True}, 60), lambda: dying.generate(PROMPT, 60)]
        with pytest.raises(ServerFailed, match="dying ended with status 3"):
            all_at_once(calls, [dying, waiting])
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_survives_the_end_of_the_program(tmp_path: Path, number: signal.Signals) -> None:
    port = PORTS.take()
    program = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        from sglang_dspark_cp.smoke.servers import Server, ServerSet, all_at_once
        command = [sys.executable, {str(STUB)!r}, "--port", "{port}"]
        server = Server("stub", {port}, command, {{}}, Path({str(tmp_path)!r}))
        with ServerSet() as group:
            group.start([server], 30)
            print(server.process.pid, flush=True)
            all_at_once([lambda: server.generate({{"hang": True}}, 200)], [server])
        """
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    server = int(driver.stdout.readline())
    assert group_members(server)
    time.sleep(0.3)
    os.kill(driver.pid, number)
    assert driver.wait(20) != 0
    deadline = time.monotonic() + 5
    while group_members(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group_members(server) == []


def test_ports_in_use_are_passed_over() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        first = taken.getsockname()[1]
        if first + 100 < 65536:
            assert Ports(first).take() != first
    with pytest.raises(ServerFailed, match="--ports"):
        Ports(65536).take()


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (f"a\n{TRACE}\nKeyError: 'y'\nlater", f"{TRACE}\nKeyError: 'y'"),
        ("sglang-dspark-cp: refused\nbye", "sglang-dspark-cp: refused"),
        ("one\ntwo", "one\ntwo"),
        (TRACE, TRACE),
        (f"{TRACE}\n[2026 TP1] noise: y\nValueError: z\nmore", f"{TRACE}\n[2026 TP1] noise: y\nValueError: z"),
    ],
)
def test_first_traceback(log: str, expected: str) -> None:
    assert first_traceback(log) == expected


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"output_ids": [1], "meta_info": {"finish_reason": {"type": "length"}}}, ""),
        ({"error": {"message": "no", "code": 400}}, "no"),
        ({"error": "plain"}, "plain"),
        ({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "gone"}}}, "gone"),
        ({"text": "what"}, "what"),
    ],
)
def test_error_of(answer: dict[str, object], error: str) -> None:
    assert error_of(answer) == error
