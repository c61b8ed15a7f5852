"""SGLang 0.5.17, debug only: what is written is in `debug`."""

from __future__ import annotations

import functools

from ..hooks.spec import Hook, ReliesOn, Tier
from . import debug


def install_for(disaggregation_mode: str) -> None:
    """Install the debug hooks of a worker: `prefill` (without CP), else those of a worker that drafts.

    Raises:
        ActivationError: a target is not the reviewed one, or cannot be patched.
    """
    debug.install_checked(PREFILL_DEBUG_HOOKS if disaggregation_mode == "prefill" else DECODE_DEBUG_HOOKS)


READER = debug.Reader(
    end_of=lambda req: int(req.extend_range.end),
    pool_row=lambda req: int(req.req_pool_idx),
    tp_rank=lambda scheduler: int(scheduler.ps.tp_rank),
    attn_tp_rank=lambda scheduler: int(scheduler.ps.attn_tp_rank),
)

dump_prefill_rows = functools.partial(debug.dump_prefill_rows, READER)
send_kv_chunk = functools.partial(debug.send_kv_chunk, READER)
pop_transferred = functools.partial(debug.pop_transferred, READER)


PREFILL_DEBUG_HOOKS = (
    Hook(
        id="debug-rows-sent",
        target="sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk",
        handler=send_kv_chunk,
        parameters=("self", "req", "last_chunk", "end_idx"),
        digest="93ef0516ff54",
        tier=Tier.WORKER,
        relies_on=ReliesOn.SIGNATURE,
        process="prefill scheduler without CP, with SGLANG_DSPARK_CP_DUMP_DIR only",
        why="draft-KV rows of a prefill without CP, as the reference for those of one with CP",
        upstream="none, because it is a debug aid of this package",
        remove_when="never",
    ),
)

DECODE_DEBUG_HOOKS = (
    Hook(
        id="debug-rows-arrived",
        target="sglang.srt.disaggregation.decode.DecodeTransferQueue.pop_transferred",
        handler=pop_transferred,
        parameters=("self", "rids_to_check"),
        digest="4ec55c6ea403",
        tier=Tier.WORKER,
        relies_on=ReliesOn.SIGNATURE,
        process="decode scheduler, with SGLANG_DSPARK_CP_DUMP_DIR only",
        why="the rows that a request's draft reads, after transfer and before its first step",
        upstream="none, because it is a debug aid of this package",
        remove_when="never",
    ),
    Hook(
        id="debug-proposals",
        target="sglang.srt.speculative.dspark_components.dspark_draft.DraftBlockProposer.propose",
        handler=debug.propose,
        parameters=("self", "batch"),
        digest="e1b8eed7cfe4",
        tier=Tier.WORKER,
        relies_on=ReliesOn.BODY,
        process="every scheduler that drafts, with SGLANG_DSPARK_CP_DUMP_DIR only",
        why="proposals are a fingerprint of the context rows, whatever the target then accepts",
        upstream="none, because it is a debug aid of this package",
        remove_when="never",
    ),
)
