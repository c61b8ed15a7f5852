"""Real SGLang servers: start, ask, stop. Whatever was started is gone afterwards, however the run ends."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ..errors import DsparkCpError

HOST = "127.0.0.1"
HEALTH_INTERVAL = 0.25
WATCH_INTERVAL = 0.25
GONE_WITHIN = 15.0
PORT_SPACING = 100
"""SGLang derives more ports from the one that it is given."""


class ServerFailed(DsparkCpError):
    """A server stopped or did not get ready; the text holds the first traceback of its log."""


def first_traceback(log: str, lines: int = 60) -> str:
    """The first traceback in a log, up to the line that names its error; without one, what comes nearest."""
    rows = log.splitlines()
    start = next((number for number, row in enumerate(rows) if "Traceback (most recent call last)" in row), None)
    if start is None:
        errors = [row for row in rows if "Error" in row or "error:" in row or row.startswith("sglang-dspark-cp:")]
        return "\n".join(errors[:3] or rows[-15:])
    for number in range(start + 1, len(rows)):
        row = rows[number]
        if row and not row.startswith((" ", "\t", "[")) and ("Error" in row or "Exception" in row or ": " in row):
            return "\n".join(rows[max(start, number - lines) : number + 1])
    return "\n".join(rows[start : start + lines])


def group_members(group: int) -> list[int]:
    """Live processes (no zombies) of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(pgrp) == group and state not in "ZX":
                    found.append(int(entry.name))
    return found


