"""What SGLang's Mooncake manager sends, and what a decode registered, in the words of `core.handshake`.

What the releases share; each release's own module has its handlers and its table of hooks.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from typing import Any

from ..core import handshake
from ..hooks.spec import Hook, ReliesOn, Tier

logger = logging.getLogger(__name__)


def layout_of(kv_args: Any) -> handshake.Layout:
    """What this prefill worker sends."""
    kinds = [kind.value for kind in kv_args.state_types]
    return handshake.Layout(
        kv_buffers=len(kv_args.kv_data_ptrs),
        kv_item=kv_args.kv_item_lens[0] if kv_args.kv_item_lens else 0,
        aux_buffers=len(kv_args.aux_data_ptrs),
        components=handshake.named(kinds, kv_args.state_item_lens),
    )


def registered_layout(info: Any) -> handshake.Layout:
    """What a decode registered. Kinds, page size, dtype and window are not in the message."""
    return handshake.Layout(
        kv_buffers=len(info.dst_kv_ptrs),
        kv_item=info.dst_kv_item_len,
        aux_buffers=len(info.dst_aux_ptrs),
        components=handshake.unnamed(info.dst_state_item_lens),
    )


def name_of(peer: Any) -> str:
    """A decode rank, for messages."""
    return f"{peer.endpoint}:{peer.dst_port} (session {peer.mooncake_session_id})"


def explain_failure(original: Callable[..., None], sender: Any, fail_room: Callable[[Any, int, str], None]) -> None:
    """Say what a request died of that waited for CP ranks that decode does not know. Raises what stock raises.

    Args:
        fail_room: (manager, room, text), which also tells decode.

    With `SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER` on this side only, decode registers with CP rank 0 alone: there
    the request waits for the others, and these wait for decode until SGLang's bootstrap time-out.
    """
    from sglang.srt.disaggregation.base.conn import KVPoll

    manager, room = sender.kv_mgr, sender.bootstrap_room
    if manager.attn_cp_size > 1 and manager.enable_all_cp_ranks_for_transfer and sender.curr_idx == 0:
        known = manager.failure_records.get(room)
        if not manager.decode_kv_args_table and known is not None:
            text = f"{known}; {handshake.no_decode_here(manager.attn_cp_rank)}"
            logger.error("sglang-dspark-cp: room %d: %s", room, text)
            manager.record_failure(room, text)
        elif known is None and manager.request_status.get(room) == KVPoll.WaitingForInput:
            fail_room(manager, room, handshake.others_without_decode())
    original(sender)


def stages_of(arguments: Any) -> int:
    """Number of draft stages in the checkpoint, counted as the draft's own constructor does.

    Args:
        arguments: resolved launch arguments.
    """
    from sglang.srt.speculative.dspark_components.dspark_config import parse_dspark_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(
        arguments.speculative_draft_model_path,
        trust_remote_code=arguments.trust_remote_code,
        revision=arguments.speculative_draft_model_revision,
        model_override_args=json.loads(arguments.json_model_override_args),
    )
    captured = parse_dspark_draft_config(draft_hf_config=config).target_layer_ids
    return len(captured) if captured is not None else int(getattr(config, "num_nextn_predict_layers", 1) or 1)


handshake_hook = functools.partial(
    Hook,
    tier=Tier.WORKER,
    relies_on=ReliesOn.BODY,
    upstream="none, because no release compares the two sides",
    remove_when="SGLang compares state layouts when a decode registers",
)
"""(id, target, handler, parameters, digest, process=, why=, reads=) of a hook of this feature."""
