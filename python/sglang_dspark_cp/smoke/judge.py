"""What the dumps and answers of a GPU run say: pure functions over numbers, no server and no GPU.

Shape symbols: S draft stages, N dumped rows of one request, 583 bytes of one row as the pool holds them
(448 e4m3 | 64 bf16 of the rotated part | 7 UE8M0 scales; the pool's last byte is left out, no writer touches it).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NOPE, ROPE, TILE = 448, 64, 64
DATA_BYTES, SCALES = NOPE + 2 * ROPE, NOPE // TILE
ROW_BYTES = DATA_BYTES + SCALES

ROWS_TOLERANCE = 1e-2
"""Largest relative error (norm of the difference / norm, per row, e4m3 part and rotated part apart) of a CP row against
the non-CP row of the same position. Holds for the oracle checkpoint: no row hangs on near-tied attention scores, and in
bf16 the values lie well inside their e4m3 codes. A row of another position or request is off by about 1. With random
weights the last bit of a sum tips a value from one e4m3 code to the next, which is 6 to 12 % of it: there errors are
reported only.
"""
ACCEPT_TOLERANCE = 0.02
FIRST_STEPS_AGREE = 0.97
CONTROL_ACCEPT = 0.7
CONTROL_AGREE = 0.5


# ------------------------------------------------------------------------------------------------------ draft rows


@dataclass(frozen=True)
class Rows:
    """Draft-pool rows of one request.

    Attributes:
        start, end: positions that the draft on decode reads, [max(0, L - W), L).
        positions: [N], those of them that had a slot in the pool.
        data: [S, N, 583] uint8.
    """

    start: int
    end: int
    positions: NDArray[np.int64]
    data: NDArray[np.uint8]

    @property
    def missing(self) -> int:
        """Positions of the window without a row."""
        return self.end - self.start - len(self.positions)


def load_rows(folder: Path, role: str) -> dict[int, Rows]:
    """All `rows-<role>-<room>.npz` of a folder, by bootstrap room."""
    found = {}
    for path in sorted(folder.glob(f"rows-{role}-*.npz")):
        with np.load(path) as stored:
            start, end = (int(value) for value in stored["window"])
            found[int(path.stem.rpartition("-")[2])] = Rows(start, end, stored["positions"], stored["data"])
    return found


def e4m3_values() -> NDArray[np.float64]:
    """[256]: value of each e4m3 code (no infinities; 0x7f and 0xff are NaN)."""
    code = np.arange(256)
    sign = np.where(code & 0x80, -1.0, 1.0)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[(code & 0x7F) == 0x7F] = np.nan
    found: NDArray[np.float64] = sign * value
    return found


def dequantise(data: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Rows as numbers: [..., 583] uint8 -> [..., 512] float64."""
    codes = e4m3_values()[data[..., :NOPE]].reshape(*data.shape[:-1], SCALES, TILE)
    scale = np.exp2(data[..., DATA_BYTES : DATA_BYTES + SCALES].astype(np.float64) - 127.0)
    nope = (codes * scale[..., None]).reshape(*data.shape[:-1], NOPE)
    words = np.ascontiguousarray(data[..., NOPE:DATA_BYTES]).view("<u2").astype(np.uint32) << 16
    return np.concatenate([nope, words.view(np.float32).astype(np.float64)], axis=-1)


@dataclass(frozen=True)
class RowComparison:
    """Rows of one request in two places, over the positions that both windows want.

    Attributes:
        rows: S * positions compared.
        byte_equal: rows whose bytes are all equal.
        missing: positions that one side lacks.
        max_rel_err: worst relative error of a row's e4m3 or rotated part (0 when nothing was compared).
        over: rows whose error is above `ROWS_TOLERANCE`.
    """

    rows: int
    byte_equal: int
    missing: int
    max_rel_err: float
    over: int


