"""The benchmarks are scripts, not part of the package: their folders are put on the path here."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmark"

for folder in ("common", "gsm8k", "pd_serving"):
    sys.path.insert(0, str(BENCHMARK / folder))
