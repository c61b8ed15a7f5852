"""What the benchmarks share: requests to SGLang servers and routers, bounded concurrency, options, JSON results."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

Item = TypeVar("Item")

JSON_HEADERS = {"Content-Type": "application/json"}
CONNECT_TIMEOUT = 10.0
INFO_TIMEOUT = 10.0
KEEP_IDLE = 2.0
"""Seconds. Below the 5 s after which SGLang closes an idle connection: reusing a closed one would fail a request."""
ERROR_LENGTH = 500
TOLD = (
    "model_path",
    "served_model_name",
    "version",
    "speculative_algorithm",
    "disaggregation_mode",
    "tp_size",
    "dp_size",
)
"""Keys of `/server_info` that a result keeps."""

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class RequestFailed(Exception):
    """One request got no usable answer; the text says why."""


class Unreachable(Exception):
    """Nothing listens at a server's address."""


# --------------------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True)
class Generated:
    """One answer. A figure that the server did not tell is None.

    Attributes:
        tokens: output token ids.
        accept_length: output tokens per verification step of this request.
        seconds: from sending the request to the end of the answer.
        first_token_s: to the first output token, of streamed answers.
    """

    text: str | None = None
    tokens: list[int] | None = None
    output_count: int | None = None
    prompt_count: int | None = None
    cached_count: int | None = None
    accept_length: float | None = None
    verify_steps: int | None = None
    seconds: float = 0.0
    first_token_s: float | None = None


def error_of(answer: Mapping[str, Any]) -> str:
    """The error that an answer with status 200 can still hold; empty without one."""
    error = answer.get("error")
    if isinstance(error, Mapping):
        error = error.get("message") or json.dumps(error)
    reason = as_mapping(answer.get("meta_info")).get("finish_reason")
    if not error and isinstance(reason, Mapping) and reason.get("type") == "abort":
        error = reason.get("message") or "the server aborted the request"
    return shorten(str(error)) if error else ""


def from_native(answer: Mapping[str, Any], seconds: float, first_token_s: float | None = None) -> Generated:
    """A final `/generate` answer.

    Raises:
        RequestFailed: it holds an error, or neither text nor token ids.
    """
    problem = error_of(answer)
    text, tokens = answer.get("text"), answer.get("output_ids")
    if not problem and not isinstance(text, str) and not isinstance(tokens, list):
        problem = f"the answer holds neither text nor output_ids: {shorten(json.dumps(answer))}"
    if problem:
        raise RequestFailed(problem)
    meta = as_mapping(answer.get("meta_info"))
    count, steps = whole_number(meta.get("completion_tokens")), whole_number(meta.get("spec_verify_ct"))
    accept = real_number(meta.get("spec_accept_length"))
    if accept is None and count and steps:
        accept = count / steps
    return Generated(
        text=text if isinstance(text, str) else None,
        tokens=tokens if isinstance(tokens, list) else None,
        output_count=count,
        prompt_count=whole_number(meta.get("prompt_tokens")),
        cached_count=whole_number(meta.get("cached_tokens")),
        accept_length=accept,
        verify_steps=steps,
        seconds=seconds,
        first_token_s=first_token_s,
    )


def from_openai(answer: Mapping[str, Any], seconds: float) -> Generated:
    """A `/v1/completions` answer; it tells no accept length.

    Raises:
        RequestFailed: it holds an error or no text.
    """
    problem = error_of(answer)
    choices = answer.get("choices")
    choice = as_mapping(choices[0]) if isinstance(choices, list) and choices else {}
    text = choice.get("text")
    if not problem and choice.get("finish_reason") == "abort":
        problem = "the server aborted the request"
    if problem or not isinstance(text, str):
        raise RequestFailed(problem or f"the answer holds no text: {shorten(json.dumps(answer))}")
    usage = as_mapping(answer.get("usage"))
    return Generated(
        text=text,
        output_count=whole_number(usage.get("completion_tokens")),
        prompt_count=whole_number(usage.get("prompt_tokens")),
        seconds=seconds,
    )


# -------------------------------------------------------------------------------------------------------- requests


def open_client(timeout: float) -> httpx.AsyncClient:
    """A client that neither queues requests itself nor goes through a proxy of the environment: both spoil times."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT)),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_IDLE),
        trust_env=False,
    )


@asynccontextmanager
async def failures_named(where: str, timeout: float) -> AsyncIterator[None]:
    """Turn every way in which a request can break into RequestFailed, and bound its whole time.

    The client's own time-out bounds each read only: a server that sends a byte now and then would never time out.
    """
    try:
        async with asyncio.timeout(timeout):
            yield
    except (TimeoutError, httpx.TimeoutException):
        raise RequestFailed(f"{where}: no complete answer within {timeout:g} s") from None
    except httpx.HTTPError as error:
        raise RequestFailed(f"{where}: {type(error).__name__}: {error or 'no details'}") from error
    except RequestFailed as error:
        raise RequestFailed(f"{where}: {error}") from error


def decode_object(content: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        RequestFailed: it is something else.
    """
    try:
        parsed = json.loads(content)
    except ValueError:
        raise RequestFailed(f"not JSON: {shorten(content.decode(errors='replace'))}") from None
    if not isinstance(parsed, dict):
        raise RequestFailed(f"not a JSON object: {shorten(json.dumps(parsed))}")
    return parsed


def require_success(status: int, content: bytes) -> None:
    """Raise unless the status is 200.

    Raises:
        RequestFailed: with the status and the beginning of the body.
    """
    if status != httpx.codes.OK:
        raise RequestFailed(f"HTTP {status}: {shorten(content.decode(errors='replace')) or 'empty body'}")


