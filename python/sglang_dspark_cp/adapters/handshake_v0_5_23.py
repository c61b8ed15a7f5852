"""SGLang 0.5.23: a decode that does not fit is refused when it registers (`core.handshake` says why).

This release compares the item lengths of paired state buffers itself, and refuses by session. What it does not compare
(missing components, KV and metadata buffers) is added to its own verdict, and acted on before the prefill runs.

Threads: registrations and `WaitingForInput` come from the thread that receives them; rooms also change in the transfer
threads and in the scheduler's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from ..core import handshake
from .handshake import explain_failure, handshake_hook, layout_of, name_of, registered_layout, stages_of

logger = logging.getLogger(__name__)


def _peers(manager: Any, room: int) -> list[Any]:
    return list(manager.transfer_infos.get(room, {}).values())


def fail_room(manager: Any, room: int, text: str) -> None:
    """End a request's transfer with `text` on this rank and tell its decode ranks; idempotent.

    Stock's next poll, reduced over the CP ranks, then aborts the request everywhere and answers its client.
    """
    from sglang.srt.disaggregation.base.conn import KVPoll

    if manager.request_status.get(room) not in (None, KVPoll.Failed):
        manager.conclude_failure(bootstrap_room=room, failure_reason=text)


def _reason(manager: Any, room: int) -> str | None:
    """Why a room may not be served, once all of its decode ranks are known."""
    peers = _peers(manager, room)
    if not peers or len(peers) < peers[0].required_dst_info_num:
        return None
    for peer in peers:
        refused: str | None = manager.state_layout_rejections.get(peer.mooncake_session_id)
        if refused is not None:
            return refused
        if peer.mooncake_session_id not in manager.decode_kv_args_table and not peer.is_dummy:
            return handshake.stranger(name_of(peer))
    return None


# ------------------------------------------------------------------------------------------------------- handlers


def register_buffers(original: Callable[..., None], manager: Any) -> None:
    """Stop here if this worker's own draft KV is not what it will send."""
    from sglang.srt.arg_groups.overrides import resolving_view

    args = manager.kv_args
    handshake.require_own(layout_of(args), stages_of(resolving_view(manager.server_args)), args.page_size)
    original(manager)


def validate_peer(
    original: Callable[..., tuple[bool, str | None]], manager: Any, registration_info: Any
) -> tuple[bool, str | None]:
    """Compare what decode registered with what is sent; stock refuses the session with the reason and logs it."""
    ours = layout_of(manager.kv_args)
    text = handshake.refusal(
        name_of(registration_info), ours, registered_layout(registration_info), sends=not manager.is_dummy_cp_rank
    )
    return original(manager, registration_info) if text is None else (False, text)


