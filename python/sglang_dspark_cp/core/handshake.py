"""Do both sides of the wire mean the same bytes? Standard library and errors only.

A prefill worker sends pages and state rows by position: component i, buffer j, `item` bytes per page, with its own
numbers on both sides. Nothing on the way notices that the receiver has other buffers there, so it is compared when a
decode registers, before the first byte.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from itertools import groupby

from ..errors import TransferError

DRAFT = "draft swa"
"""Name of the component that holds draft KV: window pages of each draft stage."""

ROW_BYTES = 584
PAGE_ALIGNMENT = 576
"""A draft page is its rows, filled up to a multiple of this; 256 rows are 149760 bytes."""

SAME_DRAFT = "start both with --speculative-algorithm DSPARK and the same checkpoint"
SAME_ROWS = f"{SAME_DRAFT}, and give both the same --page-size and --kv-cache-dtype"
SAME_RELEASE = "run the same SGLang release and the same SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS on both"
SAME_CP_SENDERS = "set SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER to the same value on both sides"


@dataclass(frozen=True)
class Component:
    """One state component.

    Attributes:
        items: bytes per page (or per ring, or per row) of each buffer.
        name: what it is, empty where only the position is known: a registration carries no names.
    """

    items: tuple[int, ...]
    name: str = ""

    def __str__(self) -> str:
        runs = [f"{len(list(run))} x {item}" for item, run in groupby(self.items)]
        size = f"{len(self.items)} buffer{'s' if len(self.items) != 1 else ''}"
        if len(runs) == 1:
            size += f", item {self.items[0]}"
        elif runs:
            size += f", items {' + '.join(runs)}"
        return f"{self.name or 'component'} x {size}"


@dataclass(frozen=True)
class Layout:
    """The memory that one side has on the wire.

    Attributes:
        kv_buffers, kv_item: number of paged KV buffers; bytes per page of the first one (a registration has no more).
        aux_buffers: number of metadata buffers.
        components: state, in order.
    """

    kv_buffers: int
    kv_item: int
    aux_buffers: int
    components: tuple[Component, ...]


def named(kinds: Sequence[str], items: Sequence[Sequence[int]]) -> tuple[Component, ...]:
    """Components of a prefill worker; a second `swa`, which stock appends behind the target's, is the draft's."""
    names = [DRAFT if kind == "swa" and "swa" in kinds[:place] else kind for place, kind in enumerate(kinds)]
    return tuple(Component(tuple(item), name) for name, item in zip(names, items, strict=True))


def unnamed(items: Sequence[Sequence[int]]) -> tuple[Component, ...]:
    """Components as a registration carries them."""
    return tuple(Component(tuple(item)) for item in items)


def draft_page_bytes(page: int) -> int:
    """Bytes of one draft page of `page` rows."""
    return -(-ROW_BYTES * page // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


@dataclass(frozen=True)
class Difference:
    """One thing in which two layouts differ."""

    prefill: str
    decode: str
    fix: str

    def __str__(self) -> str:
        return f"decode registered {self.decode}, prefill sends {self.prefill}; {self.fix}"


def differences(prefill: Layout, decode: Layout) -> list[Difference]:
    """Everything in which a decode's registration is not what this prefill worker sends; names are not compared."""
    found: list[Difference] = []
    ours, theirs = prefill.components, decode.components
    if len(ours) != len(theirs):
        found.append(Difference(_listed(ours), _listed(theirs), SAME_DRAFT))
    else:
        for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            if mine.items != other.items:
                count = len(mine.items) != len(other.items)
                fix = SAME_DRAFT if count else SAME_ROWS
                found.append(Difference(f"{mine}", f"state component {place}: {other}", fix))
    if (prefill.kv_buffers, prefill.kv_item) != (decode.kv_buffers, decode.kv_item):
        found.append(Difference(_paged(prefill), _paged(decode), SAME_ROWS))
    if prefill.aux_buffers != decode.aux_buffers:
        buffers = "metadata buffers"
        found.append(Difference(f"{prefill.aux_buffers} {buffers}", f"{decode.aux_buffers} {buffers}", SAME_RELEASE))
    return found


def _paged(side: Layout) -> str:
    return f"{side.kv_buffers} KV buffers, first item {side.kv_item}"


def _listed(components: tuple[Component, ...]) -> str:
    text = "; ".join(str(component) for component in components)
    return f"{len(components)} state component{'s' if len(components) != 1 else ''} ({text})"


def refusal(peer: str, prefill: Layout, decode: Layout, *, sends: bool = True) -> str | None:
    """Why nothing may be sent to a decode, or None.

    Args:
        peer: who registered.
        sends: whether this rank sends anything; a rank that does not is known to nobody who agrees on that.
    """
    if not sends:
        return (
            f"decode {peer} registered with a CP rank that sends nothing: it waits for an answer from every CP rank,"
            f" and this prefill server sends from CP rank 0 only; {SAME_CP_SENDERS}"
        )
    found = differences(prefill, decode)
    return f"decode {peer} cannot take what this prefill worker sends: {' | '.join(map(str, found))}" if found else None


def stranger(peer: str) -> str:
    """Why nothing may be sent to a decode that this rank knows nothing of."""
    return f"decode {peer} asks for KV and never registered its buffers with this prefill worker; restart the decode"


def no_decode_here(cp_rank: int) -> str:
    """Added to the failure of a request for which no decode came to this CP rank, nor ever one before."""
    return (
        f"this prefill worker sends from every CP rank (SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER=1), and no decode"
        f" ever registered with attn_cp_rank {cp_rank}. A decode without that variable registers with attn_cp_rank 0"
        f" only; {SAME_CP_SENDERS}"
    )


def others_without_decode() -> str:
    """Why a request failed whose decode came to this CP rank, when another rank gave it up before anything was sent."""
    return (
        "another CP rank failed this request before anything was sent, while its decode had registered with this one."
        " This prefill worker sends from every CP rank (SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER=1): if the other"
        f" ranks' log says that no decode registered there, {SAME_CP_SENDERS}"
    )


def index_mismatch(
    components: Sequence[Component], ours: Sequence[Sized | None] | None, theirs: Sequence[Sized]
) -> str | None:
    """Whether a request's last chunk brings state for every row that decode reserved, component by component.

    Stock cuts the longer of two window lists, which shifts every row, and takes a missing list for nothing to send.
    """
    mine = [None if rows is None else len(rows) for rows in (ours or [])]
    other = [len(rows) for rows in theirs]
    if mine == other and len(mine) == len(components):
        return None
    names = ", ".join(component.name for component in components)
    return (
        f"the state rows of this request differ: prefill sends {mine} pages or rows of ({names}), decode reserved"
        f" {other}; start both with the same checkpoint (its sliding window) and the same --page-size"
    )


def own_violations(layout: Layout, stages: int, page: int) -> list[str]:
    """What is wrong with this prefill worker's own memory, before anybody registers."""
    drafts = [component for component in layout.components if component.name == DRAFT]
    if not drafts:
        return [f"no draft component among {_listed(layout.components)}; expected one with {stages} buffers"]
    expected = Component((draft_page_bytes(page),) * stages, DRAFT)
    found = []
    if drafts != [expected]:
        found.append(f"found {', '.join(map(str, drafts))}; expected {expected}")
    return found


def require_own(layout: Layout, stages: int, page: int) -> None:
    """Stop a prefill worker that has no complete draft KV on the wire.

    Raises:
        TransferError: with what was found and expected.
    """
    if found := own_violations(layout, stages, page):
        raise TransferError(f"this prefill worker cannot send draft KV: {'; '.join(found)}; {SAME_ROWS}")
