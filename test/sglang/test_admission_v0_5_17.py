"""Launch arguments through SGLang's own resolution: what is admitted, what is refused, what stays stock."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from argument_cases import PRETEND_HIP, Resolved
from spawning import Spawn

from sglang_dspark_cp.smoke.arguments import prefill_arguments, write_model_folder
from sglang_dspark_cp.smoke.processes import RankPool, RankProcess
from sglang_dspark_cp.smoke.stock import unified

pytestmark = pytest.mark.timeout(150)

LEGACY_CP = ["--enable-dsa-prefill-context-parallel", "--dsa-prefill-cp-mode", "round-robin-split"]
UNIFIED_CP = ["--enable-prefill-cp", "--cp-strategy", "interleave"]
DSPARK = ["--speculative-algorithm", "DSPARK"]


@dataclass(frozen=True)
class Server:
    """The processes that resolve, and the small model's folder."""

    pool: RankPool
    model: Path
    with_plugin: RankProcess
    switched_off: RankProcess
    guarded: RankProcess

    def resolve(self, rank: RankProcess, *lines: list[str], **variables: str) -> list[Resolved]:
        rank.start("resolve_all", list(lines), variables)
        (answers,) = self.pool.collect([rank], 60.0)
        return answers

    def prefill(self, *more: str, tp: int = 8) -> list[str]:
        """The documented arguments of a CP prefill worker."""
        return [*prefill_arguments(self.model, tp, 8192, 8998), "--random-seed", "1", *more]

    def without(self, line: list[str], *gone: list[str]) -> list[str]:
        """A line less groups of flags that stand together."""
        for flags in gone:
            at = next(i for i in range(len(line)) if line[i : i + len(flags)] == flags)
            line = line[:at] + line[at + len(flags) :]
        return line