def update_status(original: Callable[..., None], manager: Any, bootstrap_room: int, status: Any) -> None:
    """A room of a refused decode fails as soon as its decode ranks are known, not after its prefill."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    original(manager, bootstrap_room, status)
    if status == KVPoll.WaitingForInput:
        text = _reason(manager, bootstrap_room)
        if text is not None:
            fail_room(manager, bootstrap_room, text)


def add_transfer_request(
    original: Callable[..., None],
    manager: Any,
    bootstrap_room: int,
    kv_indices: Any,
    index_slice: slice,
    is_last_chunk: bool,
    **rest: Any,
) -> None:
    """Queue a last chunk only if it brings exactly the state rows that decode reserved."""
    if is_last_chunk and manager.attn_cp_rank == 0:  # state is sent by this rank
        components, rows = layout_of(manager.kv_args).components, rest.get("state_indices")
        for peer in _peers(manager, bootstrap_room):
            text = None if peer.is_dummy else handshake.index_mismatch(components, rows, peer.dst_state_indices)
            if text is not None:
                logger.error("sglang-dspark-cp: room %d, decode %s: %s", bootstrap_room, name_of(peer), text)
                return fail_room(manager, bootstrap_room, text)
    return original(manager, bootstrap_room, kv_indices, index_slice, is_last_chunk, **rest)


def failure_exception(original: Callable[..., None], sender: Any) -> None:
    """Name the likely cause where CP ranks wait that decode does not know."""
    explain_failure(original, sender, fail_room)


# ---------------------------------------------------------------------------------------------------------- table

_COMMON = "sglang.srt.disaggregation.common.conn."
_MOONCAKE = "sglang.srt.disaggregation.mooncake.conn."
_MANAGER = f"{_MOONCAKE}MooncakeKVManager."

_hook = functools.partial(
    handshake_hook,
    upstream="sgl-project/sglang: item lengths of paired state buffers are compared since 0.5.22, the rest is not",
    remove_when="SGLang compares everything that is paired by position when a decode registers",
)

HANDSHAKE_HOOKS = (
    handshake_hook(
        "own-state",
        f"{_MANAGER}register_buffer_to_engine",
        register_buffers,
        ("self",),
        "fdae0b203b78",
        process="prefill scheduler, once, and after memory was released and resumed",
        why="a worker without complete draft KV on the wire stops at start",
        reads=(("sglang.srt.disaggregation.utils.setup_state_kv_args", "c129e4de7b6d"),),
    ),
    _hook(
        "compare-registration",
        f"{_MANAGER}_validate_peer_state_layout",
        validate_peer,
        ("self", "registration_info"),
        "1ead7c004bd8",
        process="prefill scheduler, once per decode rank that registers",
        why="stock passes over a component that decode lacks, and over KV and metadata buffers of another size",
        reads=(
            (f"{_MANAGER}__init__", "223afa9414ff"),
            (f"{_MANAGER}_publish_peer_registration", "ad24a51e682e"),
            (f"{_MANAGER}_state_stride_mismatch", "f5df1bcf70e7"),
            (f"{_COMMON}CommonKVManager.__init__", "d07a0fd8d013"),
            (f"{_COMMON}CommonKVManager.check_peer_aux_buffer_count", "98765fe0bcb1"),
            (f"{_MOONCAKE}KVArgsRegisterInfo.from_zmq", "111e8475aa8a"),
            (f"{_MOONCAKE}TransferInfo.from_zmq", "cb53f9d82ffe"),
        ),
    ),
    _hook(
        "refuse-decode",
        f"{_COMMON}CommonKVManager.update_status",
        update_status,
        ("self", "bootstrap_room", "status"),
        "d4db3c021ae8",
        process="prefill scheduler, a few times per request",
        why="stock finds out after the whole prefill ran, and a decode that never registered ends its transfer thread",
        reads=(
            (f"{_COMMON}CommonKVManager.conclude_transfer", "518b2f8186a2"),
            (f"{_COMMON}CommonKVManager.conclude_failure", "a63c340fcdfa"),
            (f"{_COMMON}CommonKVSender.__init__", "894d2d3117b0"),
            (f"{_MANAGER}start_prefill_thread", "b52ceff122a8"),
        ),
    ),
    _hook(
        "state-rows",
        f"{_MANAGER}add_transfer_request",
        add_transfer_request,
        ("self", "bootstrap_room", "kv_indices", "index_slice", "is_last_chunk", "state_indices"),
        "762acb4faf1a",
        process="prefill scheduler, every chunk that is sent",
        why="stock cuts window lists of different length and passes over missing ones; both end as Success",
        # What turns a rejected write into a failed request is stock's own; here it is held to what was reviewed.
        reads=(
            (f"{_MANAGER}transfer_worker", "bb623a09bc86"),
            (f"{_MANAGER}maybe_send_extra", "039ea198dbc9"),
            (f"{_MANAGER}_send_kvcache_generic", "be5e7f0ba5e9"),
            (f"{_MANAGER}_transfer_data", "6e67c4b7dc64"),
            (f"{_MANAGER}send_aux", "f09bb0bf17f8"),
            (f"{_COMMON}CommonKVSender.send", "4cbec3bef224"),
            (f"{_COMMON}CommonKVSender._prepare_send_indices", "93b61ab14d5e"),
            (
                "sglang.srt.distributed.device_communicators.mooncake_transfer_engine."
                "MooncakeTransferEngine.batch_transfer_sync",
                "5ab8f96e66c4",
            ),
        ),
    ),
    handshake_hook(
        "explain-failure",
        f"{_COMMON}CommonKVSender.failure_exception",
        failure_exception,
        ("self",),
        "26b583aa4cd6",
        process="prefill scheduler, once per failed request",
        why="CP ranks that decode does not know wait until a time-out whose text does not say why",
        remove_when="SGLang compares SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER of both sides",
        reads=(
            (f"{_COMMON}CommonKVSender._check_bootstrap_timeout", "ce33ffd6954c"),
            (f"{_COMMON}CommonKVSender.poll", "2cfe5ed36fc8"),
        ),
    ),
)
"""Every hook of the comparison between prefill and decode."""
