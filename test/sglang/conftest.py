"""Processes with SGLang in them: forked from one server that imported it once, so that each costs a fork."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spawning import Spawn

from sglang_dspark_cp.adapters import REVIEWED
from sglang_dspark_cp.hooks.check import sglang_release
from sglang_dspark_cp.smoke.processes import RankConfig, RankPool, RankProcess

HERE = REVIEWED[sglang_release().split("+", 1)[0]]
OTHERS = [name for name in REVIEWED.values() if name != HERE]
collect_ignore = [f"test_{what}_{name}.py" for what in ("admission", "forward") for name in OTHERS]
"""Tests of another release than the installed one: they are run in that release's environment."""

STARTS_WITHIN_S = 120.0
"""The first process waits for the server's import of SGLang."""


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with RankPool() as ranks:
        yield ranks


@pytest.fixture(scope="session")
def spawn(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Spawn:
    """Start rank processes of one factory and wait until they stand."""
    folder = tmp_path_factory.mktemp("ranks")

    def start(
        factory: str, count: int = 1, environment: dict[str, str] | None = None, **options: Any
    ) -> list[RankProcess]:
        configs = [
            RankConfig(
                role=factory.partition(":")[2],
                rank=rank,
                factory=factory,
                environment=environment or {},
                log=str(Path(folder) / f"{len(pool.ranks)}-{rank}.log"),
                options=options,
            )
            for rank in range(count)
        ]
        ranks = pool.spawn(configs)
        pool.collect(ranks, STARTS_WITHIN_S)
        return ranks

    return start
