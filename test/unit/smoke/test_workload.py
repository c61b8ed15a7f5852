"""The requests of a CPU run: what they cover, that they stay the same, and how a bad prompts file is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from sglang_dspark_cp.errors import DsparkCpError
from sglang_dspark_cp.smoke import geometry
from sglang_dspark_cp.smoke.weights import draft_checkpoint, target_weights
from sglang_dspark_cp.smoke.workload import (
    FIRST_ROOM,
    FIRST_TOKEN,
    Prompt,
    WorkloadError,
    build,
    read_questions,
    tokenize,
)

torch.set_num_threads(1)

CHUNK = 2048
QUESTIONS = ["What is 2 + 3?", "How many eggs?"]


def lengths(prompts: list[Prompt], wave: int) -> list[int]:
    return [len(prompt.tokens) for prompt in prompts if prompt.wave == wave]


# ------------------------------------------------------------------------------------------------------------ tokens


def test_tokenize() -> None:
    assert tokenize("A b") == [FIRST_TOKEN + 65, FIRST_TOKEN + 32, FIRST_TOKEN + 98]
    assert tokenize("é") == [FIRST_TOKEN + 0xC3, FIRST_TOKEN + 0xA9]
    assert tokenize("") == []
    assert max(tokenize("\U0010ffff")) < geometry.VOCAB


# ------------------------------------------------------------------------------------------------------------- build


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_what_a_run_covers(cp_size: int) -> None:
    prompts = build(QUESTIONS, cp_size, CHUNK)
    assert [prompt.tokens for prompt in prompts if prompt.wave == 0] == [tokenize(text) for text in QUESTIONS]
    # Around the CP size: fewer tokens than ranks, as many, one more, and almost two rows per rank.
    short = lengths(prompts, 1)
    assert short == sorted({*range(1, cp_size + 2), 2 * cp_size - 1})
    # Around the window, one page and two pages.
    assert lengths(prompts, 2) == [127, 128, 129, 255, 256, 257, 511, 513]
    # More than two chunks, and an end that does not divide by the CP size.
    assert lengths(prompts, 3) == [2 * CHUNK, 2 * CHUNK + 1, 2 * CHUNK + 3]
    # Last of all a request that is alone in its batch and shorter than the CP group.
    assert prompts[-1].tokens != []
    assert lengths(prompts, max(prompt.wave for prompt in prompts)) == [1]


def test_cached_prefixes_are_whole_pages_and_come_later() -> None:
    prompts = {prompt.name: prompt for prompt in build(QUESTIONS, 8, CHUNK)}
    first = prompts["prefix, first time"]
    again = [prompts["the same prefix, one token more"], prompts["the same prefix, other end"]]
    prefix = 2 * geometry.PAGE
    for prompt in again:
        assert prompt.wave > first.wave
        assert prompt.tokens[:prefix] == first.tokens[:prefix]
        assert prompt.tokens[prefix:] != first.tokens[prefix : len(prompt.tokens)]
    assert [len(prompt.tokens) - prefix for prompt in (first, *again)] == [60, 1, 300]


@pytest.mark.parametrize("cp_size", [2, 8])
def test_rooms_are_unique_and_waves_in_order(cp_size: int) -> None:
    prompts = build(QUESTIONS, cp_size, CHUNK)
    assert [prompt.room for prompt in prompts] == list(range(FIRST_ROOM, FIRST_ROOM + len(prompts)))
    waves = [prompt.wave for prompt in prompts]
    assert waves == sorted(waves)
    assert all(later - earlier <= 1 for earlier, later in pairwise(waves))


def test_tokens_are_in_the_vocabulary_and_fit_the_model() -> None:
    for prompt in build(read_questions(None), 8, CHUNK):
        assert 0 < len(prompt.tokens) < geometry.POSITIONS
        assert min(prompt.tokens) >= FIRST_TOKEN
        assert max(prompt.tokens) < geometry.VOCAB


def test_two_builds_are_the_same() -> None:
    assert build(QUESTIONS, 8, CHUNK) == build(QUESTIONS, 8, CHUNK)


def test_max_tokens_leaves_longer_requests_out() -> None:
    prompts = build(QUESTIONS, 8, CHUNK, max_tokens=128)
    assert max(len(prompt.tokens) for prompt in prompts) == 128
    assert [prompt.room for prompt in prompts] == list(range(FIRST_ROOM, FIRST_ROOM + len(prompts)))
    everything = {prompt.name: prompt.tokens for prompt in build(QUESTIONS, 8, CHUNK)}
    assert all(everything[prompt.name] == prompt.tokens for prompt in prompts)


@pytest.mark.parametrize("only", [False, True])
def test_nothing_is_left(only: bool) -> None:
    with pytest.raises(WorkloadError, match="no prompt has 0 tokens or fewer; give a larger --max-tokens"):
        build(QUESTIONS, 8, CHUNK, max_tokens=0, only_questions=only)


def test_questions_alone_are_not_refused_for_prompts_that_are_not_sent() -> None:
    chunk = geometry.POSITIONS // 2
    prompts = build([*QUESTIONS, "x" * 200], 8, chunk, max_tokens=100, only_questions=True)
    assert [prompt.tokens for prompt in prompts] == [tokenize(text) for text in QUESTIONS]
    with pytest.raises(WorkloadError, match=f"--max-tokens {geometry.POSITIONS - 1} leaves such prompts out"):
        build(QUESTIONS, 8, chunk)


def test_a_prompt_that_the_small_model_cannot_hold() -> None:
    longest = geometry.POSITIONS - 1
    build(["x" * longest], 2, CHUNK)
    with pytest.raises(WorkloadError, match=f"question 1 has {longest + 1} tokens, the small model holds {longest}"):
        build(["x" * (longest + 1)], 2, CHUNK)


# --------------------------------------------------------------------------------------------------------- questions


def test_questions_of_this_package() -> None:
    questions = read_questions(None)
    assert len(questions) >= 5
    assert len(set(questions)) == len(questions)
    assert all(question.strip() for question in questions)


def test_both_fields_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "one"}, {"question": "zwei, größer"}, {"prompt": "three", "question": "not this"}]
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n \n", encoding="utf-8")
    assert read_questions(path) == ["one", "zwei, größer", "three"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        ("\n \n", "holds no prompts"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "line 2 has no `prompt` and no `question` text"),
        ('{"prompt": "  "}\n', "line 1 has no `prompt`"),
        ('{"prompt": 7}\n', "line 1 has no `prompt`"),
        ('["prompt"]\n', "line 1 has no `prompt`"),
        ('\n{"prompt": \n', "line 2 is not JSON"),
    ],
)
def test_bad_prompts_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(WorkloadError, match=message) as error:
        read_questions(path)
    assert str(path) in str(error.value)
    assert isinstance(error.value, DsparkCpError)


def test_missing_prompts_file(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    with pytest.raises(WorkloadError, match="No such file or directory; give --prompts FILE") as error:
        read_questions(path)
    assert str(path) in str(error.value)


def test_a_prompts_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(WorkloadError):
        read_questions(path)


def test_a_folder_for_a_prompts_file(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="Is a directory"):
        read_questions(tmp_path)


# ----------------------------------------------------------------------------------------------------------- weights


def test_weights_are_the_same_for_ranks_and_oracle() -> None:
    one, two = target_weights(), target_weights()
    for name in ("embedding", "gain", "bias", "place"):
        assert torch.equal(getattr(one, name), getattr(two, name))
    assert one.embedding.shape == (geometry.VOCAB, geometry.HIDDEN)
    assert one.place.shape == (geometry.LAYERS, geometry.POSITIONS, geometry.HIDDEN)
    assert one.gain.shape == (geometry.LAYERS, geometry.STREAMS)
    first, second = draft_checkpoint(), draft_checkpoint()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["mtp.0.main_proj.weight"].shape == (geometry.HIDDEN, geometry.HIDDEN * len(geometry.CAPTURED_LAYERS))


def different_rows(table: torch.Tensor) -> int:
    return len({row.tobytes() for row in table.view(torch.int16).numpy()})


def test_every_token_and_every_position_has_weights_of_its_own() -> None:
    """Else a swapped row could not be told from the right one."""
    weights = target_weights()
    assert different_rows(weights.embedding) == geometry.VOCAB
    for layer in geometry.CAPTURED_LAYERS:
        assert different_rows(weights.place[layer]) == geometry.POSITIONS
