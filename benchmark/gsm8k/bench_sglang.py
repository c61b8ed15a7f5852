"""GSM8K against a running SGLang server or PD router: accuracy, throughput, accept length; two servers side by side.

    python benchmark/gsm8k/bench_sglang.py --port 30000 --data-path test.jsonl --num-questions 200
    python benchmark/gsm8k/bench_sglang.py --port 30000 --compare-port 31000 --data-path test.jsonl

Exit status: 0 all requests were answered, 1 a request failed, 2 usage. Accuracy does not change it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import bench_http as http
from gsm8k_data import NEXT_QUESTION, WHERE_TO_GET, DataError, Question, build_prompt, choose, extract_number

NOT_TOLD = "n/a"
FAILURES_SHOWN = 20
BASE, COMPARED = "server", "compared"


# --------------------------------------------------------------------------------------------------------- one side


@dataclass(frozen=True)
class Answer:
    """What one server made of one question.

    Attributes:
        number: the answer's number, None if it has none.
        right: whether that is the expected one.
        error: why the request failed; then the rest is empty.
    """

    generated: http.Generated | None = None
    number: Decimal | None = None
    right: bool = False
    error: str = ""

    @property
    def state(self) -> str:
        """`failed`, `invalid` (no number), `right` or `wrong`."""
        if self.generated is None:
            return "failed"
        if self.number is None:
            return "invalid"
        return "right" if self.right else "wrong"

    @property
    def accept_length(self) -> float | None:
        """Output tokens per verification step, if told."""
        return self.generated.accept_length if self.generated else None

    def record(self) -> dict[str, Any]:
        """For the JSON result."""
        if self.generated is None:
            return {"state": self.state, "error": self.error}
        return {
            "state": self.state,
            "number": None if self.number is None else str(self.number),
            "output_tokens": self.generated.output_count,
            "accept_length": self.accept_length,
            "verify_steps": self.generated.verify_steps,
            "seconds": round(self.generated.seconds, 4),
            "text": self.generated.text,
            "output_ids": self.generated.tokens,
        }


@dataclass
class Side:
    """One server and its answers by question number (from 0)."""

    name: str
    url: str
    facts: http.ServerFacts = field(default_factory=http.ServerFacts)
    answers: dict[int, Answer] = field(default_factory=dict)
    seconds: float = 0.0

    def count(self, state: str) -> int:
        """Answers in a state."""
        return sum(answer.state == state for answer in self.answers.values())

    def finished(self) -> list[http.Generated]:
        """All answers of requests that did not fail."""
        return [answer.generated for answer in self.answers.values() if answer.generated is not None]


def ratio(part: float, whole: float) -> float | None:
    """A quotient, None where there is none."""
    return part / whole if whole else None


def mean_accept_length(answers: Sequence[http.Generated]) -> float | None:
    """Mean over requests, each weighted by its output tokens; None if no request tells an accept length."""
    told = [(a.accept_length, a.output_count) for a in answers if a.accept_length is not None and a.output_count]
    return ratio(sum(length * count for length, count in told), sum(count for _, count in told))


def tokens_per_step(answers: Sequence[http.Generated]) -> float | None:
    """All output tokens divided by all verification steps of the requests that tell both."""
    told = [(a.output_count, a.verify_steps) for a in answers if a.output_count and a.verify_steps]
    return ratio(sum(count for count, _ in told), sum(steps for _, steps in told))


def summarise(side: Side) -> dict[str, Any]:
    """Figures of one server; None where the server does not tell what a figure needs."""
    finished = side.finished()
    counts = [answer.output_count for answer in finished]
    # A sum without the answers that tell no count would pass for the throughput of all.
    told = [count for count in counts if count is not None]
    output_tokens = sum(told) if told and len(told) == len(counts) else None
    return {
        "url": side.url,
        "server": side.facts.told,
        "not_told": side.facts.notes,
        "questions": len(side.answers),
        "answered": len(finished),
        "right": side.count("right"),
        "wrong": side.count("wrong"),
        "invalid": side.count("invalid"),
        "failed": side.count("failed"),
        "accuracy": ratio(side.count("right"), len(finished)),
        "invalid_rate": ratio(side.count("invalid"), len(finished)),
        "latency_s": side.seconds,
        "request_latency_median_s": statistics.median(a.seconds for a in finished) if finished else None,
        "output_tokens": output_tokens,
        "output_tokens_per_s": None if output_tokens is None else ratio(output_tokens, side.seconds),
        "accept_length": mean_accept_length(finished),
        "accept_length_requests": sum(a.accept_length is not None for a in finished),
        "tokens_per_verify_step": tokens_per_step(finished),
        "server_accept_lengths": side.facts.accept_lengths,
    }


# -------------------------------------------------------------------------------------------------------- comparing


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Where two token sequences part, None if they are the same."""
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))


