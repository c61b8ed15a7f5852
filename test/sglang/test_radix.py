"""The rows that mode `window` leaves out are never read, for whatever prefix SGLang's own cache hands out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from radix_cases import PAGE, Seen
from spawning import Spawn

from sglang_dspark_cp.smoke.processes import RankPool, RankProcess

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def cache(pool: RankPool, spawn: Spawn) -> Iterator[RankProcess]:
    (rank,) = spawn("radix_cases:RadixRank", environment={"SGLANG_NCCL_SO_PATH": "/nonexistent"})
    yield rank
    rank.kill()
    pool.ranks.remove(rank)


def run(pool: RankPool, cache: RankProcess, seed: int, page: int | None) -> Seen:
    cache.start("run", seed, 300, page)
    seen = pool.collect([cache], 90.0)[0]
    assert isinstance(seen, Seen)
    return seen


@pytest.mark.parametrize("seed", [1, 2])
def test_every_row_that_is_read_was_written(pool: RankPool, cache: RankProcess, seed: int) -> None:
    seen = run(pool, cache, seed, PAGE)
    assert seen.requests > 200
    assert len(seen.hits) > 50
    assert all(hit % PAGE == 0 for hit in seen.hits), "the cache handed out part of a page"
    assert len(set(seen.hits)) > 3
    assert seen.read > 10_000
    assert seen.unwritten == []
    assert seen.written < 0.9 * seen.computed


def test_the_rows_of_a_set_up_without_cache_are_too_few(pool: RankPool, cache: RankProcess) -> None:
    """What the test above would see if the rule forgot the cache."""
    seen = run(pool, cache, 1, None)
    assert seen.unwritten != []
    assert "from the cache" in seen.unwritten[0]
