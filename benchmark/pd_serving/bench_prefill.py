"""Time to the first token and input tokens/s of prefill at a fixed input length and concurrency.

One server or router:       --base cp8=http://host:30000
Two, in alternating rounds: --base tp8=http://host:30000 --candidate cp8=http://host:31000
A PD pair without router:   --prefill-url http://p:30000 --decode-url http://d:30000 --bootstrap-port 8998
Two pairs:                  --base tp8=http://p:30000,http://d:30000,8998 --candidate cp8=...

Exit status: 0 all requests were answered, 1 a request failed, 2 usage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import bench_http as http

NOT_TOLD = "n/a"
FAILURES_SHOWN = 20
BOOTSTRAP_PORT = 8998
"""Default of SGLang's `--disaggregation-bootstrap-port`."""
HIGHEST_ROOM = 2**62
OTHER_HALF_WITHIN = 1.0
FIGURES = {
    "input_tokens_per_s": ("Input tokens/s", 1.0, 0),
    "ttft_p50_s": ("TTFT p50, ms", 1e3, 1),
    "ttft_p90_s": ("TTFT p90, ms", 1e3, 1),
    "ttft_p99_s": ("TTFT p99, ms", 1e3, 1),
    "requests_per_s": ("Requests/s", 1.0, 2),
}
"""Figure of a round -> its label, factor and digits in the table."""


@dataclass(frozen=True)
class Pair:
    """Where decode fetches KV of a prefill server from, for clients that do without a router."""

    decode_url: str
    bootstrap_host: str
    bootstrap_port: int


@dataclass(frozen=True)
class Side:
    """What is measured: a server or router, or with `pair` a prefill server and its decode server."""

    name: str
    url: str
    pair: Pair | None = None


@dataclass(frozen=True)
class Load:
    """One round's requests."""

    input_len: int
    output_len: int
    num_prompts: int
    concurrency: int
    min_id: int
    max_id: int
    timeout: float


@dataclass
class Round:
    """One round on one side. Times are in seconds."""

    number: int
    ttft: list[float] = field(default_factory=list)
    seconds: float = 0.0
    input_tokens: int = 0
    cached_tokens: int | None = None
    failures: list[str] = field(default_factory=list)


# -------------------------------------------------------------------------------------------------------- requests


def make_prompts(seed: int, part: str, count: int, load: Load) -> list[list[int]]:
    """Random token ids, the same for every side and others in every round: a repeated prompt would be cached."""
    rng = random.Random(f"{seed}/{part}")
    ids = range(load.min_id, load.max_id)
    return [rng.choices(ids, k=load.input_len) for _ in range(count)]


