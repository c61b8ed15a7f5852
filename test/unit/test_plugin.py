"""`register`: who decides what is installed. The installed source tree is real or, where it must differ, a fake."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dspark_cp import adapters, guard, plugin
from sglang_dspark_cp.adapters import runtime
from sglang_dspark_cp.config import AlignLevel
from sglang_dspark_cp.errors import ActivationError
from sglang_dspark_cp.hooks.check import sglang_root
from sglang_dspark_cp.hooks.spec import Hook


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[Hook]:
    """What `register` hands to the installation, instead of SGLang's registry."""
    hooks: list[Hook] = []
    monkeypatch.setattr(plugin, "install", hooks.extend)
    monkeypatch.setattr(guard, "install", hooks.extend)
    monkeypatch.setattr(runtime, "_runtime", None)
    return hooks


def fake_sglang(root: Path, signature: str) -> Path:
    """An SGLang tree that has nothing but the guard's place to stand."""
    module = root / "srt" / "arg_groups" / "speculative_hook.py"
    module.parent.mkdir(parents=True)
    module.write_text(f"def _handle_dspark({signature}):\n    pass\n")
    return root


def refusal(hook: Hook, **arguments: Any) -> str:
    """What the guard says to launch arguments; empty when it lets stock decide."""
    server_args = SimpleNamespace(
        **{"disaggregation_mode": "prefill", "enable_prefill_cp": True, "attn_cp_size": 1, **arguments}
    )
    seen = []
    try:
        assert hook.handler(lambda args: seen.append(args) or "stock", server_args) == "stock"
    except ActivationError as error:
        assert seen == []
        return str(error)
    assert seen == [server_args]
    return ""


