"""What `test_hooks` does inside a process of its own: hooks patch the process that they are installed in."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang_dspark_cp.smoke.processes import RankConfig

MODEL_CONFIG = SimpleNamespace(
    sliding_window_size=128,
    hf_config=SimpleNamespace(architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4"),
)

CACHE_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(
        (
            "enable_hierarchical_cache",
            "enable_streaming_session",
            "enable_session_radix_cache",
            "enable_lmcache",
            "enable_flexkv",
            "enable_hisparse",
            "disable_radix_cache",
        ),
        False,
    ),
    "radix_cache_backend": None,
    "page_size": 256,
    "get_model_config": lambda: MODEL_CONFIG,
    "_model_config": MODEL_CONFIG,
}
"""What the choice of the gather mode reads of a `ServerArgs`."""


class Cases:
    """A rank of `smoke.processes.RankPool` whose methods are the cases; one process runs one of them."""

    def __init__(self, config: RankConfig, report: Callable[[Any], None]) -> None:
        from sglang_dspark_cp import adapters, plugin
        from sglang_dspark_cp.hooks.check import sglang_release
        from sglang_dspark_cp.hooks.install import _attribute

        adapter = adapters.find(sglang_release())
        assert adapter is not None
        if hasattr(adapter, "_require_groups"):  # no process group exists here
            adapter._require_groups = lambda: None
        self.plugin, self.adapter, self.attribute = plugin, adapter, _attribute
        self.eager = [hook.target for hook in adapter.EAGER_HOOKS]
        self.worker = [hook.target for hook in adapter.WORKER_HOOKS]
        self.stock = {target: _attribute(target) for target in (*self.eager, *self.worker)}

    def _load(self) -> str | None:
        """SGLang's own loader; the text of what escapes it."""
        from sglang.srt.plugins import load_plugins

        try:
            load_plugins()
        except SystemExit as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _changed(self) -> list[str]:
        """Targets that are no longer the object of stock."""
        return [target for target, stock in self.stock.items() if self.attribute(target) is not stock]

    def _state(self) -> dict[str, Any]:
        from sglang.srt.plugins.hook_registry import HookRegistry

        from sglang_dspark_cp.adapters import runtime
        from sglang_dspark_cp.hooks import install

        return {
            "changed": self._changed(),
            "registered": sorted(target for target, hooks in HookRegistry._hooks.items() if hooks),
            "patched": sorted(HookRegistry._patched),
            "installed": list(install.installed),
            "fired": dict(install.fired),
            "runtime": runtime._runtime is not None,
        }

    def _ask_handle_dspark(self, **arguments: Any) -> str:
        """What the patched `_handle_dspark` answers; stock itself stops at the device `none`."""
        from sglang.srt.arg_groups.speculative_hook import _handle_dspark

        try:
            _handle_dspark(SimpleNamespace(device="none", **arguments))
        except (Exception, SystemExit) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _guard_answers(self) -> dict[str, str]:
        ask = self._ask_handle_dspark
        return {
            "prefill, CP flag": ask(disaggregation_mode="prefill", enable_prefill_cp=True, attn_cp_size=1),
            "prefill, CP size": ask(disaggregation_mode="prefill", enable_prefill_cp=False, attn_cp_size=8),
            "prefill": ask(disaggregation_mode="prefill", enable_prefill_cp=False, attn_cp_size=1),
            "decode, CP": ask(disaggregation_mode="decode", enable_prefill_cp=True, attn_cp_size=8),
            "aggregated, CP": ask(disaggregation_mode="null", enable_prefill_cp=True, attn_cp_size=8),
        }

    # ------------------------------------------------------------------------------------------------------- cases

    def load(self) -> dict[str, Any]:
        """Plugins are loaded; which stock functions does a loaded SGLang module still hold under any name?"""
        from importlib.metadata import entry_points

        names = {entry.name: entry.value for entry in entry_points(group="sglang.srt.plugins")}
        escaped = self._load()
        stale = []
        eager = {id(self.stock[target]): target for target in self.eager}
        for name, module in list(sys.modules.items()):
            if name.startswith("sglang.") and module is not None:
                stale += [f"{name}.{key}" for key, value in list(vars(module).items()) if id(value) in eager]
        return {"escaped": escaped, "entry_points": names, "stale": stale, **self._state()}

    def load_twice(self) -> dict[str, Any]:
        """A second `register()` in one process changes nothing."""
        self._load()
        first = {target: self.attribute(target) for target in self.stock}
        self.plugin.register()
        return {"same": all(self.attribute(target) is value for target, value in first.items()), **self._state()}

    def _place(self, table: str, hook_id: str) -> int:
        return [hook.id for hook in getattr(self.adapter, table)].index(hook_id)

    def stale_digest(self, table: str, hook_id: str) -> dict[str, Any]:
        """One hook of the adapter was reviewed for another body."""
        hooks, index = list(getattr(self.adapter, table)), self._place(table, hook_id)
        hooks[index] = dataclasses.replace(hooks[index], digest="000000000000")
        setattr(self.adapter, table, tuple(hooks))
        escaped = self._load()
        return {"escaped": escaped, "id": hooks[index].id, "answers": self._guard_answers(), **self._state()}

    def unreviewed(self, release: str) -> dict[str, Any]:
        """The installed SGLang says that it is another release."""
        self.plugin.sglang_release = lambda: release
        escaped = self._load()
        return {"escaped": escaped, "answers": self._guard_answers(), **self._state()}

    def no_place_for_the_guard(self) -> dict[str, Any]:
        """An unreviewed release that has no `_handle_dspark` either."""
        from sglang_dspark_cp import guard

        self.plugin.sglang_release = lambda: "0.5.99"
        guard.TARGET = "sglang.srt.arg_groups.speculative_hook._handle_dspark_elsewhere"
        return {"escaped": self._load(), **self._state()}

    def create_worker(self) -> dict[str, Any]:
        """Workers of every kind, the one with the feature last."""
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        def arguments(mode: str, cp_size: int) -> Any:
            return SimpleNamespace(
                disaggregation_mode=mode, attn_cp_size=cp_size, enable_multi_layer_eagle=False, **CACHE_ARGUMENTS
            )

        others = [
            ("DSPARK", "prefill", 1),
            ("DSPARK", "decode", 8),
            ("DSPARK", "null", 8),
            ("EAGLE", "prefill", 8),
            ("STANDALONE", "prefill", 8),
        ]
        stock_classes = [
            SpeculativeAlgorithm[name].create_worker(arguments(mode, size)).__qualname__ for name, mode, size in others
        ]
        self._load()
        classes = [
            SpeculativeAlgorithm[name].create_worker(arguments(mode, size)).__qualname__ for name, mode, size in others
        ]
        before = self._state()
        dspark = SpeculativeAlgorithm.DSPARK
        made = dspark.create_worker(arguments("prefill", 2))
        after = self._state()
        first = {target: self.attribute(target) for target in self.stock}
        again = dspark.create_worker(arguments("prefill", 2))
        return {
            "stock_classes": stock_classes,
            "classes": classes,
            "before": before,
            "after": after,
            "made": made.__qualname__,
            "same_class": made is again,
            "same": all(self.attribute(target) is value for target, value in first.items()),
        }

    def patched_before(self, table: str, hook_id: str) -> dict[str, Any]:
        """Another plugin was there first, on one target."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        hook = getattr(self.adapter, table)[self._place(table, hook_id)]
        HookRegistry.register(hook.target, lambda original, *args, **kw: original(*args, **kw), HookType.AROUND)
        HookRegistry.apply_hooks()
        theirs = self.attribute(hook.target)
        escaped = self._load()
        if table == "WORKER_HOOKS":
            assert escaped is None
            arguments = SimpleNamespace(disaggregation_mode="prefill", attn_cp_size=8, **CACHE_ARGUMENTS)
            try:
                SpeculativeAlgorithm.DSPARK.create_worker(arguments)
            except SystemExit as error:
                escaped = f"{type(error).__name__}: {error}"
        kept = self.attribute(hook.target) is theirs
        return {"escaped": escaped, "id": hook.id, "target": hook.target, "kept": kept, **self._state()}

    def not_applied(self) -> dict[str, Any]:
        """SGLang's registry logs that it could not apply a hook and goes on."""
        from sglang.srt.plugins.hook_registry import HookRegistry

        apply_target = HookRegistry._apply_target
        skipped = self.adapter.EAGER_HOOKS[self._place("EAGER_HOOKS", "admit")].target

        def apply(target: str, hooks: list[Any]) -> None:
            if target == skipped:
                raise RuntimeError("made to fail")
            apply_target(target, hooks)

        HookRegistry._apply_target = apply
        return {"escaped": self._load(), "target": skipped, **self._state()}
