"""Costs by arithmetic: the numbers of the design documents must come out, by hand."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark_cp.core import costs
from sglang_dspark_cp.core.costs import Chunk, CostInputError, DesignCost, Gather, ModelShape, Rates

FLASH = costs.built_in("flash")
PRO = costs.built_in("pro")
RATES = Rates(link_gb_s=250, matmul_tflop_s=700, launch_us=20)


def design(id: str, shape: ModelShape, chunk: Chunk, **options: Any) -> DesignCost:
    return next(cost for cost in costs.designs(shape, chunk, RATES, **options) if cost.id == id)


# All rows, bf16, without addresses, T = 8192: MB of the documented table.
TABLE = [
    ("packed", PRO, True, 352_321_536),  # 8192 * 3 * 7168 * 2
    ("packed", FLASH, True, 201_326_592),  # 8192 * 3 * 4096 * 2
    ("context", PRO, True, 117_440_512),  # 8192 * 7168 * 2
    ("context", FLASH, True, 67_108_864),  # 8192 * 4096 * 2
    ("kv", PRO, True, 25_165_824),  # 8192 * 3 * 512 * 2
    ("kv", FLASH, True, 25_165_824),
    ("window", PRO, True, 12_582_912),  # half of the rows: 32 pages of 256, 128 rows each
    ("window", FLASH, True, 12_582_912),
    ("window", PRO, False, 393_216),  # 128 * 3 * 512 * 2
    ("window", FLASH, False, 393_216),
]


@pytest.mark.parametrize(("id", "shape", "radix", "expected"), TABLE)
def test_the_documented_table_comes_out(id: str, shape: ModelShape, radix: bool, expected: int) -> None:
    assert design(id, shape, Chunk(8192, 8, radix=radix)).all_rows_bytes == expected


@pytest.mark.parametrize(("shape", "head"), [(PRO, 469_762_048), (FLASH, 268_435_456)])  # 8192 * 4 * H * 2
def test_the_gather_before_the_head_is_the_rest_of_the_stock_designs(shape: ModelShape, head: int) -> None:
    chunk = Chunk(8192, 8)
    packed = design("packed", shape, chunk).all_rows_bytes
    assert design("stock-0.5.18", shape, chunk).all_rows_bytes == packed + head
    assert design("stock-0.5.23", shape, chunk).all_rows_bytes == packed + head + packed // 3
    kept = design("packed", shape, chunk, boundary=True)
    assert (kept.all_rows_bytes, kept.collectives, kept.gathers) == (packed + head, 2, ("[T,4H]", "[T,3H]+addr"))


def test_what_a_rank_receives_in_packed_mode() -> None:
    cost = design("packed", PRO, Chunk(8192, 8))
    # 7 other ranks * 1024 rows * (3 * 7168 * 2 + 16) bytes
    assert cost.received_bytes == 7 * 1024 * 43_024 == 308_396_032
    # buffer and copy: 2 * 8192 * 43024
    assert cost.peak_bytes == 704_905_216
    # 2 * 8192 * (3 * 7168 * 7168 + 7168 * 1536)
    assert cost.flops == 2_705_829_396_480
    # 308.396032 MB / 250 GB/s = 1.23358 ms; 2.70583 T / 700 T/s = 3.86547 ms; 0.02 ms
    assert cost.milliseconds == pytest.approx(1.23358 + 3.86547 + 0.02, abs=2e-5)


def test_projection_on_the_shard() -> None:
    chunk = Chunk(8192, 8)
    # main_proj on 1024 rows: 2 * 1024 * 3 * 7168^2; wkv on 8192 rows: 2 * 8192 * 7168 * 1536
    assert design("context", PRO, chunk).flops == 315_680_096_256 + 180_388_626_432
    assert design("kv", PRO, chunk).flops == 2_705_829_396_480 // 8
    assert design("window", PRO, chunk).flops == 2_705_829_396_480 // 16


def test_collectives_and_gathers() -> None:
    found = {cost.id: (cost.collectives, cost.gathers) for cost in costs.designs(PRO, Chunk(8192, 8), RATES)}
    assert found == {
        "stock-0.5.18": (4, ("[T,H]", "[T,H]", "[T,H]", "[T,4H]")),
        "stock-0.5.23": (3, ("[T,H]", "[T,4H]", "[T,3H]")),
        "packed": (1, ("[T,3H]+addr",)),
        "context": (1, ("[T,H]+addr",)),
        "kv": (1, ("[T,3*D]+addr",)),
        "window": (1, ("[rows,3*D]+addr",)),
    }


def test_padding_rows_are_received_too() -> None:
    cost = design("kv", FLASH, Chunk(9, 8))  # P = 2: 7 * 2 rows of 3 * 512 * 2 + 16 = 3088 bytes
    assert (cost.rows, cost.rows_per_rank, cost.received_bytes) == (9, 2, 43_232)
    assert cost.peak_bytes == (16 + 9) * 3088


def test_peak_memory_keeps_earlier_copies() -> None:
    # widths 1 and 4 (2 and 8 bytes), 10 rows, 2 ranks of 5: 20 + 20, then 20 + 80 + 80
    assert costs.peak_bytes((Gather("a", 1, 10, 5), Gather("b", 4, 10, 5)), 2) == 180
    # the other way round: 80 + 80, then 80 + 20 + 20
    assert costs.peak_bytes((Gather("b", 4, 10, 5), Gather("a", 1, 10, 5)), 2) == 160
    assert costs.peak_bytes((), 2) == 0


# Two H200, all ranks of CP2, bf16, medians in ms and peak MB of the first gather probe.
PROBE = {
    (8192, "flash"): (2.94, 1.96, 0.99, 0.76),
    (8192, "pro"): (6.43, 4.90, 2.54, 2.04),
    (32768, "flash"): (11.27, 7.75, 3.98, 3.32),
    (32768, "pro"): (25.43, 20.07, 10.50, 8.84),
}


@pytest.mark.parametrize(("case", "measured"), PROBE.items(), ids=str)
def test_times_are_below_the_probe_on_two_h200_but_not_far(case: tuple[int, str], measured: tuple[float, ...]) -> None:
    found = costs.designs(costs.built_in(case[1]), Chunk(case[0], 2), replace(RATES, launch_us=0))
    times = {cost.id: cost.milliseconds for cost in found}
    for id, real in zip(("stock-0.5.18", "packed", "context", "kv"), measured, strict=True):
        assert 0.76 < times[id] / real < 0.98, id


def test_peak_memory_of_stock_and_packed_is_that_of_the_probe() -> None:
    peaks = [round(design(id, PRO, Chunk(8192, 2)).peak_bytes / 1e6) for id in ("stock-0.5.18", "packed")]
    assert peaks == [1292, 705]


def test_fewer_tokens_than_ranks_are_not_gathered() -> None:
    for cost in costs.designs(FLASH, Chunk(7, 8), RATES):
        assert (cost.collectives, cost.received_bytes, cost.peak_bytes, cost.gathers) == (0, 0, 0, ())
        assert cost.flops == 7 * 2 * (3 * 4096 * 4096 + 4096 * 1536)


# -- the window rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        (Chunk(512, 8), [(128, 256), (384, 512)]),
        (Chunk(600, 8), [(128, 256), (384, 600)]),  # page tails, and the last 128 rows from 472
        (Chunk(600, 8, radix=False), [(472, 600)]),
        (Chunk(100, 8), [(0, 100)]),
        (Chunk(1000, 8, requests=2, radix=False), [(372, 500), (872, 1000)]),
        (Chunk(600, 8, prefix=200), [(0, 56), (184, 312), (440, 600)]),  # 200..255, 384..511, 640..767, 672..799
        (Chunk(300, 8, page=128), [(0, 300)]),  # a page is no longer than the window: every row
    ],
    ids=str,
)
def test_window_runs_by_hand(chunk: Chunk, expected: list[tuple[int, int]]) -> None:
    assert costs.window_runs(chunk, 128) == expected


chunks = st.builds(
    Chunk,
    tokens=st.integers(1, 1500),
    cp=st.integers(2, 8),
    requests=st.just(1),
    prefix=st.integers(0, 700),
    page=st.sampled_from([128, 256, 384]),
    radix=st.booleans(),
).flatmap(lambda chunk: st.integers(1, min(6, chunk.tokens)).map(lambda n: replace(chunk, requests=n)))


@given(chunks, st.sampled_from([1, 100, 128]))
def test_window_rows_are_those_of_the_rule_row_by_row(chunk: Chunk, window: int) -> None:
    rows = set()
    first = 0
    for length in chunk.lengths:
        for index in range(length):
            position = chunk.prefix + index
            tail = chunk.radix and position % chunk.page >= chunk.page - window
            if tail or index >= length - window:
                rows.add(first + index)
        first += length
    assert first == chunk.tokens
    runs = costs.window_runs(chunk, window)
    assert [row for start, stop in runs for row in range(start, stop)] == sorted(rows)
    ranks = range(chunk.cp) if chunk.split else ()
    most = max((sum(row % chunk.cp == rank for row in rows) for rank in ranks), default=len(rows))
    assert costs.window_rows(chunk, window) == (len(rows), most)


# -- properties -----------------------------------------------------------------------------------------------------

shapes = st.sampled_from([FLASH, PRO])


@given(chunks, shapes, st.booleans())
def test_window_is_at_most_kv_is_at_most_context_is_at_most_packed(
    chunk: Chunk, shape: ModelShape, boundary: bool
) -> None:
    found = {cost.id: cost for cost in costs.designs(shape, chunk, RATES, boundary=boundary)}
    ordered = [found[id] for id in ("window", "kv", "context", "packed")]
    for less, more in itertools.pairwise(ordered):
        for name in ("all_rows_bytes", "received_bytes", "peak_bytes", "flops", "milliseconds"):
            assert getattr(less, name) <= getattr(more, name), name
    # an address is 16 bytes: packed is below stock once the other gathers are gone
    assert boundary or found["packed"].received_bytes <= found["stock-0.5.18"].received_bytes


@given(st.integers(8, 3000), st.sampled_from([2, 4, 8]), st.integers(0, 700), st.booleans(), shapes)
def test_costs_grow_with_the_tokens_of_one_request(
    tokens: int, cp: int, prefix: int, radix: bool, shape: ModelShape
) -> None:
    before = costs.designs(shape, Chunk(tokens, cp, prefix=prefix, radix=radix), RATES)
    after = costs.designs(shape, Chunk(tokens + 1, cp, prefix=prefix, radix=radix), RATES)
    for less, more in zip(before, after, strict=True):
        for name in ("rows", "all_rows_bytes", "received_bytes", "peak_bytes", "flops", "milliseconds"):
            assert getattr(less, name) <= getattr(more, name), (less.id, name)


@given(chunks)
def test_lengths_are_even_and_sum_to_the_tokens(chunk: Chunk) -> None:
    assert sum(chunk.lengths) == chunk.tokens
    assert max(chunk.lengths) - min(chunk.lengths) <= 1


# -- memory of the draft --------------------------------------------------------------------------------------------


def test_weight_bytes_by_hand() -> None:
    assert costs.weight_bytes(256, 384, "bf16") == 196_608
    assert costs.weight_bytes(256, 384, "fp8") == 98_304 + 4 * 2 * 3
    assert costs.weight_bytes(130, 384, "fp8") == 49_920 + 4 * 2 * 3  # a part of a block has a scale too
    assert costs.weight_bytes(256, 384, "fp4") == 49_152 + 256 * 12


def test_draft_of_flash_on_tp8_by_hand() -> None:
    parts = {part.name: (part.stock, part.context) for part in costs.draft_parts(FLASH, 8)}
    assert parts == {
        # 3 stages * 256 experts * 3 * 2048 * 4096 * (1/2 + 1/32) / 8
        "routed experts, fp4": (1_283_457_024, 0),
        # 3 * (3 * 2048 * 4096 + 3 * 4 * 16 * 32) / 8
        "shared experts": (9_439_488, 0),
        # 3 * 256 * (2 * 4096 + 4)
        "router": (6_294_528, 0),
        # 3 * (1024 * 4096 + 4 * 8 * 32  +  2 * 1024  +  32768 * 1024 + 4 * 256 * 8)
        "query path": (113_280_000, 0),
        # 3 * (2 * 8192 * 4096  +  4096 * 8192 + 4 * 32 * 64)
        "output path": (302_014_464, 0),
        # 2 matrices * 2 bytes * 129280 * 256
        "Markov head": (132_382_720, 0),
        # 3 * (4 * (2 * 24 * 16384 + 48 + 6) + 4 * 4096 + 4 * 64) + 4 * (4 * 16384 + 5) + 2 * 4096
        "mHC, norms, attention sink": (9_758_108, 0),
        # 4096 * 12288 + 4 * 32 * 96 + 2 * 4096
        "main_proj, main_norm": (50_352_128, 50_352_128),
        # 3 * (512 * 4096 + 4 * 4 * 32 + 2 * 512)
        "wkv, kv_norm": (6_296_064, 6_296_064),
        # 1048576 * 32 * 8
        "rope table": (268_435_456, 268_435_456),
    }
    assert sum(part.saved for part in costs.draft_parts(FLASH, 8)) == 1_856_626_332


# Counted once on SGLang 0.5.17's DeepseekV4ForCausalLMDSpark at full size on torch's meta device, bf16, TP 1, attention
# TP 1. The shared experts were fused into the routed ones there.
COUNTED = {
    "flash": """38_805_700_608 6_294_528 226_498_560 402_653_184 132_382_720
        9_758_108 100_671_488 12_585_984 268_435_456""",
    "pro": """152_599_265_280 16_519_680 670_049_280 1_107_296_256 264_765_440
        17_076_380 308_295_680 22_023_168 268_435_456""",
}


@pytest.mark.parametrize("name", COUNTED)
def test_bytes_in_bf16_are_those_counted_on_sglangs_own_draft(name: str) -> None:
    shape = replace(costs.built_in(name), linear="bf16", expert="bf16")
    routed, shared, *others = (part.stock for part in costs.draft_parts(shape, 1))
    assert [routed + shared, *others] == [int(size) for size in COUNTED[name].split()]


def test_routed_experts_of_pro_on_tp8() -> None:
    # 3 * 384 * 3 * 3072 * 7168 / 8 = 9 512 681 472 weights, at 1/2 + 1/32 bytes, 1 byte and scales, 2 bytes
    sizes = {
        dtype: costs.draft_parts(replace(PRO, expert=dtype), 8)[0].stock
        for dtype in costs.DTYPES  # fp8 scales: 4 bytes per 16384 weights
    }
    assert sizes == {"fp4": 5_053_612_032, "fp8": 9_515_003_904, "bf16": 19_025_362_944}


def test_replicated_shared_experts_are_not_divided() -> None:
    sharded, whole = (costs.draft_parts(FLASH, 8, shared_sharded=sharded)[1].stock for sharded in (True, False))
    assert whole == 8 * sharded


def test_kv_bytes_per_token_by_hand() -> None:
    # row 584, indexer key 132, states 16/128 * 16 * 640 = 1280
    # Flash: 43 layers, 21 of ratio 4, 20 of ratio 128:
    # 0.1 * 584 * 43 + 584 * 20 / 128 + 21 * ((584 + 132) / 4 + 128) = 2511.2 + 91.25 + 6447 = 9049.45, * 44 / 43
    assert costs.kv_bytes_per_token(FLASH) == pytest.approx(9049.45 * 44 / 43)
    # Pro: 61 layers, 30 of ratio 4, 31 of ratio 128: 3562.4 + 141.4375 + 9210 = 12913.8375, * 62 / 61
    assert costs.kv_bytes_per_token(PRO) == pytest.approx(12913.8375 * 62 / 61)
    assert costs.kv_bytes_per_token(replace(PRO, ratios=None)) is None


# -- config.json ----------------------------------------------------------------------------------------------------


def config(**changes: Any) -> dict[str, object]:
    return {key: value for key, value in {**costs.FLASH, **changes}.items() if value is not ...}


def test_a_config_without_draft_or_sizes_names_everything_that_is_missing() -> None:
    with pytest.raises(CostInputError) as caught:
        costs.shape_from_config(config(dspark_target_layer_ids=..., o_groups=..., sliding_window=...), "x", "x")
    for name in ("dspark_target_layer_ids", "o_groups", "sliding_window or window_size", "--model"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "4096"},
        {"hidden_size": 0},
        {"hidden_size": True},
        {"quantization_config": {"quant_method": "awq"}},
        {"expert_dtype": "int3"},
        {"dspark_target_layer_ids": []},
    ],
    ids=str,
)
def test_a_config_with_a_bad_value_is_refused_with_all_that_helps(changes: dict[str, Any]) -> None:
    with pytest.raises(CostInputError, match=r"found .*; allowed: .*; because .*; fix: --model"):
        costs.shape_from_config(config(**changes), "x", "x")


def test_an_unnamed_expert_dtype_is_assumed_and_marked() -> None:
    shape = costs.shape_from_config(config(expert_dtype=...), "x", "x")
    assert (shape.linear, shape.expert, shape.expert_assumed) == ("fp8", "fp8", True)
    shape = costs.shape_from_config(config(expert_dtype=..., quantization_config=...), "x", "x")
    assert (shape.linear, shape.expert) == ("bf16", "bf16")


@pytest.mark.parametrize("ratios", [..., [0, 0], [7] * 46, "0"], ids=str)
def test_unusable_ratios_leave_the_kv_tokens_out(ratios: Any) -> None:
    assert costs.shape_from_config(config(compress_ratios=ratios), "x", "x").ratios is None


@pytest.mark.parametrize(
    ("chunk", "flag"),
    [
        (Chunk(8192, 16), "--cp"),
        (Chunk(8192, 1), "--cp"),
        (Chunk(4, 2, requests=5), "--requests"),
        (Chunk(8192, 8, page=64), "--page"),
        (Chunk(8192, 8, prefix=2**20), "--prefix"),
    ],
    ids=str,
)
def test_an_impossible_forward_is_refused_with_the_flag(chunk: Chunk, flag: str) -> None:
    with pytest.raises(CostInputError, match=rf"found .*; allowed: .*; because .*; fix: .*{flag}"):
        costs.check_chunk(chunk, FLASH.positions)


def test_the_module_needs_no_torch() -> None:
    script = "import sys, json, sglang_dspark_cp.core.costs; print(json.dumps('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) is False


def test_the_address_is_that_of_packed_rows() -> None:
    from sglang_dspark_cp.core.pack import ADDRESS_BYTES

    assert costs.ADDRESS == ADDRESS_BYTES