@pytest.fixture(scope="module")
def server(pool: RankPool, spawn: Spawn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    factory, ours = "argument_cases:ManyResolver", {"SGLANG_PLUGINS": "dspark_cp"}
    ranks = [
        *spawn(factory, environment=ours),
        *spawn(factory, environment={**ours, "SGLANG_DSPARK_CP": "0"}),
        *spawn(factory, environment=ours, release="0.5.99"),
    ]
    yield Server(pool, write_model_folder(tmp_path_factory.mktemp("model")), *ranks)
    for rank in ranks:
        rank.kill()
        pool.ranks.remove(rank)


# ---------------------------------------------------------------------------------------------------------- admitted


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_both_spellings_resolve_to_the_same_arguments(server: Server, tp: int) -> None:
    line = server.prefill(tp=tp)
    legacy, new, named, both = server.resolve(
        server.with_plugin,
        line,
        unified(line),
        [*unified(line), "--attention-context-parallel-size", str(tp)],
        [*line, *UNIFIED_CP],
    )
    assert legacy.error == ""
    assert legacy.fields["attn_cp_size"] == legacy.fields["tp_size"] == str(tp)
    assert legacy.fields["speculative_algorithm"] == "'DSPARK'"
    assert legacy.fields["cp_strategy"] == "'interleave'"
    assert legacy.fields["enable_dp_attention"] == "False", "set only while arguments resolve"
    assert legacy.fields["speculative_draft_model_path"] == repr(str(server.model))
    assert len(legacy.fields) > 300
    assert new == legacy
    assert named == legacy
    assert both == legacy


@pytest.mark.parametrize(
    "flags",
    [
        ["--disaggregation-transfer-backend", "mooncake"],
        ["--disable-radix-cache"],
        ["--chunked-prefill-size", "1"],
        ["--disable-overlap-schedule"],
        ["--enable-dp-lm-head"],
        ["--data-parallel-size", "1"],
        ["--attention-backend", "dsv4"],
    ],
    ids=" ".join,
)
def test_what_may_be_added(server: Server, flags: list[str]) -> None:
    for line in (server.prefill(*flags), unified(server.prefill(*flags))):
        (resolved,) = server.resolve(server.with_plugin, line)
        assert resolved.error == ""
        assert resolved.fields["attn_cp_size"] == "8"


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


REFUSED = {
    "pp 2": (["--pipeline-parallel-size", "2"], "pipeline parallel size 2; allowed: 1"),
    "dp 2": (["--data-parallel-size", "2"], "data parallel size 2; allowed: 1"),
    "attention tp 2": (["--attn-cp-size", "4"], "attention TP 2 (tp 8, attention CP 4, dp 1)"),
    "attention tp 4": (["--attention-context-parallel-size", "2"], "attention TP 4 (tp 8, attention CP 2, dp 1)"),
    "nixl": (["--disaggregation-transfer-backend", "nixl"], "transfer backend 'nixl'; allowed: 'mooncake'"),
    "hierarchical cache": (["--enable-hierarchical-cache"], "the hierarchical cache;"),
    "dcp 2": (["--dcp-size", "2"], "decode context parallel size 2; allowed: 1"),
    "pdmux": (["--enable-pdmux"], "PD multiplexing;"),
    "tp 1": (["--tensor-parallel-size", "1"], "tensor parallel size 1; allowed: 2 to 8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(server: Server, name: str) -> None:
    flags, text = REFUSED[name]
    line = server.prefill(*flags)
    for resolved in server.resolve(server.with_plugin, line, unified(line)):
        assert_refused(resolved, text)


def test_zigzag_is_refused_in_both_spellings(server: Server) -> None:
    line = server.without(server.prefill(), LEGACY_CP)
    legacy = [*line, "--enable-dsa-prefill-context-parallel", "--dsa-prefill-cp-mode", "in-seq-split"]
    for resolved in server.resolve(
        server.with_plugin, legacy, [*line, "--enable-prefill-cp", "--cp-strategy", "zigzag"]
    ):
        assert_refused(resolved, "context-parallel split 'zigzag'; allowed: 'interleave'")
        assert "--cp-strategy interleave" in resolved.error
        assert "--dsa-prefill-cp-mode round-robin-split" in resolved.error


def test_cp_v2_is_refused(server: Server) -> None:
    line = server.prefill()
    for resolved in server.resolve(server.with_plugin, line, unified(line), SGLANG_ENABLE_CP_V2="1"):
        assert_refused(resolved, "SGLANG_ENABLE_CP_V2=1")
        assert "unset SGLANG_ENABLE_CP_V2" in resolved.error
    (off,) = server.resolve(server.with_plugin, line, SGLANG_ENABLE_CP_V2="0")
    assert off.error == ""


def test_the_unified_kv_ring_is_refused_where_it_exists(server: Server) -> None:
    line, ring = server.prefill(), {"SGLANG_HACK_FLASHMLA_BACKEND": "unified_kv_triton"}
    for resolved in server.resolve(server.with_plugin, line, unified(line), **ring, **{PRETEND_HIP: "1"}):
        assert_refused(resolved, "the unified-KV ring")
        assert "unset SGLANG_HACK_FLASHMLA_BACKEND" in resolved.error
    (on_nvidia,) = server.resolve(server.with_plugin, line, **ring)
    assert on_nvidia.error == "", "SGLang ignores that variable on NVIDIA GPUs"


def test_every_violation_is_named_at_once(server: Server) -> None:
    flags = [
        *("--enable-prefill-cp", "--cp-strategy", "zigzag", "--pipeline-parallel-size", "2"),
        *("--data-parallel-size", "2", "--disaggregation-transfer-backend", "nixl", "--enable-hierarchical-cache"),
    ]
    line = [*server.without(server.prefill(), LEGACY_CP), *flags]
    (resolved,) = server.resolve(server.with_plugin, line, SGLANG_ENABLE_CP_V2="1")
    assert_refused(
        resolved,
        "context-parallel split 'zigzag'",
        "pipeline parallel size 2",
        "data parallel size 2",
        "transfer backend 'nixl'",
        "SGLANG_ENABLE_CP_V2=1",
        "the hierarchical cache",
    )


# ------------------------------------------------------------------------------------------------------ left to stock


def stock_lines(server: Server) -> dict[str, list[str]]:
    """Command lines that are none of this package's business."""
    prefill = server.prefill()
    plain = server.without(prefill, LEGACY_CP)
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
        "DSPARK decode with CP": [*decode, *LEGACY_CP],
        "DSPARK prefill without CP": plain,
        "DSPARK prefill without CP, nixl, DP8": [
            *(*plain, "--disaggregation-transfer-backend", "nixl", "--data-parallel-size", "8"),
            *("--enable-dp-attention", "--enable-dp-lm-head"),
        ],
        "prefill CP without DSPARK": server.without(prefill, DSPARK),
        "prefill CP without DSPARK, zigzag": [
            *(*server.without(plain, DSPARK), "--enable-prefill-cp", "--cp-strategy", "zigzag"),
        ],
        "prefill CP without DSPARK, unified flags": unified(server.without(prefill, DSPARK)),
        "aggregated DSPARK": aggregated,
        "aggregated DSPARK with CP": [*aggregated, *LEGACY_CP],
        "aggregated DSPARK with CP, unified flags": [*aggregated, *UNIFIED_CP],
        "aggregated": server.without(aggregated, DSPARK),
        "an unknown flag": server.prefill("--no-such-flag"),
    }


ACCEPTED_BY_STOCK = {
    *("DSPARK decode, TP8/DP8", "DSPARK decode, TP8", "DSPARK prefill without CP", "prefill CP without DSPARK"),
    *("DSPARK prefill without CP, nixl, DP8", "aggregated DSPARK", "aggregated"),
}


def test_everything_else_is_left_to_stock(server: Server) -> None:
    lines = stock_lines(server)
    ours, stock, guarded = (
        dict(zip(lines, server.resolve(rank, *lines.values()), strict=True))
        for rank in (server.with_plugin, server.switched_off, server.guarded)
    )
    assert {name for name, resolved in stock.items() if not resolved.error} == ACCEPTED_BY_STOCK
    for name in lines:
        assert ours[name] == stock[name], name
        assert guarded[name] == stock[name], name
    assert "prefill" not in stock["DSPARK decode, TP8/DP8"].fields["disaggregation_mode"]


def test_the_guard_refuses_real_arguments(server: Server) -> None:
    legacy, by_size, new = server.resolve(
        server.guarded,
        server.prefill(),
        [*server.without(server.prefill(), LEGACY_CP), "--attn-cp-size", "8"],
        unified(server.prefill()),
    )
    for resolved in (legacy, by_size):
        assert resolved.error.startswith("ActivationError: sglang-dspark-cp: SGLang 0.5.99 was not reviewed.")
        assert not resolved.built_modules
    assert "mutually exclusive" in new.error, "stock refuses these before the guard is asked"


@pytest.mark.compat
def test_stock_refuses_both_spellings(server: Server) -> None:
    line = server.prefill()
    legacy, new, with_lm_head = server.resolve(server.switched_off, line, unified(line), [*line, "--enable-dp-lm-head"])
    assert legacy.error == "ValueError: DSpark with dp attention requires --enable-dp-lm-head."
    assert "mutually exclusive" in new.error
    assert with_lm_head.error.startswith("ValueError: DSpark with dp attention does not support context parallel")
