"""Ranks that are killed or stopped in the middle of their work, and what the other side makes of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from peer_cases import Peers

from sglang_dspark_cp.smoke import native
from sglang_dspark_cp.smoke.processes import RankPool

pytestmark = pytest.mark.timeout(240)

TIMEOUTS = {
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "8",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "8",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
}
"""SGLang's own bounds, small; its defaults are 300 s, 300 s, 5 s and 2. Where a test ends by one of them it says so."""


@pytest.fixture(scope="module", autouse=True)
def mooncake_loads() -> None:
    native.prepare()


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    """CP2 -> two decode ranks; stays alive in all tests that take it, and is looked over at the end."""
    with RankPool() as pool:
        made = Peers(pool, tmp_path_factory.mktemp("peers"), TIMEOUTS)
        yield made
        made.finish()


def assert_served(peers: Peers) -> None:
    """Both decode ranks get what they ask for."""
    requests = [peers.ask(length, decode) for length in (3, 700) for decode in (0, 1)]
    peers.all_ended(requests, 15)
    assert [request.outcome for request in requests] == ["finished"] * 4, peers.state()


def test_a_request_aborted_between_its_last_chunk_and_success(peers: Peers) -> None:
    assert_served(peers)
    with peers.held():
        request = peers.ask(700, 0, plan="transfer")  # takes effect once a write waits
        peers.until(lambda: bool(request.landed), 10)
        took = peers.all_ended([request], 5)  # although the write still waits
        assert peers.a_write_waits()
    assert request.landed == "transfer"
    assert "Aborted by AbortReq" in (request.prefill or "")
    assert "Aborted by AbortReq" in (request.decode or "")
    assert took < 5
    assert_served(peers)


def test_a_decode_rank_is_killed_in_the_middle_of_a_transfer(peers: Peers) -> None:
    with peers.held():
        hit = [peers.ask(length, 0) for length in (5, 700, 1200)]
        other = peers.ask(300, 1)
        peers.until(peers.a_write_waits, 10)
        peers.fleet.kill_decode(0)
    took = peers.all_ended([*hit, other], 20)
    assert other.outcome == "finished"
    for request in hit:
        assert request.killed
        texts = ("Failed to send", "is not alive", "timed out")
        # Success only where all bytes were gone before the other end was.
        assert request.prefill == "" or any(text in (request.prefill or "") for text in texts), request
    assert any(request.prefill for request in hit)
    assert took < 12
    peers.fleet.restart_decode(0)
    peers.until(lambda: peers.fleet.decode[0].ready, 30)
    assert_served(peers)


def test_a_decode_rank_is_stopped_in_the_middle_of_a_transfer_and_goes_on(peers: Peers) -> None:
    pid = peers.fleet.decode[0].process.process.pid
    assert pid is not None
    with peers.held():
        stopped = [peers.ask(length, 0) for length in (200, 900)]
        other = peers.ask(300, 1)
        peers.until(peers.a_write_waits, 10)
        os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(20):  # two seconds with a peer that is there and takes nothing in
            peers.fleet.pump(0.1)
        assert all(request.decode is None for request in stopped)
    finally:
        os.kill(pid, signal.SIGCONT)
    peers.all_ended([*stopped, other], 20)
    # Short of SGLang's waiting time-out nothing is lost: the write goes on where it stopped. The other decode's request
    # may have waited with it: SGLang deals sessions out to four queues, a write that blocks holds up its queue. On a
    # slow machine the time-out may come first, and says so. Rows are compared wherever decode saw Success.
    for request in [*stopped, other]:
        assert request.outcome == "finished" or "timed out" in (request.decode or ""), request
    assert_served(peers)


@pytest.mark.parametrize(
    ("rank", "whole_server"),
    [(0, False), (1, False), (1, True)],
    ids=["the-rank-that-sends", "another-rank", "then-the-whole-server"],
)
def test_a_prefill_rank_is_killed_in_the_middle_of_a_batch(tmp_path: Path, rank: int, whole_server: bool) -> None:
    with RankPool() as pool:
        peers = Peers(pool, tmp_path, TIMEOUTS, "--chunk", "64")
        requests = [peers.ask(1400, decode) for decode in (0, 1) * 4]
        peers.until(lambda: any(request.prefill is not None for request in requests), 20)
        victim = peers.fleet.prefill[rank].process
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        # The other rank sits in a gloo collective with the dead one and gets an error from it: it ends by itself.
        names = {f"prefill rank {number}" for number in (0, 1)}
        ends = peers.until(lambda: names <= set(peers.fleet.deaths), 15)
        assert ends < 15
        left = peers.fleet.deaths[f"prefill rank {1 - rank}"]
        assert "onnection" in left or "gloo" in left, left
        if whole_server:  # as SGLang does: the server's processes, its bootstrap server among them, end together
            peers.fleet.bootstrap.process.kill()
        open_requests = [request for request in requests if request.decode is None]
        assert open_requests
        took = peers.until(lambda: all(request.decode is not None for request in open_requests), 20)
        # Bounded by SGLang's heartbeat to the bootstrap server, and while that answers by the waiting time-out.
        words = ("Lost connection with prefill", "timed out") if whole_server else ("timed out",)
        for request in open_requests:
            assert any(word in (request.decode or "") for word in words), request.decode
        assert took < 14
        if whole_server:
            assert any("Lost connection" in (request.decode or "") for request in open_requests)
