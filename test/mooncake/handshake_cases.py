"""Ranks of `test_decode_refusal`: SGLang's Mooncake manager, sender and receiver on the smoke's pools; no scheduler."""

from __future__ import annotations

import copy
import importlib
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sglang_dspark_cp.adapters import REVIEWED
from sglang_dspark_cp.hooks import install
from sglang_dspark_cp.hooks.check import sglang_release
from sglang_dspark_cp.smoke import geometry as g
from sglang_dspark_cp.smoke import native
from sglang_dspark_cp.smoke.decode import _wait_for_port
from sglang_dspark_cp.smoke.processes import RankConfig
from sglang_dspark_cp.smoke.ranks import EMPTY, Memory, make_pool
from sglang_dspark_cp.smoke.release import installed

ADAPTER = importlib.import_module(f"sglang_dspark_cp.adapters.handshake_{REVIEWED[sglang_release()]}")
HANDSHAKE_HOOKS = ADAPTER.HANDSHAKE_HOOKS

SLOTS = 8
STEP_S = 0.005
ROWS = [[2], [1], [2]]
"""State rows on prefill: of swa, c128_state, draft swa."""
THEIRS = [[5], [3], [5]]
"""State rows on decode."""
STATUS = {0: "Failed", 1: "Bootstrapping", 2: "WaitingForInput", 3: "Transferring", 4: "Success"}


class _Rank:
    """Pools, memory and manager of either side.

    Options: stages (0: no draft), speculative (algorithm or None), lie (KVArgs attributes to misstate), draft_item
    (bytes per draft page to misstate), survive (go on without a thread that died), dist_port.
    """

    mode = ""

    def __init__(self, config: RankConfig, report: Callable[[Any], None]) -> None:
        self.config, self.options = config, config.options
        self.sglang = installed()
        native.load(self.options["stand_in"])
        self.sglang.without_gpu()
        self.thread_errors: list[str] = []
        if self.options.get("survive"):  # otherwise a dead thread ends the rank, and with it the test
            threading.excepthook = lambda failure: self.thread_errors.append(str(failure.exc_value))
        self._publish()
        self.before_manager()
        self._pools()
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
        from sglang.srt.disaggregation.utils import DisaggregationMode, is_mla_backend
        from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import init_mooncake_transfer_engine

        self.engine = init_mooncake_transfer_engine(hostname="127.0.0.1", gpu_id=0, ib_device=None)
        self.manager = MooncakeKVManager(
            self.kv_args, DisaggregationMode(self.mode), self.server_args, is_mla_backend(self.target_pool)
        )
        self.requests: dict[int, Any] = {}

    def before_manager(self) -> None:
        """What this side does first."""

    def _publish(self) -> None:
        size = self.options.get("cp_size", 1)
        arguments = {
            "device": "cpu",
            "host": "127.0.0.1",
            "page_size": g.PAGE,
            "tp_size": size,
            "attn_cp_size": size,
            "disaggregation_mode": self.mode,
            "disaggregation_transfer_backend": "mooncake",
            "disaggregation_bootstrap_port": self.options.get("bootstrap_port", 1),
            "speculative_algorithm": self.options.get("speculative", "DSPARK"),
            "speculative_draft_model_path": self.options.get("model"),
            "load_balance_method": "follow_bootstrap_room",
        }
        self.server_args = self.sglang.publish(self.config.rank, **arguments)
        self.sglang.join_groups(size, self.config.rank, self.options["dist_port"], dp_size=1, cp_size=size)

    def _pools(self) -> None:
        stages, mapping = self.options.get("stages", g.STAGES), torch.arange(g.POOL_PAGES * g.PAGE)
        self.target_pool = make_pool(g.TARGET_RATIOS, SLOTS)
        self.target_pool.register_mapping(mapping)
        self.draft_pool = make_pool((0,) * stages, SLOTS) if stages else None
        if self.draft_pool is not None:
            self.draft_pool.register_mapping(mapping)
        self.metadata = self.sglang.metadata_buffers(SLOTS)
        self.kv_args = a = self.sglang.kv_args(
            rank=self.config.rank,
            dp_rank=0,
            prefill=self.mode == "prefill",
            pools=(self.target_pool, self.draft_pool),
            metadata=self.metadata,
        )
        self.memory = Memory(copy.copy(a))
        for name, value in self.options.get("lie", {}).items():
            setattr(a, name, value)
        if "draft_item" in self.options:
            a.state_item_lens = [*a.state_item_lens[:-1], [self.options["draft_item"]] * len(a.state_item_lens[-1])]

    def failure(self, room: int) -> str:
        """SGLang's text for a failed request; frees its state."""
        from sglang.srt.disaggregation.common.conn import KVTransferError

        try:
            self.requests.pop(room).failure_exception()
        except KVTransferError as error:
            return str(error)
        return ""

    def errors(self) -> list[str]:
        """What background threads died of."""
        return self.thread_errors


