"""One module per shape of SGLang; a release maps to the module that was reviewed for it."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from ..hooks.spec import Hook

REVIEWED: dict[str, str] = {"0.5.17": "v0_5_17", "0.5.23": "v0_5_23"}
"""SGLang release -> adapter module of this package."""

NOT_SUPPORTED: dict[str, str] = {
    "0.5.18": "its model splits the batch and gathers each captured layer by itself, in a function that no adapter of"
    " this package stands in",
    "0.5.19": "its model splits the batch and gathers each captured layer by itself, in a function that no adapter of"
    " this package stands in",
    "0.5.20": "it gathers each captured layer by itself, and looks up where draft KV goes after the forward, which no"
    " adapter of this package takes up",
    "0.5.21": "it gathers each captured layer by itself, and looks up where draft KV goes after the forward, which no"
    " adapter of this package takes up",
    "0.5.22": "it gathers each captured layer by itself, and looks up where draft KV goes after the forward, which no"
    " adapter of this package takes up",
}
"""SGLang releases that were looked at and are refused, and why; `docs/adding-a-release.md` has more."""


class Adapter(Protocol):
    """What an adapter module offers."""

    EAGER_HOOKS: tuple[Hook, ...]
    WORKER_HOOKS: tuple[Hook, ...]


def find(release: str) -> Adapter | None:
    """The adapter for an SGLang release, or None if that release was not reviewed."""
    base = release.split("+", 1)[0]
    name = REVIEWED.get(base)
    return None if name is None else cast(Adapter, importlib.import_module(f"{__name__}.{name}"))


def refusal(release: str) -> str:
    """Why the feature is refused in a release that `find` does not know."""
    why = NOT_SUPPORTED.get(release.split("+", 1)[0])
    if why is None:
        return f"SGLang {release} was not reviewed."
    return f"SGLang {release} is not supported: {why}; use {' or '.join(REVIEWED)}."


def debug_hooks(release: str) -> tuple[Hook, ...]:
    """Hooks that are used only with SGLANG_DSPARK_CP_DUMP_DIR; none for a release that was not reviewed."""
    name = REVIEWED.get(release.split("+", 1)[0])
    if name is None:
        return ()
    module = importlib.import_module(f"{__name__}.debug_{name}")
    return (*module.PREFILL_DEBUG_HOOKS, *module.DECODE_DEBUG_HOOKS)
