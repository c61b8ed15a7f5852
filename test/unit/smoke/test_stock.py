"""What `--stock` makes of two runs, and which module drives which release."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import pytest
from rich.console import Console

from sglang_dspark_cp import adapters
from sglang_dspark_cp.smoke import geometry as g
from sglang_dspark_cp.smoke import oracle, release, stock
from sglang_dspark_cp.smoke.prefill import Collective
from sglang_dspark_cp.smoke.weights import lm_head_weight, target_weights


def rank(*widths: int) -> SimpleNamespace:
    """A rank of CP 4 with forwards of 3, 8 and 16 tokens, whose collectives are `widths` hidden sizes wide."""
    found = [
        Collective(forward, rows, rows * width * 2 * g.HIDDEN) for forward, rows in ((1, 2), (2, 4)) for width in widths
    ]
    return SimpleNamespace(forward_tokens=[3, 8, 16], model_collectives=found)


def test_stock_side() -> None:
    side = stock.of_stock(rank(1, 4, 3), cp_size=4)
    assert (side.cp_forwards, side.tokens) == (2, 24)
    assert [part.name for part in side.parts] == list(stock.PARTS.values())
    assert [part.collectives for part in side.parts] == [2, 2, 2]
    # Three other ranks give 2 + 4 rows each.
    assert [part.bytes_at_hidden["4096"] for part in side.parts] == [18 * 2 * 4096 * width for width in (1, 4, 3)]
    assert side.bytes_per_token("4096") == 18 * 2 * 4096 * 8 / 24


def test_a_collective_that_was_not_reviewed_shows() -> None:
    side = stock.of_stock(rank(1, 4, 3, 7), cp_size=4)
    assert [part.name for part in side.parts][3:] == [f"{7 * 2 * g.HIDDEN} bytes per row"]


def test_ratio_is_per_token() -> None:
    theirs = stock.of_stock(rank(1, 4, 3), cp_size=4)
    received = {size: theirs.parts[0].bytes_at_hidden[size] for size in ("512", "4096", "7168")}
    report = {"mode": "kv", "cp_group_collectives": 1, "gather_bytes_at_hidden": received, "cp_forwards": 1}
    ours = stock.of_ours(report, tokens=12)
    assert stock.ratios(theirs, ours) == dict.fromkeys(received, 0.25)
    shown = Console(width=120, record=True, quiet=True)
    sides = {"stock": asdict(theirs), "ours": asdict(ours), "ours_to_stock": stock.ratios(theirs, ours)}
    with shown.capture() as text:
        shown.quiet = False
        shown.print(stock.table(sides))
    for words in ("stock: all", "draft rows (kv)", "25.0 %"):
        assert words in text.get()


def test_first_tokens_are_few_and_depend_on_token_and_position() -> None:
    """So that a row for the head from another place or another request shows."""
    target, head = target_weights(), lm_head_weight()
    tokens = [oracle.first_tokens([7, 8, last], target, head) for last in range(20, 60)]
    places = [oracle.first_tokens([7] * length, target, head) for length in range(1, 41)]
    for found in (tokens, places):
        assert all(1 <= len(each) <= 3 for each in found)
        assert len({frozenset(each) for each in found}) > 15
    assert oracle.first_tokens([9, 8, 20], target, head) == tokens[0]


def test_each_reviewed_release_can_be_driven() -> None:
    assert set(release.MODULES) == set(adapters.REVIEWED)


def test_a_release_that_cannot_be_driven_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "sglang_release", lambda: "0.5.99")
    release.installed.cache_clear()
    try:
        with pytest.raises(release.UnknownRelease, match=r"does not know SGLang 0\.5\.99; it knows 0\.5\.17, 0\.5\.23"):
            release.installed()
    finally:
        release.installed.cache_clear()


@pytest.mark.parametrize("name", release.MODULES)
def test_a_module_offers_every_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "sglang_release", lambda: name)
    release.installed.cache_clear()
    try:
        module = release.installed()
    finally:
        release.installed.cache_clear()
    wanted = {each for each in vars(release.Release) if not each.startswith("_")} | set(release.Release.__annotations__)
    assert {each for each in wanted if not hasattr(module, each)} == set()