def compare_rows(ours: Rows, theirs: Rows) -> RowComparison:
    """Compare rows of the same positions; `theirs` is what relative errors are relative to."""
    _, left, right = np.intersect1d(ours.positions, theirs.positions, return_indices=True)
    wanted = max(ours.end, theirs.end) - min(ours.start, theirs.start)
    a, b = ours.data[:, left], theirs.data[:, right]
    equal = (a == b).all(axis=-1)
    errors = np.zeros(0)
    if not equal.all():
        stage, row = np.nonzero(~equal)
        x = dequantise(a[stage, row])
        y = dequantise(b[stage, row])
        by_part = []
        for part in (slice(0, NOPE), slice(NOPE, NOPE + ROPE)):
            gap = np.linalg.norm(x[:, part] - y[:, part], axis=-1)
            size = np.maximum(np.linalg.norm(y[:, part], axis=-1), 1e-12)
            by_part.append(np.nan_to_num(gap / size, nan=np.inf, posinf=np.inf))
        errors = np.maximum(*by_part)
    worst, over = float(errors.max(initial=0.0)), int((errors > ROWS_TOLERANCE).sum())
    return RowComparison(int(equal.size), int(equal.sum()), wanted - len(left), worst, over)


def compare_many(pairs: Iterable[tuple[Rows, Rows]]) -> dict[str, Any]:
    """Sums and worst over requests."""
    found = [compare_rows(ours, theirs) for ours, theirs in pairs]
    return {
        "requests": len(found),
        "rows": sum(each.rows for each in found),
        "rows_byte_equal": sum(each.byte_equal for each in found),
        "rows_missing": sum(each.missing for each in found),
        "rows_over_tolerance": sum(each.over for each in found),
        "max_rel_err": round(max((each.max_rel_err for each in found), default=0.0), 6),
    }


def rows_identical(ours: Rows, theirs: Rows) -> bool:
    """Whether both hold the same whole window, byte for byte."""
    found = compare_rows(ours, theirs)
    return found.missing == 0 and found.byte_equal == found.rows


# ------------------------------------------------------------------------------------------------------- proposals

Proposals = Mapping[int, Mapping[int, Sequence[int]]]
"""Bootstrap room -> position of the block's first token (the anchor) -> proposed tokens."""