class PrefillRank(_Rank):
    """Options: cp_size, hooks (ids to install), bootstrap_port."""

    mode = "prefill"

    def before_manager(self) -> None:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVBootstrapServer

        install.install(hook for hook in HANDSHAKE_HOOKS if hook.id in self.options["hooks"])
        if self.config.rank == 0:
            self.server = MooncakeKVBootstrapServer("127.0.0.1", self.options["bootstrap_port"])
            _wait_for_port(self.options["bootstrap_port"])

    def tag(self) -> None:
        """Give every component its own byte."""
        for number, (name, *_) in enumerate(self.memory.components()):
            self.memory.fill(0x10 + number, (name,))

    def reject(self, component: str) -> None:
        """From now on Mooncake rejects writes from this component ('' for none)."""
        original = self.engine.__dict__.setdefault("accepts", self.engine.batch_transfer_sync)

        def write(session: Any, sources: list[int], *rest: Any) -> int:
            return -1 if self.memory._component_of(sources[0]) == component else original(session, sources, *rest)

        self.engine.batch_transfer_sync = write

    def serve(self, room: int, pages: list[int], states: list[list[int]] | None, steps: int = 1000) -> tuple[str, str]:
        """One request as the scheduler's loop serves it, with its reduced poll; status and failure text."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.requests[room] = sender = self.sglang.make_sender(self.manager, "unused", room, self.config.rank)
        sent, poll = False, int(KVPoll.Bootstrapping)
        for _ in range(steps):  # by count, so that all ranks leave together
            poll = self._poll(sender)
            if poll in (KVPoll.Failed, KVPoll.Success):
                break
            if poll == KVPoll.WaitingForInput and not sent:
                sender.init(len(pages), room % SLOTS)
                sender.send(np.asarray(pages[:1], np.int32), None)
                sender.send(np.asarray(pages[1:], np.int32), states and [np.asarray(s, np.int32) for s in states])
                sent = True
            time.sleep(STEP_S)
        if poll == KVPoll.Failed:
            return STATUS[poll], self.failure(room)
        if poll == KVPoll.Success:
            self.requests.pop(room).clear()
        return STATUS[poll], ""

    @staticmethod
    def _poll(sender: Any) -> int:
        from sglang.srt.disaggregation.utils import poll_and_all_reduce_attn_cp_tp_group
        from sglang.srt.distributed import parallel_state

        cp, tp = parallel_state.get_attn_cp_group().cpu_group, parallel_state.get_attn_tp_group().cpu_group
        return int(poll_and_all_reduce_attn_cp_tp_group([sender], cp, tp)[0])

    def fail_while_the_first_is_gone(self, room: int) -> list[tuple[str, int, int, int, int]]:
        """What is sent when a room fails whose first decode cannot be reached and whose second is a dummy.

        Returns:
            (host, port, room, status, rank) of each message that was tried.
        """
        import zmq
        from sglang.srt.disaggregation.base.conn import KVPoll

        tried: list[tuple[str, int, int, int, int]] = []
        manager = self.manager

        def note(*message: Any) -> None:
            tried.append(message)  # type: ignore[arg-type]
            if len(tried) == 1:
                raise zmq.Again()

        def multipart(address: str, parts: list[bytes], **_: Any) -> None:
            host, port = address.removeprefix("tcp://").split(":")
            note(host, int(port), *(int(part) for part in parts))

        # The last step of such a message in 0.5.17 and in 0.5.23, which has only the second.
        steps = {"sync_status_to_decode_endpoint": note, "_send_multipart_locked": multipart}
        name = next(name for name in steps if hasattr(manager, name))
        manager.transfer_infos[room] = {
            session: SimpleNamespace(
                endpoint="10.0.0.1",
                dst_port=port,
                mooncake_session_id=session,
                room=room,
                is_dummy=port == 2,
                required_dst_info_num=4,
            )
            for session, port in (("a", 1), ("b", 2), ("c", 3))
        }
        manager.update_status(room, KVPoll.Bootstrapping)
        setattr(manager, name, steps[name])
        try:
            ADAPTER.fail_room(manager, room, "of a test")
        finally:
            delattr(manager, name)
            for table in (manager.transfer_infos, manager.request_status, manager.failure_records):
                table.pop(room, None)
        return tried

    def late_success(self, room: int) -> str:
        """State of a room that failed and is called a success afterwards."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        for status in (KVPoll.Bootstrapping, KVPoll.Failed, KVPoll.Success):
            self.manager.update_status(room, status)
        return STATUS[int(self.manager.request_status.pop(room))]

    def open_rooms(self) -> list[int]:
        """Rooms that the manager still knows."""
        return sorted(self.manager.request_status)


