"""What `test_radix` does inside a process: SGLang's own radix cache with its sliding-window part, on a CPU."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from sglang_dspark_cp.core.window import kept_rows
from sglang_dspark_cp.smoke.processes import RankConfig

PAGE, WINDOW, POOL = 256, 128, 64 * 256


class Pool:
    """In place of the KV buffers: the allocator and the cache move locations only."""

    device = "cpu"
    full_to_swa_index_mapping: torch.Tensor

    def register_mapping(self, mapping: torch.Tensor) -> None:
        """As SGLang's pools do."""
        self.full_to_swa_index_mapping = mapping

    def translate_loc_from_full_to_swa(self, loc: torch.Tensor) -> torch.Tensor:
        """As SGLang's pools do."""
        return self.full_to_swa_index_mapping[loc]


@dataclass
class Seen:
    """What a run of random requests showed."""

    requests: int = 0
    hits: list[int] = field(default_factory=list)
    read: int = 0
    computed: int = 0
    written: int = 0
    unwritten: list[str] = field(default_factory=list)


class RadixRank:
    """One cache, filled by requests whose rows are written or not as `kept_rows` says."""

    def __init__(self, config: RankConfig, report: Callable[[Any], None]) -> None:
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        pool_class: Any = type("CpuPool", (Pool, BaseSWAKVPool), {"__init__": lambda self: None})
        pool_class.__abstractmethods__ = frozenset()
        self.pool = pool_class()
        self.allocator = SWATokenToKVPoolAllocator(
            size=POOL,
            size_swa=POOL,
            page_size=PAGE,
            dtype=torch.uint8,
            device="cpu",
            kvcache=self.pool,
            need_sort=False,
        )
        slots = SimpleNamespace(req_to_token=torch.zeros(4, 8192, dtype=torch.int32))
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=slots,
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE,
                sliding_window_size=WINDOW,
                tree_components=(ComponentType.FULL, ComponentType.SWA),
            )
        )
        self.written: set[int] = set()

    def run(self, seed: int, requests: int, page: int | None) -> Seen:
        """Random prompts that share prefixes, in random chunks.

        Args:
            page: what `kept_rows` is told; the cache's own page is 256. None must lead to unwritten rows.
        """
        rng, seen = random.Random(seed), Seen()
        trunk = [rng.randrange(5, 900) for _ in range(4000)]
        for number in range(requests):
            shared = rng.choice([0, 255, 256, 257, 300, 511, 512, 640, 1000, 1024, 1025, rng.randrange(2000)])
            own = rng.choice([1, 2, 5, 127, 128, 129, 200, 256, 700])
            self._request([*trunk[:shared], *(10_000 + number * 1000 + i for i in range(own))], rng, page, seen)
        return seen

    def _locations(self, found: Any) -> torch.Tensor:
        """Cache locations of a matched prefix; from 0.5.23 on a match says where its path ends."""
        if hasattr(found, "device_indices"):
            return found.device_indices  # type: ignore[no-any-return]
        located: torch.Tensor = self.cache.path_device_indices(found.last_device_node)[: found.device_prefix_len]
        return located

    def _request(self, tokens: list[int], rng: random.Random, page: int | None, seen: Seen) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        def key(ids: list[int]) -> Any:
            return RadixKey(array("q", ids), None)

        # As the scheduler does: at least one token is computed.
        found = self.cache.match_prefix(MatchPrefixParams(key=key(tokens[:-1])))
        prefix = self._locations(found).to(torch.int64)
        hit, length = len(prefix), len(tokens)
        pages = -(-(length - hit) // PAGE) * PAGE
        full = self.allocator.full_attn_allocator.alloc(pages)
        if full is None:
            self.cache.evict(EvictParams(num_tokens=POOL, swa_num_tokens=POOL))
            self.written.clear()
            return
        swa = self.allocator.swa_attn_allocator.alloc(pages)
        self.allocator.set_full_to_swa_mapping(full, swa)
        self.written -= set(full.tolist())
        loc = torch.cat([prefix, full[: length - hit]])
        start = hit
        while start < length:  # chunk after chunk, of any size
            end = min(length, start + rng.choice([1, 100, 127, 128, 129, 255, 256, 257, 512, 4096]))
            rows = start + kept_rows([(start, end)], WINDOW, page)
            self.written |= set(loc[rows].tolist())
            seen.written += len(rows)
            start = end
        seen.requests += 1
        seen.computed += length - hit
        if hit:
            seen.hits.append(hit)
        for position in range(max(0, length - WINDOW), length):
            seen.read += 1
            if int(loc[position]) not in self.written:
                seen.unwritten.append(f"position {position} of {length}, of which {hit} from the cache")
        whole = length // PAGE * PAGE
        if whole > hit:
            self.cache.insert(InsertParams(key=key(tokens[:whole]), value=loc[:whole], prev_prefix_len=hit))
        if length > whole:
            self.allocator.free_segment(loc[whole:], start_pos=whole)