def load_proposals(folder: Path) -> dict[int, dict[int, list[int]]]:
    """All `proposals-*.jsonl` of a folder. A block that was proposed twice counts as first proposed."""
    found: dict[int, dict[int, list[int]]] = {}
    for path in sorted(folder.glob("proposals-*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["room"] is not None:
                found.setdefault(int(record["room"]), {}).setdefault(int(record["anchor"]), record["tokens"])
    return found


@dataclass(frozen=True)
class Agreement:
    """How far the proposals of two requests, or of many, are the same.

    Attributes:
        requests: pairs of requests of which both have proposals.
        first_steps: pairs whose first block is the same.
        blocks, same_blocks: blocks with an anchor that both have; those that are the same.
    """

    requests: int
    first_steps: int
    blocks: int
    same_blocks: int

    def report(self) -> dict[str, Any]:
        """Shares, None where nothing was to compare."""
        return {
            "requests": self.requests,
            "first_step": round(self.first_steps / self.requests, 4) if self.requests else None,
            "blocks": self.blocks,
            "all_steps": round(self.same_blocks / self.blocks, 4) if self.blocks else None,
        }


def agreement(proposals: Proposals, rooms: Sequence[int], reference_rooms: Sequence[int]) -> Agreement:
    """Compare the proposals of requests (by room) with those of the reference requests at the same place."""
    requests = first_steps = blocks = same = 0
    for room, reference in zip(rooms, reference_rooms, strict=True):
        ours, theirs = proposals.get(room), proposals.get(reference)
        if not ours or not theirs:
            continue
        requests += 1
        first = min(theirs)
        first_steps += list(ours.get(first, ())) == list(theirs[first])
        common = ours.keys() & theirs.keys()
        blocks += len(common)
        same += sum(list(ours[anchor]) == list(theirs[anchor]) for anchor in common)
    return Agreement(requests, first_steps, blocks, same)


# --------------------------------------------------------------------------------------------------------- answers


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of what is known, None if nothing is."""
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), 4) if known else None


def worst_gap(meta: Mapping[str, Any], tokens: Sequence[int]) -> float | None:
    """Worst distance of a teacher-forced token's log-probability from the best token's.

    Args:
        meta: `meta_info` of a request for prompt + tokens with `return_logprob` and one top log-probability.
        tokens: the tokens that were forced.

    Returns:
        0 when each token is the best one, None when the answer does not cover these tokens.
    """
    given, best = meta.get("input_token_logprobs") or [], meta.get("input_top_logprobs") or []
    pairs = [(g[1], b[0][0] - g[0]) for g, b in zip(given, best, strict=False) if g and b and g[0] is not None]
    forced = pairs[-len(tokens) :] if tokens else []
    if not forced or [token for token, _ in forced] != list(tokens):
        return None
    return round(float(max(gap for _, gap in forced)), 3)


# --------------------------------------------------------------------------------------------------------- verdict


@dataclass(frozen=True)
class Finding:
    """What was measured of one set-up that has a context-parallel prefill, beside the one that has none."""

    name: str
    accept_length: float | None
    reference_accept_length: float | None
    first_step_agreement: float | None
    rows: Mapping[str, Any] | None
    """As `compare_many` says, against the non-CP prefill; None when there is no such reference."""


def judge_set_up(finding: Finding, *, strict_rows: bool) -> list[str]:
    """Reasons why a CP set-up is not as good as the one without CP."""
    reasons = []
    accept, reference = finding.accept_length, finding.reference_accept_length
    if accept is None:
        reasons.append(f"{finding.name}: no accept length was reported")
    elif reference and abs(accept / reference - 1) > ACCEPT_TOLERANCE:
        reasons.append(
            f"{finding.name}: mean accept length {accept}, without CP {reference};"
            f" allowed are {ACCEPT_TOLERANCE:.0%} of difference"
        )
    share = finding.first_step_agreement
    if finding.rows is not None:
        if share is None:
            reasons.append(f"{finding.name}: no proposals were recorded")
        elif share < FIRST_STEPS_AGREE:
            reasons.append(
                f"{finding.name}: {share:.1%} of first proposals as without CP, wanted {FIRST_STEPS_AGREE:.0%}"
            )
        if not finding.rows["requests"]:
            reasons.append(f"{finding.name}: no draft rows to compare were dumped")
        if finding.rows["rows_missing"]:
            reasons.append(f"{finding.name}: {finding.rows['rows_missing']} draft rows are missing in the windows")
        if strict_rows and finding.rows["max_rel_err"] > ROWS_TOLERANCE:
            reasons.append(
                f"{finding.name}: draft rows differ from the non-CP ones by {finding.rows['max_rel_err']:.2g},"
                f" allowed is {ROWS_TOLERANCE:g}"
            )
    return reasons


def judge_control(fault: str, accept: float | None, reference: float | None, first_step: float | None) -> str | None:
    """Why a negative control did not show: neither acceptance nor proposals fell. None when one of them did."""
    if accept is None:
        return f"control {fault}: no request was answered"
    if reference is not None and accept <= CONTROL_ACCEPT * reference:
        return None
    if first_step is not None and first_step < CONTROL_AGREE:
        return None
    return (
        f"control {fault}: spoilt rows do not show: mean accept length {accept} against {reference} with right rows,"
        f" first proposals agree on {first_step}"
    )


def judge_refusal(refusal: Mapping[str, Any], cp_size: int) -> list[str]:
    """Reasons why a fault with the proof on did not end as it must."""
    fault = refusal["fault"]
    reasons = []
    if refusal["answered"] or "AlignmentError" not in refusal["error"]:
        reasons.append(f"proof on, {fault}: the client saw {refusal['error'][:200]!r} instead of an AlignmentError")
    if refusal["ranks_with_alignment_error"] != cp_size:
        reasons.append(f"proof on, {fault}: {refusal['ranks_with_alignment_error']} of {cp_size} CP ranks logged it")
    if not refusal["next_request_answered"]:
        reasons.append(f"proof on, {fault}: the next request was not answered rightly")
    if not refusal["same_prompt_answered_later"]:
        reasons.append(f"proof on, {fault}: the refused prompt, sent again, was not answered rightly")
    return reasons
