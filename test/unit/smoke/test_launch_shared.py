"""Ranks that share a GPU: what each scheduler process is told."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dspark_cp.smoke.launch_shared import run_rank


@pytest.mark.parametrize(
    ("tp_size", "visible", "rank", "gpu", "host"),
    [(2, 1, 1, 0, "dspark-cp-rank-1"), (8, 2, 5, 1, "dspark-cp-rank-5"), (2, 2, 1, 1, None), (1, 1, 0, 0, None)],
)
def test_gpu_and_host_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, tp_size: int, visible: int, rank: int, gpu: int, host: str | None
) -> None:
    calls: list[tuple[Any, ...]] = []
    scheduler = ModuleType("sglang.srt.managers.scheduler")
    scheduler.run_scheduler_process = lambda *args, **kw: calls.append((args, kw))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, scheduler.__name__, scheduler)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setenv("NCCL_HOSTID", "")
    monkeypatch.delenv("NCCL_HOSTID")
    arguments = SimpleNamespace(tp_size=tp_size)
    run_rank(arguments, "ports", rank, rank, "more", named=1)
    assert calls == [((arguments, "ports", gpu, rank, "more"), {"named": 1})]
    assert os.environ.get("NCCL_HOSTID") == host
