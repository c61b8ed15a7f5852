"""A Triton writer of draft-pool rows, for this benchmark only: every design writes with it, so that it cancels out.

Same bytes as `core.reference` up to the last bit of a float32 sum. Needs hardware e4m3 (compute capability 8.9) or
Triton's interpreter (TRITON_INTERPRET=1 before this module is imported).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dspark_cp.core.reference import DATA_BYTES, NOPE, SCALE_BYTES, page_bytes

WARPS = 2


@triton.jit
def _write_row(
    kv,
    kv_stride,
    weight,
    freqs,
    positions,
    slots,
    pool8,
    pool16,
    eps,
    PAGE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    ROW: tl.constexpr,
    SCALES: tl.constexpr,
    FLAT: tl.constexpr,
):
    # One program per row of 512 = 8 tiles of 64; the last tile is rotated and stays bf16.
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        source = kv + row.to(tl.int64) * kv_stride
        tile = tl.arange(0, 8)[:, None]
        column = tile * 64 + tl.arange(0, 64)[None, :]
        x = tl.load(source + column).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) * (1.0 / 512) + eps)
        y = x * inverse * tl.load(weight + column).to(tl.float32)

        page_start = (slot // PAGE).to(tl.int64) * PAGE_BYTES
        data = page_start + (slot % PAGE) * ROW
        largest = tl.maximum(tl.max(tl.abs(y), axis=1), 1e-4)
        bits = tl.div_rn(largest, 448.0).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)  # 2 ** (127 - exponent), exactly
        codes = tl.minimum(tl.maximum(y * factor[:, None], -448.0), 448.0).to(tl.float8e4nv)
        tl.store(pool8 + data + column, codes.to(tl.uint8, bitcast=True), mask=tile < 7)
        index = tl.arange(0, 8)
        scales = page_start + PAGE * ROW + (slot % PAGE) * SCALES
        tl.store(pool8 + scales + index, exponent.to(tl.uint8), mask=index < 7)

        even = 2 * tl.arange(0, 32)
        real = tl.load(source + FLAT + even).to(tl.float32) * inverse * tl.load(weight + FLAT + even).to(tl.float32)
        imag = tl.load(source + FLAT + even + 1).to(tl.float32) * inverse
        imag = imag * tl.load(weight + FLAT + even + 1).to(tl.float32)
        angle = freqs + tl.load(positions + row).to(tl.int64) * 64 + even
        cos, sin = tl.load(angle), tl.load(angle + 1)
        rotated = pool16 + (data + FLAT) // 2 + even
        tl.store(rotated, (real * cos - imag * sin).to(tl.bfloat16))
        tl.store(rotated + 1, (real * sin + imag * cos).to(tl.bfloat16))


def write(
    pool: torch.Tensor,
    page_size: int,
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Norm, rotate, quantise and scatter rows in one launch.

    Args:
        pool: [pages, page bytes] uint8.
        kv: [N, 512] bf16, any row stride; weight: [512] bf16; freqs_cis: [positions, 32] complex64; positions: [N].
        slots: [N], page * page_size + offset, negative: the row is skipped.
    """
    if not kv.shape[0]:
        return
    _write_row[(kv.shape[0],)](
        kv,
        kv.stride(0),
        weight,
        torch.view_as_real(freqs_cis),
        positions,
        slots,
        pool,
        pool.view(torch.bfloat16),
        eps,
        PAGE=page_size,
        PAGE_BYTES=page_bytes(page_size),
        ROW=DATA_BYTES,
        SCALES=SCALE_BYTES,
        FLAT=NOPE,
        num_warps=WARPS,
    )