def test_reviewed_release_gets_the_eager_hooks_and_the_settings(
    installed: list[Hook], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DSPARK_CP_ALIGN", "shape")
    plugin.register()
    adapter = adapters.find(plugin.sglang_release())
    assert adapter is not None
    assert tuple(installed) == adapter.EAGER_HOOKS
    assert [hook.id for hook in installed][-2:] == ["admit", "create-worker"]
    assert runtime.runtime().config.align is AlignLevel.SHAPE


def test_switched_off_installs_nothing(installed: list[Hook], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DSPARK_CP", "0")
    plugin.register()
    assert installed == []
    with pytest.raises(RuntimeError, match="not activated"):
        runtime.runtime()


def test_a_bad_value_ends_the_process_with_the_allowed_ones(
    installed: list[Hook], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DSPARK_CP_ALIGN", "full")
    with pytest.raises(ActivationError, match="allowed are rows, shape, off"):
        plugin.register()
    assert installed == []


@pytest.mark.parametrize("release", ["0.5.16", "0.5.17.post1", "0.5.23rc1", "0.6.0"])
def test_a_release_that_was_not_reviewed_gets_the_guard_only(
    installed: list[Hook], monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    monkeypatch.setattr(plugin, "sglang_release", lambda: release)
    plugin.register()
    (hook,) = installed
    assert hook.id == "guard"
    text = refusal(hook)
    assert f"SGLang {release} was not reviewed." in text
    for word in (*adapters.REVIEWED, "SGLANG_DSPARK_CP=0"):
        assert word in text


@pytest.mark.parametrize("release", [*adapters.NOT_SUPPORTED, "0.5.20+cu129"])
def test_a_release_that_was_looked_at_is_refused_with_the_reason(
    installed: list[Hook], monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    monkeypatch.setattr(plugin, "sglang_release", lambda: release)
    plugin.register()
    (hook,) = installed
    assert hook.id == "guard"
    why = adapters.NOT_SUPPORTED[release.split("+")[0]]
    assert f"SGLang {release} is not supported: {why}; use 0.5.17 or 0.5.23. " in refusal(hook)
    assert refusal(hook, disaggregation_mode="decode") == ""


def test_no_release_is_supported_and_not() -> None:
    assert set(adapters.NOT_SUPPORTED).isdisjoint(adapters.REVIEWED)


def test_a_stale_digest_leads_to_the_guard_which_names_every_stale_hook(
    installed: list[Hook], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = adapters.find(plugin.sglang_release())
    assert adapter is not None
    stale = [dataclasses.replace(hook, digest="0" * 12) for hook in adapter.WORKER_HOOKS[:2]]
    monkeypatch.setattr(adapter, "WORKER_HOOKS", (*stale, *adapter.WORKER_HOOKS[2:]))
    plugin.register()
    (guarding,) = installed
    text = refusal(guarding)
    for hook in stale:
        assert f"hook {hook.id} on {hook.target}: found body" in text
    assert adapter.EAGER_HOOKS[0].target not in text


@pytest.mark.parametrize(
    "arguments",
    [
        {"disaggregation_mode": "decode"},
        {"disaggregation_mode": "null"},
        {"enable_prefill_cp": False},
        {"disaggregation_mode": "decode", "attn_cp_size": 8},
    ],
    ids=str,
)
def test_the_guard_leaves_everything_but_the_feature_to_stock(installed: list[Hook], arguments: dict[str, Any]) -> None:
    guard.install_guard("why.")
    assert refusal(installed[0], **arguments) == ""


@pytest.mark.parametrize(
    "arguments", [{}, {"enable_prefill_cp": False, "attn_cp_size": 8}, {"attn_cp_size": 8}], ids=str
)
def test_the_guard_refuses_the_feature(installed: list[Hook], arguments: dict[str, Any]) -> None:
    guard.install_guard("why.")
    text = refusal(installed[0], **arguments)
    assert text.startswith("sglang-dspark-cp: why. DSPARK on PD prefill with context parallelism is refused")


def test_the_guard_stands_in_a_tree_that_has_its_place(
    installed: list[Hook], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(guard, "sglang_root", lambda: fake_sglang(tmp_path, "server_args"))
    guard.install_guard("why.")
    assert [hook.target for hook in installed] == [guard.TARGET]


@pytest.mark.parametrize("signature", ["", "self, server_args", "args", "server_args, view", None])
def test_without_a_place_to_stand_the_guard_says_so(
    installed: list[Hook], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, signature: str | None
) -> None:
    root = tmp_path if signature is None else fake_sglang(tmp_path, signature)
    monkeypatch.setattr(guard, "sglang_root", lambda: root)
    with pytest.raises(ActivationError, match="cannot even be refused") as caught:
        guard.install_guard("why.")
    assert "SGLANG_DSPARK_CP=0" in str(caught.value)
    assert installed == []


@pytest.mark.parametrize(
    ("release", "found"),
    [
        *(("0.5.17", True), ("0.5.17+cu130", True), ("0.5.17.post1", False), ("0.5.1", False), ("", False)),
        *(("0.5.23", True), ("0.5.23+cu130", True), ("0.5.22", False)),
    ],
)
def test_which_releases_have_an_adapter(release: str, found: bool) -> None:
    assert (adapters.find(release) is not None) is found


def test_runtime_levels_and_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_dspark_cp.config import Config, Fault, FaultKind

    levels = {level: runtime.Runtime(Config(align=level)) for level in AlignLevel}
    assert {level: (r.check_shape, r.addressed) for level, r in levels.items()} == {
        AlignLevel.OFF: (False, False),
        AlignLevel.SHAPE: (True, False),
        AlignLevel.ROWS: (True, True),
    }
    fault = Fault(FaultKind.DROP_ROW, forwards=2)
    state = runtime.Runtime(Config(fault=fault))
    assert state.fault is None  # no worker yet
    ledger = state.require_ledger(3)
    assert (ledger.cp_rank, state.require_ledger(3)) == (3, ledger)
    hits = []
    for forward in range(1, 5):
        ledger.counters.cp_forwards = forward
        hits.append(state.fault is fault)
    assert hits == [True, True, False, False]
    assert state.proof is None


def test_the_tree_of_the_installed_sglang_is_used_by_default() -> None:
    assert plugin.sglang_root is sglang_root
    assert guard.sglang_root is sglang_root
