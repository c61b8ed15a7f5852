"""GSM8K questions from files, few-shot prompts, and the number that an answer ends in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

WHERE_TO_GET = (
    "get test.jsonl from the grade-school-math repository on GitHub (grade_school_math/data) or the parquet files of "
    "the openai/gsm8k dataset on Hugging Face, and give the file or its folder with --data-path"
)
SUFFIXES = (".jsonl", ".parquet")
SPLIT_NAME = re.compile(r"(?P<split>test|train)(?:-\d+-of-\d+)?")
NEXT_QUESTION = "Question:"


class DataError(Exception):
    """The data cannot be used; the text says which file and what to do."""


# ------------------------------------------------------------------------------------------------- number of an answer

MARKER = "####"
_SIGN = r"(?:(?<![\w)\]])[-\u2212+])?"
_DIGITS = r"(?:[0-9]++(?:[,.][0-9]++)*+|\.[0-9]++)"
# Commas and points are taken in greedily and judged afterwards: half of a malformed number is not a number.
_NUMBER = rf"{_SIGN}(?:[$\u20ac\u00a3\u00a5] ?)?{_SIGN}{_DIGITS}(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?"
_TOKEN = re.compile(
    # What holds digits but is no single number: 3/4, 5 1/2, 3/4/2020, 2^5, 10:30, \frac{3}{4}, or 5 and a half sign.
    rf"(?P<unusable>\\[dt]?frac\s*\{{[^{{}}]*\}}\s*\{{[^{{}}]*\}}"
    rf"|(?<![0-9]){_NUMBER}(?:(?: +{_DIGITS})?(?: *[/\u2044^] *{_NUMBER})+"
    rf"|(?::[0-9]++)+| ?[\u00bc-\u00be\u2150-\u215e]))"
    # The lookbehinds keep away from cm2, H2O, v1.5, m^2 and m^{2}.
    rf"|(?<![A-Za-z0-9_^])(?<![0-9][.,])(?<!\^\{{)(?P<number>{_NUMBER})"
)
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")
_BEFORE_NUMBER = re.compile(r"[\s*_:=]*")
_SIGN_APART = re.compile(r"(\s*[-\u2212])\s+(?=[$0-9.])")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|\\,|[\u00a0\u2009\u202f])(?=[0-9]{3})")


def read_number(text: str) -> Decimal | None:
    """The value of one number as text, None if it is malformed (1,23 or 1.2.3)."""
    digits = re.sub(r"[$\u20ac\u00a3\u00a5\s]", "", text).replace("\u2212", "-")
    whole = re.split(r"[.eE]", digits.lstrip("+-"), maxsplit=1)[0]
    fraction = re.split(r"[eE]", digits, maxsplit=1)[0].partition(".")[2]
    if ("," in whole and not _GROUPED.fullmatch(whole)) or "." in fraction or "," in fraction:
        return None
    if sum(digits.count(sign) for sign in "+-") - len(re.findall(r"[eE][-+]", digits)) > 1:
        return None
    return Decimal(digits.replace(",", ""))


def _value(token: re.Match[str]) -> Decimal | None:
    return None if token["number"] is None else read_number(token["number"])


def _marked(text: str) -> re.Match[str] | None:
    """What the first `####` with a number right behind it is followed by."""
    for part in text.split(MARKER)[1:]:
        # Elsewhere `- 5` is a list item or a subtraction; right behind the marker it can only be a sign.
        if sign := _SIGN_APART.match(part):
            part = sign[1] + part[sign.end() :]
        space = _BEFORE_NUMBER.match(part)
        token = _TOKEN.match(part, space.end() if space else 0)
        if token is not None:
            return token
    return None


def extract_number(text: str) -> Decimal | None:
    """The number that an answer gives, None if it gives none that is beyond doubt.

    The first `####` that a number follows decides. Without one, the last number of the text does, unless the text was
    cut off right behind a marker. Text from the next `Question:` on is not part of the answer. Currency signs, units
    and per cent signs are passed over; fractions, powers, times and malformed numbers are no answer.
    """
    answer = _THOUSANDS.sub(",", text.split(NEXT_QUESTION, 1)[0]).replace("\\$", "$")
    marked = _marked(answer)
    if marked is not None:
        return _value(marked)
    if answer.rstrip().endswith(MARKER):
        return None
    tokens = list(_TOKEN.finditer(answer))
    return _value(tokens[-1]) if tokens else None


# ---------------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Question:
    """One line of the data.

    Attributes:
        place: file and line, for messages and records.
        answer: worked solution, ending in `#### number`.
        expected: that number.
    """

    place: str
    question: str
    answer: str
    expected: Decimal


def _rows_of_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start})") from None
    # Not splitlines(): JSON text may hold line separators of Unicode unescaped.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{path} line {number}"
        try:
            yield place, json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{place} is not JSON ({error.msg}); one JSON object per line is expected") from None


def _rows_of_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"reading {path} needs pyarrow: pip install pyarrow, or give a JSONL file") from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from None
    for number, row in enumerate(rows, 1):
        yield f"{path} row {number}", row


def _text(place: str, row: Any, name: str) -> str:
    value = row.get(name) if isinstance(row, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{place} has no text in its field `{name}`; GSM8K has `question` and `answer`")
    return value


def _question(place: str, row: Any) -> Question:
    question, answer = _text(place, row, "question"), _text(place, row, "answer")
    marked = _marked(answer)
    expected = None if marked is None else _value(marked)
    if expected is None:
        raise DataError(f"{place}: the answer does not end in `{MARKER} number`")
    return Question(place, question, answer, expected)


def load_file(path: Path) -> list[Question]:
    """All questions of a JSONL or parquet file.

    Raises:
        DataError: the file is missing, empty, of another kind or has a line that is no question.
    """
    readers = {".jsonl": _rows_of_jsonl, ".parquet": _rows_of_parquet}
    reader = readers.get(path.suffix)
    if reader is None:
        raise DataError(f"{path} is neither {' nor '.join(SUFFIXES)}; {WHERE_TO_GET}")
    try:
        questions = [_question(place, row) for place, row in reader(path)]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; {WHERE_TO_GET}") from None
    if not questions:
        raise DataError(f"{path} holds no questions")
    return questions


def _splits(folder: Path) -> dict[str, list[Path]]:
    """Files of each split; JSONL is preferred where a split is there twice."""
    found: dict[str, list[Path]] = {}
    for suffix in SUFFIXES:
        files: dict[str, list[Path]] = {}
        for path in sorted(folder.glob(f"*{suffix}")):
            name = SPLIT_NAME.fullmatch(path.stem)
            if name and path.is_file():
                files.setdefault(name["split"], []).append(path)
        found = files | found
    return found


def load(path: Path) -> tuple[list[Question], list[Question]]:
    """Questions to ask and questions for few-shot examples, the second empty unless a folder has a train split.

    A folder holds `test` and, if wanted, `train` as `.jsonl` or as parquet files, itself or in `main/` (as in the
    dataset on Hugging Face). The only data file of a folder may have any name.

    Raises:
        DataError: nothing usable is there.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; {WHERE_TO_GET}")
    if not path.is_dir():
        return load_file(path), []
    folder = path
    splits = _splits(folder)
    if not splits and (path / "main").is_dir():
        folder = path / "main"
        splits = _splits(folder)
    if "test" in splits:
        loaded = {split: [q for file in files for q in load_file(file)] for split, files in splits.items()}
        return loaded["test"], loaded.get("train", [])
    files = [file for suffix in SUFFIXES for file in sorted(folder.glob(f"*{suffix}"))]
    if len(files) == 1:
        return load_file(files[0]), []
    names = ", ".join(file.name for file in files) or "no JSONL or parquet file"
    raise DataError(f"{folder} has no test split (found: {names}); give a file, or {WHERE_TO_GET}")


def choose(path: Path, shots: int, wanted: int) -> tuple[list[Question], list[Question]]:
    """Few-shot examples and the questions to ask; fewer than wanted if the data has fewer.

    Raises:
        DataError: the data cannot be used or has too few lines.
    """
    asked, train = load(path)
    if train:
        if len(train) < shots:
            raise DataError(f"the train split of {path} has {len(train)} questions, --num-shots asks for {shots}")
        return train[:shots], asked[:wanted]
    if len(asked) <= shots:
        raise DataError(f"{path} has {len(asked)} questions: none is left after {shots} few-shot examples")
    return asked[:shots], asked[shots : shots + wanted]


def build_prompt(examples: list[Question], question: Question) -> str:
    """Worked examples, then the question without its answer."""
    solved = [f"{NEXT_QUESTION} {example.question}\nAnswer: {example.answer}\n\n" for example in examples]
    return "".join([*solved, f"{NEXT_QUESTION} {question.question}\nAnswer:"])
