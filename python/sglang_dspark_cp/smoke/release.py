"""The installed SGLang as the CPU run drives it: one module per release, the same names in each."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any, Protocol, cast

from ..errors import DsparkCpError
from ..hooks.check import sglang_release

MODULES = {"0.5.17": "sglang_v0_5_17", "0.5.23": "sglang_v0_5_23"}
"""SGLang release -> module of this package."""


class UnknownRelease(DsparkCpError):
    """The CPU run has no module for the installed SGLang."""


class Release(Protocol):
    """What a module offers. Everything that it starts is SGLang's own unless the docstring says stand-in.

    Attributes:
        STOCK_WIDTH: hidden sizes per row that stock gathers at the end of a CP forward.
        DRAFT_POOL: arguments of a pool that only a draft worker gives.
        HEADS: whether the run makes logits; without them the first token is the prompt's last one plus 1.
    """

    STOCK_WIDTH: int
    DRAFT_POOL: dict[str, bool]
    HEADS: bool

    def resolve(self, arguments: list[str]) -> Any:
        """Resolved `ServerArgs` of a command line; raises what SGLang raises."""

    def without_gpu(self) -> None:
        """Replace the few GPU-only calls on the way; each stands in for hardware that is not there."""

    def join_groups(self, world_size: int, rank: int, port: int, *, dp_size: int, cp_size: int) -> None:
        """Real gloo process groups, made by `initialize_model_parallel`."""

    def join_alone(self, port: int, *, dp_rank: int, dp_size: int) -> None:
        """A decode rank alone in its process group, so that it can be replaced; for SGLang it is rank `dp_rank`."""

    def publish_prefill(self, server_args: Any, rank: int) -> None:
        """Make resolved arguments those of this process; they are used on a CPU from here on."""

    def publish(self, rank: int, **arguments: Any) -> Any:
        """`ServerArgs` of a process that needs a manager but no model; returns them."""

    def request_state(self, pool: Any, request_slot: int, length: int) -> Any:
        """Rows of the 128:1 compressor's state that belong to a request, as decode computes them."""

    def kv_args(self, *, rank: int, dp_rank: int, prefill: bool, pools: tuple[Any, Any], metadata: Any) -> Any:
        """`KVArgs` of a manager that is built without a scheduler. `pools`: target, draft (or None)."""

    def metadata_buffers(self, slots: int) -> Any:
        """`MetadataBuffers`."""

    def make_sender(self, manager: Any, address: str, room: int, rank: int) -> Any:
        """`MooncakeKVSender` of one request."""

    def build_model(self, cp_size: int, fused: bool) -> Any:
        """`DeepseekV4Model` over stand-in layers."""

    def target_worker(self, model: Any, server_args: Any, cp_size: int, requests: Any) -> Any:
        """Stand-in for the target worker around the runner's own steps. `requests`: `ReqToTokenPool`."""

    def build_draft(self, server_args: Any) -> Any:
        """`DeepseekV4ForCausalLMDSpark` in miniature, without weights."""

    def attach(self, draft: Any, target: Any, cp_size: int) -> None:
        """`attach_shared_modules` with what the target has."""

    def use_reference_writer(self) -> None:
        """The pool's row writer is a CUDA kernel; this package's reference writer takes its place."""

    def make_worker(self, worker_class: Any, target: Any, draft: Any, draft_pool: Any) -> Any:
        """The DSpark worker without its constructor (it loads both models on a GPU), with its real injector."""

    def make_scheduler(self, rank: Any, radix: bool) -> Any:
        """The prefill scheduler's own methods on an object with just the attributes that they use, its queue and
        Mooncake manager. `rank`: `PrefillRank`."""

    def make_request(self, prompt: Any, server_args: Any) -> Any:
        """`Req`."""

    def begin(self, scheduler: Any, req: Any, *, first: bool) -> int:
        """Open a round of a request; the first one looks up and locks its cached prefix. Returns its start."""

    def admit(self, req: Any, end: int) -> None:
        """Let this round reach position `end`."""

    def end_of(self, req: Any) -> int:
        """Where the last round ended."""

    def make_batch(self, scheduler: Any, reqs: Sequence[Any]) -> Any:
        """An extend batch with its cache locations."""

    def run_batch(self, worker: Any, batch: Any) -> Any:
        """The worker's own prefill of one batch."""


@functools.cache
def installed() -> Release:
    """The module of the installed release.

    Raises:
        UnknownRelease: there is none.
    """
    release = sglang_release().split("+", 1)[0]
    if release not in MODULES:
        raise UnknownRelease(
            f"the CPU run does not know SGLang {release}; it knows {', '.join(MODULES)}. Install one of these, or run"
            " real servers: smoke --device cuda"
        )
    return cast(Release, importlib.import_module(f"{__package__}.{MODULES[release]}"))
