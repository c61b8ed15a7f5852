"""Which mode runs, and why."""

from __future__ import annotations

import dataclasses

import pytest

from sglang_dspark_cp.adapters.gather_mode import CacheSetup, choose
from sglang_dspark_cp.config import GatherMode
from sglang_dspark_cp.errors import TopologyError

PLAIN = CacheSetup(radix=True, page=256, window=128)


@pytest.mark.parametrize("radix", [True, False])
def test_auto_takes_the_window_where_it_is_safe(radix: bool) -> None:
    mode, why = choose(GatherMode.AUTO, dataclasses.replace(PLAIN, radix=radix))
    assert mode is GatherMode.WINDOW
    assert ("256" in why) is radix


def test_auto_takes_all_rows_where_it_is_not_proved() -> None:
    mode, why = choose(GatherMode.AUTO, dataclasses.replace(PLAIN, unproved=("--enable-lmcache",)))
    assert mode is GatherMode.KV
    assert "--enable-lmcache" in why


@pytest.mark.parametrize("mode", [GatherMode.KV, GatherMode.CONTEXT, GatherMode.PACKED])
def test_what_is_asked_for_is_taken_where_all_rows_are_sent(mode: GatherMode) -> None:
    assert choose(mode, dataclasses.replace(PLAIN, unproved=("--enable-lmcache",))) == (mode, "asked for")
    assert choose(GatherMode.WINDOW, PLAIN) == (GatherMode.WINDOW, "asked for")


def test_window_is_refused_where_it_is_not_proved() -> None:
    with pytest.raises(TopologyError) as caught:
        choose(GatherMode.WINDOW, dataclasses.replace(PLAIN, unproved=("--enable-streaming-session", "--x")))
    text = str(caught.value)
    assert "SGLANG_DSPARK_CP_GATHER=window together with --enable-streaming-session, --x" in text
    assert "SGLANG_DSPARK_CP_GATHER=auto or kv" in text


def test_the_page_counts_only_with_a_prefix_cache() -> None:
    assert PLAIN.cache_page == 256
    assert dataclasses.replace(PLAIN, radix=False).cache_page is None
    with pytest.raises(TopologyError, match="page size 0"):
        choose(GatherMode.WINDOW, dataclasses.replace(PLAIN, page=0))
