"""Where the debug hooks are installed, and that nothing of them runs without SGLANG_DSPARK_CP_DUMP_DIR."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dspark_cp import adapters, plugin
from sglang_dspark_cp.adapters import debug_v0_5_17 as debug
from sglang_dspark_cp.adapters import runtime as runtime_module
from sglang_dspark_cp.adapters import v0_5_17 as adapter
from sglang_dspark_cp.adapters.gather_mode import CacheSetup
from sglang_dspark_cp.config import Config
from sglang_dspark_cp.core.inject import Ledger
from sglang_dspark_cp.errors import ActivationError
from sglang_dspark_cp.hooks.spec import Hook


def use(monkeypatch: pytest.MonkeyPatch, dump_dir: Path | None) -> Ledger:
    """A runtime of CP rank 1 whose ledger lets every request pass."""
    state = runtime_module.Runtime(Config(dump_dir=dump_dir), Ledger(1))
    monkeypatch.setattr(runtime_module, "_runtime", state)
    monkeypatch.setattr(adapter, "_cp_rank", lambda: 1)
    assert state.ledger is not None
    return state.ledger


@pytest.mark.parametrize(
    ("mode", "cp_size", "dspark", "dump", "wanted"),
    [
        ("decode", 1, True, True, debug.DECODE_DEBUG_HOOKS),
        ("null", 1, True, True, debug.DECODE_DEBUG_HOOKS),
        ("prefill", 1, True, True, debug.PREFILL_DEBUG_HOOKS),
        ("prefill", 2, True, True, adapter.WORKER_HOOKS),
        ("prefill", 2, True, False, adapter.WORKER_HOOKS),
        ("decode", 1, True, False, ()),
        ("prefill", 1, True, False, ()),
        ("decode", 1, False, True, ()),
        ("prefill", 2, False, True, ()),
    ],
)
def test_what_a_worker_gets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str, cp_size: int, dspark: bool, dump: bool, wanted: Any
) -> None:
    use(monkeypatch, tmp_path if dump else None)
    installed: list[Hook] = []
    monkeypatch.setattr(adapter, "install", installed.extend)
    monkeypatch.setattr(debug, "install", installed.extend)
    monkeypatch.setattr(adapter, "cache_setup_of", lambda args: CacheSetup(radix=True, page=256, window=128))
    args = SimpleNamespace(disaggregation_mode=mode, attn_cp_size=cp_size)
    algorithm = SimpleNamespace(is_dspark=lambda: dspark)
    assert adapter.create_worker(lambda algorithm, args: "worker", algorithm, args) == "worker"
    assert tuple(installed) == tuple(wanted)


@pytest.mark.parametrize("dump", [True, False])
def test_cp_prefill_dumps_a_last_chunk_that_is_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dump: bool
) -> None:
    ledger = use(monkeypatch, tmp_path if dump else None)
    monkeypatch.setattr(Ledger, "require_complete", lambda self, rid, length, window: self.failure(rid))
    refused: list[str] = []
    monkeypatch.setattr(adapter, "_refuse", lambda scheduler, req, start, end, text: refused.append(req.rid))
    order: list[tuple[str, str]] = []
    monkeypatch.setattr(debug, "dump_prefill_rows", lambda scheduler, req: order.append(("dump", req.rid)))

    def original(scheduler: Any, req: Any, last_chunk: bool, end_idx: int | None) -> None:
        order.append(("send", req.rid))

    def request(rid: str) -> Any:
        return SimpleNamespace(rid=rid, origin_input_ids=[1] * 9, extend_range=SimpleNamespace(end=9))

    ledger._failed["bad"] = "AlignmentError: x"
    scheduler = SimpleNamespace(sliding_window_size=128)
    adapter.send_kv_chunk(original, scheduler, request("middle"))
    adapter.send_kv_chunk(original, scheduler, request("last"), last_chunk=True)
    adapter.send_kv_chunk(original, scheduler, request("bad"), last_chunk=True)
    assert order == [("send", "middle"), *([("dump", "last")] if dump else []), ("send", "last")]
    assert refused == ["bad"]


def test_counters_follow_finished_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ledger = use(monkeypatch, tmp_path)
    ledger.counters.alignment_failures = 3
    adapter.process_inflight_queue(lambda scheduler: [], None)
    assert list(tmp_path.iterdir()) == []
    adapter.process_inflight_queue(lambda scheduler: [SimpleNamespace(rid="a")], None)
    (path,) = tmp_path.iterdir()
    assert path.name == "counters-1.json"
    assert json.loads(path.read_text())["counters"]["alignment_failures"] == 3


def test_no_counters_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, None)
    monkeypatch.setattr(debug, "dump_counters", lambda ledger: pytest.fail("dumped without a folder"))
    assert len(adapter.process_inflight_queue(lambda scheduler: [SimpleNamespace(rid="a")], None)) == 1


@pytest.mark.parametrize("dump", [True, False])
def test_register_checks_the_debug_hooks_when_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dump: bool
) -> None:
    installed: list[Hook] = []
    monkeypatch.setattr(plugin, "install", installed.extend)
    monkeypatch.setattr(runtime_module, "_runtime", None)
    if dump:
        monkeypatch.setenv("SGLANG_DSPARK_CP_DUMP_DIR", str(tmp_path))
    else:
        monkeypatch.delenv("SGLANG_DSPARK_CP_DUMP_DIR", raising=False)
    plugin.register()
    assert tuple(installed) == adapter.EAGER_HOOKS
    installed.clear()
    stale = tuple(dataclasses.replace(hook, digest="0" * 12) for hook in debug.DECODE_DEBUG_HOOKS)
    monkeypatch.setattr(debug, "DECODE_DEBUG_HOOKS", stale)
    if dump:
        with pytest.raises(ActivationError, match="SGLANG_DSPARK_CP_DUMP_DIR is set, but") as caught:
            plugin.register()
        assert all(hook.target in str(caught.value) for hook in stale)
        assert installed == []
    else:
        plugin.register()
        assert tuple(installed) == adapter.EAGER_HOOKS


def test_debug_hooks_of_a_release() -> None:
    assert adapters.debug_hooks("0.5.17+cu130") == (*debug.PREFILL_DEBUG_HOOKS, *debug.DECODE_DEBUG_HOOKS)
    assert adapters.debug_hooks("0.5.18") == ()
