"""What the debug hooks write, with plain objects in the place of SGLang's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_dspark_cp import adapters
from sglang_dspark_cp.adapters import debug as shared
from sglang_dspark_cp.adapters import debug_v0_5_17, debug_v0_5_23
from sglang_dspark_cp.adapters import runtime as runtime_module
from sglang_dspark_cp.config import Config
from sglang_dspark_cp.core import reference
from sglang_dspark_cp.smoke import judge

PAGE, STAGES, WINDOW = 256, 3, 128


RANKS = SimpleNamespace(tp_rank=0, attn_tp_rank=0)
"""Where 0.5.23 reads ranks."""


@pytest.fixture(params=[debug_v0_5_17, debug_v0_5_23], ids=["0.5.17", "0.5.23"])
def debug(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(debug_v0_5_23, "_parallel", lambda: RANKS)
    return request.param


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(runtime_module, "_runtime", runtime_module.Runtime(Config(dump_dir=tmp_path / "dump")))
    return tmp_path / "dump"


def scheduler(tp_rank: int = 0, attn_tp_rank: int = 0) -> Any:
    """A scheduler whose request slot 1 holds full locations 1000, 1001, ...; the window pool holds them reversed."""
    mapping = torch.zeros(4096, dtype=torch.int64)
    mapping[1000:1512] = torch.arange(1000, 1512).flip(0) - 700
    pages = torch.randint(0, 126, (8, reference.page_bytes(PAGE)), dtype=torch.uint8)
    buffers = [(pages + stage) % 126 for stage in range(STAGES)]
    pool = SimpleNamespace(
        translate_loc_from_full_to_swa=lambda loc: mapping[loc],
        swa_kv_pool=SimpleNamespace(kv_buffer=buffers, page_size=PAGE),
    )
    RANKS.tp_rank, RANKS.attn_tp_rank = tp_rank, attn_tp_rank
    table = torch.zeros(4, 2048, dtype=torch.int32)
    table[1, :1024] = torch.arange(1000, 2024)
    return SimpleNamespace(
        ps=SimpleNamespace(tp_rank=tp_rank, attn_tp_rank=attn_tp_rank),
        sliding_window_size=WINDOW,
        disagg_prefill_bootstrap_queue=SimpleNamespace(draft_token_to_kv_pool=pool),
        disagg_decode_prealloc_queue=SimpleNamespace(draft_token_to_kv_pool=pool),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        mapping=mapping,
    )


def request(length: int, room: int = 77) -> Any:
    return SimpleNamespace(
        rid="r",
        req_pool_idx=1,
        kv=SimpleNamespace(req_pool_idx=1),
        bootstrap_room=room,
        origin_input_ids=[8] * length,
        extend_range=SimpleNamespace(end=length),
        extend_end=length,
    )


@pytest.mark.parametrize("length", [5, 128, 300])
def test_prefill_dumps_the_final_window(debug: Any, folder: Path, length: int) -> None:
    engine = scheduler()
    debug.dump_prefill_rows(engine, request(length))
    rows = judge.load_rows(folder, "prefill")[77]
    start = max(0, length - WINDOW)
    assert (rows.start, rows.end, rows.missing) == (start, length, 0)
    np.testing.assert_array_equal(rows.positions, np.arange(start, length))
    assert rows.data.shape == (STAGES, length - start, judge.ROW_BYTES)
    slot = int(engine.mapping[1000 + length - 1])
    page = engine.disagg_prefill_bootstrap_queue.draft_token_to_kv_pool.swa_kv_pool.kv_buffer[2][slot // PAGE]
    at = slot % PAGE
    np.testing.assert_array_equal(rows.data[2, -1, :576], page[at * 576 : at * 576 + 576].numpy())
    scales = PAGE * 576 + at * 8
    np.testing.assert_array_equal(rows.data[2, -1, 576:], page[scales : scales + 7].numpy())


def test_positions_without_a_slot_are_missing(debug: Any, folder: Path) -> None:
    debug.dump_prefill_rows(scheduler(), request(600))  # full locations from 1512 on have no slot
    assert judge.load_rows(folder, "prefill")[77].missing == 600 - 512


def test_only_rank_0_of_prefill_writes(debug: Any, folder: Path) -> None:
    debug.dump_prefill_rows(scheduler(tp_rank=1), request(5))
    assert not folder.exists()


def test_send_hook_dumps_before_a_last_chunk_only(debug: Any, folder: Path) -> None:
    sent = []

    def original(engine: Any, req: Any, last_chunk: bool, end_idx: int | None) -> None:
        sent.append((last_chunk, end_idx, sorted(path.name for path in folder.glob("*"))))

    debug.send_kv_chunk(original, scheduler(), request(300), False, 256)
    debug.send_kv_chunk(original, scheduler(), request(300), last_chunk=True)
    assert sent == [(False, 256, []), (True, None, ["rows-prefill-77.npz"])]


def test_decode_dumps_what_arrived(debug: Any, folder: Path) -> None:
    queue = SimpleNamespace(scheduler=scheduler(tp_rank=1))
    arrived = [request(300, 5), request(200, 6)]
    assert debug.pop_transferred(lambda queue, rids: arrived, queue, None) == arrived
    assert sorted(judge.load_rows(folder, "decode")) == [5, 6]
    queue.scheduler.ps.attn_tp_rank = RANKS.attn_tp_rank = 1
    debug.pop_transferred(lambda queue: [request(300, 7)], queue)
    assert 7 not in judge.load_rows(folder, "decode")


def test_proposals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = pytest.importorskip("sglang.srt.runtime_context")
    monkeypatch.setattr(context, "get_parallel", lambda: SimpleNamespace(attn_tp_rank=0, tp_rank=3))
    proposal = SimpleNamespace(
        draft_block_ids=torch.tensor([[9, 3, 3, 3], [10, 3, 3, 3]]),
        draft_block=SimpleNamespace(draft_tokens=torch.arange(8).view(2, 4)),
    )
    batch = SimpleNamespace(seq_lens=torch.tensor([300, 204]), reqs=[request(300, 5), request(200, 6)])
    assert shared.propose(lambda proposer, batch, bs: proposal, None, batch=batch, bs=2) is proposal
    assert judge.load_proposals(folder) == {5: {300: [0, 1, 2, 3]}, 6: {204: [4, 5, 6, 7]}}
    first = json.loads((folder / "proposals-decode-3.jsonl").read_text().splitlines()[0])
    assert (first["anchor_token"], first["prompt"]) == (9, 300)


def test_counters_of_a_cp_worker(debug: Any, folder: Path) -> None:
    runtime_module.runtime().require_ledger(0).counters.cp_forwards = 4
    debug.dump_prefill_rows(scheduler(), request(5))
    assert json.loads((folder / "counters-0.json").read_text())["counters"]["cp_forwards"] == 4
    assert not list(folder.glob("*.part"))


def test_every_debug_hook_fits_the_installed_release() -> None:
    from sglang_dspark_cp.hooks.check import problems, sglang_release, sglang_root

    hooks = adapters.debug_hooks(sglang_release())
    assert len(hooks) == 3
    assert [str(problem) for problem in problems(hooks, sglang_root())] == []
