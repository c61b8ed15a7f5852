"""Scheduler handlers of the adapters on thin stand-ins of the scheduler; the real one runs in test/mooncake."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dspark_cp.adapters import runtime as runtime_module
from sglang_dspark_cp.adapters import scheduler, v0_5_17, v0_5_23
from sglang_dspark_cp.config import Config
from sglang_dspark_cp.core.inject import BatchProof, Ledger
from sglang_dspark_cp.errors import TopologyError

ADAPTERS = [v0_5_17, v0_5_23]


@pytest.fixture(params=ADAPTERS, ids=["0.5.17", "0.5.23"])
def adapter(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """The ledger of CP rank 0."""
    found = Ledger(0)
    monkeypatch.setattr(runtime_module, "_runtime", runtime_module.Runtime(Config(), found))
    monkeypatch.setattr(scheduler, "cp_rank", lambda: 0)
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
    adapter: Any, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, queue: str
) -> None:
    emptied: list[Any] = []
    monkeypatch.setattr(scheduler, "drop_cached_prefixes", lambda engine, cache: emptied.append(cache))
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
    adapter: Any, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "drop_cached_prefixes", lambda *_: pytest.fail("the cache was emptied"))
    done = [SimpleNamespace(rid="a")]
    assert adapter.process_inflight_queue(lambda scheduler: done, scheduler_with()) == done


class Copy:
    """Stands for the event behind a batch's results: waiting for it ends the GPU's work, which stores the words."""

    def __init__(self, proof: BatchProof, *, in_time: bool) -> None:
        assert proof._found is not None
        self.memory, self.words, self.in_time = proof._found.memory, proof._found.memory.clone(), in_time
        self.memory.zero_()

    def synchronize(self) -> None:
        if self.in_time:
            self.memory.copy_(self.words)


@pytest.mark.parametrize("in_time", [True, False])
def test_the_verdict_is_read_behind_the_batchs_results(
    adapter: Any, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    proof = BatchProof(["a"], [0], [3])
    ledger.begin(proof)
    hidden, where = torch.randn(3, 8), torch.arange(3)
    proof.note_local(hidden)
    assert proof.admit(hidden, where, where + 256, expected_width=8, to_swa=lambda locations: locations) is not None
    refused: list[str] = []
    monkeypatch.setattr(scheduler, "_gather_words", lambda words, group: [words.tolist()])
    monkeypatch.setattr(scheduler, "_report", lambda *_: None)
    monkeypatch.setattr(scheduler, "refuse", lambda engine, prefill, req, start, end, why: refused.append(why))
    result = SimpleNamespace(dspark_cp_proof=proof, copy_done=Copy(proof, in_time=in_time))
    handed_on: list[Any] = []
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid="a")])
    prefill = SimpleNamespace(attn_cp_cpu_group="group")
    adapter.process_batch_result(lambda *given: handed_on.append(given), prefill, batch, result)
    assert handed_on == [(prefill, batch, result)]
    assert "dspark_cp_proof" not in vars(result)
    if in_time:
        assert refused == []
    else:
        (why,) = refused
        assert why.startswith("AlignmentError: draft KV of a prefill batch of 3 tokens is not aligned")
        assert "did not reach the host" in why


class Cache:
    """A prefix cache that notes what is evicted."""

    def __init__(self, prefixes: bool) -> None:
        self.prefixes, self.evicted = prefixes, 0

    def is_chunk_cache(self) -> bool:
        return not self.prefixes

    def supports_prefix_sharing(self) -> bool:
        return self.prefixes

    def full_evictable_size(self) -> int:
        return 300

    def swa_evictable_size(self) -> int:
        return 20

    def evict(self, params: Any) -> None:
        assert params.num_tokens == params.swa_num_tokens
        self.evicted = params.num_tokens


@pytest.mark.parametrize(("prefixes", "evicted"), [(True, 320), (False, 0)])
def test_everything_is_evicted_where_there_are_prefixes(adapter: Any, prefixes: bool, evicted: int) -> None:
    pytest.importorskip("sglang.srt.mem_cache.base_prefix_cache")
    cache = Cache(prefixes)
    scheduler.drop_cached_prefixes(adapter.ENGINE, cache)
    assert cache.evicted == evicted


def request_of(adapter: Any, length: int, *, row: int | None = 2, middle_chunks: int = 0) -> Any:
    """A request as that release has it."""
    shape: dict[str, Any] = (
        {"req_pool_idx": row, "extend_range": SimpleNamespace(end=length), "inflight_middle_chunks": middle_chunks}
        if adapter is v0_5_17
        else {"kv": SimpleNamespace(req_pool_idx=row), "extend_end": length, "disagg_decode_prefix_len": 0}
    )
    return SimpleNamespace(
        rid="a",
        origin_input_ids=[1] * length,
        disagg_kv_sender=SimpleNamespace(kv_mgr="manager", bootstrap_room=7),
        **shape,
    )


def prefill_of(retired: list[str]) -> Any:
    """A scheduler whose request row 2 holds locations 512, 513, ..."""
    table = torch.zeros(4, 1024, dtype=torch.int64)
    table[2] = torch.arange(512, 512 + 1024)
    return SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool_allocator=SimpleNamespace(page_size=256),
        sliding_window_size=128,
        clear_pending_chunk_send=lambda req: retired.append(req.rid),
    )


@pytest.mark.parametrize(("row", "pages"), [(2, {2, 3}), (None, {scheduler.NO_PAGE})])
def test_a_refused_request(
    adapter: Any, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, row: int | None, pages: set[int]
) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(adapter, "fail_room", lambda *what: failed.append(what))
    req = request_of(adapter, 300, row=row)
    scheduler.refuse(adapter.ENGINE, prefill_of([]), req, 0, 300, "why")
    assert ledger.tainted_pages == pages
    assert req.skip_radix_cache_insert is True
    assert failed == [("manager", 7, "why")]


def test_between_two_chunks_0_5_17_still_wants_the_cache() -> None:
    req = request_of(v0_5_17, 300, middle_chunks=1)
    v0_5_17.ENGINE.skip_cache(req)
    assert req.skip_radix_cache_insert is False


def test_a_last_chunk_without_injected_rows_is_not_sent(
    adapter: Any, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(adapter, "fail_room", lambda manager, room, text: failed.append(text))
    retired: list[str] = []
    adapter.send_kv_chunk(
        lambda *_, **__: pytest.fail("it was sent"), prefill_of(retired), request_of(adapter, 300), True
    )
    (text,) = failed
    assert text.startswith("TransferError: draft KV of request a is not complete")
    assert retired == ([] if adapter is v0_5_17 else ["a"])


def test_rows_of_a_prefix_that_decode_has_are_not_counted_as_sent(ledger: Ledger) -> None:
    req = request_of(v0_5_23, 300)
    assert v0_5_23.ENGINE.sends_from(prefill_of([]), req, 300) == 300 - 128
    req.disagg_decode_prefix_len = 256
    assert v0_5_23.ENGINE.sends_from(prefill_of([]), req, 300) == 256
    assert v0_5_23.ENGINE.sends_from(prefill_of([]), request_of(v0_5_23, 5), 5) == 0
    assert v0_5_17.ENGINE.sends_from(prefill_of([]), request_of(v0_5_17, 5), 5) == 0


def test_a_draft_that_is_not_the_bundled_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sglang.srt.speculative.dspark_components.dspark_config")
    module.draft_is_deepseek_v4 = lambda server_args: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(TopologyError, match=r"'other/draft'.*leave out --speculative-draft-model-path"):
        v0_5_17._require_bundled_draft(SimpleNamespace(speculative_draft_model_path="other/draft"))


def test_a_draft_that_is_not_the_bundled_one_is_refused_in_0_5_23(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "sglang.srt.configs.model_config": {"is_deepseek_v4": lambda config: config != "other"},
        "sglang.srt.utils.hf_transformers_utils": {"get_config": lambda path, **_: path.split("/")[0]},
    }
    for name, values in names.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    asked = SimpleNamespace(
        speculative_draft_model_path="other/draft",
        speculative_draft_model_revision=None,
        trust_remote_code=True,
        json_model_override_args="{}",
        model_config_parser="auto",
    )
    with pytest.raises(TopologyError, match=r"'other/draft'.*leave out --speculative-draft-model-path"):
        v0_5_23._require_bundled_draft(asked)
    asked.speculative_draft_model_path = "v4/draft"
    v0_5_23._require_bundled_draft(asked)
