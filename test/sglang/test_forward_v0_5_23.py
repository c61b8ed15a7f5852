"""The hooked end of a CP forward on real gloo groups, inside SGLang's own runner step, next to stock's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from forward_cases_v0_5_23 import Forward
from forward_shapes import AUX_WIDTH, BATCHES, MODES, ROW_BYTES, reachable, wire_bytes
from spawning import Spawn

from sglang_dspark_cp.core.align import HOST_WORDS, HostCounts
from sglang_dspark_cp.smoke import geometry as g
from sglang_dspark_cp.smoke.arguments import prefill_arguments, write_model_folder
from sglang_dspark_cp.smoke.processes import RankPool, RankProcess, free_ports

pytestmark = pytest.mark.timeout(240)

Ranks = dict[int, list[RankProcess]]
STOCK_WIDTHS = (g.HIDDEN, g.STREAMS * g.HIDDEN, AUX_WIDTH)
"""Elements per row of stock's three gathers: after the norm, the streams before the head, the captured layers."""


@pytest.fixture(scope="module")
def ranks(pool: RankPool, spawn: Spawn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Groups of 2 and of 4 ranks."""
    ours = {"SGLANG_PLUGINS": "dspark_cp"}
    model = write_model_folder(tmp_path_factory.mktemp("model"))
    started = spawn("sglang_dspark_cp.smoke.arguments:Resolver", environment=ours)
    (resolver,) = started
    groups: Ranks = {}
    environment = {**ours, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "SGLANG_NCCL_SO_PATH": "/nonexistent"}
    for cp_size in (2, 4):
        resolver.start("resolve", prefill_arguments(model, cp_size, 8192, 8998))
        (server_args,) = pool.collect([resolver], 90.0)
        assert isinstance(server_args, bytes), server_args
        (port,) = free_ports(1)
        factory = "forward_cases_v0_5_23:ForwardRank"
        groups[cp_size] = spawn(factory, cp_size, environment, cp_size=cp_size, server_args=server_args, port=port)
        started += groups[cp_size]
    yield groups
    for rank in started:
        rank.kill()
        pool.ranks.remove(rank)


def ask(pool: RankPool, ranks: list[RankProcess], method: str, *arguments: Any) -> list[Any]:
    """The same call on every rank."""
    for rank in ranks:
        rank.start(method, *arguments)
    return pool.collect(ranks, 60.0)


def physical_rows(tokens: int, cp_size: int) -> int:
    """Rows of every rank in this release: a multiple of C."""
    return -(-tokens // cp_size**2) * cp_size


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cp_size", [2, 4])
def test_rows_equal_stock_without_cp(pool: RankPool, ranks: Ranks, cp_size: int, mode: str, fused: bool) -> None:
    for extend, prefix in BATCHES:
        tokens = sum(extend)
        wanted = reachable(extend, prefix) if mode == "window" else list(range(tokens))
        by_rank: list[Forward] = ask(pool, ranks[cp_size], "forward", extend, prefix, fused, mode)
        for seen in by_rank:
            assert seen.which == wanted
            assert torch.equal(seen.rows, seen.expected[wanted])
            assert seen.through == (tokens, 1)
            assert seen.logits_equal
            assert seen.logits == (len(extend), g.VOCAB)
            assert seen.heads == len(extend)
            assert seen.addresses_right
            # One gather brings rows, addresses and heads, in place of stock's three.
            assert seen.collectives == [wire_bytes(wanted, extend, cp_size, mode)]
            physical = physical_rows(tokens, cp_size)
            assert seen.stock_collectives == [physical * width * 2 for width in STOCK_WIDTHS]
            assert seen.left == ((), None)
        assert by_rank[0].expected.ne(0).any()


@pytest.mark.parametrize("cp_size", [2, 4])
def test_all_rows_before_the_head_where_logprobs_are_wanted(pool: RankPool, ranks: Ranks, cp_size: int) -> None:
    physical = physical_rows(18, cp_size)
    for seen in ask(pool, ranks[cp_size], "forward", [13, 5], [0, 0], True, "kv", True):
        assert seen.logits_equal
        assert seen.heads == 18
        # Behind the one gather stock's of the rows after the norm stays; its streams before the head do not travel.
        assert seen.collectives == [-(-18 // cp_size) * ROW_BYTES["kv"], physical * g.HIDDEN * 2]
        assert torch.equal(seen.rows, seen.expected)
        assert seen.left == ((), None)


def test_counters_follow(pool: RankPool, ranks: Ranks) -> None:
    before = [seen.counters for seen in ask(pool, ranks[4], "forward", [8], [0], True)]
    after = [seen.counters for seen in ask(pool, ranks[4], "forward", [13], [0], True)]
    for old, new in zip(before, after, strict=True):
        grown = {name: new[name] - old[name] for name in old if new[name] != old[name]}
        assert grown == {
            "forwards": 1,
            "cp_forwards": 1,
            "aux_collectives": 1,
            "rows_on_shard": 4,
            "heads_sent": 1,
            "rows_captured": 4,
            "rows_gathered": 13,
            "gather_bytes": 3 * wire_bytes(list(range(13)), [13], 4, "packed"),
        }


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize(("extend", "prefix"), [([1], [0]), ([1], [512]), ([3], [0]), ([1, 2], [7, 0])], ids=str)
def test_fewer_tokens_than_ranks(
    pool: RankPool, ranks: Ranks, extend: list[int], prefix: list[int], fused: bool
) -> None:
    for seen in ask(pool, ranks[4], "forward", extend, prefix, fused, "window"):
        assert seen.collectives == seen.stock_collectives == []
        assert seen.through == (sum(extend), AUX_WIDTH)
        assert torch.equal(seen.rows, seen.expected)
        assert seen.logits_equal


@pytest.mark.parametrize("cp_size", [2, 4])
def test_a_forward_that_raises_leaves_nothing_behind(pool: RankPool, ranks: Ranks, cp_size: int) -> None:
    for error, whole in ask(pool, ranks[cp_size], "fail_in_a_layer"):
        assert "NoneType" in error
        assert whole
    for seen in ask(pool, ranks[cp_size], "forward", [13], [0], False):
        assert torch.equal(seen.rows, seen.expected)


@pytest.mark.parametrize("kind", ["drop-row", "swap-rows", "zero-rows"])
def test_a_spoilt_shard_is_noticed_by_every_rank(pool: RankPool, ranks: Ranks, kind: str) -> None:
    for rank, words in enumerate(ask(pool, ranks[2], "faulty", kind)):
        counts = HostCounts(*words[:HOST_WORDS])
        assert counts.missing_rows == (1 if kind == "drop-row" and rank == 1 else 0)
        assert counts.hidden_rows == counts.positions == counts.expected_rows == 13
        bad_positions, bad_locations = words[HOST_WORDS : HOST_WORDS + 2]
        assert bad_positions == bad_locations == 6, "rank 1 owns six of the thirteen rows"


@pytest.mark.compat
@pytest.mark.parametrize("cp_size", [2, 4])
def test_stock_gathers_every_row_three_times(pool: RankPool, ranks: Ranks, cp_size: int) -> None:
    for seen in ask(pool, ranks[cp_size], "forward", [13], [0], True):
        assert torch.equal(seen.stock_rows, seen.expected), "stock's rows under CP are those without"
        assert seen.stock_collectives == [physical_rows(13, cp_size) * width * 2 for width in STOCK_WIDTHS]
