"""The smallest end-to-end run on real GPUs: real servers, oracle checkpoint, rows and proposals compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible"),
]


def smoke(folder: Path, *options: str) -> dict[str, object]:
    command = [sys.executable, "-m", "sglang_dspark_cp.cli.main", "smoke", "--device", "cuda", "--json"]
    done = subprocess.run(
        [*command, "--keep", str(folder), *options], stdout=subprocess.PIPE, text=True, timeout=580, check=False
    )
    report: dict[str, object] = json.loads(done.stdout)
    assert (done.returncode == 0) == report["ok"]
    return report


@pytest.mark.parametrize("quant", ["bf16", "fp8"])
def test_a_pd_pair_without_faults(tmp_path: Path, quant: str) -> None:
    size = max(size for size in (1, 2, 4, 8) if size <= torch.cuda.device_count())
    gpus = ",".join(str(index) for index in range(size))
    pairs = "pd1" if size == 1 else f"pd-tp{size},cp{size}-tp{size}"
    report = smoke(tmp_path, "--gpus", gpus, "--pairs", pairs, "--quant", quant, "--no-controls")
    assert report["reasons"] == []
