"""Where the debug hooks are installed, and that nothing of them runs without SGLANG_DSPARK_CP_DUMP_DIR."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dspark_cp import adapters, plugin
from sglang_dspark_cp.adapters import debug as shared
from sglang_dspark_cp.adapters import runtime as runtime_module
from sglang_dspark_cp.adapters import scheduler as scheduler_module
from sglang_dspark_cp.adapters.gather_mode import CacheSetup
from sglang_dspark_cp.config import Config
from sglang_dspark_cp.core.inject import Ledger
from sglang_dspark_cp.errors import ActivationError
from sglang_dspark_cp.hooks.check import sglang_release
from sglang_dspark_cp.hooks.spec import Hook

PACKAGE = "sglang_dspark_cp.adapters"


@pytest.fixture(params=sorted(set(adapters.REVIEWED.values())))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def adapter(name: str) -> Any:
    return importlib.import_module(f"{PACKAGE}.{name}")


@pytest.fixture
def debug(name: str) -> Any:
    return importlib.import_module(f"{PACKAGE}.debug_{name}")


def use(monkeypatch: pytest.MonkeyPatch, dump_dir: Path | None) -> Ledger:
    """A runtime of CP rank 1 whose ledger lets every request pass."""
    state = runtime_module.Runtime(Config(dump_dir=dump_dir), Ledger(1))
    monkeypatch.setattr(runtime_module, "_runtime", state)
    monkeypatch.setattr(scheduler_module, "cp_rank", lambda: 1)
    assert state.ledger is not None
    return state.ledger


@pytest.mark.parametrize(
    ("mode", "cp_size", "dspark", "dump", "wanted"),
    [
        ("decode", 1, True, True, "DECODE_DEBUG_HOOKS"),
        ("null", 1, True, True, "DECODE_DEBUG_HOOKS"),
        ("prefill", 1, True, True, "PREFILL_DEBUG_HOOKS"),
        ("prefill", 2, True, True, "WORKER_HOOKS"),
        ("prefill", 2, True, False, "WORKER_HOOKS"),
        ("decode", 1, True, False, ""),
        ("prefill", 1, True, False, ""),
        ("decode", 1, False, True, ""),
        ("prefill", 2, False, True, ""),
    ],
)
def test_what_a_worker_gets(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    adapter: Any,
    debug: Any,
    mode: str,
    cp_size: int,
    dspark: bool,
    dump: bool,
    wanted: str,
) -> None:
    use(monkeypatch, tmp_path if dump else None)
    installed: list[Hook] = []
    monkeypatch.setattr(adapter, "install", installed.extend)
    monkeypatch.setattr(debug, "install_for", lambda mode: installed.extend(of_mode(debug, mode)))
    monkeypatch.setattr(adapter, "cache_setup_of", lambda args: CacheSetup(radix=True, page=256, window=128))
    if hasattr(adapter, "_view"):  # 0.5.23 reads arguments through SGLang
        monkeypatch.setattr(adapter, "_view", lambda args: args)
        monkeypatch.setattr(adapter, "_model_config", lambda args: deepseek("deepseek_v4"))
        monkeypatch.setattr(adapter, "_require_groups", lambda: None)
    args = SimpleNamespace(disaggregation_mode=mode, attn_cp_size=cp_size)
    algorithm = SimpleNamespace(is_dspark=lambda: dspark)
    assert adapter.create_worker(lambda algorithm, args: "worker", algorithm, args) == "worker"
    assert tuple(installed) == (tuple(getattr(debug, wanted, ())) or getattr(adapter, wanted, ()))


def deepseek(model_type: str, architecture: str = "DeepseekV4ForCausalLM") -> Any:
    return SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture], model_type=model_type))


def of_mode(debug: Any, mode: str) -> tuple[Hook, ...]:
    found: tuple[Hook, ...] = debug.PREFILL_DEBUG_HOOKS if mode == "prefill" else debug.DECODE_DEBUG_HOOKS
    return found


@pytest.mark.parametrize("mode", ["prefill", "decode", "null"])
def test_debug_hooks_go_by_the_mode(monkeypatch: pytest.MonkeyPatch, debug: Any, mode: str) -> None:
    installed: list[Hook] = []
    monkeypatch.setattr(shared, "install", installed.extend)
    monkeypatch.setattr(shared, "problems", lambda hooks, root: [])
    debug.install_for(mode)
    assert tuple(installed) == of_mode(debug, mode)


@pytest.mark.parametrize("dump", [True, False])
def test_cp_prefill_dumps_a_last_chunk_that_is_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, adapter: Any, debug: Any, dump: bool
) -> None:
    ledger = use(monkeypatch, tmp_path if dump else None)
    monkeypatch.setattr(Ledger, "require_complete", lambda self, rid, length, window: self.failure(rid))
    refused: list[str] = []
    monkeypatch.setattr(
        scheduler_module, "refuse", lambda engine, scheduler, req, start, end, text: refused.append(req.rid)
    )
    order: list[tuple[str, str]] = []
    monkeypatch.setattr(debug, "dump_prefill_rows", lambda scheduler, req: order.append(("dump", req.rid)))

    def original(scheduler: Any, req: Any, last_chunk: bool, end_idx: int | None) -> None:
        order.append(("send", req.rid))

    def request(rid: str) -> Any:
        return SimpleNamespace(
            rid=rid,
            origin_input_ids=[1] * 9,
            extend_range=SimpleNamespace(end=9),
            extend_end=9,
            disagg_decode_prefix_len=0,
        )

    ledger._failed["bad"] = "AlignmentError: x"
    scheduler = SimpleNamespace(sliding_window_size=128, clear_pending_chunk_send=lambda req: None)
    adapter.send_kv_chunk(original, scheduler, request("middle"))
    adapter.send_kv_chunk(original, scheduler, request("last"), last_chunk=True)
    adapter.send_kv_chunk(original, scheduler, request("bad"), last_chunk=True)
    assert order == [("send", "middle"), *([("dump", "last")] if dump else []), ("send", "last")]
    assert refused == ["bad"]


def test_counters_follow_finished_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, adapter: Any) -> None:
    ledger = use(monkeypatch, tmp_path)
    ledger.counters.alignment_failures = 3
    adapter.process_inflight_queue(lambda scheduler: [], None)
    assert list(tmp_path.iterdir()) == []
    adapter.process_inflight_queue(lambda scheduler: [SimpleNamespace(rid="a")], None)
    (path,) = tmp_path.iterdir()
    assert path.name == "counters-1.json"
    assert json.loads(path.read_text())["counters"]["alignment_failures"] == 3


def test_no_counters_without_a_folder(monkeypatch: pytest.MonkeyPatch, adapter: Any) -> None:
    use(monkeypatch, None)
    monkeypatch.setattr(shared, "dump_counters", lambda ledger: pytest.fail("dumped without a folder"))
    assert len(adapter.process_inflight_queue(lambda scheduler: [SimpleNamespace(rid="a")], None)) == 1


@pytest.mark.parametrize("dump", [True, False])
def test_register_checks_the_debug_hooks_when_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dump: bool
) -> None:
    here = adapters.REVIEWED[sglang_release()]
    adapter, debug = (importlib.import_module(f"{PACKAGE}.{name}") for name in (here, f"debug_{here}"))
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


def test_debug_hooks_of_a_release(name: str, debug: Any) -> None:
    release = next(release for release, module in adapters.REVIEWED.items() if module == name)
    assert adapters.debug_hooks(f"{release}+cu130") == (*debug.PREFILL_DEBUG_HOOKS, *debug.DECODE_DEBUG_HOOKS)
    assert adapters.debug_hooks("0.5.18") == ()


@pytest.mark.parametrize(
    ("model_type", "architecture", "active", "dumps"),
    [
        ("deepseek_v4", "DeepseekV4ForCausalLM", True, False),
        ("deepseek_v41", "DeepseekV4ForCausalLM", False, False),
        ("qwen3", "Qwen3ForCausalLM", False, True),
    ],
)
def test_0_5_23_leaves_other_models_to_stock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_type: str, architecture: str, active: bool, dumps: bool
) -> None:
    from sglang_dspark_cp.adapters import debug_v0_5_23, v0_5_23

    use(monkeypatch, tmp_path)
    installed: list[Hook] = []
    dumping: list[str] = []
    monkeypatch.setattr(debug_v0_5_23, "install_for", dumping.append)
    monkeypatch.setattr(v0_5_23, "install", installed.extend)
    monkeypatch.setattr(v0_5_23, "cache_setup_of", lambda args: CacheSetup(radix=True, page=256, window=128))
    monkeypatch.setattr(v0_5_23, "_view", lambda args: args)
    monkeypatch.setattr(v0_5_23, "_model_config", lambda args: deepseek(model_type, architecture))
    monkeypatch.setattr(v0_5_23, "_require_groups", lambda: None)
    args = SimpleNamespace(disaggregation_mode="prefill", attn_cp_size=8)
    v0_5_23.create_worker(lambda algorithm, args: "worker", SimpleNamespace(is_dspark=lambda: True), args)
    assert bool(installed) is active
    assert bool(dumping) is dumps
