"""Installation of hooks: the only caller of SGLang's hook registry."""

from __future__ import annotations

import functools
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import ActivationError
from .spec import Hook

fired: Counter[str] = Counter()
"""How often each hook of this process ran, by hook id."""

installed: dict[str, Hook] = {}
"""Hooks of this process that were proved to be applied, by hook id."""


def _counted(hook: Hook) -> Callable[..., Any]:
    @functools.wraps(hook.handler)
    def handler(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        fired[hook.id] += 1
        return hook.handler(original, *args, **kwargs)

    return handler


def _attribute(target: str) -> Any:
    owner, _, name = target.rpartition(".")
    holder = pkgutil.resolve_name(owner)
    return vars(holder)[name] if isinstance(holder, type) else getattr(holder, name)


def install(hooks: Iterable[Hook]) -> None:
    """Register and apply hooks, then prove that each target is another object than before.

    Hooks that this process already installed are passed over.

    Raises:
        ActivationError: a target was patched by somebody else before, or is unpatched afterwards.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wanted = [hook for hook in hooks if hook.id not in installed]
    before = {}
    for hook in wanted:
        if hook.target in HookRegistry._patched:
            raise ActivationError(
                f"{hook.target} is already patched by another plugin, so hook {hook.id} would be ignored."
                " Load sglang-dspark-cp alone (SGLANG_PLUGINS=dspark_cp) or set SGLANG_DSPARK_CP=0."
            )
        before[hook.id] = _attribute(hook.target)
    for hook in wanted:  # only after every target was found free
        HookRegistry.register(hook.target, _counted(hook), HookType(hook.kind.value))
    HookRegistry.apply_hooks()
    unpatched = [hook for hook in wanted if _attribute(hook.target) is before[hook.id]]
    if unpatched:
        names = ", ".join(f"{hook.id} ({hook.target})" for hook in unpatched)
        raise ActivationError(
            f"SGLang's hook registry did not apply {names}; its log says why. Nothing may run half patched."
            " Fix the cause or set SGLANG_DSPARK_CP=0."
        )
    installed.update({hook.id: hook for hook in wanted})
