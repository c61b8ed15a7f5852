"""Requests, rounds and figures of `prefill_cost`. Nothing here starts a server."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import bench_http as http
import httpx

NO_TRANSFER_HOST = "2.2.2.2"
"""SGLang's own mark of a PD request whose KV goes nowhere: its health check and its warm-up use it."""
FIRST_TOKEN_ID = 8
FEWEST_ROUNDS = 3
RESAMPLES = 2000
GOAL_PERCENT = 1.0
"""What the project wants: DSpark makes prefill at most this much slower."""
SERIES = ("ttft", "throughput")


@dataclass(frozen=True)
class Load:
    """Requests of one side in one round: some one after the other, then some at once."""

    input_len: int
    single: int
    together: int
    concurrency: int
    vocab: int
    timeout: float


@dataclass
class Round:
    """One round of one side. Seconds; `first` are the first output tokens in the order of the prompts."""

    number: int
    place: int
    ttft_s: list[float] = field(default_factory=list)
    together_s: float | None = None
    answered_together: int = 0
    cached_tokens: int = 0
    first: dict[int, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


# --------------------------------------------------------------------------------------------------------- requests


def prompts_of(seed: int, number: int, load: Load) -> list[list[int]]:
    """The prompts of a round: the same for every side, others in every round."""
    rng = random.Random(f"{seed}/{number}")
    ids = range(FIRST_TOKEN_ID, load.vocab)
    return [rng.choices(ids, k=load.input_len) for _ in range(load.single + load.together)]


def body_of(prompt: Sequence[int], room: int) -> bytes:
    """A request to a prefill server alone."""
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    where = {"bootstrap_host": NO_TRANSFER_HOST, "bootstrap_room": room}
    return json.dumps({"input_ids": list(prompt), "sampling_params": sampling, **where}).encode()


def order_of(sides: Sequence[str], number: int) -> list[str]:
    """Sides take turns: a round there, one back, then the next side begins. So none has the better place."""
    turn = (number - 1) // 2 % len(sides)
    turned = [*sides[turn:], *sides[:turn]]
    return turned if number % 2 else turned[::-1]


async def run_round(client: httpx.AsyncClient, url: str, done: Round, bodies: Sequence[bytes], load: Load) -> None:
    """Send a round's requests to one side; what came back is in `done`."""

    async def one(item: tuple[int, bytes]) -> float | None:
        number, body = item
        seconds: float
        try:
            reply, seconds = await http.post(client, f"{url}/generate", body, load.timeout)
            answer = http.from_native(reply, seconds)
            if answer.prompt_count not in (None, load.input_len):
                raise http.RequestFailed(f"{answer.prompt_count} prompt tokens instead of {load.input_len}")
        except http.RequestFailed as error:
            done.failures.append(f"request {number}: {error}")
            return None
        done.cached_tokens += answer.cached_count or 0
        if answer.tokens:
            done.first[number] = answer.tokens[0]
        return seconds

    requests = list(enumerate(bodies))
    for request in requests[: load.single]:
        seconds = await one(request)
        if seconds is not None:
            done.ttft_s.append(seconds)

    async def counted(item: tuple[int, bytes]) -> None:
        seconds = await one(item)  # before the count is read: others count meanwhile
        done.answered_together += seconds is not None

    started = time.perf_counter()
    await http.run_bounded(requests[load.single :], load.concurrency, counted)
    done.together_s = time.perf_counter() - started


async def measure(
    urls: Mapping[str, str],
    load: Load,
    *,
    rounds: int,
    warmup: int,
    seed: int,
    found: dict[str, list[Round]],
    usable: Callable[[], Sequence[str]],
    time_left: Callable[[], float],
    say: Callable[[str], None],
) -> None:
    """Warm up every side, then all rounds, or as many as the time allows.

    Args:
        urls: address of each side.
        load: what a round sends.
        rounds: how many; `warmup` more before them are not counted (numbers below 1).
        seed: of the prompts.
        found: rounds by side, filled as they end.
        usable: sides that can still be measured; asked before each turn.
        time_left: seconds for what is not begun yet.
        say: takes a line of progress.
    """
    rooms = itertools.count(1)
    sides, longest = list(found), 0.0
    async with http.open_client(load.timeout) as client:
        for number in range(1 - warmup, rounds + 1):
            if number > 1 and time_left() < 1.2 * longest:
                say(f"the time is over after {number - 1} of {rounds} rounds")
                return
            prompts = prompts_of(seed, number, load)
            began = time.monotonic()
            for place, side in enumerate(order_of(sides, max(number, 1))):
                if len(usable()) < 2:
                    say("too few servers are left to compare any")
                    return
                if side not in usable():
                    continue
                if time_left() <= 0:
                    say(f"the time is over in round {number}")
                    return
                done = Round(number, place)
                # Encoded before the clock starts.
                bodies = [body_of(prompt, next(rooms)) for prompt in prompts]
                found[side].append(done)
                try:
                    async with asyncio.timeout(time_left()):
                        await run_round(client, urls[side], done, bodies, load)
                except TimeoutError:
                    done.failures.append("the time was over before the round")
            if number > 0:
                longest = max(longest, time.monotonic() - began)
            say(line_of(number, rounds, found))


def line_of(number: int, rounds: int, found: Mapping[str, Sequence[Round]]) -> str:
    """A round for people."""
    parts = []
    for side, done in found.items():
        last = done[-1] if done and done[-1].number == number else None
        if last is not None:
            parts.append(f"{side} {1e3 * statistics.median(last.ttft_s):.1f} ms" if last.ttft_s else f"{side} failed")
    return f"{f'round {number} of {rounds}' if number > 0 else 'warm-up'}: {', '.join(parts)}"


# ---------------------------------------------------------------------------------------------------------- figures


def figures_of(done: Round, load: Load) -> dict[str, Any]:
    """A round for the result file. A figure of which a request failed is None: it would be of another load."""
    whole = not done.failures
    rate = None
    if whole and done.together_s:
        rate = done.answered_together * load.input_len / done.together_s
    return {
        "round": done.number,
        "place": done.place,
        "ttft_median_s": statistics.median(done.ttft_s) if whole and done.ttft_s else None,
        "input_tokens_per_s": rate,
        "together_s": done.together_s,
        "cached_tokens": done.cached_tokens,
        "ttft_s": done.ttft_s,
        "failures": done.failures,
    }


def interval_of(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % interval of the median, by resampling the rounds."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


def verdict_of(low: float, high: float) -> str:
    """Whether the goal is met, as far as the rounds tell."""
    if high <= GOAL_PERCENT:
        return "met"
    return "missed" if low > GOAL_PERCENT else "not settled"


def cost_of(base: Sequence[Mapping[str, Any]], side: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How much slower a side is than the one without DSpark, in percent, round by round; None with too few rounds."""
    of_base = {figures["round"]: figures for figures in base}
    pairs = [(of_base[figures["round"]], figures) for figures in side if figures["round"] in of_base]
    found: dict[str, Any] = {}
    for series in SERIES:
        key = "ttft_median_s" if series == "ttft" else "input_tokens_per_s"
        both = [(one[key], two[key]) for one, two in pairs if one[key] and two[key]]
        slower = [(two / one if series == "ttft" else one / two) for one, two in both]
        percent = [100 * (ratio - 1) for ratio in slower]
        if len(percent) < FEWEST_ROUNDS:
            found[series] = None
            continue
        low, high = interval_of(percent)
        found[series] = {
            "percent": statistics.median(percent),
            "low": low,
            "high": high,
            "rounds": len(percent),
            "by_round": percent,
            "verdict": verdict_of(low, high),
        }
        if series == "ttft":
            found[series]["ms"] = statistics.median(1e3 * (two - one) for one, two in both)
    return found


def agreement_of(base: Sequence[Round], side: Sequence[Round]) -> float | None:
    """Share of prompts whose first output token is that of the side without DSpark; None if no token was told."""
    of_base = {(done.number, prompt): token for done in base for prompt, token in done.first.items()}
    pairs = [
        of_base[done.number, prompt] == token
        for done in side
        for prompt, token in done.first.items()
        if (done.number, prompt) in of_base
    ]
    return sum(pairs) / len(pairs) if pairs else None


def summary_of(found: Mapping[str, Sequence[Round]], load: Load, base: str) -> dict[str, Any]:
    """Medians of each side, and its cost over `base`."""
    figures = {side: [figures_of(done, load) for done in rounds if done.number > 0] for side, rounds in found.items()}
    summary: dict[str, Any] = {}
    for side, rounds in figures.items():
        ttft = [each["ttft_median_s"] for each in rounds if each["ttft_median_s"] is not None]
        rates = [each["input_tokens_per_s"] for each in rounds if each["input_tokens_per_s"] is not None]
        summary[side] = {
            "rounds": len(rounds),
            "ttft_ms": 1e3 * statistics.median(ttft) if ttft else None,
            "input_tokens_per_s": statistics.median(rates) if rates else None,
            "first_tokens_as_off": None if side == base else agreement_of(found[base], found[side]),
            "cost": None if side == base else cost_of(figures[base], rounds),
        }
    return summary
