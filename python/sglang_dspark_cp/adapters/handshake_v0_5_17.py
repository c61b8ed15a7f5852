"""SGLang 0.5.17: a decode that does not fit is refused when it registers (`core.handshake` says why).

Threads: `Registrations` is written by the thread that receives registrations; room states change in that thread, in
the transfer threads and in the scheduler's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from ..core import handshake
from .handshake import explain_failure, handshake_hook, layout_of, name_of, registered_layout, stages_of

logger = logging.getLogger(__name__)


class Registrations(dict[str, Any]):
    """Stock's table of registered decodes by session, which compares each one as it is entered.

    Attributes:
        layout: what this prefill worker sends.
        refused: session -> why nothing is sent to it.
        lock: taken by whoever changes the state of a room.
    """

    def __init__(self, layout: handshake.Layout, sends: bool) -> None:
        super().__init__()
        self.layout, self.sends = layout, sends
        self.refused: dict[str, str] = {}
        self.lock = threading.Lock()

    def __setitem__(self, session: str, info: Any) -> None:
        text = handshake.refusal(name_of(info), self.layout, registered_layout(info), sends=self.sends)
        if text is None:
            self.refused.pop(session, None)  # the same decode, restarted with other flags
        else:
            self.refused[session] = text
            logger.error("sglang-dspark-cp: %s", text)
        super().__setitem__(session, info)

    def reason(self, peers: list[Any]) -> str | None:
        """Why a room may not be served, once all of its decode ranks are known."""
        if not peers or len(peers) < peers[0].required_dst_info_num:
            return None
        for peer in peers:
            if peer.mooncake_session_id in self.refused:
                return self.refused[peer.mooncake_session_id]
            if peer.mooncake_session_id not in self and not peer.is_dummy:
                return handshake.stranger(name_of(peer))
        return None


def _peers(manager: Any, room: int) -> list[Any]:
    return list(manager.transfer_infos.get(room, {}).values())


def tell(manager: Any, peers: Iterable[Any]) -> None:
    """Tell decode ranks that their request failed. A decode that is gone must not stop the thread that tells it."""
    import zmq
    from sglang.srt.disaggregation.base.conn import KVPoll

    rank = (manager.attn_tp_rank * manager.pp_size + manager.pp_rank) * manager.attn_cp_size + manager.attn_cp_rank
    for peer in peers:
        if peer.is_dummy:
            continue
        try:
            manager.sync_status_to_decode_endpoint(peer.endpoint, peer.dst_port, peer.room, KVPoll.Failed, rank)
        except zmq.ZMQError as error:
            logger.warning("sglang-dspark-cp: decode %s was not told that it failed: %s", name_of(peer), error)


def fail_room(manager: Any, room: int, text: str) -> None:
    """End a request's transfer with `text` on this rank and tell its decode ranks; idempotent.

    Stock's next poll, reduced over the CP ranks, then aborts the request everywhere and answers its client.
    """
    from sglang.srt.disaggregation.base.conn import KVPoll

    if manager.request_status.get(room) in (None, KVPoll.Failed):
        return
    manager.record_failure(room, text)
    manager.update_status(room, KVPoll.Failed)
    tell(manager, _peers(manager, room))


# ------------------------------------------------------------------------------------------------------- handlers


def register_buffers(original: Callable[..., None], manager: Any) -> None:
    """Stop here if this worker's own draft KV is not what it will send."""
    args = manager.kv_args
    handshake.require_own(layout_of(args), stages_of(manager.server_args), args.page_size)
    original(manager)


def start_prefill_thread(original: Callable[..., None], manager: Any) -> None:
    """Have registrations compared from the first one on."""
    manager.decode_kv_args_table = Registrations(layout_of(manager.kv_args), sends=not manager.is_dummy_cp_rank)
    original(manager)


