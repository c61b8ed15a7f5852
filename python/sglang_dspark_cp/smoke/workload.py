"""The requests of a CPU run: grade-school questions plus lengths that are known to break systems of this kind."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ..errors import DsparkCpError
from . import geometry

FIRST_TOKEN = 8
FIRST_ROOM = 1000


class WorkloadError(DsparkCpError, ValueError):
    """The prompts file cannot be used."""


@dataclass(frozen=True)
class Prompt:
    """One request.

    Attributes:
        name: why it is here.
        tokens: token ids.
        room: bootstrap room, unique in a run.
        wave: requests of one wave are queued together; a wave starts when the one before it is done.
    """

    name: str
    tokens: list[int]
    room: int
    wave: int


def tokenize(text: str) -> list[int]:
    """UTF-8 bytes as token ids; the small model has no vocabulary of its own."""
    return [FIRST_TOKEN + byte for byte in text.encode()]


def read_questions(path: Path | None) -> list[str]:
    """Prompts of a JSONL file with a `prompt` or `question` field per line; None: the file of this package.

    Raises:
        WorkloadError: the file is missing, empty or has a line without either field.
    """
    if path is None:
        text = (resources.files(__package__) / "data" / "questions.jsonl").read_text(encoding="utf-8")
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise WorkloadError(f"cannot read the prompts file {path}: {error.strerror}; give --prompts FILE") from None
        except UnicodeDecodeError as error:
            raise WorkloadError(f"{path} is not UTF-8 text (byte {error.start}); give a JSONL file") from None
    questions = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise WorkloadError(f"{path} line {number} is not JSON ({error.msg}); one JSON object per line") from None
        value = row.get("prompt", row.get("question")) if isinstance(row, dict) else None
        if not isinstance(value, str) or not value.strip():
            raise WorkloadError(f"{path} line {number} has no `prompt` and no `question` text")
        questions.append(value)
    if not questions:
        raise WorkloadError(f"{path} holds no prompts")
    return questions


def build(
    questions: Sequence[str], cp_size: int, chunk: int, max_tokens: int | None = None, *, only_questions: bool = False
) -> list[Prompt]:
    """All requests of a run, in order of arrival; longer ones than `max_tokens` are left out.

    Raises:
        WorkloadError: a prompt is longer than the small model holds, or none is left.
    """
    rng = random.Random(7)
    longest = geometry.POSITIONS - 1
    prompts: list[Prompt] = []

    def add(name: str, tokens: list[int], wave: int) -> None:
        if max_tokens is not None and len(tokens) > max_tokens:
            return
        if len(tokens) > longest:
            raise WorkloadError(
                f"prompt {name} has {len(tokens)} tokens, the small model holds {longest};"
                f" --max-tokens {longest} leaves such prompts out"
            )
        prompts.append(Prompt(name, tokens, FIRST_ROOM + len(prompts), wave))

    def noise(length: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN, geometry.VOCAB) for _ in range(length)]

    for number, question in enumerate(questions):
        add(f"question {number + 1}", tokenize(question), 0)
    if only_questions:
        return _not_empty(prompts, max_tokens)
    for length in sorted({*range(1, cp_size + 2), 2 * cp_size - 1}):
        add(f"length {length}", noise(length), 1)
    for length in (127, 128, 129, 255, 256, 257, 511, 513):
        add(f"length {length}", noise(length), 2)
    for extra in (0, 1, 3):
        add(f"{2 * chunk + extra} tokens, several chunks", noise(2 * chunk + extra), 3)
    # Cached prefixes: a page-aligned prefix is matched, the rest of the request is computed.
    base = noise(2 * geometry.PAGE)
    add("prefix, first time", [*base, *noise(60)], 4)
    add("the same prefix, one token more", [*base, *noise(1)], 5)
    add("the same prefix, other end", [*base, *noise(300)], 5)
    # Alone in its batch and shorter than the CP group: no collective may take place.
    add("alone, one token", noise(1), 6)
    return _not_empty(prompts, max_tokens)


def _not_empty(prompts: list[Prompt], max_tokens: int | None) -> list[Prompt]:
    if not prompts:
        raise WorkloadError(f"no prompt has {max_tokens} tokens or fewer; give a larger --max-tokens")
    return prompts
