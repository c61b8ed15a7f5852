"""Launch arguments through SGLang's own resolution: what this package adds to stock's checks, and what stays stock."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from argument_cases import PRETEND_HIP, Resolved
from spawning import Spawn

from sglang_dspark_cp.smoke.arguments import prefill_arguments, write_model_folder
from sglang_dspark_cp.smoke.processes import RankPool, RankProcess

pytestmark = pytest.mark.timeout(150)

CP = ["--enable-prefill-cp", "--cp-strategy", "interleave"]
DSPARK = ["--speculative-algorithm", "DSPARK"]


@dataclass(frozen=True)
class Server:
    """The processes that resolve, and the small models' folders."""

    pool: RankPool
    model: Path
    v41: Path
    with_plugin: RankProcess
    switched_off: RankProcess
    guarded: RankProcess

    def resolve(self, rank: RankProcess, *lines: list[str], **variables: str) -> list[Resolved]:
        rank.start("resolve_all", list(lines), variables)
        (answers,) = self.pool.collect([rank], 90.0)
        return answers

    def prefill(self, *more: str, tp: int = 8, model: Path | None = None) -> list[str]:
        """The documented arguments of a CP prefill worker."""
        return [*prefill_arguments(model or self.model, tp, 8192, 8998), "--random-seed", "1", *more]

    def without(self, line: list[str], *gone: list[str]) -> list[str]:
        """A line less groups of flags that stand together."""
        for flags in gone:
            at = next(i for i in range(len(line)) if line[i : i + len(flags)] == flags)
            line = line[:at] + line[at + len(flags) :]
        return line


