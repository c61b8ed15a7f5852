"""SGLang's server with several ranks on one GPU (`smoke --device cuda --ranks-per-gpu N`): no speed, but real CUDA.

Stands in for GPUs that are not there. NCCL refuses two ranks of one communicator on the same device of one host; each
rank therefore names a host of its own (NCCL_HOSTID), and NCCL moves the data through sockets. Every kernel, stream and
collective call is the one of a run with a GPU per rank; only the transport below NCCL differs.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def run_rank(server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, *rest: Any, **named: Any) -> None:
    """SGLang's scheduler process, on GPU `gpu_id` modulo the number of visible GPUs when ranks have to share."""
    import torch
    from sglang.srt.managers.scheduler import run_scheduler_process

    visible = torch.cuda.device_count()
    if server_args.tp_size > visible:
        os.environ["NCCL_HOSTID"] = f"dspark-cp-rank-{tp_rank}"
        gpu_id %= visible
    run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *rest, **named)


if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from sglang_dspark_cp.smoke import launch_shared

    load_plugins()
    try:
        launch_server(prepare_server_args(sys.argv[1:]), run_scheduler_process_func=launch_shared.run_rank)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
