"""A decode that does not fit is refused when it registers; others, later requests and the threads go on."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from handshake_cases import HANDSHAKE_HOOKS, ROWS, THEIRS

from sglang_dspark_cp.adapters import handshake_v0_5_17, handshake_v0_5_23
from sglang_dspark_cp.core.handshake import Layout, named
from sglang_dspark_cp.hooks.check import problems, sglang_release, sglang_root
from sglang_dspark_cp.smoke import native
from sglang_dspark_cp.smoke.arguments import write_model_folder
from sglang_dspark_cp.smoke.processes import RankConfig, RankFailed, RankPool, RankProcess, free_ports

pytestmark = pytest.mark.timeout(240)

RELEASE = sglang_release()
STARTS_WITHIN_S = 180.0
"""The first process waits for the fork server's import of SGLang."""
ALL = {"SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "1"}
HOOKS = tuple(hook.id for hook in HANDSHAKE_HOOKS)
WITHOUT_OWN = tuple(hook for hook in HOOKS if hook != "own-state")
PAGES = [3, 4]
TOLD = "Failed to get kvcache from prefill instance"


class Fleet:
    """Prefill servers and decode ranks by name, started when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.pool, self.folder = RankPool(), folder
        self.stand_in = native.prepare(folder)
        self.model = str(write_model_folder(folder / "model"))
        self.rooms = itertools.count(100)
        self.ports: dict[str, int] = {}
        self.servers: dict[str, list[RankProcess]] = {}
        self.decodes: dict[str, RankProcess] = {}

    def _config(
        self, role: str, rank: int, name: str, environment: dict[str, str] | None, options: dict[str, Any]
    ) -> RankConfig:
        common = {
            "SGLANG_HOST_IP": "127.0.0.1",
            "MOONCAKE_PROTOCOL": "tcp",
            "MC_FORCE_TCP": "1",
            "MC_TCP_ENABLE_CONNECTION_POOL": "1",
            "GLOG_minloglevel": "2",
            "MC_LOG_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "SGLANG_NCCL_SO_PATH": "/nonexistent",
            "SGLANG_DISAGGREGATION_THREAD_POOL_SIZE": "4",
            "SGLANG_DISAGGREGATION_QUEUE_SIZE": "1",
            "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "0",
        }
        return RankConfig(
            role,
            rank,
            f"handshake_cases:{role.capitalize()}Rank",
            common | (environment or {}),
            str(self.folder / f"{name}-{rank}.log"),
            {"stand_in": self.stand_in, "model": self.model, **options},
        )

    def prefill(
        self, name: str, cp_size: int = 1, environment: dict[str, str] | None = None, **options: Any
    ) -> list[RankProcess]:
        if name not in self.servers:
            bootstrap, dist = free_ports(2)
            self.ports[name] = bootstrap
            options |= {"cp_size": cp_size, "bootstrap_port": bootstrap, "dist_port": dist}
            ranks = self.pool.spawn(
                self._config("prefill", rank, name, environment, options) for rank in range(cp_size)
            )
            self.pool.collect(ranks, STARTS_WITHIN_S)
            self.call(ranks, "tag")
            self.servers[name] = ranks
        return self.servers[name]

    def decode(self, name: str, environment: dict[str, str] | None = None, **options: Any) -> RankProcess:
        if name not in self.decodes:
            rank = self.pool.spawn([self._config("decode", 0, name, environment, options | _dist_port())])
            self.pool.collect(rank, STARTS_WITHIN_S)
            self.decodes[name] = rank[0]
        return self.decodes[name]

    def call(self, ranks: list[RankProcess], method: str, *arguments: Any, within: float = 30) -> list[Any]:
        for rank in ranks:
            rank.start(method, *arguments)
        return self.pool.collect(ranks, within)

    def request(
        self,
        server: str,
        decode: RankProcess,
        *,
        rows: list[list[int]] | None = ROWS,
        theirs: list[list[int]] = THEIRS,
        steps: int = 1000,
        wait: float = 6.0,
    ) -> tuple[list[tuple[str, str]], dict[str, Any]]:
        """One request: (status, text) of each prefill rank, and what decode saw."""
        room, ranks = next(self.rooms), self.servers[server]
        decode.start("ask", room, self.ports[server], [7, 8], theirs, wait)
        for rank in ranks:
            rank.start("serve", room, PAGES, rows, steps)
        *prefill, seen = self.pool.collect([*ranks, decode], 30)
        return prefill, seen

    def log(self, name: str, rank: int = 0) -> str:
        return (self.folder / f"{name}-{rank}.log").read_text(errors="replace")


def _dist_port() -> dict[str, int]:
    return {"dist_port": free_ports(1)[0]}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    with made.pool:
        yield made


@pytest.fixture(scope="module")
def hooked(fleet: Fleet) -> str:
    """CP2 prefill with a draft and all hooks; its ranks die if a thread of theirs does."""
    fleet.prefill("hooked", cp_size=2, hooks=HOOKS)
    return "hooked"


@pytest.fixture(scope="module")
def good(fleet: Fleet) -> RankProcess:
    return fleet.decode("good")


def assert_served(answer: tuple[list[tuple[str, str]], dict[str, Any]], components: int = 3) -> None:
    prefill, seen = answer
    assert [status for status, _ in prefill] == ["Success"] * len(prefill), prefill
    assert seen["status"] == "Success"
    assert list(seen["bytes"].values()) == [[0x11 + number] for number in range(components)]


def assert_refused(answer: tuple[list[tuple[str, str]], dict[str, Any]]) -> str:
    """Both sides failed at once and nothing arrived; prefill's texts (a rank may hear of it from another first)."""
    prefill, seen = answer
    assert [status for status, _ in prefill] == ["Failed"] * len(prefill), prefill
    assert seen["status"] == "Failed"
    assert TOLD in seen["failure"]
    assert seen["seconds"] < 3
    assert all(found == [0xEE] for found in seen["bytes"].values()), seen
    return "\n".join(text for _, text in prefill)


def test_the_hooks_fit_the_installed_release() -> None:
    assert [str(problem) for problem in problems(HANDSHAKE_HOOKS, sglang_root())] == []


def test_sides_that_agree(fleet: Fleet, hooked: str, good: RankProcess) -> None:
    for _ in range(2):
        assert_served(fleet.request(hooked, good))
    assert fleet.call(fleet.servers[hooked], "open_rooms") == [[], []]


BAD: dict[str, tuple[dict[str, Any], list[list[int]], str]] = {
    "no-draft": ({"stages": 0}, THEIRS[:2], r"registered 2 state components .* sends 3 state components .*DSPARK"),
    "two-stages": ({"stages": 2}, THEIRS, r"component 2: component x 2 buffers, .*draft swa x 3 buffers, item 149760"),
    "no-speculation": ({"speculative": None}, THEIRS, r"component 0: .*, prefill sends swa x .*DSPARK"),
    "other-kv": ({"lie": {"kv_item_lens": [64] * 4}}, THEIRS, r"KV buffers, first item 64, .*--kv-cache-dtype"),
    "other-page": (
        {"draft_item": 37440},
        THEIRS,
        r"component 2: component x 3 buffers, item 37440, prefill .*--page-size",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_decode_that_differs(fleet: Fleet, hooked: str, good: RankProcess, name: str) -> None:
    options, theirs, text = BAD[name]
    bad = fleet.decode(name, **options)
    for _ in range(2):
        found = assert_refused(fleet.request(hooked, bad, theirs=theirs))
        assert "cannot take what this prefill worker sends" in found
        assert re.search(text, found), found
    assert fleet.log(hooked).count(f"session {_session(found)}") >= 1
    assert_served(fleet.request(hooked, good))
    assert fleet.call(fleet.servers[hooked], "open_rooms") == [[], []]


def _session(text: str) -> str:
    return text.partition("(session ")[2].partition(")")[0]


def test_a_bad_and_a_good_decode_at_once(fleet: Fleet, hooked: str, good: RankProcess) -> None:
    bad, port = fleet.decode("two-stages", stages=2), fleet.ports[hooked]
    rooms = [next(fleet.rooms), next(fleet.rooms)]
    # Both decodes are there before prefill has heard of the requests.
    fleet.call([bad], "begin", rooms[0], port, [7, 8], THEIRS)
    fleet.call([good], "begin", rooms[1], port, [7, 8], THEIRS)
    (early,) = fleet.call([bad], "finish", rooms[0], 6.0)
    assert (early["status"], early["seconds"] < 3) == ("Failed", True)
    assert {status for status, _ in fleet.call(fleet.servers[hooked], "serve", rooms[0], PAGES, ROWS)} == {"Failed"}
    assert {status for status, _ in fleet.call(fleet.servers[hooked], "serve", rooms[1], PAGES, ROWS)} == {"Success"}
    assert fleet.call([good], "finish", rooms[1], 6.0)[0]["status"] == "Success"


def test_a_decode_with_a_draft_behind_a_prefill_without_one(fleet: Fleet, good: RankProcess) -> None:
    fleet.prefill("bare", hooks=WITHOUT_OWN, stages=0)
    found = assert_refused(fleet.request("bare", good, rows=ROWS[:2]))
    assert "registered 3 state components" in found
    assert "prefill sends 2 state components" in found
    fit = fleet.decode("no-draft", stages=0)
    assert_served(fleet.request("bare", fit, rows=ROWS[:2], theirs=THEIRS[:2]), components=2)


@pytest.mark.parametrize(("name", "stages", "text"), [("none", 0, "no draft component"), ("two", 2, "x 2 buffers")])
def test_a_prefill_without_complete_draft_kv_stops_at_start(fleet: Fleet, name: str, stages: int, text: str) -> None:
    with pytest.raises(RankFailed, match=f"TransferError.*cannot send draft KV.*{text}"):
        fleet.prefill(f"start-{name}", hooks=HOOKS, stages=stages)


@pytest.mark.parametrize(
    ("rows", "theirs"),
    [
        ([[2, 3], [1], [2, 3]], THEIRS),
        (ROWS, [[5, 6], [3], [5, 6]]),
        (ROWS, [[5], [], [5]]),
        (ROWS, THEIRS[:2]),
        (None, THEIRS),
    ],
    ids=["prefill-more-pages", "decode-more-pages", "decode-no-c128", "decode-no-draft-rows", "prefill-no-state"],
)
def test_state_rows_that_differ(
    fleet: Fleet, hooked: str, good: RankProcess, rows: list[list[int]] | None, theirs: list[list[int]]
) -> None:
    found = assert_refused(fleet.request(hooked, good, rows=rows, theirs=theirs))
    assert "the state rows of this request differ" in found
    assert_served(fleet.request(hooked, good))


@pytest.mark.parametrize("component", ["swa2", "aux"])
def test_a_rejected_write_is_never_a_success(fleet: Fleet, hooked: str, good: RankProcess, component: str) -> None:
    victim = fleet.decode(f"victim-{component}")
    assert_served(fleet.request(hooked, victim))
    fleet.call(fleet.servers[hooked], "reject", component)
    try:
        prefill, seen = fleet.request(hooked, victim)
    finally:
        fleet.call(fleet.servers[hooked], "reject", "")
    assert [status for status, _ in prefill] == ["Failed", "Failed"]
    assert (seen["status"], seen["seconds"] < 3) == ("Failed", True)
    assert_served(fleet.request(hooked, good))


def test_a_decode_that_waits_for_every_cp_rank(fleet: Fleet, hooked: str, good: RankProcess) -> None:
    prefill, seen = fleet.request(hooked, fleet.decode("waits-for-all", ALL))
    assert {status for status, _ in prefill} <= {"Failed", "Success"}  # rank 0 may be done before rank 1 is asked
    assert (seen["status"], seen["seconds"] < 3) == ("Failed", True)
    assert "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER to the same value" in fleet.log(hooked, 1)
    assert_served(fleet.request(hooked, good))


def test_every_cp_rank_sends(fleet: Fleet) -> None:
    fleet.prefill("all-send", cp_size=2, environment=ALL, hooks=HOOKS)
    assert_served(fleet.request("all-send", fleet.decode("waits-for-all", ALL)))
    bad = fleet.decode("two-stages-all", ALL, stages=2)
    assert "draft swa x 3 buffers" in assert_refused(fleet.request("all-send", bad))


def test_a_decode_that_does_not_know_every_cp_rank(fleet: Fleet) -> None:
    """The variable is set on prefill only: bounded by SGLang's bootstrap time-out, and said why on both ranks."""
    short = ALL | {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "1"}
    fleet.prefill("all-alone", cp_size=2, environment=short, hooks=HOOKS)
    prefill, seen = fleet.request("all-alone", fleet.decode("knows-rank-0"))
    assert [status for status, _ in prefill] == ["Failed", "Failed"]
    assert "timed out" in prefill[1][1]
    assert "no decode ever registered with attn_cp_rank 1" in prefill[1][1]
    assert "another CP rank failed this request before anything was sent" in prefill[0][1]
    for _, text in prefill:
        assert "set SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER to the same value on both sides" in text
    assert "no decode ever registered with attn_cp_rank 1" in fleet.log("all-alone", 1)
    assert (seen["status"], seen["seconds"] < 4) == ("Failed", True), "decode is told, it need not wait"
    assert_served(fleet.request("all-alone", fleet.decode("waits-for-all", ALL)))


def test_a_failed_room_never_becomes_a_success(fleet: Fleet, hooked: str) -> None:
    assert fleet.call(fleet.servers[hooked], "late_success", next(fleet.rooms)) == ["Failed", "Failed"]


# ------------------------------------------------------------------------------- the table, without SGLang around it


def peer(session: str, needed: int = 1, dummy: bool = False) -> Any:
    return SimpleNamespace(
        endpoint="10.0.0.1",
        dst_port=1,
        mooncake_session_id=session,
        required_dst_info_num=needed,
        is_dummy=dummy,
        room=7,
    )


def registration(session: str, draft_buffers: int) -> Any:
    info = peer(session)
    info.dst_kv_ptrs, info.dst_aux_ptrs, info.dst_kv_item_len = [0], [0], 64
    info.dst_state_item_lens = [[8], [16] * draft_buffers]
    return info


class Table17:
    """Registrations and verdicts as 0.5.17 keeps them."""

    def __init__(self) -> None:
        layout = Layout(1, 64, 1, named(["swa", "swa"], [[8], [16, 16, 16]]))
        self.registrations = handshake_v0_5_17.Registrations(layout, sends=True)

    def register(self, info: Any) -> None:
        self.registrations[info.mooncake_session_id] = info

    def reason(self, peers: list[Any]) -> str | None:
        return self.registrations.reason(peers)


class Table23:
    """The same in 0.5.23, whose manager keeps the verdicts."""

    def __init__(self) -> None:
        kv_args = SimpleNamespace(
            state_types=[SimpleNamespace(value="swa")] * 2,
            state_item_lens=[[8], [16, 16, 16]],
            kv_data_ptrs=[0],
            kv_item_lens=[64],
            aux_data_ptrs=[0],
        )
        self.manager = SimpleNamespace(
            kv_args=kv_args,
            is_dummy_cp_rank=False,
            transfer_infos={},
            state_layout_rejections={},
            decode_kv_args_table={},
        )

    def register(self, info: Any) -> None:
        session, manager = info.mooncake_session_id, self.manager
        _, text = handshake_v0_5_23.validate_peer(lambda *_: (True, None), manager, info)
        manager.state_layout_rejections.pop(session, None)
        if text is not None:
            manager.state_layout_rejections[session] = text
        manager.decode_kv_args_table[session] = info

    def reason(self, peers: list[Any]) -> str | None:
        self.manager.transfer_infos[7] = dict(enumerate(peers))
        return handshake_v0_5_23._reason(self.manager, 7)


@pytest.fixture(params=[Table17, Table23], ids=["0.5.17", "0.5.23"])
def table(request: pytest.FixtureRequest) -> Table17 | Table23:
    made = request.param()
    made.register(registration("fits", 3))
    made.register(registration("bad", 2))
    return made


def test_one_decode_rank_that_differs_is_enough(table: Table17 | Table23) -> None:
    assert table.reason([peer("fits", 2)]) is None
    assert table.reason([peer("bad", 2)]) is None, "the other decode rank would not be told"
    assert "draft swa x 3 buffers" in str(table.reason([peer("fits", 2), peer("bad", 2)]))
    assert table.reason([peer("fits", 2), peer("fits", 2)]) is None
    assert table.reason([]) is None


def test_a_decode_that_registers_again_with_other_flags(table: Table17 | Table23) -> None:
    table.register(registration("bad", 3))
    assert table.reason([peer("bad")]) is None
    table.register(registration("fits", 0))
    assert table.reason([peer("fits")]) is not None


def test_a_decode_that_never_registered(table: Table17 | Table23) -> None:
    assert "never registered its buffers" in str(table.reason([peer("new")]))
    assert table.reason([peer("new", dummy=True)]) is None


def test_a_decode_that_cannot_be_told_does_not_stop_the_thread(fleet: Fleet, hooked: str) -> None:
    room = next(fleet.rooms)
    tried = fleet.call(fleet.servers[hooked], "fail_while_the_first_is_gone", room)
    # The rank is this prefill's unique one, as in stock's own answers; the dummy is left out.
    assert tried == [[("10.0.0.1", 1, room, 0, rank), ("10.0.0.1", 3, room, 0, rank)] for rank in (0, 1)]
    words = {"0.5.17": "10.0.0.1:1 (session a) was not told", "0.5.23": f"of room {room} to 10.0.0.1:1"}
    assert words[RELEASE] in fleet.log(hooked)


# ------------------------------------------------------------------------------------------------ what stock does


@pytest.mark.compat
def test_stock_sends_to_a_decode_with_a_draft_without_one(fleet: Fleet, good: RankProcess) -> None:
    fleet.prefill("stock-bare", hooks=(), stages=0)
    _, seen = fleet.request("stock-bare", good, rows=ROWS[:2])
    assert seen["status"] == "Success"
    assert list(seen["bytes"].values())[2] == [0xEE]


@pytest.mark.compat
def test_stock_and_another_state_ring(fleet: Fleet) -> None:
    """0.5.17 does; 0.5.23 compares item lengths and refuses."""
    fleet.prefill("stock", hooks=())
    _, seen = fleet.request("stock", fleet.decode("no-speculation", speculative=None))
    if RELEASE == "0.5.17":
        assert seen["status"] == "Success"
        assert next(iter(seen["bytes"].values())) != [0x11]
    else:
        assert seen["status"] == "Failed"
        assert "item length mismatch" in fleet.log("stock")


@pytest.mark.compat
def test_stock_and_a_late_success(fleet: Fleet) -> None:
    """0.5.17 does; 0.5.23 keeps a failed room failed."""
    found = fleet.call(fleet.prefill("stock", hooks=()), "late_success", next(fleet.rooms))
    assert found == [{"0.5.17": "Success", "0.5.23": "Failed"}[RELEASE]]


@pytest.mark.compat
def test_stock_cuts_window_rows(fleet: Fleet, good: RankProcess) -> None:
    fleet.prefill("stock", hooks=())
    _, seen = fleet.request("stock", good, theirs=[[5, 6], [3], [5, 6]])
    assert seen["status"] == "Success"


@pytest.mark.compat
@pytest.mark.parametrize("name", ["no-draft", "two-stages"])
def test_the_transfer_thread_of_stock(fleet: Fleet, good: RankProcess, name: str) -> None:
    """In 0.5.23 only where decode lacks a component: buffers that it compares end the request, not the thread."""
    options, theirs, _ = BAD[name]
    server = f"stock-{name}"
    (rank,) = fleet.prefill(server, hooks=(), survive=True)
    _, seen = fleet.request(server, fleet.decode(name, **options), theirs=theirs, steps=200, wait=1.0)
    if RELEASE == "0.5.23" and name == "two-stages":
        assert seen["status"] == "Failed"
        assert fleet.call([rank], "errors") == [[]]
        assert_served(fleet.request(server, good))
        return
    assert seen["status"] == "WaitingForInput"
    assert "Transfer thread failed" in fleet.call([rank], "errors")[0][0]
    _, after = fleet.request(server, good, steps=200, wait=1.0)
    assert after["status"] == "WaitingForInput", "a decode that fits is served no more"


@pytest.mark.compat
def test_only_prefill_sends_from_every_cp_rank_is_not_seen(fleet: Fleet, good: RankProcess) -> None:
    """No message reaches the other CP ranks: they wait for one, as long as SGLang's bootstrap time-out."""
    fleet.prefill("all-send", cp_size=2, environment=ALL, hooks=HOOKS)
    prefill, seen = fleet.request("all-send", good, steps=200, wait=1.0)
    assert [status for status, _ in prefill] == ["Bootstrapping"] * 2
    assert seen["status"] == "WaitingForInput"
