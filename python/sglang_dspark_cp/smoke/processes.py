"""One process per rank, driven over pipes. Ranks are forked from a server that imported SGLang once."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ..errors import DsparkCpError

PRELOAD = "sglang_dspark_cp.smoke.preload"
PORTS = range(10000, 15000)
_GIVEN: set[int] = set()
_ANY = random.SystemRandom()
"""Without a state: forked processes would draw the same ports from one that has some."""


class RankFailed(DsparkCpError):
    """A rank raised or died; the text holds its first traceback."""


def free_ports(count: int) -> list[int]:
    """TCP ports that nothing listens on now, none of which this process was given before.

    They lie below the kernel's range for outgoing connections, one of which can take a port before it is listened on
    (seen: EADDRINUSE at start), and below those that Mooncake draws from.

    Raises:
        RankFailed: fewer than `count` are left.
    """
    found: list[int] = []
    for port in _ANY.sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        if port not in _GIVEN and _is_free(port):
            found.append(port)
    if len(found) < count:
        raise RankFailed(
            f"found {len(found)} free TCP ports from {PORTS[0]} to {PORTS[-1]}, needed {count}; end what listens there"
        )
    _GIVEN.update(found)
    return found


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind(("", port))
        return True
    return False


@dataclass(frozen=True)
class RankConfig:
    """What one rank process needs to know.

    Attributes:
        role: `bootstrap`, `prefill`, `decode` or `resolve`.
        factory: `module:function` that makes the rank object from this configuration.
        environment: set before anything is imported.
        log: file that takes standard output and error of the process.
        options: whatever the factory wants, picklable.
    """

    role: str
    rank: int
    factory: str
    environment: dict[str, str]
    log: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.role} rank {self.rank}"


def _die_with_thread(failure: threading.ExceptHookArgs) -> None:
    """A dead background thread would leave its peers waiting: end the rank, the driver shows its log."""
    traceback.print_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
    sys.stderr.flush()
    os._exit(1)


def _serve(pipe: Connection, config: RankConfig) -> None:
    os.environ.update(config.environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.open(config.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    threading.excepthook = _die_with_thread
    status = 0
    try:
        module, _, name = config.factory.partition(":")
        rank = getattr(importlib.import_module(module), name)(config, lambda event: pipe.send(("event", event)))
        pipe.send(("ok", None))
        while True:
            method, arguments = pipe.recv()
            pipe.send(("ok", getattr(rank, method)(*arguments)))
    except EOFError:
        pass
    except BaseException:
        status = 1
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            pipe.send(("error", text))
    # Mooncake's manager threads are not daemons: an ordinary return would wait for them forever.
    os._exit(status)


class RankProcess:
    """Driver's side of one rank."""

    def __init__(self, context: Any, config: RankConfig) -> None:
        self.config = config
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, config), daemon=True, name=config.name)
        self.process.start()
        theirs.close()

    def start(self, method: str, *arguments: Any) -> None:
        """Begin a call; its answer is fetched with `collect`."""
        self.pipe.send((method, arguments))

    def kill(self) -> None:
        """End the process now."""
        self.process.kill()
        self.process.join(10)
        self.pipe.close()


class RankPool:
    """All rank processes of a run; a context manager that leaves none behind."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([PRELOAD])
        self.ranks: list[RankProcess] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()

    def spawn(self, configs: Iterable[RankConfig]) -> list[RankProcess]:
        """Start processes; each answers once when its rank object stands."""
        new = [RankProcess(self._context, config) for config in configs]
        self.ranks += new
        return new

    def collect(
        self, ranks: Iterable[RankProcess], timeout: float, on_event: Callable[[Any], None] = lambda event: None
    ) -> list[Any]:
        """One answer from each of `ranks`, in their order.

        Raises:
            RankFailed: a rank raised, died or stayed silent until the time-out.
        """
        ranks = list(ranks)
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(ranks):
            open_pipes = {rank.pipe: index for index, rank in enumerate(ranks) if index not in answers}
            ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = ", ".join(ranks[index].config.name for index in open_pipes.values())
                tails = "\n".join(_tail(ranks[index].config) for index in list(open_pipes.values())[:1])
                raise RankFailed(f"no answer within {timeout:.0f} s from {silent}\n{tails}")
            for pipe in ready:
                index = open_pipes[pipe]  # type: ignore[index]
                rank = ranks[index]
                try:
                    kind, value = rank.pipe.recv()
                except EOFError:
                    raise RankFailed(f"{rank.config.name} died\n{_tail(rank.config)}") from None
                if kind == "error":
                    raise RankFailed(f"{rank.config.name} failed:\n{value}")
                if kind == "event":
                    on_event(value)
                else:
                    answers[index] = value
        return [answers[index] for index in range(len(ranks))]


def _tail(config: RankConfig, lines: int = 25) -> str:
    path = Path(config.log)
    if not path.is_file():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