async def post(client: httpx.AsyncClient, url: str, body: bytes, timeout: float) -> tuple[dict[str, Any], float]:
    """POST encoded JSON; the JSON object that comes back and the seconds it took.

    Raises:
        RequestFailed: no answer, another status than 200, or no JSON object.
    """
    async with failures_named(url, timeout):
        started = time.perf_counter()
        response = await client.post(url, content=body, headers=JSON_HEADERS)
        seconds = time.perf_counter() - started
        require_success(response.status_code, response.content)
        return decode_object(response.content), seconds


async def post_streamed(client: httpx.AsyncClient, url: str, body: bytes, timeout: float) -> Generated:
    """POST to `/generate` with `stream` on; the last event and when the first token came.

    Raises:
        RequestFailed: as for `post`, or the stream ended before the request did, or it held no token.
    """
    async with failures_named(url, timeout):
        first: float | None = None
        last: dict[str, Any] = {}
        done = False
        started = time.perf_counter()
        async with client.stream("POST", url, content=body, headers=JSON_HEADERS) as response:
            if response.status_code != httpx.codes.OK:
                require_success(response.status_code, await response.aread())
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    done = True
                    break
                last = decode_object(data.encode())
                if problem := error_of(last):
                    raise RequestFailed(problem)
                if first is None and holds_token(last):
                    first = time.perf_counter() - started
        seconds = time.perf_counter() - started
        if not done:
            raise RequestFailed("the stream ended before [DONE]")
        if first is None:
            raise RequestFailed("the stream held no token")
        return from_native(last, seconds, first)


def holds_token(event: Mapping[str, Any]) -> bool:
    """Whether a stream event carries output, not only a first sign of life."""
    count = whole_number(as_mapping(event.get("meta_info")).get("completion_tokens"))
    return bool(event.get("output_ids") or event.get("text") or count)


async def run_bounded(items: Iterable[Item], limit: int, work: Callable[[Item], Awaitable[None]]) -> None:
    """Do the work for all items, at most `limit` at a time; the next starts when one ends."""
    source = iter(items)

    async def worker() -> None:
        for item in source:
            await work(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(limit):
            group.create_task(worker())


# ------------------------------------------------------------------------------------------------ about the server


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about itself.

    Attributes:
        told: model, version and the like.
        accept_lengths: mean accept length since the server started, one per data-parallel rank that tells one.
        notes: what was asked for in vain.
    """

    told: dict[str, Any] = field(default_factory=dict)
    accept_lengths: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def model(self) -> str | None:
        """Name of the model, if told."""
        name = self.told.get("served_model_name") or self.told.get("model_path")
        return str(name) if name else None


async def ask_server(client: httpx.AsyncClient, url: str) -> ServerFacts:
    """Model, version and accept length. Servers and routers differ in what they tell; nothing here is required.

    Raises:
        Unreachable: no connection at all.
    """
    facts = ServerFacts()
    for path in ("/server_info", "/get_server_info"):
        info = await _get(client, url + path, facts)
        if info is not None:
            facts.told.update({key: info[key] for key in TOLD if info.get(key) is not None})
            facts.accept_lengths.extend(accept_lengths(info))
            break
    if facts.model is None:
        models = (await _get(client, url + "/v1/models", facts) or {}).get("data")
        if isinstance(models, list) and models and (name := as_mapping(models[0]).get("id")):
            facts.told["served_model_name"] = name
    return facts


async def _get(client: httpx.AsyncClient, url: str, facts: ServerFacts) -> dict[str, Any] | None:
    try:
        response = await client.get(url, timeout=INFO_TIMEOUT)
        require_success(response.status_code, response.content)
        return decode_object(response.content)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise Unreachable(
            f"cannot connect to {url}: {error or type(error).__name__}; is the server running?"
        ) from error
    except httpx.HTTPError as error:
        facts.notes.append(f"{url}: {type(error).__name__}: {error}")
    except RequestFailed as error:
        facts.notes.append(f"{url}: {error}")
    return None


def accept_lengths(info: Mapping[str, Any]) -> list[float]:
    """Accept lengths in `/server_info`, of a server or of a router that lists its decode servers."""
    workers = [info]
    decode = info.get("decode")
    if not info.get("internal_states") and isinstance(decode, list):
        workers = [as_mapping(worker) for worker in decode]
    found = []
    for worker in workers:
        states = worker.get("internal_states")
        for state in states if isinstance(states, list) else []:
            value = real_number(as_mapping(state).get("avg_spec_accept_length"))
            if value is not None:
                found.append(value)
    return found


# --------------------------------------------------------------------------------------------- values and options


def as_mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def whole_number(value: Any) -> int | None:
    """The value if it is an integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def real_number(value: Any) -> float | None:
    """The value if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def shorten(text: str) -> str:
    """Text on one line, not longer than an error list can bear."""
    folded = " ".join(text.split())
    return folded if len(folded) <= ERROR_LENGTH else folded[:ERROR_LENGTH] + " ..."


def positive(text: str) -> int:
    """An option's whole number, 1 or more."""
    return _at_least(text, 1)


def not_negative(text: str) -> int:
    """An option's whole number, 0 or more."""
    return _at_least(text, 0)


def port_number(text: str) -> int:
    """An option's port."""
    number = _at_least(text, 1)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port (1 to 65535)")
    return number


def _at_least(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return number


def positive_seconds(text: str) -> float:
    """An option's time."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return number


def server_url(text: str) -> str:
    """An option's address of a server, without a final slash."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address like http://host:port")
    return text.rstrip("/")


def address(host: str, port: int) -> str:
    """Address of a server, IPv6 or not."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def result_file(text: str) -> Path:
    """An option's file to write. Checked before the run: a result must not be lost because of a missing folder."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text} does not exist")
    return path


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result as a whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
