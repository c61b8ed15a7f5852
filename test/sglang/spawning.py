"""What the fixture `spawn` is, for the tests that take it."""

from __future__ import annotations

from collections.abc import Callable

from sglang_dspark_cp.smoke.processes import RankProcess

Spawn = Callable[..., list[RankProcess]]
