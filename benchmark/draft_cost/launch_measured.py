"""A prefill server whose ranks write down how much GPU memory they hold: SGLang's server, nothing replaced.

Where several processes share a GPU, the free memory that SGLang's log is made from is everybody's, and `nvidia-smi`
does not tell processes apart in every container. PyTorch's own counters are of one process alone. Each rank writes
them to `$DRAFT_COST_MEMORY/rank-N.jsonl`, a few times a second and whenever a model begins or ends to load.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

FOLDER = "DRAFT_COST_MEMORY"
INTERVAL = 0.2


class MemoryLog:
    """Writes one JSON object per line: seconds, event, bytes allocated, reserved and the peak of reserved."""

    def __init__(self, path: Path, gpu: int) -> None:
        self._gpu, self._lock = gpu, threading.Lock()
        self._out = path.open("w", buffering=1)

    def note(self, event: str) -> None:
        """Write the counters now; nothing before CUDA is in use."""
        import torch

        cuda: Any = torch.cuda
        if not cuda.is_initialized():
            return
        counters = cuda.memory_stats(self._gpu)
        line = {
            "seconds": round(time.monotonic(), 3),
            "event": event,
            "allocated": counters.get("allocated_bytes.all.current", 0),
            "reserved": counters.get("reserved_bytes.all.current", 0),
            "peak": counters.get("reserved_bytes.all.peak", 0),
        }
        with self._lock:
            self._out.write(json.dumps(line) + "\n")

    def sees(self, record: logging.LogRecord) -> bool:
        """Filter of the logger that announces loads; lets everything through."""
        message = record.getMessage()
        if message.startswith("Load weight "):
            self.note(message)
        return True

    def run(self) -> None:
        """Sample for ever."""
        while True:
            self.note("")
            time.sleep(INTERVAL)


def run_rank(server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, *rest: Any, **named: Any) -> None:
    """The scheduler process of `smoke.launch_shared`, watched."""
    import torch

    from sglang_dspark_cp.smoke import launch_shared

    log = MemoryLog(Path(os.environ[FOLDER]) / f"rank-{tp_rank}.jsonl", gpu_id % max(1, torch.cuda.device_count()))
    # SGLang sets up its handlers anew in each process, but leaves filters of a logger alone.
    logging.getLogger("sglang.srt.model_executor.model_runner").addFilter(log.sees)
    threading.Thread(target=log.run, daemon=True).start()
    launch_shared.run_rank(server_args, port_args, gpu_id, tp_rank, *rest, **named)


if __name__ == "__main__":
    import launch_measured
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        launch_server(prepare_server_args(sys.argv[1:]), run_scheduler_process_func=launch_measured.run_rank)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