def update_status(original: Callable[..., None], manager: Any, bootstrap_room: int, status: Any) -> None:
    """A room of a refused decode can only fail, and a failed room never becomes a success."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    table, peers = manager.decode_kv_args_table, _peers(manager, bootstrap_room)
    with table.lock:
        failed = manager.request_status.get(bootstrap_room) == KVPoll.Failed
        text = None if status == KVPoll.Failed else table.reason(peers)
        if text is not None:
            # Also for a room whose request is still on its way here: it finds the verdict when it comes.
            manager.request_status[bootstrap_room] = KVPoll.Failed
            manager.record_failure(bootstrap_room, text)
        elif not (failed and status == KVPoll.Success):
            original(manager, bootstrap_room, status)
    if text is not None and not failed:
        tell(manager, peers)


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
        components, rows = manager.decode_kv_args_table.layout.components, rest.get("state_indices")
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


HANDSHAKE_HOOKS = (
    handshake_hook(
        "own-state",
        f"{_MANAGER}register_buffer_to_engine",
        register_buffers,
        ("self",),
        "14541aa040e3",
        process="prefill scheduler, once, and after memory was released and resumed",
        why="a worker without complete draft KV on the wire stops at start",
        reads=(("sglang.srt.disaggregation.utils.setup_state_kv_args", "f99249073a36"),),
    ),
    handshake_hook(
        "compare-registration",
        f"{_MANAGER}start_prefill_thread",
        start_prefill_thread,
        ("self",),
        "01aad7abfeb0",
        process="prefill scheduler, once; its table: once per decode rank that registers",
        why="stock sends into whatever buffers a decode registered: garbage as Success, or a dead transfer thread",
        reads=(
            (f"{_MANAGER}__init__", "5b7cedaa0b5b"),
            (f"{_COMMON}CommonKVManager.__init__", "294816fbe71e"),
            (f"{_MOONCAKE}KVArgsRegisterInfo.from_zmq", "bf1f1cfeeb74"),
            (f"{_MOONCAKE}TransferInfo.from_zmq", "cb53f9d82ffe"),
        ),
    ),
    handshake_hook(
        "refuse-decode",
        f"{_COMMON}CommonKVManager.update_status",
        update_status,
        ("self", "bootstrap_room", "status"),
        "2ab1dcf2ea50",
        process="prefill scheduler, a few times per request",
        why="requests of a refused decode fail before the first byte; stock lets a failed room become a success",
        reads=(
            (f"{_COMMON}CommonKVSender.__init__", "adbc20a6296a"),
            (f"{_COMMON}CommonKVSender._prepare_send_indices", "a4314299271e"),
            (f"{_MANAGER}sync_status_to_decode_endpoint", "c18fdc1c3edf"),
        ),
    ),
    handshake_hook(
        "state-rows",
        f"{_MANAGER}add_transfer_request",
        add_transfer_request,
        ("self", "bootstrap_room", "kv_indices", "index_slice", "is_last_chunk", "state_indices"),
        "cab637f0d6f4",
        process="prefill scheduler, every chunk that is sent",
        why="stock cuts window lists of different length and passes over missing ones; both end as Success",
        # What turns a rejected write into a failed request is stock's own; here it is held to what was reviewed.
        reads=(
            (f"{_MANAGER}transfer_worker", "f578561291e1"),
            (f"{_MANAGER}maybe_send_extra", "24ae6030239e"),
            (f"{_MANAGER}_send_kvcache_generic", "5d365ea67709"),
            (f"{_MANAGER}_transfer_data", "6e67c4b7dc64"),
            (f"{_MANAGER}send_aux", "396b664cd141"),
            (
                "sglang.srt.distributed.device_communicators.mooncake_transfer_engine."
                "MooncakeTransferEngine.batch_transfer_sync",
                "5ab8f96e66c4",
            ),
        ),
    ),
    handshake_hook(
        "explain-failure",
        f"{_MOONCAKE}MooncakeKVSender.failure_exception",
        failure_exception,
        ("self",),
        "2ecd5594fb3f",
        process="prefill scheduler, once per failed request",
        why="CP ranks that decode does not know wait until a time-out whose text does not say why",
        remove_when="SGLang compares SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER of both sides",
        reads=(
            (f"{_COMMON}CommonKVSender._check_bootstrap_timeout", "e5e372f27542"),
            (f"{_MOONCAKE}MooncakeKVSender.poll", "20b86d168f91"),
        ),
    ),
)
"""Every hook of the comparison between prefill and decode."""