def compare_answers(one: Answer, other: Answer) -> dict[str, Any] | None:
    """One question on both servers, None if a request failed."""
    if one.generated is None or other.generated is None:
        return None
    mine, theirs = one.generated.tokens, other.generated.tokens
    lengths = (one.accept_length, other.accept_length)
    return {
        "same_answer": one.number == other.number,
        "right": ("none", "one", "both")[one.right + other.right],
        "same_text": one.generated.text == other.generated.text,
        "same_tokens": None if mine is None or theirs is None else mine == theirs,
        "first_different_token": None if mine is None or theirs is None else first_difference(mine, theirs),
        "accept_length": list(lengths),
        "accept_length_difference": None if lengths[0] is None or lengths[1] is None else lengths[1] - lengths[0],
    }


def summarise_comparison(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Totals over questions that both servers answered."""
    differences = [row["accept_length_difference"] for row in rows if row["accept_length_difference"] is not None]
    tokens = [row["same_tokens"] for row in rows if row["same_tokens"] is not None]
    return {
        "questions": len(rows),
        "same_answer": sum(row["same_answer"] for row in rows),
        "both_right": sum(row["right"] == "both" for row in rows),
        "one_right": sum(row["right"] == "one" for row in rows),
        "none_right": sum(row["right"] == "none" for row in rows),
        "same_text": sum(row["same_text"] for row in rows),
        "same_tokens": sum(tokens) if tokens else None,
        "same_tokens_of": len(tokens),
        "accept_length_difference_mean": statistics.fmean(differences) if differences else None,
        "accept_length_difference_of": len(differences),
    }


# ---------------------------------------------------------------------------------------------------------- asking


@dataclass(frozen=True)
class Settings:
    """How every question is asked."""

    route: str
    max_new_tokens: int
    temperature: float
    timeout: float


def request_of(settings: Settings, model: str | None, prompt: str) -> tuple[str, bytes]:
    """Path and body of a request."""
    stop = [NEXT_QUESTION]
    if settings.route == "openai":
        body = {
            "model": model or "default",
            "prompt": prompt,
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "stop": stop,
        }
        return "/v1/completions", json.dumps(body).encode()
    sampling = {"max_new_tokens": settings.max_new_tokens, "temperature": settings.temperature, "stop": stop}
    return "/generate", json.dumps({"text": prompt, "sampling_params": sampling}).encode()


async def ask(client: httpx.AsyncClient, side: Side, settings: Settings, prompt: str, expected: Decimal) -> Answer:
    """One question to one server; a failed request is an answer too."""
    path, body = request_of(settings, side.facts.model, prompt)
    try:
        reply, seconds = await http.post(client, side.url + path, body, settings.timeout)
        parse = http.from_openai if settings.route == "openai" else http.from_native
        generated = parse(reply, seconds)
        if generated.text is None:
            raise http.RequestFailed("the answer holds no text; is the server run with --skip-tokenizer-init?")
    except http.RequestFailed as error:
        return Answer(error=str(error))
    number = extract_number(generated.text)
    return Answer(generated, number, number == expected)


async def ask_all(
    sides: Sequence[Side],
    examples: list[Question],
    questions: Sequence[Question],
    settings: Settings,
    parallel: int,
    progress: Progress,
) -> None:
    """All questions to all servers, `parallel` questions at a time.

    Raises:
        http.Unreachable: a server cannot be connected to at the start.
    """
    task = progress.add_task("questions", total=len(questions))
    async with http.open_client(settings.timeout) as client:
        for side in sides:
            side.facts = await http.ask_server(client, side.url)
        started = time.perf_counter()

        async def one_side(side: Side, number: int, prompt: str) -> None:
            side.answers[number] = await ask(client, side, settings, prompt, questions[number].expected)
            side.seconds = time.perf_counter() - started

        async def one_question(number: int) -> None:
            prompt = build_prompt(examples, questions[number])
            async with asyncio.TaskGroup() as both:
                for side in sides:
                    both.create_task(one_side(side, number, prompt))
            progress.advance(task)

        await http.run_bounded(range(len(questions)), parallel, one_question)
        for side in sides:
            await read_accept_lengths(client, side)


async def read_accept_lengths(client: httpx.AsyncClient, side: Side) -> None:
    """Ask again after the run: the accept length that a server tells counts what it has done so far."""
    notes = side.facts.notes
    lengths: list[float] = []
    try:
        lengths = (await http.ask_server(client, side.url)).accept_lengths
    except http.Unreachable as error:
        # The answers that came before are kept; its requests that failed are counted.
        notes = [*notes, f"after the run: {error}"]
    side.facts = http.ServerFacts(side.facts.told, lengths, notes)


# ---------------------------------------------------------------------------------------------------------- results


def build_result(args: argparse.Namespace, sides: Sequence[Side], questions: Sequence[Question]) -> dict[str, Any]:
    """The JSON result."""
    records, compared = [], []
    for number, question in enumerate(questions):
        answers = {side.name: side.answers[number] for side in sides}
        record: dict[str, Any] = {
            "number": number,
            "place": question.place,
            "expected": str(question.expected),
            "answers": {name: answer.record() for name, answer in answers.items()},
        }
        if len(sides) == 2:
            record["comparison"] = compare_answers(*answers.values())
            if record["comparison"] is not None:
                compared.append(record["comparison"])
        records.append(record)
    result: dict[str, Any] = {
        "benchmark": "gsm8k",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "sides": {side.name: summarise(side) for side in sides},
    }
    if len(sides) == 2:
        result["comparison"] = summarise_comparison(compared)
    return result | {"questions": records}


def shown(value: float | None, digits: int = 3, unit: str = "") -> str:
    """A figure for the table."""
    return NOT_TOLD if value is None else f"{value:.{digits}f}{unit}"


def print_sides(console: Console, summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """The table of figures, a column per server."""
    table = Table(title="GSM8K")
    table.add_column("")
    for name, figures in summaries.items():
        table.add_column(f"{name}\n{escape(figures['url'])}", justify="right", overflow="fold")

    def row(label: str, *cells: str) -> None:
        table.add_row(label, *(escape(cell) for cell in cells))

    all_figures = list(summaries.values())
    row(
        "Model",
        *(str(f["server"].get("served_model_name") or f["server"].get("model_path") or NOT_TOLD) for f in all_figures),
    )
    row("Version", *(str(f["server"].get("version") or NOT_TOLD) for f in all_figures))
    row("Accuracy", *(f"{shown(f['accuracy'])} ({f['right']} of {f['answered']})" for f in all_figures))
    row("Invalid", *(f"{shown(f['invalid_rate'])} ({f['invalid']} of {f['answered']})" for f in all_figures))
    row("Failed requests", *(str(f["failed"]) for f in all_figures))
    row("Latency", *(shown(f["latency_s"], unit=" s") for f in all_figures))
    row("Request latency, median", *(shown(f["request_latency_median_s"], unit=" s") for f in all_figures))
    row("Output tokens/s", *(shown(f["output_tokens_per_s"], 1) for f in all_figures))
    row("Accept length", *(shown(f["accept_length"]) for f in all_figures))
    row("Tokens / verify steps", *(shown(f["tokens_per_verify_step"]) for f in all_figures))
    row(
        "Accept length since start",
        *(", ".join(shown(value) for value in f["server_accept_lengths"]) or NOT_TOLD for f in all_figures),
    )
    console.print(table)


def print_comparison(console: Console, records: Sequence[Mapping[str, Any]], totals: Mapping[str, Any]) -> None:
    """Question by question, then totals."""
    table = Table(title="Question by question")
    for heading in ("#", "expected", BASE, COMPARED, "right", "tokens", "accept lengths"):
        table.add_column(heading, justify="right", overflow="fold")
    for record in records:
        answers, row = record["answers"], record["comparison"]
        numbers = [answer.get("number") or answer["state"] for answer in answers.values()]
        cells = [NOT_TOLD] * 3
        if row is not None:
            tokens = {True: "same", False: f"differ at {row['first_different_token']}", None: NOT_TOLD}
            lengths = " / ".join(shown(length, 2) for length in row["accept_length"])
            cells = [row["right"], tokens[row["same_tokens"]], lengths]
        table.add_row(str(record["number"]), *(escape(text) for text in (record["expected"], *numbers, *cells)))
    console.print(table)
    same_tokens = (
        NOT_TOLD if totals["same_tokens"] is None else f"{totals['same_tokens']} of {totals['same_tokens_of']}"
    )
    console.print(
        f"Both answered {totals['questions']} questions. Same answer: {totals['same_answer']}. "
        f"Right: both {totals['both_right']}, one {totals['one_right']}, none {totals['none_right']}. "
        f"Same tokens: {same_tokens}. Same text: {totals['same_text']}. "
        f"Accept length, {COMPARED} minus {BASE}: mean {shown(totals['accept_length_difference_mean'])} "
        f"over {totals['accept_length_difference_of']} questions.",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )


def print_failures(console: Console, sides: Sequence[Side]) -> None:
    """Failed requests with the reason, the first of them if there are many."""
    for side in sides:
        failed = [(number, answer.error) for number, answer in sorted(side.answers.items()) if answer.error]
        for number, error in failed[:FAILURES_SHOWN]:
            console.print(f"failed: {side.name}, question {number}: {error}", soft_wrap=True, markup=False)
        if len(failed) > FAILURES_SHOWN:
            console.print(f"failed: {side.name}, {len(failed) - FAILURES_SHOWN} more; --json lists all", markup=False)


# ------------------------------------------------------------------------------------------------------ command line


def temperature(text: str) -> float:
    """The option's value."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return value


def build_parser() -> argparse.ArgumentParser:
    """Options."""
    parser = argparse.ArgumentParser(
        prog="bench_sglang.py",
        description="GSM8K against a running SGLang server or PD router. Nothing is downloaded.",
        epilog="Exit status: 0 all requests answered, 1 a request failed, 2 usage.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="of the server or router (default: %(default)s)")
    parser.add_argument("--port", type=http.port_number, default=30000, help="(default: %(default)s)")
    parser.add_argument("--compare-host", help="host of a second server (default: --host)")
    parser.add_argument("--compare-port", type=http.port_number, help="ask a second server the same questions")
    parser.add_argument("--route", choices=("native", "openai"), default="native", help="(default: %(default)s)")
    parser.add_argument("--data-path", type=Path, help="JSONL or parquet file, or a folder with test (and train)")
    parser.add_argument("--num-questions", type=http.positive, default=200, help="at most (default: %(default)s)")
    parser.add_argument("--num-shots", type=http.not_negative, default=5, help="examples (default: %(default)s)")
    parser.add_argument("--parallel", type=http.positive, default=64, help="at a time (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=http.positive, default=512, help="(default: %(default)s)")
    parser.add_argument("--temperature", type=temperature, default=0.0, help="(default: %(default)s)")
    parser.add_argument("--timeout", type=http.positive_seconds, default=600.0, help="s/request (default: %(default)s)")
    parser.add_argument("--json", type=http.result_file, metavar="FILE", help="write all figures and answers there")
    return parser


def run(args: argparse.Namespace, examples: list[Question], questions: Sequence[Question]) -> int:
    """Ask, print, write; the exit status."""
    out, err = Console(), Console(stderr=True)
    sides = [Side(BASE, http.address(args.host, args.port))]
    if args.compare_port is not None:
        sides.append(Side(COMPARED, http.address(args.compare_host or args.host, args.compare_port)))
    settings = Settings(args.route, args.max_new_tokens, args.temperature, args.timeout)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=err) as progress:
            asyncio.run(ask_all(sides, examples, questions, settings, args.parallel, progress))
    except http.Unreachable as error:
        print(error, file=sys.stderr)
        return http.FAILED
    result = build_result(args, sides, questions)
    if len(sides) == 2:
        print_comparison(out, result["questions"], result["comparison"])
    print_sides(out, result["sides"])
    print_failures(err, sides)
    if args.json is not None:
        try:
            http.write_json(args.json, result)
        except OSError as error:
            print(f"cannot write {args.json}: {error.strerror}", file=sys.stderr)
            return http.FAILED
    return http.FAILED if any(side.count("failed") for side in sides) else http.OK


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; wrong usage and unusable data exit with 2."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.compare_host is not None and args.compare_port is None:
        parser.error("--compare-host needs --compare-port")
    if args.data_path is None:
        parser.error(f"--data-path is missing: {WHERE_TO_GET}")
    try:
        examples, questions = choose(args.data_path, args.num_shots, args.num_questions)
    except DataError as error:
        parser.error(str(error))
    if len(questions) < args.num_questions:
        print(f"{args.data_path} has {len(questions)} questions to ask, all are asked", file=sys.stderr)
    try:
        return run(args, examples, questions)
    except KeyboardInterrupt:
        print("interrupted; no result was written", file=sys.stderr)
        return http.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
