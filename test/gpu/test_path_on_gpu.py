"""The path of one batch on a real GPU: no host sync, the same rows as on the CPU, and the pool's own CUDA writer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_dspark_cp.core import reference
from sglang_dspark_cp.core.align import HOST_WORDS, HostCounts, explain
from sglang_dspark_cp.core.capture import AuxCapture
from sglang_dspark_cp.core.gather import ArrivedRows, gather_rows
from sglang_dspark_cp.core.inject import NOT_WRITTEN, BatchProof
from sglang_dspark_cp.core.layout import rows_per_rank, send_all, shard
from sglang_dspark_cp.core.pack import PackedRows
from sglang_dspark_cp.core.rows import mean_streams, mean_streams_torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible"),
]

HIDDEN, STREAMS, LAYERS = 4096, 4, 3


class Streams(torch.nn.Module):
    """Yields given streams [P, M, H]."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, *, positions: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return self.rows, None, None, None


def packed_of_rank(
    streams: list[torch.Tensor], positions: torch.Tensor, cache_loc: torch.Tensor, cp_size: int, cp_rank: int
) -> tuple[AuxCapture, PackedRows]:
    """Capture on one rank's shard of global streams [T, M, H], and its rows with their addresses."""
    rows = rows_per_rank(positions.shape[0], cp_size)
    layers = torch.nn.ModuleList([Streams(shard(each, cp_size, cp_rank)) for each in streams])
    local_positions = shard(positions, cp_size, cp_rank)
    with AuxCapture(layers, [0, 1, 2], lambda _, out: out[0], expected_rows=rows, addressed=True) as capture:
        for layer in layers:
            layer(positions=local_positions)
    (packed,) = capture.take()
    packed.write_address(local_positions, shard(cache_loc, cp_size, cp_rank))
    return capture, packed


