"""The hooked `DeepseekV4Model.forward` on real gloo groups, next to stock's own forward on the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from forward_cases_v0_5_17 import Forward
from forward_shapes import AUX_WIDTH, BATCHES, MODES, ROW_BYTES, reachable, wire_bytes
from spawning import Spawn

from sglang_dspark_cp.smoke import geometry as g
from sglang_dspark_cp.smoke.arguments import prefill_arguments, write_model_folder
from sglang_dspark_cp.smoke.processes import RankPool, RankProcess, free_ports

pytestmark = pytest.mark.timeout(180)

Ranks = dict[int, list[RankProcess]]


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
        (server_args,) = pool.collect([resolver], 60.0)
        assert isinstance(server_args, bytes), server_args
        (port,) = free_ports(1)
        groups[cp_size] = spawn(
            "forward_cases_v0_5_17:ForwardRank",
            cp_size,
            environment,
            cp_size=cp_size,
            server_args=server_args,
            port=port,
        )
        started += groups[cp_size]
    yield groups
    for rank in started:
        rank.kill()
        pool.ranks.remove(rank)


def ask(pool: RankPool, ranks: list[RankProcess], method: str, *arguments: Any) -> list[Any]:
    """The same call on every rank."""
    for rank in ranks:
        rank.start(method, *arguments)
    return pool.collect(ranks, 30.0)


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
            assert seen.rows is not None
            assert torch.equal(seen.rows, seen.expected[wanted])
            assert seen.through == (tokens, 1)
            assert seen.last_equal
            assert seen.heads == len(extend)
            assert seen.addresses_right
            assert seen.capture_restored
            # Stock gathers all streams before the head; here one gather brings rows, addresses and heads.
            rows = -(-tokens // cp_size)
            assert seen.stock_collectives == [rows * g.STREAMS * g.HIDDEN * 2]
            assert seen.collectives == [wire_bytes(wanted, extend, cp_size, mode)]
        assert by_rank[0].expected.ne(0).any()


@pytest.mark.parametrize("mode", ["context", "kv", "window"])
def test_captured_rows_in_two_buffers(pool: RankPool, ranks: Ranks, mode: str) -> None:
    (before,) = set(ask(pool, ranks[2], "split_from", 2))
    try:
        for extend, prefix in BATCHES:
            wanted = reachable(extend, prefix) if mode == "window" else list(range(sum(extend)))
            for seen in ask(pool, ranks[2], "forward", extend, prefix, True, mode):
                assert seen.rows is not None
                assert torch.equal(seen.rows, seen.expected[wanted])
                assert seen.addresses_right
                assert seen.collectives == [wire_bytes(wanted, extend, 2, mode)]
    finally:
        assert set(ask(pool, ranks[2], "split_from", before)) == {2}


@pytest.mark.parametrize("cp_size", [2, 4])
def test_all_rows_before_the_head_where_logprobs_are_wanted(pool: RankPool, ranks: Ranks, cp_size: int) -> None:
    for seen in ask(pool, ranks[cp_size], "forward", [13, 5], [0, 0], True, "kv", True):
        assert seen.last_equal
        assert seen.heads == -(-18 // cp_size) * cp_size
        rows = -(-18 // cp_size)
        assert seen.collectives == [rows * g.STREAMS * g.HIDDEN * 2, rows * ROW_BYTES["kv"]]
        assert torch.equal(seen.rows, seen.expected)


def test_the_logits_processor_picks_the_same_rows(pool: RankPool, ranks: Ranks) -> None:
    for extend in ([13], [3, 4, 9], [1] * 9):
        for ours, stock in ask(pool, ranks[2], "logits_rows", extend):
            assert ours == stock


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
    for seen in ask(pool, ranks[4], "forward", extend, prefix, fused):
        assert seen.collectives == []
        assert seen.through == (sum(extend), AUX_WIDTH)
        assert torch.equal(seen.rows, seen.expected)
        assert seen.last_equal
        assert seen.capture_restored


@pytest.mark.parametrize("cp_size", [2, 4])
def test_a_forward_that_raises_leaves_nothing_behind(pool: RankPool, ranks: Ranks, cp_size: int) -> None:
    for error, restored, hooks_left in ask(pool, ranks[cp_size], "fail_in_a_layer"):
        assert "NoneType" in error
        assert restored
        assert hooks_left == 0
    for seen in ask(pool, ranks[cp_size], "forward", [13], [0], False):
        assert torch.equal(seen.rows, seen.expected)


@pytest.mark.compat
@pytest.mark.parametrize("cp_size", [2, 4])
def test_stock_does_not_capture_under_cp(pool: RankPool, ranks: Ranks, cp_size: int) -> None:
    for error in ask(pool, ranks[cp_size], "stock_capture_under_cp"):
        assert error.startswith("NotImplementedError: DSpark aux hidden-state capture is not supported together with")


@pytest.mark.compat
def test_stock_wants_as_many_markov_shards_as_attention_tp(pool: RankPool, ranks: Ranks) -> None:
    for error in ask(pool, ranks[2], "markov_shard", 8):
        assert error.startswith("ValueError: DSpark markov_w2 TP-shard needs the attn-TP group")
        assert "attn_tp_size=1 vs lm_head tp_size=8" in error
    assert ask(pool, ranks[2], "markov_shard", 1) == ["", ""]
