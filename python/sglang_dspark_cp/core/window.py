"""Which draft-KV rows of a batch can ever be read.

The draft on decode reads the positions [L - W, L) of a prompt of L tokens, nothing else. Rows of a batch are therefore
read only if they lie in the last W of their request's chunk (the request may end there, or less than W later), or if
another request can take them over from the prefix cache and end less than W behind the place where it took over. The
radix cache hands out whole pages, so such a place is a page boundary B, and the rows are [B - W, B).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from .layout import PLANS, SendPlan, send_some


def kept_rows(spans: Sequence[tuple[int, int]], window: int, page: int | None) -> torch.Tensor:
    """Global rows of a batch that a later read can reach.

    Args:
        spans: positions [start, end) of each request of the batch.
        window: W.
        page: tokens of a page that the prefix cache hands out whole; None: there is no prefix cache.

    Returns:
        [K] int64 on the CPU, ascending.
    """
    keep = []
    for start, end in spans:
        positions = torch.arange(start, end)
        reached = positions >= end - window
        if page is not None:
            reached |= page - 1 - positions % page < window
        keep.append(reached)
    return torch.cat(keep).nonzero().flatten() if keep else torch.zeros(0, dtype=torch.int64)


def send_kept(spans: Sequence[tuple[int, int]], window: int, page: int | None, cp_size: int, cp_rank: int) -> SendPlan:
    """The plan that sends `kept_rows`, the same object for batches of one shape."""
    first = [0 if page is None else start % page for start, _ in spans]  # nothing else of a start matters
    shape = tuple((low, low + end - start) for low, (start, end) in zip(first, spans, strict=True))
    return _send_kept(shape, window, page, cp_size, cp_rank)


@functools.lru_cache(maxsize=PLANS)
def _send_kept(
    spans: tuple[tuple[int, int], ...], window: int, page: int | None, cp_size: int, cp_rank: int
) -> SendPlan:
    tokens = sum(end - start for start, end in spans)
    return send_some(kept_rows(spans, window, page), tokens, cp_size, cp_rank)
