"""One module per shape of SGLang; a release maps to the module that was reviewed for it."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from ..hooks.spec import Hook

REVIEWED: dict[str, str] = {"0.5.17": "v0_5_17", "0.5.23": "v0_5_23"}
"""SGLang release -> adapter module of this package."""


class Adapter(Protocol):
    """What an adapter module offers."""

    EAGER_HOOKS: tuple[Hook, ...]
    WORKER_HOOKS: tuple[Hook, ...]


def find(release: str) -> Adapter | None:
    """The adapter for an SGLang release, or None if that release was not reviewed."""
    base = release.split("+", 1)[0]
    name = REVIEWED.get(base)
    return None if name is None else cast(Adapter, importlib.import_module(f"{__name__}.{name}"))


def debug_hooks(release: str) -> tuple[Hook, ...]:
    """Hooks that are used only with SGLANG_DSPARK_CP_DUMP_DIR; none for a release that was not reviewed."""
    name = REVIEWED.get(release.split("+", 1)[0])
    if name is None:
        return ()
    module = importlib.import_module(f"{__name__}.debug_{name}")
    return (*module.PREFILL_DEBUG_HOOKS, *module.DECODE_DEBUG_HOOKS)
