"""Real SGLang servers: start, ask, stop. Whatever was started is gone afterwards, however the run ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ..errors import DsparkCpError

HEALTH_INTERVAL = 0.5


class ServerFailed(DsparkCpError):
    """A server stopped or did not get ready; the text holds the first traceback of its log."""


def first_traceback(log: str, lines: int = 60) -> str:
    """The first traceback in a log, up to the line that names its error; the log's end if there is none."""
    rows = log.splitlines()
    start = next((number for number, row in enumerate(rows) if "Traceback (most recent call last)" in row), None)
    if start is None:
        errors = [row for row in rows if "Error" in row]
        return "\n".join(errors[:3] or rows[-15:])
    for number in range(start + 1, len(rows)):
        row = rows[number]
        if row and not row.startswith((" ", "\t", "[")) and ":" in row:
            return "\n".join(rows[max(start, number - lines) : number + 1])
    return "\n".join(rows[start : start + lines])


class Server:
    """One server process in a process group of its own.

    Args:
        name: for messages and the log's name.
        port: HTTP port on 127.0.0.1.
        command: the whole command line.
        environment: added to this process' own.
        folder: where the log goes.
    """

    def __init__(self, name: str, port: int, command: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        self.name, self.port, self.command = name, port, list(command)
        self.environment = environment
        self.log_path = folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.boot_seconds: float | None = None
        self._started = 0.0

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
            )

    def log(self) -> str:
        """The log so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.is_file() else ""

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
        """Whether the server answers its health check now."""
        if self.boot_seconds is not None:
            return True
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=3):
                pass
        except (urllib.error.URLError, OSError):
            return False
        self.boot_seconds = round(time.monotonic() - self._started, 1)
        return True

    def post(self, path: str, body: Any, timeout: float = 120.0) -> dict[str, Any]:
        """POST JSON and return the JSON answer; HTTP errors come back as {"error": text, "status": code}."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            return {"error": error.read().decode(errors="replace"), "status": error.code}
        except (urllib.error.URLError, OSError) as error:
            return {"error": f"{type(error).__name__}: {error}", "status": 0}
        try:
            parsed = json.loads(text)
        except json.JSONDecodeError:
            return {"text": text}
        return parsed if isinstance(parsed, dict) else {"answer": parsed}

    def stop(self) -> None:
        """End the whole process group now."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(15)


class ServerSet:
    """Servers of one run; a context manager that also ends them on SIGINT and SIGTERM."""

    def __init__(self) -> None:
        self.servers: list[Server] = []
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> ServerSet:
        def stop(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt(f"signal {number}")

        self._handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for server in self.servers:
            server.stop()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(self, servers: Iterable[Server], timeout: float, progress: Any = None) -> None:
        """Start servers together and wait until all are ready.

        Raises:
            ServerFailed: one ended, or was not ready in time.
        """
        new = list(servers)
        self.servers += new
        for server in new:
            server.start()
        deadline = time.monotonic() + timeout
        waiting = list(new)
        while waiting:
            for server in list(waiting):
                server.require_alive()
                if server.ready():
                    waiting.remove(server)
                    if progress is not None:
                        progress(server)
            if waiting and time.monotonic() > deadline:
                server = waiting[0]
                raise ServerFailed(
                    f"{', '.join(each.name for each in waiting)} not ready within {timeout:.0f} s:\n"
                    f"{first_traceback(server.log())}"
                )
            time.sleep(HEALTH_INTERVAL)


def launch_command(arguments: Sequence[str], port: int) -> list[str]:
    """Command line of a real server."""
    return [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port), *arguments]
