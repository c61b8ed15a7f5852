"""A fleet of a few ranks for the tests of peers that die, and prefill ranks whose transfers can be held."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_dspark_cp.cli.main import build_parser
from sglang_dspark_cp.smoke import geometry as g
from sglang_dspark_cp.smoke import native
from sglang_dspark_cp.smoke.arguments import prefill_arguments, write_model_folder
from sglang_dspark_cp.smoke.processes import RankConfig, RankPool
from sglang_dspark_cp.smoke.soak import Fleet, Judge, Request, SoakRun
from sglang_dspark_cp.smoke.soak_ranks import SoakPrefillRank
from sglang_dspark_cp.smoke.workload import FIRST_TOKEN, Prompt

HOLD = "hold"
"""While a file of this name is in the folder, no write of prefill rank 0 begins."""
HELD = "held"
"""Made when the first write waits."""


class HeldPrefillRank(SoakPrefillRank):
    """The prefill rank of a soak; its transfers can be held between two Mooncake writes."""

    def __init__(self, config: RankConfig, report: Callable[[Any], None]) -> None:
        super().__init__(config, report)
        folder, write = Path(config.options["folder"]), self.engine.batch_transfer_sync
        self.folder = folder

        def held(*arguments: Any) -> int:
            deadline = time.monotonic() + 30
            while (folder / HOLD).exists() and time.monotonic() < deadline:
                (folder / HELD).touch()
                time.sleep(0.005)
            return int(write(*arguments))

        self.engine.batch_transfer_sync = held

    def _due(self) -> Iterator[str]:
        # A request in the inflight queue may not have begun its write, and one that is aborted then never begins it.
        if not (self.folder / HOLD).exists() or (self.folder / HELD).exists():
            yield from super()._due()


class Peers:
    """Prefill ranks, decode ranks, and what became of each request."""

    def __init__(self, pool: RankPool, folder: Path, environment: dict[str, str], *flags: str) -> None:
        arguments = ["smoke", "--soak", "1m", "--prefill-cp", "2", "--decode-dp", "2", *flags]
        self.folder = folder
        run = SoakRun(build_parser().parse_args(arguments), [], folder, Console(stderr=True))
        run.stand_in = native.prepare(folder)
        launch = prefill_arguments(
            write_model_folder(folder / "model"), 2, run.args.chunk, bootstrap_port=run.ports["bootstrap"]
        )
        resolver = pool.spawn([run.config("resolve", 0, "arguments:Resolver", {})])
        pool.collect(resolver, 180)
        self.fleet = Fleet(
            run,
            pool,
            run.resolve(pool, resolver[0], launch),
            environment,
            prefill=("peer_cases:HeldPrefillRank", {"folder": str(folder)}),
        )
        self.judge = Judge(all_cp_ranks=False, cp_size=2)
        self.done: dict[int, Request] = {}
        self.rng = random.Random(3)
        self.room = 2_000_000

        def ended(request: Request, received: Any) -> None:
            self.done[request.prompt.room] = request
            self.judge.ended(request, received)

        self.fleet.on_end = ended

    def ask(self, length: int, decode: int, plan: str = "") -> Request:
        self.room += 1
        tokens = self.rng.choices(range(FIRST_TOKEN, g.VOCAB), k=length)
        return self.fleet.submit(Prompt("peer", tokens, self.room, 0), decode, plan)

    def until(self, true: Callable[[], bool], within: float) -> float:
        """Pump until something is true; seconds that it took."""
        started = time.monotonic()
        while not true():
            assert time.monotonic() - started < within, self.state()
            self.fleet.pump(0.05)
        return time.monotonic() - started

    def all_ended(self, requests: list[Request], within: float) -> float:
        return self.until(lambda: all(request.ended for request in requests), within)

    def state(self) -> str:
        open_requests = [(r.prompt.room, r.prefill, r.decode, r.landed) for r in self.fleet.requests.values()]
        return f"open: {open_requests}; deaths: {self.fleet.deaths}"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Writes of prefill rank 0 wait meanwhile."""
        (self.folder / HELD).unlink(missing_ok=True)
        (self.folder / HOLD).touch()
        try:
            yield
        finally:
            (self.folder / HOLD).unlink()

    def a_write_waits(self) -> bool:
        return (self.folder / HELD).exists()

    def finish(self) -> None:
        """Stop; nothing may be leaked and no row may be wrong."""
        answers = self.fleet.stop(20)
        assert not self.fleet.deaths
        assert len(answers) == 4, answers
        for report in answers.values():
            assert report.leaked_pages == 0, report
            assert not any(getattr(report, "held", {}).values()), report
        assert self.judge.tallies.rows > 0
        assert self.judge.tallies.wrong == 0
        assert self.judge.tallies.wrong_pages == self.judge.tallies.wrong_first_token == 0