def encode(prompt: Sequence[int], load: Load, side: Side, room: int) -> dict[str, bytes]:
    """The bodies to send, by URL. Made before the clock starts: encoding thousands of ids takes time."""
    sampling = {"temperature": 0, "max_new_tokens": load.output_len, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": list(prompt), "sampling_params": sampling}
    if side.pair is None:
        return {side.url: json.dumps(body | {"stream": True}).encode()}
    body |= {
        "bootstrap_host": side.pair.bootstrap_host,
        "bootstrap_port": side.pair.bootstrap_port,
        "bootstrap_room": room,
    }
    return {
        side.url: json.dumps(body).encode(),
        side.pair.decode_url: json.dumps(body | {"stream": True}).encode(),
    }


async def send(client: httpx.AsyncClient, side: Side, bodies: Mapping[str, bytes], load: Load) -> http.Generated:
    """One request; with a pair both halves at once, the first that fails ends the other.

    Raises:
        http.RequestFailed: no complete answer of the length that was asked for.
    """
    if side.pair is None:
        generated = await http.post_streamed(client, f"{side.url}/generate", bodies[side.url], load.timeout)
    else:
        decode_url = side.pair.decode_url
        decode = asyncio.create_task(
            http.post_streamed(client, f"{decode_url}/generate", bodies[decode_url], load.timeout)
        )
        await both_halves([asyncio.create_task(prefill(client, side.url, bodies[side.url], load.timeout)), decode])
        generated = decode.result()
    if generated.output_count not in (None, load.output_len):
        raise http.RequestFailed(f"{side.url}: {generated.output_count} output tokens instead of {load.output_len}")
    return generated


async def both_halves(halves: Sequence[asyncio.Task[Any]]) -> None:
    """Wait for the halves of a request; when one fails, the other is ended after a moment.

    Raises:
        http.RequestFailed: with the errors of all halves that failed: decode often says only that prefill did.
    """
    try:
        _, pending = await asyncio.wait(halves, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=OTHER_HALF_WITHIN)
    finally:
        for half in halves:
            half.cancel()
        results = await asyncio.gather(*halves, return_exceptions=True)
    errors = [result for result in results if isinstance(result, Exception)]
    for error in errors:
        if not isinstance(error, http.RequestFailed):
            raise error
    if errors:
        raise http.RequestFailed("; ".join(str(error) for error in errors))


async def prefill(client: httpx.AsyncClient, url: str, body: bytes, timeout: float) -> None:
    """The prefill half of a request; its answer holds nothing that decode's does not."""
    reply, _ = await http.post(client, f"{url}/generate", body, timeout)
    if problem := http.error_of(reply):
        raise http.RequestFailed(f"{url}: {problem}")


async def run_round(
    client: httpx.AsyncClient,
    side: Side,
    number: int,
    prompts: Sequence[Sequence[int]],
    load: Load,
    rooms: random.Random,
    progress: Progress,
) -> Round:
    """All prompts once."""
    done = Round(number)
    task = progress.add_task(f"{side.name}, round {number}" if number else f"{side.name}, warm-up", total=len(prompts))
    requests = [encode(prompt, load, side, rooms.randrange(1, HIGHEST_ROOM)) for prompt in prompts]

    async def one(request: tuple[int, Mapping[str, bytes]]) -> None:
        place, bodies = request
        try:
            answer = await send(client, side, bodies, load)
        except http.RequestFailed as error:
            done.failures.append(f"request {place}: {error}")
        else:
            if answer.first_token_s is not None:
                done.ttft.append(answer.first_token_s)
            done.input_tokens += load.input_len
            if answer.cached_count is not None:
                done.cached_tokens = (done.cached_tokens or 0) + answer.cached_count
        progress.advance(task)

    started = time.perf_counter()
    await http.run_bounded(enumerate(requests), load.concurrency, one)
    done.seconds = time.perf_counter() - started
    return done


def order(sides: Sequence[Side], number: int) -> list[Side]:
    """Who goes first changes from round to round, so that a drift of the machine hits all alike."""
    return list(sides) if number % 2 else list(reversed(sides))


async def measure(
    sides: Sequence[Side], load: Load, rounds: int, warmup: int, seed: int, progress: Progress
) -> tuple[dict[str, list[Round]], dict[str, dict[str, http.ServerFacts]]]:
    """Warm-up, then all rounds; the rounds by side (round 0 is the warm-up) and what the servers say.

    Raises:
        http.Unreachable: a server cannot be connected to at the start.
    """
    # Rooms of two runs must not meet on the same servers: they do not come from the seed.
    rooms = random.Random()
    found: dict[str, list[Round]] = {side.name: [] for side in sides}
    facts: dict[str, dict[str, http.ServerFacts]] = {}
    async with http.open_client(load.timeout) as client:
        for side in sides:
            urls = [side.url, *([side.pair.decode_url] if side.pair else [])]
            facts[side.name] = {url: await http.ask_server(client, url) for url in urls}
        for number in range(0 if warmup else 1, rounds + 1):
            prompts = make_prompts(seed, f"round {number}", load.num_prompts if number else warmup, load)
            for side in order(sides, number):
                found[side.name].append(await run_round(client, side, number, prompts, load, rooms, progress))
    return found, facts


# --------------------------------------------------------------------------------------------------------- figures


def percentile(values: Sequence[float], share: float) -> float | None:
    """Percentile with linear interpolation between neighbours, None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share / 100 * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def figures_of(done: Round) -> dict[str, Any]:
    """Figures of one round over the requests that were answered."""
    answered = len(done.ttft)
    measured = answered > 0 and done.seconds > 0
    return {
        "round": done.number,
        "answered": answered,
        "failed": len(done.failures),
        "seconds": done.seconds,
        "input_tokens_per_s": done.input_tokens / done.seconds if measured else None,
        "requests_per_s": answered / done.seconds if measured else None,
        "ttft_p50_s": percentile(done.ttft, 50),
        "ttft_p90_s": percentile(done.ttft, 90),
        "ttft_p99_s": percentile(done.ttft, 99),
        "cached_tokens": done.cached_tokens,
        "ttft_s": done.ttft,
        "failures": done.failures,
    }


def medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Median over rounds of every figure."""
    result: dict[str, float | None] = {}
    for name in FIGURES:
        values = [figures[name] for figures in rounds if figures[name] is not None]
        result[name] = statistics.median(values) if values else None
    return result


def ratios(base: Mapping[str, Any], candidate: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Candidate / base of the medians, and of each round that both sides have."""
    result = {}
    for name in FIGURES:
        pairs = zip(base["rounds"], candidate["rounds"], strict=True)
        each = [two[name] / one[name] for one, two in pairs if one[name] and two[name] is not None]
        one, two = base["median"][name], candidate["median"][name]
        result[name] = {"of_medians": two / one if one and two is not None else None, "by_round": each}
    return result


def build_result(
    args: argparse.Namespace,
    sides: Sequence[Side],
    found: Mapping[str, Sequence[Round]],
    facts: Mapping[str, Mapping[str, http.ServerFacts]],
) -> dict[str, Any]:
    """The JSON result."""
    described: dict[str, dict[str, Any]] = {}
    for side in sides:
        rounds = [figures_of(done) for done in found[side.name]]
        measured = [figures for figures in rounds if figures["round"]]
        described[side.name] = {
            "url": side.url,
            "pair": asdict(side.pair) if side.pair else None,
            "servers": {url: {"told": told.told, "not_told": told.notes} for url, told in facts[side.name].items()},
            "warmup": next((figures for figures in rounds if not figures["round"]), None),
            "rounds": measured,
            "median": medians(measured),
        }
    options = {
        name: str(value) if isinstance(value, Path) else asdict(value) if isinstance(value, Side) else value
        for name, value in vars(args).items()
    }
    result: dict[str, Any] = {
        "benchmark": "prefill",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": options,
        "sides": described,
    }
    if len(sides) == 2:
        result["ratio"] = ratios(described[sides[0].name], described[sides[1].name])
    return result


# --------------------------------------------------------------------------------------------------------- printing


def shown(value: float | None, factor: float, digits: int) -> str:
    """A figure for the table."""
    return NOT_TOLD if value is None else f"{value * factor:,.{digits}f}"


def shown_ratio(ratio: Mapping[str, Any]) -> str:
    """Ratio of the medians and the range over rounds."""
    if ratio["of_medians"] is None:
        return NOT_TOLD
    each = ratio["by_round"]
    spread = f" ({min(each):.3f} to {max(each):.3f})" if each else ""
    return f"{ratio['of_medians']:.3f}{spread}"


def print_result(console: Console, result: Mapping[str, Any], load: Load, rounds: int) -> None:
    """The table: medians of rounds and, for two sides, their ratio."""
    title = (
        f"{load.input_len} tokens in, {load.output_len} out, {load.concurrency} at a time, median of {rounds} rounds"
    )
    table = Table(title=title)
    table.add_column("")
    sides = result["sides"]
    for name in sides:
        table.add_column(escape(name), justify="right")
    if "ratio" in result:
        table.add_column("ratio (by round)", justify="right")
    for figure, (label, factor, digits) in FIGURES.items():
        cells = [shown(side["median"][figure], factor, digits) for side in sides.values()]
        if "ratio" in result:
            cells.append(shown_ratio(result["ratio"][figure]))
        table.add_row(label, *cells)
    table.add_row("Failed requests", *(str(count_failures(side)) for side in sides.values()))
    console.print(table)
    for name, side in sides.items():
        cached = sum(figures["cached_tokens"] or 0 for figures in side["rounds"])
        if cached:
            text = f"{name}: {cached} input tokens came from the prefix cache; its figures are too good"
            console.print(text, soft_wrap=True, markup=False)


def count_failures(side: Mapping[str, Any]) -> int:
    """Failed requests of one side, warm-up included."""
    return sum(figures["failed"] for figures in (*side["rounds"], side["warmup"]) if figures is not None)


def print_failures(console: Console, sides: Mapping[str, Mapping[str, Any]]) -> None:
    """Failed requests with the reason, the first of them if there are many."""
    for name, side in sides.items():
        failures = [
            f"{name}, {'round ' + str(figures['round']) if figures['round'] else 'warm-up'}, {text}"
            for figures in (side["warmup"], *side["rounds"])
            if figures is not None
            for text in figures["failures"]
        ]
        for text in failures[:FAILURES_SHOWN]:
            console.print(f"failed: {text}", soft_wrap=True, markup=False)
        if len(failures) > FAILURES_SHOWN:
            rest = len(failures) - FAILURES_SHOWN
            console.print(f"failed: {name}, {rest} more; --json lists all", soft_wrap=True, markup=False)


# ------------------------------------------------------------------------------------------------------ command line


def make_pair(prefill_url: str, decode_url: str, host: str | None, port: int) -> Pair:
    """A pair; decode finds the bootstrap server on the prefill server's host unless another is given."""
    return Pair(decode_url, host or urlsplit(prefill_url).hostname or "", port)


def named_side(text: str) -> Side:
    """`NAME=URL` or `NAME=PREFILL_URL,DECODE_URL[,BOOTSTRAP_PORT]`."""
    name, equals, rest = text.partition("=")
    urls = rest.split(",")
    if not (name and equals) or len(urls) > 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL or NAME=PREFILL_URL,DECODE_URL[,BOOTSTRAP_PORT]")
    url = http.server_url(urls[0])
    if len(urls) == 1:
        return Side(name, url)
    if urls[0].rstrip("/") == urls[1].rstrip("/"):
        raise argparse.ArgumentTypeError(f"{text!r}: prefill and decode are two servers")
    port = http.port_number(urls[2]) if len(urls) == 3 else BOOTSTRAP_PORT
    return Side(name, url, make_pair(url, http.server_url(urls[1]), None, port))


def build_parser() -> argparse.ArgumentParser:
    """Options."""
    parser = argparse.ArgumentParser(
        prog="bench_prefill.py",
        description="Time to the first token and input tokens/s at a fixed input length and concurrency.",
        epilog="Exit status: 0 all requests answered, 1 a request failed, 2 usage.",
    )
    where = "NAME=URL, or NAME=PREFILL_URL,DECODE_URL[,BOOTSTRAP_PORT] for a PD pair without router"
    parser.add_argument("--base", type=named_side, metavar="NAME=URL", help=where)
    parser.add_argument("--candidate", type=named_side, metavar="NAME=URL", help="the same, compared with --base")
    parser.add_argument("--prefill-url", type=http.server_url, help="a pair: with --base the candidate, else alone")
    parser.add_argument("--decode-url", type=http.server_url)
    parser.add_argument("--bootstrap-port", type=http.port_number, help=f"of --prefill-url (default: {BOOTSTRAP_PORT})")
    parser.add_argument("--bootstrap-host", help="as decode sees it (default: the host of --prefill-url)")
    parser.add_argument("--input-len", type=http.positive, default=8192, help="(default: %(default)s)")
    parser.add_argument("--output-len", type=http.positive, default=1, help="(default: %(default)s)")
    parser.add_argument("--num-prompts", type=http.positive, default=128, help="a round (default: %(default)s)")
    parser.add_argument("--concurrency", type=http.positive, default=8, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=http.positive, default=3, help="(default: %(default)s)")
    parser.add_argument("--warmup", type=http.not_negative, default=8, help="requests a side (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument("--min-id", type=http.not_negative, default=1000, help="lowest id (default: %(default)s)")
    parser.add_argument("--max-id", type=http.positive, default=100_000, help="ids are below (default: %(default)s)")
    parser.add_argument("--timeout", type=http.positive_seconds, default=600.0, help="s/request (default: %(default)s)")
    parser.add_argument("--json", type=http.result_file, metavar="FILE", help="write all figures there")
    return parser


def choose_sides(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Side]:
    """One or two sides; usage errors end the program."""
    if (args.prefill_url is None) != (args.decode_url is None):
        parser.error("--prefill-url and --decode-url belong together")
    if args.prefill_url is None and (args.bootstrap_port is not None or args.bootstrap_host is not None):
        parser.error("--bootstrap-port and --bootstrap-host need --prefill-url and --decode-url")
    if args.prefill_url is not None and args.prefill_url == args.decode_url:
        parser.error("--prefill-url and --decode-url are the same server")
    sides = [side for side in (args.base, args.candidate) if side is not None]
    if args.candidate is not None and args.base is None:
        parser.error("--candidate needs --base; to measure one server, give it as --base")
    if args.prefill_url is not None:
        if args.candidate is not None:
            parser.error("--prefill-url is the candidate; give it or --candidate")
        port = args.bootstrap_port or BOOTSTRAP_PORT
        sides.append(
            Side("pd", args.prefill_url, make_pair(args.prefill_url, args.decode_url, args.bootstrap_host, port))
        )
    if not sides:
        parser.error("nothing to measure: give --base NAME=URL, or --prefill-url and --decode-url")
    if len({side.name for side in sides}) < len(sides):
        parser.error(f"both sides are called {sides[0].name}")
    return sides


def run(args: argparse.Namespace, sides: Sequence[Side]) -> int:
    """Measure, print, write; the exit status."""
    out, err = Console(), Console(stderr=True)
    load = Load(
        args.input_len, args.output_len, args.num_prompts, args.concurrency, args.min_id, args.max_id, args.timeout
    )
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=err) as progress:
            found, facts = asyncio.run(measure(sides, load, args.rounds, args.warmup, args.seed, progress))
    except http.Unreachable as error:
        print(error, file=sys.stderr)
        return http.FAILED
    result = build_result(args, sides, found, facts)
    print_result(out, result, load, args.rounds)
    print_failures(err, result["sides"])
    if args.json is not None:
        try:
            http.write_json(args.json, result)
        except OSError as error:
            print(f"cannot write {args.json}: {error.strerror}", file=sys.stderr)
            return http.FAILED
    return http.FAILED if any(count_failures(side) for side in result["sides"].values()) else http.OK


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; wrong usage exits with 2."""
    parser = build_parser()
    args = parser.parse_args(argv)
    sides = choose_sides(parser, args)
    if args.max_id <= args.min_id:
        parser.error(f"--max-id {args.max_id} must be greater than --min-id {args.min_id}")
    try:
        return run(args, sides)
    except KeyboardInterrupt:
        print("interrupted; no result was written", file=sys.stderr)
        return http.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
