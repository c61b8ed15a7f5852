"""Draft-KV rows on the CPU: page format, and the bytes of an independent quantisation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark_cp.core.reference import (
    DATA_BYTES,
    NOPE,
    ROPE,
    ROW_WIDTH,
    RowParts,
    dequantise,
    make_rows,
    page_bytes,
    read_rows,
    write_rows,
)
from sglang_dspark_cp.smoke import geometry, oracle

torch.set_num_threads(1)

UNTOUCHED = 0xA5
# Sixteen quarters whose squares have the mean 1: RMS norm with eps 0 is then exact, in any precision.
QUARTERS = (9, 7, 6, 5, 4, 4, 3, 3, 2, 2, 2, 1, 1, 1, 0, 0)


def no_rotation(positions: int) -> torch.Tensor:
    return torch.ones(positions, ROPE // 2, dtype=torch.complex64)


def rotation(positions: int) -> torch.Tensor:
    pair = torch.arange(ROPE // 2, dtype=torch.float64)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * geometry.ROPE_THETA ** (-2.0 * pair / ROPE)
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


def random_parts(rows: int, seed: int = 0) -> RowParts:
    generator = torch.Generator().manual_seed(seed)
    return RowParts(
        torch.randint(0, 256, (rows, NOPE), generator=generator, dtype=torch.uint8),
        torch.randn(rows, ROPE, generator=generator).to(torch.bfloat16),
        torch.randint(0, 256, (rows, 7), generator=generator, dtype=torch.uint8),
    )


def same(left: RowParts, right: RowParts) -> bool:
    return (
        torch.equal(left.nope, right.nope)
        and torch.equal(left.rope.view(torch.int16), right.rope.view(torch.int16))
        and torch.equal(left.scale, right.scale)
    )


def exact_kv(rows: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, 512] whose mean square is exactly 1."""
    base = torch.tensor(QUARTERS * (ROW_WIDTH // len(QUARTERS)), dtype=torch.float32) / 4
    order = torch.stack([torch.randperm(ROW_WIDTH, generator=generator) for _ in range(rows)])
    sign = torch.randint(0, 2, (rows, ROW_WIDTH), generator=generator) * 2 - 1
    kv = base[order] * sign
    assert torch.equal(kv.square().mean(-1), torch.ones(rows))
    return kv


def tile_weights(generator: torch.Generator) -> torch.Tensor:
    """[512] bf16, of another magnitude in every tile, so that the tiles get other exponents."""
    exponents = torch.randint(-12, 12, (ROW_WIDTH // 64,), generator=generator)
    return (
        ((torch.rand(8, 64, generator=generator) + 0.5) * torch.exp2(exponents.float())[:, None]).flatten().bfloat16()
    )


# ------------------------------------------------------------------------------------------------------------- pages


def test_page_bytes() -> None:
    assert page_bytes(256) == 149760
    assert page_bytes(256) % DATA_BYTES == 0
    assert page_bytes(64) == -(-584 * 64 // 576) * 576


@given(st.integers(1, 600))
def test_a_page_holds_its_rows(page_size: int) -> None:
    assert page_bytes(page_size) % DATA_BYTES == 0
    assert 0 <= page_bytes(page_size) - page_size * 584 < DATA_BYTES


@pytest.mark.parametrize("page_size", [1, 64, 256])
def test_write_and_read(page_size: int) -> None:
    pool = torch.full((4, page_bytes(page_size)), UNTOUCHED, dtype=torch.uint8)
    slots = torch.randperm(4 * page_size, generator=torch.Generator().manual_seed(1))[: 3 * page_size]
    parts = random_parts(3 * page_size)
    write_rows(pool, page_size, slots, parts)
    assert same(read_rows(pool, page_size, slots), parts)
    order = torch.arange(3 * page_size - 1, -1, -1)
    back = read_rows(pool, page_size, slots[order].int())
    assert same(back, RowParts(parts.nope[order], parts.rope[order], parts.scale[order]))


def test_where_the_bytes_lie() -> None:
    """Row r: data at r * 576, its seven exponents at 576 * 256 + r * 8; nothing else of the page moves."""
    pool = torch.full((2, page_bytes(256)), UNTOUCHED, dtype=torch.uint8)
    parts = random_parts(1)
    write_rows(pool, 256, torch.tensor([256 + 3]), parts)
    expected = torch.full_like(pool, UNTOUCHED)
    expected[1, 3 * 576 : 3 * 576 + 448] = parts.nope[0]
    expected[1, 3 * 576 + 448 : 4 * 576] = parts.rope[0].view(torch.uint8)
    expected[1, 576 * 256 + 3 * 8 : 576 * 256 + 3 * 8 + 7] = parts.scale[0]
    assert torch.equal(pool, expected)


def test_negative_slots_are_skipped() -> None:
    pool = torch.full((1, page_bytes(256)), UNTOUCHED, dtype=torch.uint8)
    parts = random_parts(5)
    write_rows(pool, 256, torch.tensor([-1, 7, -1, 255, -256]), parts)
    keep = torch.tensor([1, 3])
    kept = RowParts(parts.nope[keep], parts.rope[keep], parts.scale[keep])
    assert same(read_rows(pool, 256, torch.tensor([7, 255])), kept)
    alone = torch.full_like(pool, UNTOUCHED)
    write_rows(alone, 256, torch.tensor([7, 255]), kept)
    assert torch.equal(pool, alone)


def test_all_slots_negative() -> None:
    pool = torch.full((1, page_bytes(256)), UNTOUCHED, dtype=torch.uint8)
    write_rows(pool, 256, torch.tensor([-1, -1]), random_parts(2))
    assert pool.eq(UNTOUCHED).all()


# ------------------------------------------------------------------------------------------------------ quantisation


@pytest.mark.parametrize("seed", range(8))
def test_bytes_equal_the_oracles(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    kv, weight = exact_kv(40, generator), tile_weights(generator)
    rows = make_rows(kv, weight, 0.0, no_rotation(1), torch.zeros(40, dtype=torch.int64))
    exact = kv.double() * weight.double()
    codes, exponents = oracle._quantise(exact[:, :NOPE])
    assert len(set(exponents.flatten().tolist())) > 3
    assert torch.equal(rows.nope, codes)
    assert torch.equal(rows.scale, exponents)
    assert torch.equal(rows.rope, exact[:, NOPE:].to(torch.bfloat16))


@pytest.mark.parametrize("power", [-20, -8, -1, 0, 1, 7])
def test_exponents_at_powers_of_two(power: int) -> None:
    """A tile whose largest value is 448 * 2^k fits exactly; anything above needs the next exponent."""
    top = torch.tensor([448.0, 448.0 * (1 + 2.0**-22), 448.0 * (1 - 2.0**-22), 449.0]) * 2.0**power
    weight = torch.zeros(ROW_WIDTH)
    weight[::64] = 1.0
    kv = torch.zeros(4, ROW_WIDTH)
    kv[:, ::64] = top[:, None]
    # eps chosen so that the norm is exactly 1 is not possible here; the weight undoes it instead.
    norm = torch.rsqrt(kv.square().mean(-1))
    rows = make_rows(kv, weight, 0.0, no_rotation(1), torch.zeros(4, dtype=torch.int64))
    x = (kv * norm[:, None] * weight)[:, :NOPE]
    codes, exponents = oracle._quantise(x.double())
    assert torch.equal(rows.nope, codes)
    assert torch.equal(rows.scale, exponents)


def test_zeros_and_tiny_rows() -> None:
    kv = torch.zeros(2, ROW_WIDTH)
    kv[1] = 1e-30
    rows = make_rows(kv, torch.ones(ROW_WIDTH), 1e-6, no_rotation(1), torch.zeros(2, dtype=torch.int64))
    codes, exponents = oracle._quantise(torch.zeros(2, NOPE, dtype=torch.float64))
    assert torch.equal(rows.nope, codes)
    assert torch.equal(rows.scale, exponents)
    assert dequantise(rows).abs().max() < 1e-20


@pytest.mark.parametrize("seed", range(4))
def test_norm_and_rotation_agree_with_the_oracle(seed: int) -> None:
    """float32 against float64: equal up to the quantisation of either."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(50, ROW_WIDTH, generator=generator).bfloat16()
    weight = (torch.rand(ROW_WIDTH, generator=generator) + 0.5).bfloat16()
    positions = torch.randint(0, 512, (50,), generator=generator, dtype=torch.int32)
    rows = make_rows(kv, weight, geometry.NORM_EPS, rotation(512), positions)
    row = oracle._rms(kv.double(), weight)
    rope = oracle._rotate(row[:, NOPE:], positions.double())
    codes, exponents = oracle._quantise(row[:, :NOPE])
    assert torch.equal(rows.scale, exponents)
    assert (rows.nope != codes).float().mean() < 1e-3  # float32 next to a rounding border of e4m3
    exact = torch.cat([row[:, :NOPE], rope], dim=1)
    error = (dequantise(rows) - exact).abs()
    step = torch.exp2(rows.scale.double() - 127).repeat_interleave(64, dim=1)
    limit = (exact[:, :NOPE].abs() * 2.0**-4).maximum(step * 2.0**-10)  # half a step of e4m3
    assert (error[:, :NOPE] <= limit * 1.001).all()
    assert (error[:, NOPE:] <= rope.abs() * 2.0**-8 + 1e-5).all()


def test_rotation_uses_each_rows_position() -> None:
    generator = torch.Generator().manual_seed(3)
    kv = exact_kv(1, generator).expand(4, -1)
    rows = make_rows(kv, torch.ones(ROW_WIDTH), 0.0, rotation(16), torch.tensor([0, 5, 5, 9]))
    assert torch.equal(rows.rope[1], rows.rope[2])
    assert not torch.equal(rows.rope[0], rows.rope[1])
    assert not torch.equal(rows.rope[1], rows.rope[3])
    assert torch.equal(rows.rope[0], kv[0, NOPE:].bfloat16())
    assert torch.equal(rows.nope[0], rows.nope[3])


def test_dequantise_literal() -> None:
    nope = torch.zeros(1, NOPE)
    nope[0, 0], nope[0, 1], nope[0, 64], nope[0, 447] = 1.0, -448.0, 0.5, 240.0
    scale = torch.tensor([[127, 128, 0, 127, 127, 127, 120]], dtype=torch.uint8)
    rope = torch.linspace(-2, 2, ROPE).bfloat16().unsqueeze(0)
    numbers = dequantise(RowParts(nope.to(torch.float8_e4m3fn).view(torch.uint8), rope, scale))
    assert numbers.dtype == torch.float64
    assert numbers.shape == (1, ROW_WIDTH)
    assert numbers[0, [0, 1, 64, 447]].tolist() == [1.0, -448.0, 1.0, 240.0 / 128]
    assert numbers[0, :NOPE].count_nonzero() == 4
    assert torch.equal(numbers[0, NOPE:], rope[0].double())


def test_dequantised_rows_survive_the_pool() -> None:
    generator = torch.Generator().manual_seed(9)
    kv, weight = exact_kv(6, generator), tile_weights(generator)
    rows = make_rows(kv, weight, 0.0, rotation(8), torch.arange(6))
    pool = torch.zeros(2, page_bytes(256), dtype=torch.uint8)
    slots = torch.tensor([0, 255, 256, 300, 511, 17])
    write_rows(pool, 256, slots, rows)
    assert torch.equal(dequantise(read_rows(pool, 256, slots)), dequantise(rows))
