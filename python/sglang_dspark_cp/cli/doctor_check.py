"""One finding of `sglang-dspark-cp doctor`, and the machine that is looked at."""

from __future__ import annotations

import enum
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


class Status(enum.Enum):
    """Outcome of a check; only `FAILED` makes a machine not ready."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_CHECKED = "not-checked"


@dataclass(frozen=True)
class Check:
    """One check and what came out.

    Attributes:
        area, name: what was looked at.
        status: the outcome.
        found: what is there.
        allowed, why, fix: what would be right, the reason, and the flag or command that makes it so.
        log: lines of a process that broke.
    """

    area: str
    name: str
    status: Status
    found: str
    allowed: str = ""
    why: str = ""
    fix: str = ""
    log: str = ""

    def as_json(self) -> dict[str, str]:
        """For `--json`; the log is part of what was found."""
        return {
            "area": self.area,
            "name": self.name,
            "status": self.status.value,
            "found": f"{self.found}\n{self.log}" if self.log else self.found,
            "allowed": self.allowed,
            "why": self.why,
            "fix": self.fix,
        }


def passed(area: str, name: str, found: str, why: str = "") -> Check:
    """Nothing to do."""
    return Check(area, name, Status.OK, found, why=why)


def warning(area: str, name: str, found: str, allowed: str, why: str, fix: str) -> Check:
    """Servers start, but not everything is as it should be."""
    return Check(area, name, Status.WARNING, found, allowed, why, fix)


def failed(area: str, name: str, found: str, allowed: str, why: str, fix: str, log: str = "") -> Check:
    """Servers would not start, or not work."""
    return Check(area, name, Status.FAILED, found, allowed, why, fix, log)


def not_checked(area: str, name: str, found: str, why: str = "", fix: str = "") -> Check:
    """Nothing is known."""
    return Check(area, name, Status.NOT_CHECKED, found, why=why, fix=fix)


@dataclass(frozen=True)
class Done:
    """A command that ran."""

    status: int
    out: str
    error: str


@dataclass
class Machine:
    """What is read of the machine.

    Attributes:
        environ: environment that servers would be started with.
        sys: where sysfs is mounted.
        timeout: seconds that a command may take.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    sys: Path = Path("/sys")
    timeout: float = 60.0

    def command(self, words: Sequence[str]) -> Done | None:
        """Run a command that only reads; None if there is no such command or it does not end."""
        try:
            done = subprocess.run(
                list(words),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.timeout,
                env={**self.environ},
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return Done(done.returncode, done.stdout, done.stderr)

    def read(self, *parts: str) -> str:
        """A file below sysfs, empty if it cannot be read."""
        try:
            return self.sys.joinpath(*parts).read_text().strip()
        except OSError:
            return ""

    def names(self, *parts: str) -> list[str]:
        """Entries of a folder below sysfs, empty if there is none."""
        try:
            return sorted(path.name for path in self.sys.joinpath(*parts).iterdir())
        except OSError:
            return []
