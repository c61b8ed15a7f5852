"""Prometheus metrics of a prefill worker, on the registry that SGLang serves at /metrics with --enable-metrics.

| name | kind | meaning |
|---|---|---|
| `sglang:dspark_cp_info` | gauge, 1 | labels `gather` and `align`: the mode that runs and the level of the proof |
| `sglang:dspark_cp_batches_total` | counter | prefill batches |
| `sglang:dspark_cp_gathers_total` | counter | collectives for draft rows, one per batch that is split by CP |
| `sglang:dspark_cp_gather_bytes_total` | counter | bytes that this rank received by them |
| `sglang:dspark_cp_gather_seconds` | histogram | time of one such collective on the device |
| `sglang:dspark_cp_rows_captured_total` | counter | rows that this rank gave to the gathers |
| `sglang:dspark_cp_rows_gathered_total` | counter | rows of tokens that came out |
| `sglang:dspark_cp_rows_injected_total` | counter | draft-KV rows that were written |
| `sglang:dspark_cp_rows_sent_total` | counter | draft-KV rows of final windows that were given to Mooncake |
| `sglang:dspark_cp_alignment_failures_total` | counter | batches refused by the alignment proof |
| `sglang:dspark_cp_requests_refused_total` | counter | requests refused because draft KV was not complete |
| `sglang:dspark_cp_refused_decodes` | gauge | decode sessions that are refused now, because their pools do not fit |

Counts only, read from numbers that are on the host anyway; no host sync.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.inject import Counters

PREFIX = "sglang:dspark_cp_"
GATHER_SECONDS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5)

COUNTED = {
    "batches": ("forwards", "Prefill batches."),
    "gathers": ("aux_collectives", "Collectives for draft rows."),
    "gather_bytes": ("gather_bytes", "Bytes that this rank received by collectives for draft rows."),
    "rows_captured": ("rows_captured", "Rows that this rank gave to the gathers."),
    "rows_gathered": ("rows_gathered", "Rows of tokens that came out of the gathers."),
    "rows_injected": ("rows_injected", "Draft-KV rows that were written."),
    "rows_sent": ("rows_sent", "Draft-KV rows of final windows that were given to Mooncake."),
    "alignment_failures": ("alignment_failures", "Batches refused by the alignment proof."),
    "requests_refused": ("requests_refused", "Requests refused because draft KV was not complete."),
}
"""Metric -> field of `Counters`, text."""


class Metrics:
    """The metrics of one process.

    Args:
        labels: SGLang's own labels of this scheduler.
        gather, align: what `sglang:dspark_cp_info` says.
        registry: for tests; None is prometheus-client's default one, which SGLang serves.
    """

    def __init__(self, labels: Mapping[str, str], *, gather: str, align: str, registry: Any = None) -> None:
        # SGLang sets up prometheus-client's multi-process folder before; importing it earlier would miss that.
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        names, where = list(labels), {"registry": REGISTRY if registry is None else registry}
        self._seen = Counters()
        self._counters = {
            field: Counter(f"{PREFIX}{name}", text, names, **where).labels(**labels)
            for name, (field, text) in COUNTED.items()
        }
        self._seconds = Histogram(
            f"{PREFIX}gather_seconds", "Time of one collective for draft rows.", names, buckets=GATHER_SECONDS, **where
        ).labels(**labels)
        self._refused = Gauge(
            f"{PREFIX}refused_decodes",
            "Decode sessions that are refused now.",
            names,
            multiprocess_mode="mostrecent",
            **where,
        ).labels(**labels)
        info = Gauge(
            f"{PREFIX}info",
            "The gather mode and the level of the alignment proof.",
            [*names, "gather", "align"],
            multiprocess_mode="mostrecent",
            **where,
        )
        info.labels(**labels, gather=gather, align=align).set(1)

    def update(self, counters: Counters, gather_seconds: Sequence[float], refused_decodes: int) -> None:
        """Bring the metrics up to date, once per batch."""
        for field, counter in self._counters.items():
            counter.inc(getattr(counters, field) - getattr(self._seen, field))
            setattr(self._seen, field, getattr(counters, field))
        for seconds in gather_seconds:
            self._seconds.observe(seconds)
        self._refused.set(refused_decodes)


def log_line(counters: Counters, refused_decodes: int) -> str:
    """What the log says every `LOG_EVERY` batches."""
    c = counters
    return (
        f"{c.forwards} prefill batches, {c.aux_collectives} gathers of {c.gather_bytes / 1e6:.1f} MB, rows captured"
        f" {c.rows_captured}, gathered {c.rows_gathered}, injected {c.rows_injected}, sent {c.rows_sent}; alignment"
        f" failures {c.alignment_failures}, requests refused {c.requests_refused}, decodes refused now"
        f" {refused_decodes}"
    )


LOG_EVERY = 1000
"""Batches between two lines in the log."""