@pytest.mark.parametrize("cp_size", [2, 8])
def test_no_host_sync_and_right_rows(cp_size: int) -> None:
    tokens = 16 * cp_size
    generator = torch.Generator(device="cuda").manual_seed(3)
    streams = [
        torch.randn(tokens, STREAMS, HIDDEN, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(LAYERS)
    ]
    positions = torch.arange(5, 5 + tokens, device="cuda")
    cache_loc = torch.randperm(tokens, device="cuda") + 512
    mapping = torch.arange(4096, device="cuda")
    others = [packed_of_rank(streams, positions, cache_loc, cp_size, rank)[1] for rank in range(1, cp_size)]
    rest = torch.cat([each.buffer for each in others])

    def all_gather(output: torch.Tensor, local: torch.Tensor) -> None:
        output[: local.shape[0]] = local
        output[local.shape[0] :] = rest

    def once() -> tuple[BatchProof, torch.Tensor, torch.Tensor | None]:
        proof = BatchProof(["a"], [5], [tokens])
        capture, packed = packed_of_rank(streams, positions, cache_loc, cp_size, 0)
        arrived = gather_rows(packed, send_all(tokens, cp_size), all_gather)
        ticket = torch.empty(tokens, 1, device="cuda")
        proof.note_arrived(arrived, capture.missing_rows(), ticket)
        width = LAYERS * HIDDEN
        placed = proof.admit(ticket, positions, cache_loc, expected_width=width, to_swa=lambda loc: mapping[loc])
        return proof, arrived.hidden, None if placed is None else placed.locations

    once()  # allocate pinned memory and load kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        proof, hidden, locations = once()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    order = send_all(tokens, cp_size).order.cuda()
    assert torch.equal(hidden, torch.cat([each.mean(dim=1) for each in streams], dim=1)[order])
    assert locations is not None
    assert torch.equal(locations, cache_loc[order])
    assert proof.words().tolist()[HOST_WORDS : HOST_WORDS + 4] == [0, 0, -1, 0]


def test_sync_debug_mode_would_notice() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_wrong_row_is_not_written() -> None:
    proof = BatchProof(["a"], [0], [4])
    hidden = torch.zeros(4, 8, device="cuda")
    positions, cache_loc = torch.arange(4, device="cuda"), torch.arange(4, device="cuda") + 256
    address = torch.stack((positions.flip(0), cache_loc), dim=1)
    proof.note_arrived(ArrivedRows(hidden, address, 0), 0)
    placed = proof.admit(hidden, positions, cache_loc, expected_width=8, to_swa=lambda loc: loc)
    assert placed is not None
    assert placed.locations.tolist() == placed.slots.tolist()
    assert placed.slots.tolist() == [NOT_WRITTEN] * 4


def test_a_verdict_read_too_early_is_none() -> None:
    """The kernel stores its words in host memory: before it ran they are not taken for those of a batch in order."""

    def admitted() -> BatchProof:
        proof = BatchProof(["a"], [0], [4])
        proof.note_local(hidden)
        assert proof.admit(hidden, where, where, expected_width=8, to_swa=lambda loc: loc) is not None
        return proof

    hidden, where = torch.zeros(4, 8, device="cuda"), torch.arange(4, device="cuda") + 256
    admitted()
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # cycles, some 0.2 s
    proof = admitted()
    early = proof.words().tolist()
    torch.cuda.synchronize()
    assert HostCounts(*early[:HOST_WORDS]).unread == 1
    assert "did not reach the host" in str(explain([early]))
    assert explain([proof.words().tolist()]) is None


def test_words_of_two_streams_do_not_mix() -> None:
    hidden, where = torch.zeros(5000, 8, device="cuda"), torch.arange(5000, device="cuda") + 256
    positions = where - 256
    addresses = [torch.stack((positions, where), dim=1) for _ in range(64)]
    for number, address in enumerate(addresses):
        address[: number % 5, 0] += 1
    streams = [torch.cuda.Stream() for _ in range(2)]

    def admitted(number: int) -> BatchProof:
        proof = BatchProof(["a"], [0], [5000])
        with torch.cuda.stream(streams[number % 2]):
            proof.note_arrived(ArrivedRows(hidden, addresses[number], 0), 0)
            assert proof.admit(hidden, positions, where, expected_width=8, to_swa=lambda loc: loc) is not None
        return proof

    torch.cuda.synchronize()
    admitted(0), admitted(1)  # allocate what each stream keeps
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(400_000_000)  # both queues fill behind it, and their kernels run side by side
    proofs = [(number % 5, admitted(number)) for number in range(64)]
    torch.cuda.synchronize()
    for wrong, proof in proofs:
        assert proof.words().tolist()[HOST_WORDS : HOST_WORDS + 2] == [wrong, 0]


def test_reference_writer_equals_the_cuda_writer() -> None:
    pool_module = pytest.importorskip("sglang.srt.mem_cache.deepseek_v4_memory_pool")
    rows = 300
    generator = torch.Generator(device="cuda").manual_seed(1)
    kv = torch.randn(rows, 512, generator=generator, device="cuda").to(torch.bfloat16)
    weight = (torch.rand(512, generator=generator, device="cuda") + 0.5).to(torch.bfloat16)
    positions = torch.arange(100, 100 + rows, device="cuda")
    slots = (torch.randperm(1024, device="cuda")[:rows] + 256).to(torch.int32)
    slots[7] = -1
    angle = torch.arange(4096, device="cuda")[:, None] * (
        10000.0 ** (-torch.arange(0, 64, 2, device="cuda").double() / 64)
    )
    freqs = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)
    theirs = torch.zeros(6, reference.page_bytes(256), dtype=torch.uint8, device="cuda")
    ours = torch.zeros_like(theirs)
    pool_module.fused_k_norm_rope_flashmla(
        kv=kv, kv_weight=weight, eps=1e-6, freqs_cis=freqs, positions=positions, out_loc=slots, kvcache=theirs,
        page_size=256,
    )  # fmt: skip
    parts = reference.make_rows(kv, weight, 1e-6, freqs, positions)
    reference.write_rows(ours, 256, slots, parts)
    kept = slots[slots >= 0]
    a = reference.dequantise(reference.read_rows(theirs, 256, kept))
    b = reference.dequantise(reference.read_rows(ours, 256, kept))
    error = (a - b).norm(dim=1) / b.norm(dim=1)
    same = (theirs == ours).float().mean()
    assert float(error.max()) < 5e-3
    assert float(same) > 0.99
    assert torch.equal(theirs.any(dim=1), ours.any(dim=1))


def test_kernels_equal_their_torch_forms() -> None:
    """Every case of `triton_rows_cases.py`, in bf16: means to the last bit."""
    cases = Path(__file__).parents[1] / "unit" / "core" / "triton_rows_cases.py"
    done = subprocess.run([sys.executable, str(cases), "cuda"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("hidden", [4096, 7168])
def test_means_equal_torchs_to_the_last_bit(hidden: int) -> None:
    """The batch without CP takes SGLang's mean, which is torch's."""
    streams = torch.randn(777, STREAMS, hidden, device="cuda", dtype=torch.bfloat16) * 30
    ours, theirs = (torch.empty(777, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    mean_streams(streams, [ours])
    mean_streams_torch(streams, [theirs])
    assert torch.equal(ours, theirs)
