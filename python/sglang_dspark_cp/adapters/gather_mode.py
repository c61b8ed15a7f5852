"""Which gather mode a prefill worker takes: what is asked for, as far as it is proved safe."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import GATHER, GatherMode
from ..errors import TopologyError


@dataclass(frozen=True)
class CacheSetup:
    """What decides which rows can be read again.

    Attributes:
        radix: whether the prefix cache is on.
        page: tokens per page.
        window: W, tokens of the draft's sliding window.
        unproved: features that keep or hand out prefixes in ways that were not proved here, by their flags.
    """

    radix: bool
    page: int
    window: int
    unproved: tuple[str, ...] = ()

    @property
    def cache_page(self) -> int | None:
        """Page of the prefix cache, None without one."""
        return self.page if self.radix else None


def choose(asked: GatherMode, setup: CacheSetup) -> tuple[GatherMode, str]:
    """The mode to run and why.

    Raises:
        TopologyError: `window` is asked for where it was not proved safe.
    """
    doubts = list(setup.unproved)
    if setup.radix and setup.page < 1:
        doubts.append(f"page size {setup.page}")
    if asked is GatherMode.WINDOW and doubts:
        raise TopologyError(
            f"found {GATHER}=window together with {', '.join(doubts)}; allowed is window with the plain radix cache or"
            " without one, because only there it was proved that no later request reads a row that was not sent; fix:"
            f" {GATHER}=auto or kv, or leave out {', '.join(doubts)}"
        )
    if asked is not GatherMode.AUTO:
        return asked, "asked for"
    if doubts:
        return GatherMode.KV, f"rows outside the window may be read again with {', '.join(doubts)}"
    where = f"pages of {setup.page} tokens" if setup.radix else "no prefix cache"
    return GatherMode.WINDOW, f"with {where} no other row can be read"
