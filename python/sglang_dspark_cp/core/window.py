"""Which draft-KV rows of a batch can ever be read.

The draft on decode reads the positions [L - W, L) of a prompt of L tokens, nothing else. Rows of a batch are therefore
read only if they lie in the last W of their request's chunk (the request may end there, or less than W later), or if
another request can take them over from the prefix cache and end less than W behind the place where it took over. The
radix cache hands out whole pages, so such a place is a page boundary B, and the rows are [B - W, B).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
