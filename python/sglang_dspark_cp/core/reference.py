"""Torch writer and reader of draft-KV rows in the format of SGLang's DeepSeek-V4 sliding-window pool.

It stands in for the CUDA-only row writer on a CPU, and turns pool bytes back into numbers.

Source of the format: `srt/mem_cache/deepseek_v4_memory_pool.py` and the DSV4 kernels of SGLang 0.5.17. One page of
256 rows is ceil(584 * 256 / 576) * 576 = 149760 bytes. Row r of a page has its data at r * 576 (448 e4m3, then 64
bf16 of the rotated part) and its scales at 576 * 256 + r * 8 (7 UE8M0 exponents, one unused byte).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROW_WIDTH = 512
NOPE = 448
ROPE = 64
TILE = 64
DATA_BYTES = NOPE + 2 * ROPE
SCALE_BYTES = 8
E4M3_MAX = 448.0


def page_bytes(page_size: int) -> int:
    """Bytes of one page, rounded up to whole data rows."""
    return -(-(DATA_BYTES + SCALE_BYTES) * page_size // DATA_BYTES) * DATA_BYTES


@dataclass(frozen=True)
class RowParts:
    """Rows [N] in pieces: nope [N, 448] uint8 (e4m3), rope [N, 64] bf16, scale [N, 7] uint8 (UE8M0)."""

    nope: torch.Tensor
    rope: torch.Tensor
    scale: torch.Tensor


def make_rows(
    kv: torch.Tensor, weight: torch.Tensor, eps: float, freqs_cis: torch.Tensor, positions: torch.Tensor
) -> RowParts:
    """RMS norm, rotary embedding and quantisation of rows.

    Args:
        kv: [N, 512]; weight: [512]; freqs_cis: [positions, 32] complex; positions: [N].
    """
    x = kv.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
    pairs = torch.view_as_complex(x[:, NOPE:].reshape(-1, ROPE // 2, 2))
    rope = torch.view_as_real(pairs * freqs_cis[positions.long()]).flatten(-2)
    tiles = x[:, :NOPE].reshape(-1, NOPE // TILE, TILE)
    scale = tiles.abs().amax(-1).clamp_min(1e-4) / E4M3_MAX
    bits = scale.view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF).ne(0).int()
    quantised = (tiles * torch.exp2(127.0 - exponent.float()).unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    nope = quantised.flatten(-2).to(torch.float8_e4m3fn).view(torch.uint8)
    return RowParts(nope, rope.to(torch.bfloat16), exponent.to(torch.uint8))


def _by_row(pool: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of pool pages [pages, page_bytes]: data [pages, page_size, 576] and scales [pages, page_size, 8]."""
    pages, split = pool.shape[0], page_size * DATA_BYTES
    data = pool[:, :split].view(pages, page_size, DATA_BYTES)
    scales = pool[:, split : split + page_size * SCALE_BYTES].view(pages, page_size, SCALE_BYTES)
    return data, scales


def write_rows(pool: torch.Tensor, page_size: int, slots: torch.Tensor, rows: RowParts) -> None:
    """Scatter rows into pool pages.

    Args:
        pool: [pages, page_bytes] uint8; slots: [N], page * page_size + offset, negative = skip.
    """
    keep = slots >= 0
    page, offset = slots[keep].long() // page_size, slots[keep].long() % page_size
    data, scales = _by_row(pool, page_size)
    data[page, offset, :NOPE] = rows.nope[keep]
    data[page, offset, NOPE:] = rows.rope[keep].view(torch.uint8)
    scales[page, offset, : NOPE // TILE] = rows.scale[keep]


def read_rows(pool: torch.Tensor, page_size: int, slots: torch.Tensor) -> RowParts:
    """Gather rows from pool pages; slots: [N], all >= 0."""
    page, offset = slots.long() // page_size, slots.long() % page_size
    data, scales = _by_row(pool, page_size)
    rows = data[page, offset]
    rope = rows[:, NOPE:].contiguous().view(torch.bfloat16)
    return RowParts(rows[:, :NOPE].contiguous(), rope, scales[page, offset, : NOPE // TILE].contiguous())


def dequantise(rows: RowParts) -> torch.Tensor:
    """Rows as numbers, [N, 512] float64."""
    codes = rows.nope.contiguous().view(torch.float8_e4m3fn).double().reshape(-1, NOPE // TILE, TILE)
    scale = torch.exp2(rows.scale.double() - 127.0).unsqueeze(-1)
    return torch.cat([(codes * scale).flatten(-2), rows.rope.double()], dim=-1)
