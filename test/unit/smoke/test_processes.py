"""Ports that rank processes are told to use."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sglang_dspark_cp.smoke import processes
from sglang_dspark_cp.smoke.processes import RankFailed, free_ports

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_GIVEN", set())


def test_no_port_is_given_twice_or_belongs_to_others() -> None:
    ports = [port for count in (1, 2, 3) * 40 for port in free_ports(count)]
    assert len(set(ports)) == len(ports) == 240
    assert max(ports) < 15000  # Mooncake draws from 15000 to 17000
    assert max(ports) < int(RANGE.read_text().split()[0])


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    first = free_ports(1)[0]
    monkeypatch.setattr(processes, "PORTS", range(first, first + 1))
    monkeypatch.setattr(processes, "_GIVEN", set())
    assert free_ports(1) == [first]
    monkeypatch.setattr(processes, "_GIVEN", set())
    with socket.socket() as taken:
        taken.bind((host, first))
        taken.listen()
        with pytest.raises(RankFailed, match=f"found 0 free TCP ports from {first} to {first}, needed 1; end"):
            free_ports(1)


def test_what_is_given_is_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setattr(processes, "PORTS", range(port, port + 1))
    with pytest.raises(RankFailed, match="found 0 free"):
        free_ports(1)
