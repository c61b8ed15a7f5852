"""Scheduler handlers of the 0.5.17 adapter on thin stand-ins of the scheduler; the real one runs in test/mooncake."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_dspark_cp.adapters import runtime as runtime_module
from sglang_dspark_cp.adapters import v0_5_17 as adapter
from sglang_dspark_cp.config import Config
from sglang_dspark_cp.core.inject import Ledger
from sglang_dspark_cp.errors import TopologyError


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """The ledger of CP rank 0."""
    found = Ledger(0)
    monkeypatch.setattr(runtime_module, "_runtime", runtime_module.Runtime(Config(), found))
    monkeypatch.setattr(adapter, "_cp_rank", lambda: 0)
    return found


def scheduler_with(**queues: list[Any]) -> Any:
    """A scheduler that holds the given requests."""
    return SimpleNamespace(
        disagg_prefill_bootstrap_queue=SimpleNamespace(queue=queues.get("bootstrap", [])),
        waiting_queue=queues.get("waiting", []),
        disagg_prefill_inflight_queue=queues.get("inflight", []),
        chunked_req=next(iter(queues.get("chunked", [])), None),
        tree_cache="the cache",
    )


@pytest.mark.parametrize("queue", ["bootstrap", "waiting", "inflight", "chunked"])
def test_a_refused_request_that_is_still_held_keeps_its_pages_tainted(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, queue: str
) -> None:
    emptied: list[Any] = []
    monkeypatch.setattr(adapter, "_drop_cached_prefixes", emptied.append)
    ledger.tainted_pages.add(3)
    ledger.refuse_tainted("a", {3})
    held = scheduler_with(**{queue: [SimpleNamespace(rid="a")]})
    assert adapter.process_inflight_queue(lambda scheduler: [], held) == []
    assert (emptied, ledger.tainted_pages) == ([], {3})
    # It ended elsewhere, as after its client's abort: nothing may stay tainted for the next owner of the page.
    adapter.process_inflight_queue(lambda scheduler: [], scheduler_with())
    assert (emptied, ledger.tainted_pages) == (["the cache"], set())
    assert ledger.failed_requests() == ()


def test_finished_requests_are_forgotten_without_touching_the_cache(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_drop_cached_prefixes", lambda cache: pytest.fail("the cache was emptied"))
    done = [SimpleNamespace(rid="a")]
    assert adapter.process_inflight_queue(lambda scheduler: done, scheduler_with()) == done


def test_a_draft_that_is_not_the_bundled_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sglang.srt.speculative.dspark_components.dspark_config")
    module.draft_is_deepseek_v4 = lambda server_args: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(TopologyError, match=r"'other/draft'.*leave out --speculative-draft-model-path"):
        adapter._require_bundled_draft(SimpleNamespace(speculative_draft_model_path="other/draft"))