def write_v41(folder: Path) -> Path:
    """The small model as a DeepSeek-V4.1, as far as arguments look at it."""
    config = json.loads((write_model_folder(folder) / "config.json").read_text())
    config |= {"model_type": "deepseek_v41", "kv_source_layer_ids": [0], "index_source_layer_ids": [0]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def server(pool: RankPool, spawn: Spawn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    factory, ours = "argument_cases:ManyResolver", {"SGLANG_PLUGINS": "dspark_cp"}
    ranks = [
        *spawn(factory, environment=ours),
        *spawn(factory, environment={**ours, "SGLANG_DSPARK_CP": "0"}),
        *spawn(factory, environment=ours, release="0.5.22"),
    ]
    folder = tmp_path_factory.mktemp("model")
    yield Server(pool, write_model_folder(folder / "v4"), write_v41(folder / "v41"), *ranks)
    for rank in ranks:
        rank.kill()
        pool.ranks.remove(rank)


# ---------------------------------------------------------------------------------------------------------- admitted


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_what_is_admitted_resolves_as_in_stock(server: Server, tp: int) -> None:
    line = server.prefill(tp=tp)
    (ours,), (stock,) = (server.resolve(rank, line) for rank in (server.with_plugin, server.switched_off))
    assert ours.error == ""
    assert ours.fields["attn_cp_size"] == ours.fields["tp_size"] == str(tp)
    assert ours.fields["speculative_algorithm"] == "'DSPARK'"
    assert ours.fields["speculative_draft_model_path"] == repr(str(server.model))
    assert len(ours.fields) > 300
    assert ours == stock


@pytest.mark.parametrize(
    "flags",
    [
        ["--disable-radix-cache"],
        ["--chunked-prefill-size", "1"],
        ["--disable-overlap-schedule"],
        ["--enable-dp-lm-head"],
        ["--data-parallel-size", "1"],
        ["--attention-backend", "dsv4"],
        ["--attention-context-parallel-size", "8"],
        ["--cuda-graph-backend-prefill", "disabled"],
    ],
    ids=" ".join,
)
def test_what_may_be_added(server: Server, flags: list[str]) -> None:
    line = server.prefill(*flags)
    (ours,), (stock,) = (server.resolve(rank, line) for rank in (server.with_plugin, server.switched_off))
    assert ours.error == ""
    assert ours.fields["attn_cp_size"] == "8"
    assert ours == stock


# ----------------------------------------------------------------------------------------------------------- refused


def assert_refused(resolved: Resolved, *texts: str) -> None:
    assert resolved.error.startswith("TopologyError: DSPARK on a PD prefill worker with context parallelism is refused")
    assert f"before weights load, {len(texts)} setting(s) have to change:" in resolved.error
    for number, text in enumerate(texts, 1):
        assert f"\n  {number}. found {text}" in resolved.error
    for line in resolved.error.splitlines()[1:]:
        assert re.search(r"; allowed: .+; because .+; fix: .+", line)
    assert not resolved.built_modules
    assert resolved.fields == {}


ADDED = {
    "pp 2": (["--pipeline-parallel-size", "2"], "pipeline parallel size 2; allowed: 1"),
    "attention tp 2": (["--attn-cp-size", "4"], "attention TP 2 (tp 8, attention CP 4, dp 1)"),
    "nixl": (["--disaggregation-transfer-backend", "nixl"], "transfer backend 'nixl'; allowed: 'mooncake'"),
    "hierarchical cache": (["--enable-hierarchical-cache"], "the hierarchical cache;"),
    "pdmux": (["--enable-pdmux"], "PD multiplexing;"),
    "tp 1": (["--tensor-parallel-size", "1"], "tensor parallel size 1; allowed: 2 to 8"),
    "two-batch overlap": (["--enable-two-batch-overlap"], "two-batch overlap;"),
    "breakable graph": (["--cuda-graph-backend-prefill", "breakable"], "a CUDA graph for prefill;"),
    "full graph": (["--cuda-graph-backend-prefill", "full"], "a CUDA graph for prefill;"),
}


@pytest.mark.parametrize("name", ADDED)
def test_refused_by_this_package(server: Server, name: str) -> None:
    flags, text = ADDED[name]
    (resolved,) = server.resolve(server.with_plugin, server.prefill(*flags))
    assert_refused(resolved, text)


def test_cp_without_the_prefill_flag_is_refused(server: Server) -> None:
    line = [*server.without(server.prefill(), CP), "--attn-cp-size", "8"]
    (resolved,) = server.resolve(server.with_plugin, line)
    assert_refused(resolved, "context-parallel split 'unset'; allowed: 'interleave'")


BY_STOCK = {
    "dp 2": ["--data-parallel-size", "2"],
    "tp 16": ["--tensor-parallel-size", "16"],
    "zigzag": ["--cp-strategy", "zigzag"],
    "dcp 2": ["--dcp-size", "2"],
    "kv sharding": ["--enable-kv-cache-sharding"],
    "layer split": ["--enable-dsa-cache-layer-split"],
    "unified memory": ["--enable-unified-memory"],
    "allocation after prefill": ["--disaggregation-decode-allocation-policy", "prefill_complete"],
}


@pytest.mark.parametrize("name", BY_STOCK)
def test_refused_by_stock(server: Server, name: str) -> None:
    line = server.prefill(*BY_STOCK[name])
    (ours,), (stock,) = (server.resolve(rank, line) for rank in (server.with_plugin, server.switched_off))
    assert stock.error != ""
    assert ours == stock


@pytest.mark.compat
@pytest.mark.parametrize("name", ADDED)
def test_stock_lacks_these_checks(server: Server, name: str) -> None:
    flags, _ = ADDED[name]
    (stock,) = server.resolve(server.switched_off, server.prefill(*flags))
    later = {"pdmux", "tp 1"}  # stock meets these two with an assertion elsewhere, or drops CP without a word
    assert stock.error == "" or name in later, stock.error


def test_every_violation_is_named_at_once(server: Server) -> None:
    flags = [
        "--pipeline-parallel-size",
        "2",
        "--disaggregation-transfer-backend",
        "nixl",
        "--enable-hierarchical-cache",
    ]
    (resolved,) = server.resolve(server.with_plugin, server.prefill(*flags))
    assert_refused(resolved, "pipeline parallel size 2", "transfer backend 'nixl'", "the hierarchical cache")


def test_the_unified_kv_ring_is_refused_where_it_exists(server: Server) -> None:
    line, ring = server.prefill(), {"SGLANG_HACK_FLASHMLA_BACKEND": "unified_kv_triton"}
    (resolved,) = server.resolve(server.with_plugin, line, **ring, **{PRETEND_HIP: "1"})
    assert_refused(resolved, "the unified-KV ring")
    (on_nvidia,) = server.resolve(server.with_plugin, line, **ring)
    assert on_nvidia.error == "", "SGLang ignores that variable on NVIDIA GPUs"


# ------------------------------------------------------------------------------------------------------ left to stock


def stock_lines(server: Server) -> dict[str, list[str]]:
    """Command lines that are none of this package's business."""
    prefill = server.prefill()
    plain = server.without(prefill, CP)
    decode = ["decode" if word == "prefill" else word for word in plain]
    aggregated = server.without(
        plain,
        ["--disaggregation-mode", "prefill"],
        ["--disaggregation-transfer-backend", "mooncake"],
        ["--disaggregation-bootstrap-port", "8998"],
    )
    return {
        "DSPARK decode, TP8/DP8": [
            *decode,
            *("--data-parallel-size", "8", "--enable-dp-attention", "--enable-dp-lm-head"),
        ],
        "DSPARK decode, TP8/DP8, no DP LM head": [*decode, "--data-parallel-size", "8", "--enable-dp-attention"],
        "DSPARK decode, TP8": decode,
        "DSPARK decode with CP": [*decode, *CP],
        "DSPARK prefill without CP": plain,
        "DSPARK prefill without CP, nixl, PP2": [
            *(*plain, "--disaggregation-transfer-backend", "nixl", "--pipeline-parallel-size", "2"),
        ],
        "prefill CP without DSPARK": server.without(prefill, DSPARK),
        "prefill CP without DSPARK, nixl": [
            *(*server.without(prefill, DSPARK), "--disaggregation-transfer-backend", "nixl"),
        ],
        "aggregated DSPARK": aggregated,
        "aggregated DSPARK with CP": [*aggregated, *CP],
        "aggregated": server.without(aggregated, DSPARK),
        "an unknown flag": server.prefill("--no-such-flag"),
    }


REFUSED_BY_STOCK = {"DSPARK decode, TP8/DP8, no DP LM head", "an unknown flag"}


def test_everything_else_is_left_to_stock(server: Server) -> None:
    lines = stock_lines(server)
    ours, stock, guarded = (
        dict(zip(lines, server.resolve(rank, *lines.values()), strict=True))
        for rank in (server.with_plugin, server.switched_off, server.guarded)
    )
    assert {name for name, resolved in stock.items() if resolved.error} == REFUSED_BY_STOCK
    for name in lines:
        assert ours[name] == stock[name], name
        assert guarded[name] == stock[name], name
    assert "prefill" not in stock["DSPARK decode, TP8/DP8"].fields["disaggregation_mode"]


@pytest.mark.parametrize("flags", [[], ["--disaggregation-transfer-backend", "nixl"]], ids=["mooncake", "nixl"])
def test_deepseek_v41_is_left_to_stock(server: Server, flags: list[str]) -> None:
    line, static = server.prefill(*flags, model=server.v41), {"SGLANG_RAGGED_VERIFY_MODE": "static"}
    (ours,), (stock,) = (server.resolve(rank, line, **static) for rank in (server.with_plugin, server.switched_off))
    assert ours.error == ""
    assert ours == stock


def test_the_guard_refuses_real_arguments(server: Server) -> None:
    asked = server.prefill(), [*server.without(server.prefill(), CP), "--attn-cp-size", "8"]
    for resolved in server.resolve(server.guarded, *asked):
        assert resolved.error.startswith(
            "ActivationError: sglang-dspark-cp: SGLang 0.5.22 is not supported: it gathers"
        )
        assert "; use 0.5.17 or 0.5.23. " in resolved.error
        assert not resolved.built_modules


@pytest.mark.compat
def test_stock_admits_the_feature(server: Server) -> None:
    (stock,) = server.resolve(server.switched_off, server.prefill())
    assert stock.error == ""
    assert stock.fields["attn_cp_size"] == "8"
