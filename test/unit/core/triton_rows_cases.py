"""Kernels of `core.triton_rows` against the torch forms of `core.rows`, over many shapes.

Run on a CPU with TRITON_INTERPRET=1 (float32: the interpreter does not round to bf16), or with `cuda` as argument.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import torch

from sglang_dspark_cp.core import rows, triton_rows

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
GENERATOR = torch.Generator().manual_seed(1)


def integers(low: int, high: int, *size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(low, high, size, generator=GENERATOR).to(DEVICE, dtype)


def places() -> Iterator[tuple[str, bool]]:
    for tokens, arrived, kind in itertools.product(
        (1, 7, 255, 256, 257, 700), (0, 1, 300, 513), (torch.int32, torch.int64)
    ):
        positions, cache_loc = integers(0, 2**20, tokens, dtype=kind), integers(1, 2**30, tokens)
        slots = integers(-1, 40, tokens, dtype=kind)
        order = integers(-1, tokens, arrived)
        wire = torch.zeros(arrived, 9, dtype=torch.int64, device=DEVICE)
        address = wire[:, 5:7]
        address[:, 0], address[:, 1] = positions[order], cache_loc[order]
        if arrived > 2:
            address[arrived // 2, 0] += 1
            address[arrived // 3, 1] += 1
        for in_order, carried, check in itertools.product((True, False), repeat=3):
            given = order if in_order else None
            came = (
                (address if in_order else torch.stack((positions, cache_loc), 1).to(torch.int64)) if carried else None
            )
            arguments = {"order": given, "address": came, "check": check}
            wanted = rows.place_torch(positions, cache_loc, slots, **arguments)
            found = triton_rows.place(positions, cache_loc, slots, **arguments)
            same = all(
                torch.equal(getattr(wanted, name), getattr(found, name)) for name in ("locations", "slots", "positions")
            )
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            words = [None if each.found is None else each.found.read() for each in (wanted, found)]
            same &= words[0] == words[1] and (words[0] is not None) == check
            yield f"place {tokens} {arrived} {kind} {in_order} {carried} {check}: {words}", same


def means() -> Iterator[tuple[str, bool]]:
    for delivered, hidden, streams in itertools.product((1, 5, 37), (8, 1024, 1500), (1, 4)):
        given = torch.randn(delivered, streams, hidden, generator=GENERATOR).to(DEVICE, DTYPE)
        for select in (None, integers(0, 2 * delivered, 11)):
            count = delivered if select is None else 11
            slot = torch.zeros(count, 3 * hidden + 8, device=DEVICE, dtype=DTYPE)
            picked = given if select is None else given[select.clamp(max=delivered - 1)]
            wanted = torch.zeros_like(slot)
            wanted[:, hidden : 2 * hidden] = picked.mean(dim=1)
            for first in {count, 0, 1, count // 3}:
                two = [torch.zeros_like(slot[:first]), torch.zeros_like(slot[first:])]
                slots = [each[:, hidden : 2 * hidden] for each in two]
                triton_rows.mean_streams(given, slots[: 1 + (first < count)], select)
                yield (
                    f"mean {delivered} {hidden} {streams} {select is None} {first}",
                    torch.equal(torch.cat(two), wanted),
                )


def addresses() -> Iterator[tuple[str, bool]]:
    for count, kind, chosen in itertools.product((0, 1, 256, 300), (torch.int32, torch.int64), (False, True)):
        positions, cache_loc = integers(0, 2**20, 300, dtype=kind), integers(0, 2**30, 900, dtype=kind)[1::3]
        select = integers(0, 300, count) if chosen else None
        wire = torch.full((count, 11), -5, dtype=torch.int64, device=DEVICE)
        whole = (positions, cache_loc) if chosen else (positions[:count], cache_loc[:count])
        triton_rows.write_addresses(wire[:, 7:9], *whole, select)
        wanted = torch.full_like(wire, -5)
        wanted[:, 7] = positions[:count] if select is None else positions[select]
        wanted[:, 8] = cache_loc[:count] if select is None else cache_loc[select]
        wide = torch.full((count, 5000), -5, dtype=DTYPE, device=DEVICE)
        source = torch.randn(count, 2000, generator=GENERATOR).to(DEVICE, DTYPE)[:, :1541]
        again = torch.full_like(wire, -5)
        triton_rows.fill_rows(wide[:, 8:1549], again[:, 7:9], source, *whole, select)
        filled = torch.full_like(wide, -5)
        filled[:, 8:1549] = source
        same = torch.equal(again, wanted) and torch.equal(wide, filled)
        yield f"fill {count} {kind} {chosen}", same
        yield f"addresses {count} {kind} {chosen}", torch.equal(wire, wanted)


def batches() -> Iterator[tuple[str, bool]]:
    """Words of one batch after the other: each its own, until another batch's stand in their place."""
    positions, cache_loc = integers(0, 2**20, 600), integers(1, 2**30, 600)
    slots = integers(1, 40, 600)
    drawn = []
    for number in range(triton_rows.KEPT + 2):
        count = 1 + number % 3 * 299  # of one to three programs
        address = torch.stack((positions[:count] + number % 2, cache_loc[:count]), 1)
        placed = triton_rows.place(positions[:count], cache_loc[:count], slots[:count], address=address)
        drawn.append((count * (number % 2), placed.found))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    for number, (wrong, found) in enumerate(drawn):
        words = found.read()
        right = words is None if number < 2 else words is not None and words[:2] == [wrong, 0]
        yield f"batch {number}: {words}", right
        yield f"batch {number} is aligned", found.memory.data_ptr() % 16 == 0


def main() -> int:
    cases = [*places(), *means(), *addresses(), *batches()]
    different = [name for name, same in cases if not same]
    print(f"{len(cases)} cases, {len(different)} different")
    print("\n".join(different), file=sys.stderr)
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
