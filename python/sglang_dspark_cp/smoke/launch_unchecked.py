"""Stock's `sglang.launch_server` with one of its checks bypassed, to see what stock refuses next (`smoke --stock`).

The bypassed check is the one of DSPARK under DP attention, which argument resolution sets for a moment under CP. The
patch stands at module level because SGLang's worker processes run this module again.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import sglang.srt.arg_groups.speculative_hook as speculative_hook

_checked = speculative_hook._handle_dspark


def _bypassed(server_args: Any) -> None:
    held, server_args.enable_dp_attention = server_args.enable_dp_attention, False
    try:
        _checked(server_args)
    finally:
        server_args.enable_dp_attention = held


speculative_hook._handle_dspark = _bypassed

if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from sglang_dspark_cp.smoke.launch_shared import run_rank

    try:
        launch_server(prepare_server_args(sys.argv[1:]), run_scheduler_process_func=run_rank)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
