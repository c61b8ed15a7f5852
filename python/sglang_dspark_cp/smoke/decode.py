"""One decode rank: SGLang's Mooncake manager and receiver, its pools, and what arrived in them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..core import reference
from . import geometry as g
from . import native
from .processes import RankConfig
from .ranks import EMPTY, Memory, make_pool
from .release import installed
from .workload import Prompt

REQUEST_SLOTS = 64


class BootstrapRank:
    """SGLang's own bootstrap server."""

    def __init__(self, config: RankConfig, report: Callable[[Any], None]) -> None:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVBootstrapServer

        native.load(config.options["stand_in"])
        installed().publish(0, device="cpu", host="127.0.0.1", page_size=g.PAGE)
        port = config.options["bootstrap_port"]
        self.server = MooncakeKVBootstrapServer("127.0.0.1", port)
        _wait_for_port(port)


def _wait_for_port(port: int, timeout: float = 20.0) -> None:
    import socket

    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise TimeoutError(f"the bootstrap server did not listen on port {port} within {timeout:.0f} s")


@dataclass
class Received:
    """What one decode rank got for one request.

    Attributes:
        ok: whether the transfer ended as Success.
        failure: SGLang's text if not.
        first_token: first output token as the metadata carried it.
        start: first position of the rows below.
        nope, rope, scale: per stage, rows of positions [start, L): see `core.reference.RowParts`.
        kv_tags, state_tags: bytes found in target KV pages and in target state pages.
    """

    room: int
    decode_rank: int
    ok: bool
    failure: str = ""
    first_token: int = -1
    start: int = 0
    nope: Any = None
    rope: Any = None
    scale: Any = None
    kv_tags: tuple[int, ...] = ()
    state_tags: tuple[int, ...] = ()


@dataclass
class Asked:
    """One request that waits for its KV: SGLang's receiver, the metadata slot, the KV pages, those of the window."""

    prompt: Prompt
    receiver: Any
    slot: int
    pages: list[int]
    state_pages: list[int]
    window_page: int