def _end_with_parent() -> None:
    """In the new process, before its program starts: die when this program is killed outright (Linux)."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


@dataclass
class Reply:
    """One answer.

    Attributes:
        tokens: generated ids, None if the request failed; then `error` says why.
        meta: SGLang's `meta_info`.
        first_token_s: seconds to the first token, None if the answer was not streamed.
    """

    tokens: list[int] | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    first_token_s: float | None = None
    seconds: float = 0.0


class Server:
    """One server process in a session and process group of its own.

    Args:
        name: for messages and the log's name.
        port: HTTP port on the loopback interface.
        command: the whole command line.
        environment: added to this process' own.
        folder: where the log goes.
    """

    def __init__(
        self, name: str, port: int, command: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> None:
        self.name, self.port, self.command = name, port, list(command)
        self.environment = dict(environment)
        self.log_path = folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.boot_seconds: float | None = None
        self._started = 0.0
        self._gone = False

    def start(self) -> None:
        """Start the process; its output goes to the log."""
        self._started = time.monotonic()
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def log(self) -> str:
        """The log so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.is_file() else ""

    def alive(self) -> bool:
        """Whether the process was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def require_alive(self) -> None:
        """Raise at once if the process has ended.

        Raises:
            ServerFailed: with the exit status and the first traceback of the log.
        """
        if self.process is None:
            raise ServerFailed(f"{self.name} was not started")
        status = self.process.poll()
        if status is not None:
            raise ServerFailed(f"{self.name} ended with status {status}:\n{first_traceback(self.log())}")

    def ready(self) -> bool:
        """Whether the server answered its health check, now or before."""
        if self.boot_seconds is None:
            try:
                with urllib.request.urlopen(f"http://{HOST}:{self.port}/health", timeout=3):
                    pass
            except (urllib.error.URLError, OSError):
                return False
            self.boot_seconds = round(time.monotonic() - self._started, 1)
        return True

    def post(self, path: str, body: Any, timeout: float = 120.0) -> dict[str, Any]:
        """POST JSON and return the JSON answer; failures come back as {"error": text, "status": code}."""
        try:
            with self._open(path, body, timeout) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            return {"error": error.read().decode(errors="replace"), "status": error.code}
        except OSError as error:
            return {"error": f"{type(error).__name__}: {error}", "status": 0}
        try:
            parsed = json.loads(text)
        except json.JSONDecodeError:
            return {"text": text}
        return parsed if isinstance(parsed, dict) else {"answer": parsed}

    def generate(self, body: Mapping[str, Any], timeout: float = 120.0, *, stream: bool = True) -> Reply:
        """One `/generate` request, streamed so that the first token's time is known."""
        started = time.monotonic()
        first: float | None = None
        answer: dict[str, Any] = {"error": "the answer holds no data"}
        if stream:
            try:
                with self._open("/generate", {**body, "stream": True}, timeout) as response:
                    for line in response:
                        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                            continue
                        first = first or time.monotonic() - started
                        answer = json.loads(line[len(b"data: ") :])
            except urllib.error.HTTPError as error:
                answer = {"error": error.read().decode(errors="replace")}
            except (OSError, ValueError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
        else:
            answer = self.post("/generate", body, timeout)
        error_text = error_of(answer)
        return Reply(
            tokens=None if error_text else answer.get("output_ids"),
            meta=answer.get("meta_info") or {},
            error=error_text,
            first_token_s=None if error_text or first is None else round(first, 5),
            seconds=round(time.monotonic() - started, 5),
        )

    def _open(self, path: str, body: Any, timeout: float) -> Any:
        request = urllib.request.Request(
            f"http://{HOST}:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=timeout)

    def stop(self) -> None:
        """End the whole process group now and wait until none of it is left."""
        if self.process is None or self._gone:
            return
        deadline = time.monotonic() + GONE_WITHIN
        while not self._gone:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.5)
            self._gone = not group_members(self.process.pid) or time.monotonic() > deadline


def error_of(answer: Mapping[str, Any]) -> str:
    """Why a `/generate` answer holds no tokens; empty if it does."""
    error = answer.get("error")
    if isinstance(error, dict):
        error = error.get("message") or json.dumps(error)
    reason = (answer.get("meta_info") or {}).get("finish_reason")
    if not error and isinstance(reason, dict) and reason.get("type") == "abort":
        error = reason.get("message") or "aborted"
    if not error and "output_ids" not in answer:
        error = str(answer.get("text") or answer or "empty answer")
    return str(error or "")[:3000]


def all_at_once(calls: Sequence[Callable[[], Any]], watch: Sequence[Server]) -> list[Any]:
    """Run calls in threads and return their results; stop waiting as soon as a watched server has ended.

    Raises:
        ServerFailed: a watched server ended while a call was under way. Its threads are left to end by themselves.
    """
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        results[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(WATCH_INTERVAL)
            if thread.is_alive():
                for server in watch:
                    server.require_alive()
    return results


class ServerSet:
    """Servers of one run; a context manager that also ends them on SIGINT and SIGTERM."""

    def __init__(self) -> None:
        self.servers: list[Server] = []
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> ServerSet:
        def interrupted(number: int, frame: FrameType | None) -> None:
            # Kill first: whatever waits for an answer then gets one.
            self.stop(self.servers)
            raise KeyboardInterrupt(f"signal {signal.Signals(number).name}")

        self._handlers = {number: signal.signal(number, interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.stop(self.servers)
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def start(
        self, servers: Iterable[Server], timeout: float, progress: Callable[[Server], None] | None = None
    ) -> None:
        """Start servers together and wait until all are ready.

        Raises:
            ServerFailed: one ended, or was not ready in time.
        """
        for error in self.start_each(servers, timeout, progress, keep_going=False).values():
            raise error

    def start_each(
        self,
        servers: Iterable[Server],
        timeout: float,
        progress: Callable[[Server], None] | None = None,
        failed: Callable[[Server, ServerFailed], None] | None = None,
        *,
        keep_going: bool = True,
    ) -> dict[str, ServerFailed]:
        """The same, but servers that do not get ready are returned by name; the others go on."""
        waiting = list(servers)
        failures: dict[str, ServerFailed] = {}
        for server in waiting:
            self.servers.append(server)
            server.start()
        deadline = time.monotonic() + timeout
        while waiting and (keep_going or not failures):
            for server in list(waiting):
                try:
                    server.require_alive()
                    if server.ready():
                        waiting.remove(server)
                        if progress is not None:
                            progress(server)
                    elif time.monotonic() > deadline:
                        raise ServerFailed(
                            f"{server.name} was not ready within {timeout:.0f} s:\n{first_traceback(server.log())}"
                        )
                except ServerFailed as error:
                    waiting.remove(server)
                    failures[server.name] = error
                    server.stop()
                    if failed is not None:
                        failed(server, error)
            time.sleep(HEALTH_INTERVAL if waiting else 0)
        return failures

    def stop(self, servers: Iterable[Server]) -> None:
        """End some servers, all of them at once."""
        threads = [threading.Thread(target=server.stop) for server in list(servers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class Ports:
    """Hands out loopback ports from `first` on, `PORT_SPACING` apart; those in use are passed over."""

    def __init__(self, first: int) -> None:
        self._next = first

    def take(self) -> int:
        """The next port that is free now."""
        while self._next < 65536:
            port = self._next
            self._next += PORT_SPACING
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((HOST, port))
                return port
        raise ServerFailed("no free port is left; choose another --ports")


def launch_command(arguments: Sequence[str], port: int, module: str = "sglang.launch_server") -> list[str]:
    """Command line of a real server."""
    return [sys.executable, "-m", module, "--host", HOST, "--port", str(port), *arguments]
