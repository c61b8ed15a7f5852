"""Batches of the tests of one forward, and what each gather mode sends of them. Nothing of SGLang or of this package's
planning is in it."""

from __future__ import annotations

from sglang_dspark_cp.smoke import geometry as g

AUX_WIDTH = len(g.CAPTURED_LAYERS) * g.HIDDEN

BATCHES = [
    ([8], [0]),
    ([13], [0]),
    ([3, 4, 9], [0, 0, 0]),
    ([1] * 9, [0] * 9),
    ([257, 31], [0, 512]),
    ([3670], [1]),
    ([1, 1, 5], [256, 511, 3]),
]
"""(extend lengths, prefix lengths)."""

MODES = ["packed", "context", "kv", "window"]
ROW_BYTES = {
    "packed": AUX_WIDTH * 2 + 16,
    "context": g.HIDDEN * 2 + 16,
    "kv": g.STAGES * g.ROW * 2 + 16,
    "window": g.STAGES * g.ROW * 2 + 16,
}


def reachable(extend: list[int], prefix: list[int]) -> list[int]:
    """Rows that the draft can read: the last W of a chunk, and the last W before each page boundary."""
    found, row = [], 0
    for length, start in zip(extend, prefix, strict=True):
        for position in range(start, start + length):
            if position >= start + length - g.WINDOW or position % g.PAGE >= g.PAGE - g.WINDOW:
                found.append(row)
            row += 1
    return found


def wire_bytes(which: list[int], extend: list[int], cp_size: int, mode: str) -> int:
    """Bytes that each rank gives to the one gather: the busiest rank's rows, and the rows for the LM head behind."""

    def busiest(rows: list[int]) -> int:
        return max(sum(row % cp_size == rank for row in rows) for rank in range(cp_size))

    rows = -(-sum(extend) // cp_size) if mode != "window" else busiest(which)
    last = [sum(extend[: index + 1]) - 1 for index in range(len(extend))]
    tail = -(-busiest(last) * g.HIDDEN * 2 // ROW_BYTES[mode])
    return (rows + tail) * ROW_BYTES[mode]
