"""SGLang 0.5.23, debug only: what is written is in `debug`."""

from __future__ import annotations

import functools
from typing import Any

from ..hooks.spec import Hook, ReliesOn, Tier
from . import debug


def install_for(disaggregation_mode: str) -> None:
    """Install the debug hooks of a worker: `prefill` (without CP), else those of a worker that drafts.

    Raises:
        ActivationError: a target is not the reviewed one, or cannot be patched.
    """
    debug.install_checked(PREFILL_DEBUG_HOOKS if disaggregation_mode == "prefill" else DECODE_DEBUG_HOOKS)


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


READER = debug.Reader(
    end_of=lambda req: int(req.extend_end),
    pool_row=lambda req: int(req.kv.req_pool_idx),
    tp_rank=lambda scheduler: int(_parallel().tp_rank),
    attn_tp_rank=lambda scheduler: int(_parallel().attn_tp_rank),
)

dump_prefill_rows = functools.partial(debug.dump_prefill_rows, READER)
send_kv_chunk = functools.partial(debug.send_kv_chunk, READER)
pop_transferred = functools.partial(debug.pop_transferred, READER)

_hook = functools.partial(
    Hook,
    tier=Tier.WORKER,
    upstream="none, because it is a debug aid of this package",
    remove_when="never",
)

PREFILL_DEBUG_HOOKS = (
    _hook(
        "debug-rows-sent",
        "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk",
        send_kv_chunk,
        ("self", "req", "last_chunk", "end_idx"),
        "72a6f51f27cb",
        relies_on=ReliesOn.SIGNATURE,
        process="prefill scheduler without CP, with SGLANG_DSPARK_CP_DUMP_DIR only",
        why="draft-KV rows of a prefill without CP, as the reference for those of one with CP",
    ),
)

DECODE_DEBUG_HOOKS = (
    _hook(
        "debug-rows-arrived",
        "sglang.srt.disaggregation.decode.DecodeTransferQueue.pop_transferred",
        pop_transferred,
        ("self", "rids_to_check"),
        "628dbe61d515",
        relies_on=ReliesOn.SIGNATURE,
        process="decode scheduler, with SGLANG_DSPARK_CP_DUMP_DIR only",
        why="the rows that a request's draft reads, after transfer and before its first step",
    ),
    _hook(
        "debug-proposals",
        "sglang.srt.speculative.dspark_components.dspark_draft.DraftBlockProposer.propose",
        debug.propose,
        ("self", "batch"),
        "a1ea2088b83f",
        relies_on=ReliesOn.BODY,
        process="every scheduler that drafts, with SGLANG_DSPARK_CP_DUMP_DIR only",
        why="proposals are a fingerprint of the context rows, whatever the target then accepts",
    ),
)
