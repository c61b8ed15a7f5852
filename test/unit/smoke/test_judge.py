"""The judge of a GPU run: numbers in, reasons out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_dspark_cp.core import reference
from sglang_dspark_cp.smoke import judge
from sglang_dspark_cp.smoke.judge import Agreement, Finding, Rows


def some_rows(length: int = 300, seed: int = 0, stages: int = 3) -> Rows:
    """Rows of random numbers, written by the package's own writer. kv: [S * N, 512]."""
    start = max(0, length - 128)
    count = length - start
    kv = torch.randn(stages * count, 512, generator=torch.Generator().manual_seed(seed))
    angle = torch.arange(4096.0)[:, None] * torch.arange(32.0)
    freqs = torch.polar(torch.ones_like(angle), angle)
    parts = reference.make_rows(kv, torch.ones(512), 1e-6, freqs, torch.arange(stages * count))
    data = torch.cat([parts.nope, parts.rope.contiguous().view(torch.uint8), parts.scale], dim=1)
    return Rows(start, length, np.arange(start, length), data.view(stages, count, -1).numpy())


def changed(rows: Rows, **fields: object) -> Rows:
    return Rows(**{**vars(rows), **fields})  # type: ignore[arg-type]


def test_e4m3_is_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(judge.e4m3_values(), theirs)


def test_dequantise_equals_the_torch_reader() -> None:
    rows = some_rows()
    flat = torch.from_numpy(rows.data[0])
    parts = reference.RowParts(
        flat[:, :448], flat[:, 448:576].contiguous().view(torch.bfloat16), flat[:, 576:].contiguous()
    )
    np.testing.assert_array_equal(judge.dequantise(rows.data[0]), reference.dequantise(parts).numpy())


def test_the_same_rows() -> None:
    found = judge.compare_rows(some_rows(), some_rows())
    assert found == judge.RowComparison(rows=3 * 128, byte_equal=3 * 128, missing=0, max_rel_err=0.0, over=0)
    assert judge.rows_identical(some_rows(), some_rows())


def test_one_flipped_code_is_small_and_not_identical() -> None:
    rows = some_rows()
    data = rows.data.copy()
    data[1, 5, 10] ^= 1
    found = judge.compare_rows(changed(rows, data=data), rows)
    assert (found.byte_equal, found.missing) == (3 * 128 - 1, 0)
    assert 0 < found.max_rel_err < judge.ROWS_TOLERANCE
    assert not judge.rows_identical(changed(rows, data=data), rows)


@pytest.mark.parametrize("part", [slice(0, 448), slice(448, 576), slice(576, 583)])
def test_a_row_of_another_token_is_far(part: slice) -> None:
    rows = some_rows()
    data = rows.data.copy()
    data[0, 3, part] = 0
    assert judge.compare_rows(changed(rows, data=data), rows).max_rel_err > 0.3


def test_nan_and_missing_rows_are_seen() -> None:
    rows = some_rows()
    data = rows.data.copy()
    data[0, 0, 0] = 0x7F
    assert judge.compare_rows(changed(rows, data=data), rows).max_rel_err == np.inf
    short = changed(rows, positions=rows.positions[2:], data=rows.data[:, 2:])
    assert short.missing == 2
    found = judge.compare_rows(short, rows)
    assert (found.missing, found.rows, found.byte_equal) == (2, 3 * 126, 3 * 126)
    assert judge.compare_many([(short, rows), (rows, rows)])["rows_missing"] == 2
    assert judge.compare_many([])["requests"] == 0


def test_rows_are_matched_by_position() -> None:
    rows = some_rows()
    turned = changed(rows, positions=rows.positions[::-1].copy(), data=rows.data[:, ::-1].copy())
    assert judge.rows_identical(turned, rows)