class DecodeRank:
    """The `decode` rank."""

    def __init__(self, config: RankConfig, report: Callable[[Any], None]) -> None:
        self.config = config
        self.report = report
        options = config.options
        self.sglang = installed()
        native.load(options["stand_in"])
        self.sglang.without_gpu()
        self._publish(options)
        from sglang.srt.disaggregation.utils import DisaggregationMode, is_mla_backend
        from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import init_mooncake_transfer_engine

        self.target_pool = make_pool(g.TARGET_RATIOS, REQUEST_SLOTS)
        self.draft_pool = make_pool((0,) * g.STAGES, REQUEST_SLOTS, draft=True)
        mapping = torch.arange(g.POOL_PAGES * g.PAGE)
        self.target_pool.register_mapping(mapping)
        self.draft_pool.register_mapping(mapping)
        self.metadata = self.sglang.metadata_buffers(REQUEST_SLOTS)
        self.kv_args = self.sglang.kv_args(
            rank=0,
            dp_rank=config.rank,
            prefill=False,
            pools=(self.target_pool, self.draft_pool),
            metadata=self.metadata,
        )
        self.memory = Memory(self.kv_args)
        self.memory.fill(EMPTY)
        init_mooncake_transfer_engine(hostname="127.0.0.1", gpu_id=0, ib_device=None)
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

        self.manager = MooncakeKVManager(
            self.kv_args, DisaggregationMode.DECODE, self.server_args, is_mla_backend(self.target_pool)
        )
        self.address = f"127.0.0.1:{options['bootstrap_port']}"

    def _publish(self, options: dict[str, Any]) -> None:
        dp_size = options["dp_size"]
        self.server_args = self.sglang.publish(
            self.config.rank,
            device="cpu",
            host="127.0.0.1",
            page_size=g.PAGE,
            tp_size=dp_size,
            dp_size=dp_size,
            enable_dp_attention=dp_size > 1,
            disaggregation_mode="decode",
            disaggregation_transfer_backend="mooncake",
            disaggregation_bootstrap_port=options["bootstrap_port"],
            speculative_algorithm="DSPARK",
            load_balance_method="follow_bootstrap_room",
        )
        self._join(options)

    def _join(self, options: dict[str, Any]) -> None:
        dp_size = options["dp_size"]
        self.sglang.join_groups(dp_size, self.config.rank, options["dist_port"], dp_size=dp_size, cp_size=1)

    def serve(self, prompts: list[Prompt], timeout: float) -> list[Received]:
        """Ask for the prompts' KV and wait until each has arrived or failed."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        deadline = time.monotonic() + timeout
        while not self.manager.try_ensure_parallel_info(self.address):
            if time.monotonic() > deadline:
                raise TimeoutError("the prefill ranks did not register at the bootstrap server")
            time.sleep(0.05)
        next_page, open_requests = 1, {}
        for slot, prompt in enumerate(prompts):
            pages = list(range(next_page, next_page + -(-len(prompt.tokens) // g.PAGE)))
            next_page += len(pages)
            open_requests[prompt.room] = self.ask(prompt, slot, pages)
        received: list[Received] = []
        while open_requests:
            for room, asked in list(open_requests.items()):
                poll = asked.receiver.poll()
                if poll == KVPoll.Success:
                    received.append(self.read(asked))
                elif poll == KVPoll.Failed:
                    received.append(self.failed(asked))
                else:
                    continue
                del open_requests[room]
                self.report(("received", room))
            if time.monotonic() > deadline:
                rooms = ", ".join(str(room) for room in open_requests)
                raise TimeoutError(f"no answer from prefill for rooms {rooms} within {timeout:.0f} s")
            time.sleep(0.002)
        return received

    def ask(self, prompt: Prompt, slot: int, pages: list[int]) -> Asked:
        """Reserve metadata slot `slot` and KV pages `pages` for one prompt and tell prefill."""
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver

        receiver = MooncakeKVReceiver(self.manager, self.address, prompt.room)
        receiver.init(0)
        window_page = max(0, len(prompt.tokens) - g.WINDOW) // g.PAGE
        state_pages = pages[window_page:]
        of_request = {
            "c128_state": self.sglang.request_state(self.target_pool, slot + 1, len(prompt.tokens)),
            "request_row": [slot + 1],
        }
        components = [of_request.get(kind.value, state_pages) for kind in self.kv_args.state_types]
        receiver.send_metadata(_int32(pages), slot, [_int32(component) for component in components])
        return Asked(prompt, receiver, slot, pages, state_pages, window_page)

    def failed(self, asked: Asked) -> Received:
        """The end of a request whose transfer failed."""
        return Received(asked.prompt.room, self.config.rank, ok=False, failure=_failure(asked.receiver))

    def read(self, asked: Asked) -> Received:
        """What arrived for a request whose transfer ended as Success."""
        prompt, slot, pages, state_pages = asked.prompt, asked.slot, asked.pages, asked.state_pages
        length = len(prompt.tokens)
        start = max(0, length - g.WINDOW)
        positions = torch.arange(start, length)
        slots = torch.tensor(state_pages)[positions // g.PAGE - asked.window_page] * g.PAGE + positions % g.PAGE
        buffers = self.draft_pool.swa_kv_pool.kv_buffer
        parts = [reference.read_rows(buffers[stage], g.PAGE, slots) for stage in range(g.STAGES)]
        kv_tags = {
            int(tag)
            for buffer in range(len(self.kv_args.kv_data_ptrs))
            for page in pages
            for tag in self.memory.page("kv", buffer, page).unique()
        }
        target_state = self.memory.components()[1][0]
        state_tags = {
            int(tag)
            for buffer in range(len(self.kv_args.state_data_ptrs[0]))
            for page in state_pages
            for tag in self.memory.page(target_state, buffer, page).unique()
        }
        return Received(
            room=prompt.room,
            decode_rank=self.config.rank,
            ok=True,
            first_token=int(self.metadata.output_ids[slot, 0]),
            start=start,
            nope=torch.stack([part.nope for part in parts]).numpy(),
            rope=torch.stack([part.rope for part in parts]).float().numpy(),
            scale=torch.stack([part.scale for part in parts]).numpy(),
            kv_tags=tuple(sorted(kv_tags)),
            state_tags=tuple(sorted(state_tags)),
        )


def _int32(values: Any) -> Any:
    import numpy as np

    return np.asarray(values, dtype=np.int32)


def _failure(receiver: Any) -> str:
    from sglang.srt.disaggregation.common.conn import KVTransferError

    try:
        receiver.failure_exception()
    except KVTransferError as error:
        return str(error)
    return "failed without a reason"
