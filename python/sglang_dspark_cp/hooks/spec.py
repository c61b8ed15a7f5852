"""What a hook is. Standard library only."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class HookKind(enum.Enum):
    """How the handler stands to the original, in the words of SGLang's hook registry."""

    AROUND = "around"


class Tier(enum.Enum):
    """When a hook is installed."""

    EAGER = "eager"
    """In every process, at plugin load; passes straight through unless the feature is asked for."""
    WORKER = "worker"
    """Inside worker creation of a prefill worker that uses the feature; no other process sees it."""


class ReliesOn(enum.Enum):
    """What of the target a handler depends on."""

    SIGNATURE = "signature"
    BODY = "body"


@dataclass(frozen=True)
class Hook:
    """One patch of SGLang.

    Attributes:
        id: short name for logs and reports.
        target: dotted path of the function or method.
        parameters: names of the target's parameters, in order, that the handler relies on being there.
        digest: of the target's AST without docstrings, comments and annotations (`hooks.check.digest`).
        process: which processes run it.
        why: what it is for.
        upstream: pull request that makes it unnecessary, or "none, because ...".
        remove_when: what has to be true to delete it.
        reads: further definitions whose bodies the handler was written against, as (dotted path, digest).
    """

    id: str
    target: str
    handler: Callable[..., Any]
    parameters: tuple[str, ...]
    digest: str
    tier: Tier
    relies_on: ReliesOn
    process: str
    why: str
    upstream: str
    remove_when: str
    kind: HookKind = HookKind.AROUND
    reads: tuple[tuple[str, str], ...] = ()