class DecodeRank(_Rank):
    """Asks one prefill server or another, by bootstrap port."""

    mode = "decode"

    def ask(self, room: int, port: int, pages: list[int], states: list[list[int]], wait: float = 6.0) -> dict[str, Any]:
        """One request, from `begin` to `finish`."""
        self.begin(room, port, pages, states)
        return self.finish(room, wait)

    def begin(self, room: int, port: int, pages: list[int], states: list[list[int]]) -> None:
        """Register where needed and reserve memory for a request."""
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver

        address = f"127.0.0.1:{port}"
        deadline = time.monotonic() + 20
        while not self.manager.try_ensure_parallel_info(address):
            if time.monotonic() > deadline:
                raise TimeoutError("the prefill ranks did not register at the bootstrap server")
            time.sleep(0.05)
        self.memory.fill(EMPTY)
        self.requests[room] = receiver = MooncakeKVReceiver(self.manager, address, room)
        receiver.init(0)
        receiver.send_metadata(np.asarray(pages, np.int32), room % SLOTS, [np.asarray(s, np.int32) for s in states])

    def finish(self, room: int, wait: float) -> dict[str, Any]:
        """Wait for the end of a request: its status, failure text, seconds, and which bytes lie in rows `THEIRS`."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        started, receiver = time.monotonic(), self.requests[room]
        while (poll := receiver.poll()) not in (KVPoll.Failed, KVPoll.Success):
            if time.monotonic() - started > wait:
                break
            time.sleep(STEP_S)
        seconds = time.monotonic() - started
        found = {}
        for (name, _, _, items), (row,) in zip(self.memory.components()[1:], THEIRS, strict=False):
            pages = [self.memory.page(name, buffer, row) for buffer in range(len(items))]
            found[name] = sorted({int(byte) for page in pages for byte in page.unique()})
        failure = self.failure(room) if poll == KVPoll.Failed else ""
        if poll == KVPoll.Success:
            self.requests.pop(room).clear()
        return {"status": STATUS[int(poll)], "failure": failure, "seconds": seconds, "bytes": found}
