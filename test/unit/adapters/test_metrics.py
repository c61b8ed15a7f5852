"""What a prefill worker tells Prometheus."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sglang_dspark_cp.adapters import metrics as metrics_module
from sglang_dspark_cp.adapters import runtime as runtime_module
from sglang_dspark_cp.adapters import scheduler, v0_5_17, v0_5_23
from sglang_dspark_cp.adapters.metrics import COUNTED, PREFIX, Metrics, log_line
from sglang_dspark_cp.config import Config, GatherMode
from sglang_dspark_cp.core.inject import BatchProof, Counters, GatherSpan, Ledger

LABELS = {"model_name": "m", "engine_type": "prefill"}


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """Name (and the labels of ours) -> value."""
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            extra = {name: value for name, value in sample.labels.items() if name not in LABELS}
            assert {name: sample.labels[name] for name in LABELS} == LABELS
            found[sample.name + "".join(f"|{name}={value}" for name, value in sorted(extra.items()))] = sample.value
    return found


def test_counters_grow_by_what_happened_since() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(LABELS, gather="window", align="rows", registry=registry)
    counters = Counters(forwards=2, aux_collectives=1, gather_bytes=100, rows_injected=7)
    metrics.update(counters, [0.0003], 0)
    counters.forwards, counters.gather_bytes, counters.alignment_failures = 3, 250, 1
    metrics.update(counters, [], 2)
    found = samples(registry)
    assert found[f"{PREFIX}batches_total"] == 3
    assert found[f"{PREFIX}gathers_total"] == 1
    assert found[f"{PREFIX}gather_bytes_total"] == 250
    assert found[f"{PREFIX}rows_injected_total"] == 7
    assert found[f"{PREFIX}alignment_failures_total"] == 1
    assert found[f"{PREFIX}refused_decodes"] == 2
    assert found[f"{PREFIX}gather_seconds_count"] == 1
    assert found[f"{PREFIX}info|align=rows|gather=window"] == 1


def test_every_metric_is_in_the_table_of_the_module_and_reads_as_prometheus_text() -> None:
    registry = CollectorRegistry()
    Metrics(LABELS, gather="kv", align="off", registry=registry)
    named = set(re.findall(r"`(sglang:dspark_cp_\w+)`", metrics_module.__doc__ or ""))
    kinds = {"counter": "_total"}
    assert named == {family.name + kinds.get(family.type, "") for family in registry.collect()}
    assert b"sglang:dspark_cp_info" in generate_latest(registry)
    assert {field for field, _ in COUNTED.values()} <= set(vars(Counters()))


def test_time_of_a_collective_on_a_cpu() -> None:
    import torch

    span = GatherSpan(torch.device("cpu"))
    span.mark()
    span.mark()
    assert 0 <= span.seconds() < 1


def scheduler_with(enabled: bool, served: bool = True, refused: int = 0) -> Any:
    refusals = dict.fromkeys(range(refused), "why")
    manager = SimpleNamespace(decode_kv_args_table=SimpleNamespace(refused=refusals), state_layout_rejections=refusals)
    return SimpleNamespace(
        metrics_reporter=SimpleNamespace(enable_metrics=enabled),
        metrics_collector_context=SimpleNamespace(current_scheduler_metrics_enabled=served),
        metrics_collector=SimpleNamespace(labels=LABELS),
        disagg_prefill_bootstrap_queue=SimpleNamespace(kv_manager=manager),
    )


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> runtime_module.Runtime:
    found = runtime_module.Runtime(Config(), Ledger(0), mode=GatherMode.WINDOW)
    monkeypatch.setattr(runtime_module, "_runtime", found)
    monkeypatch.setattr(scheduler, "cp_rank", lambda: 0)
    return found


@pytest.fixture(params=[v0_5_17.ENGINE, v0_5_23.ENGINE], ids=["0.5.17", "0.5.23"])
def engine(request: pytest.FixtureRequest) -> scheduler.Engine:
    found: scheduler.Engine = request.param
    return found


def test_no_metrics_unless_sglang_serves_them(state: runtime_module.Runtime, engine: scheduler.Engine) -> None:
    proof = BatchProof(["a"], [0], [1])
    scheduler._report(engine, scheduler_with(enabled=False), proof)
    scheduler._report(engine, scheduler_with(enabled=True, served=False), proof)
    assert state.metrics is None


def test_metrics_from_the_first_batch_on(
    state: runtime_module.Runtime, engine: scheduler.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    made = []

    def make(labels: dict[str, str], **what: str) -> Metrics:
        made.append(what)
        return Metrics(labels, registry=registry, **what)

    monkeypatch.setattr(scheduler, "Metrics", make)
    assert state.ledger is not None
    for _ in range(3):
        state.ledger.counters.forwards += 1
        scheduler._report(engine, scheduler_with(enabled=True, refused=1), BatchProof(["a"], [0], [1]))
    assert made == [{"gather": "window", "align": "rows"}]
    assert samples(registry)[f"{PREFIX}batches_total"] == 3
    assert samples(registry)[f"{PREFIX}refused_decodes"] == 1


def test_a_line_in_the_log_now_and_then(
    state: runtime_module.Runtime,
    engine: scheduler.Engine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "LOG_EVERY", 2)
    assert state.ledger is not None
    with caplog.at_level("INFO"):
        for _ in range(4):
            state.ledger.counters.forwards += 1
            scheduler._report(engine, scheduler_with(enabled=False, refused=3), BatchProof(["a"], [0], [1]))
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "sglang-dspark-cp: 2 prefill batches",
        "sglang-dspark-cp: 4 prefill batches",
    ]
    assert "decodes refused now 3" in log_line(Counters(), 3)
