"""Imported once by the fork server, so that each rank costs a fork instead of a long import."""

from __future__ import annotations

import gc
import warnings

warnings.simplefilter("ignore")

import torch  # noqa: E402

torch.set_num_threads(1)

import sglang.srt.disaggregation.mooncake.conn  # noqa: E402
import sglang.srt.disaggregation.prefill  # noqa: E402
import sglang.srt.hardware_backend.npu.memory_pool_npu  # noqa: E402
import sglang.srt.managers.scheduler  # noqa: E402
import sglang.srt.mem_cache.unified_radix_cache  # noqa: E402
import sglang.srt.models.deepseek_v4_dspark  # noqa: E402
import sglang.srt.speculative.dspark_components.dspark_worker_v2  # noqa: E402, F401

gc.collect()
gc.freeze()
