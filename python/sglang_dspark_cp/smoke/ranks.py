"""What prefill and decode ranks have in common: pools, process groups, Mooncake, and a view of what was written."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core import reference
from . import geometry as g
from .release import installed

EMPTY = 0xEE
"""Byte that a decode pool holds where nothing has arrived."""


def prefill_tag(cp_rank: int) -> int:
    """Byte that fills the target pools of a prefill rank: rows from the wrong rank show."""
    return 0x10 + cp_rank


def make_pool(ratios: tuple[int, ...], request_slots: int, *, draft: bool = False) -> Any:
    """SGLang's `DeepSeekV4TokenToKVPool` on the CPU; `draft`: as a draft worker makes its own."""
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    tokens = g.POOL_PAGES * g.PAGE
    return DeepSeekV4TokenToKVPool(
        max_num_reqs=request_slots,
        swa_size=tokens,
        c4_size=tokens // 4,
        c128_size=tokens // 128,
        c4_state_pool_size=g.POOL_PAGES * 16,
        c128_state_pool_size=1,
        page_size=g.PAGE,
        swa_page_size=g.PAGE,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=g.NOPE,
        qk_rope_head_dim=g.ROPE,
        indexer_head_dim=128,
        layer_num=len(ratios),
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=list(ratios),
        sliding_window=g.WINDOW,
        start_layer=0,
        end_layer=len(ratios),
        **(installed().DRAFT_POOL if draft else {}),
    )


def without_gpu() -> None:
    """Replace the few GPU-only calls on the way, see `Release`."""
    installed().without_gpu()


def join_groups(world_size: int, rank: int, port: int, *, dp_size: int, cp_size: int) -> None:
    """Real gloo process groups, made by SGLang's own `initialize_model_parallel`."""
    installed().join_groups(world_size, rank, port, dp_size=dp_size, cp_size=cp_size)


def write_rows(
    *, kvcache: torch.Tensor, page_size: int, out_loc: torch.Tensor, kv_weight: torch.Tensor, **source: Any
) -> None:
    """In place of the CUDA kernel that writes draft rows: this package's reference writer.

    Args:
        source: the other arguments of `reference.make_rows`, which the kernel takes under the same names.
    """
    reference.write_rows(kvcache, page_size, out_loc, reference.make_rows(weight=kv_weight, **source))


@dataclass(frozen=True)
class Write:
    """One batch of Mooncake writes: which component, how many bytes, Mooncake's answer."""

    component: str
    nbytes: int
    status: int


@dataclass
class Memory:
    """The registered memory of one rank, by component: names, addresses, lengths, bytes per page."""

    kv_args: Any
    writes: list[Write] = field(default_factory=list)

    def components(self) -> list[tuple[str, list[int], list[int], list[int]]]:
        """(name, pointers, lengths, item lengths) of the KV buffers and of each state component."""
        a = self.kv_args
        found = [("kv", a.kv_data_ptrs, a.kv_data_lens, a.kv_item_lens)]
        for index, kind in enumerate(a.state_types):
            found.append(
                (f"{kind.value}{index}", a.state_data_ptrs[index], a.state_data_lens[index], a.state_item_lens[index])
            )
        return found

    def view(self, pointer: int, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8 over registered memory."""
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(pointer), dtype=torch.uint8)

    def fill(self, value: int, components: tuple[str, ...] | None = None) -> None:
        """Fill whole components (None: all) with one byte."""
        for name, pointers, lengths, _ in self.components():
            if components is None or name in components:
                for pointer, length in zip(pointers, lengths, strict=True):
                    self.view(pointer, length).fill_(value)

    def page(self, component: str, buffer: int, page: int) -> torch.Tensor:
        """Bytes of one page of one buffer."""
        for name, pointers, _, items in self.components():
            if name == component:
                return self.view(pointers[buffer] + page * items[buffer], items[buffer])
        raise KeyError(component)

    def watch(self, engine: Any) -> None:
        """Note every write that `engine` makes. Observation only."""
        original = engine.batch_transfer_sync

        def noted(session: Any, sources: list[int], targets: list[int], lengths: list[int]) -> int:
            status = int(original(session, sources, targets, lengths))
            self.writes.append(Write(self._component_of(sources[0]), sum(lengths), status))
            return status

        engine.batch_transfer_sync = noted

    def _component_of(self, address: int) -> str:
        for name, pointers, lengths, _ in self.components():
            if any(pointer <= address < pointer + length for pointer, length in zip(pointers, lengths, strict=True)):
                return name
        return "aux"