def test_dumps_are_read_back(tmp_path: Path) -> None:
    rows = some_rows(40)
    np.savez(tmp_path / "rows-prefill-7.npz", window=(rows.start, rows.end), positions=rows.positions, data=rows.data)
    found = judge.load_rows(tmp_path, "prefill")
    assert list(found) == [7]
    assert judge.rows_identical(found[7], rows)
    assert judge.load_rows(tmp_path, "decode") == {}
    lines = [{"room": 7, "anchor": 40, "tokens": [1]}, {"room": 7, "anchor": 40, "tokens": [2]}]
    lines.append({"room": None, "anchor": 40, "tokens": [3]})
    (tmp_path / "proposals-decode-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert judge.load_proposals(tmp_path) == {7: {40: [1]}}


def test_agreement() -> None:
    proposals = {
        1: {10: [1, 2], 12: [3, 4]},
        2: {10: [1, 2], 13: [5, 6], 12: [3, 9]},
        3: {10: [7, 7]},
    }
    assert judge.agreement(proposals, [2], [1]) == Agreement(1, 1, 2, 1)
    assert judge.agreement(proposals, [2, 3, 4], [1, 1, 1]) == Agreement(2, 1, 3, 1)
    assert judge.agreement(proposals, [3], [1]).report()["first_step"] == 0.0
    assert judge.agreement({}, [1], [2]).report() == {
        "requests": 0, "first_step": None, "blocks": 0, "all_steps": None,
    }  # fmt: skip


def test_worst_gap() -> None:
    meta = {
        "input_token_logprobs": [[None, 8], [-1.0, 9], [-0.5, 10]],
        "input_top_logprobs": [None, [[-0.75, 3]], [[-0.5, 10]]],
    }
    assert judge.worst_gap(meta, [9, 10]) == 0.25
    assert judge.worst_gap(meta, [10]) == 0.0
    assert judge.worst_gap(meta, [10, 9]) is None
    assert judge.worst_gap({}, [1]) is None
    assert judge.worst_gap(meta, []) is None


def test_mean() -> None:
    assert judge.mean([1.0, None, 2.0]) == 1.5
    assert judge.mean([None]) is None


GOOD_ROWS = {"requests": 3, "rows": 9, "rows_byte_equal": 9, "rows_missing": 0, "max_rel_err": 0.0}
GOOD = Finding("cp2-tp2", 5.0, 5.0, 1.0, GOOD_ROWS)


@pytest.mark.parametrize(
    ("finding", "word"),
    [
        (GOOD, None),
        (Finding("x", 4.92, 5.0, 0.97, GOOD_ROWS), None),
        (Finding("x", 5.0, None, None, None), None),
        (Finding("x", None, 5.0, 1.0, GOOD_ROWS), "no accept length"),
        (Finding("x", 4.8, 5.0, 1.0, GOOD_ROWS), "without CP 5.0"),
        (Finding("x", 5.0, 5.0, 0.96, GOOD_ROWS), "96.0% of first proposals"),
        (Finding("x", 5.0, 5.0, None, GOOD_ROWS), "no proposals"),
        (Finding("x", 5.0, 5.0, 1.0, {**GOOD_ROWS, "requests": 0}), "no draft rows"),
        (Finding("x", 5.0, 5.0, 1.0, {**GOOD_ROWS, "rows_missing": 1}), "1 draft rows are missing"),
        (Finding("x", 5.0, 5.0, 1.0, {**GOOD_ROWS, "max_rel_err": 0.02}), "0.02"),
    ],
)
def test_judge_set_up(finding: Finding, word: str | None) -> None:
    reasons = judge.judge_set_up(finding, strict_rows=True)
    assert len(reasons) == (word is not None)
    assert word is None or word in reasons[0]


def test_rounding_of_random_weights_is_reported_only() -> None:
    finding = Finding("x", 5.0, 5.0, 1.0, {**GOOD_ROWS, "max_rel_err": 0.02})
    assert judge.judge_set_up(finding, strict_rows=False) == []


@pytest.mark.parametrize(
    ("accept", "first_step", "shows"),
    [(1.0, 0.0, True), (3.5, 1.0, True), (3.6, 1.0, False), (5.0, 0.49, True), (5.0, None, False), (None, 0.0, False)],
)
def test_judge_control(accept: float | None, first_step: float | None, shows: bool) -> None:
    assert (judge.judge_control("zero-rows", accept, 5.0, first_step) is None) is shows


def test_judge_refusal() -> None:
    good = {
        "fault": "zero-rows@1#1", "answered": False, "error": "prefill: AlignmentError: x",
        "ranks_with_alignment_error": 2, "next_request_answered": True, "same_prompt_answered_later": True,
    }  # fmt: skip
    assert judge.judge_refusal(good, 2) == []
    bad = {**good, "answered": True, "ranks_with_alignment_error": 1, "next_request_answered": False}
    bad["same_prompt_answered_later"] = False
    assert len(judge.judge_refusal(bad, 2)) == 4
    assert len(judge.judge_refusal({**good, "error": "time-out"}, 2)) == 1
