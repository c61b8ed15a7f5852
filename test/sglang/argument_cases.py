"""What `test_admission` does in a process that pretends to see GPUs: SGLang resolves command lines."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_dspark_cp.smoke.arguments import Resolver
from sglang_dspark_cp.smoke.processes import RankConfig

PRETEND_HIP = "TEST_PRETEND_HIP"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class Resolved:
    """What became of one command line."""

    error: str
    """Type and text of what SGLang stopped with, or empty."""
    fields: dict[str, str]
    """Every dataclass field of the `ServerArgs`, as `repr`; empty after an error."""
    environment: dict[str, str | None]
    """Environment variables that resolution set or (None) removed."""
    built_modules: bool
    """Whether any torch module was built meanwhile: nothing loads before one is."""


class ManyResolver(Resolver):
    """A `Resolver` that forks once more for each command line, so that none sees what another one left behind."""

    def __init__(self, config: RankConfig, report: Callable[[Any], None]) -> None:
        if release := config.options.get("release"):
            from sglang_dspark_cp import plugin

            plugin.sglang_release = lambda: release
        super().__init__(config, report)

    def resolve_all(self, lines: list[list[str]], variables: dict[str, str]) -> list[Resolved]:
        """One answer per command line, with `variables` in the environment.

        The unified-KV ring exists on AMD GPUs only: `PRETEND_HIP` among the variables makes this process look like one
        to the function that decides about the ring.
        """
        return [self._in_a_fork(line, variables) for line in lines]

    def _in_a_fork(self, line: list[str], variables: dict[str, str]) -> Resolved:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                os.environ.update(variables)
                if PRETEND_HIP in variables:
                    from sglang.kernels.ops.attention.dsv4.unified_kv_kernels import env_gate

                    env_gate.is_hip = lambda: True
                answer: Any = self._resolve_here(line)
            except BaseException:
                answer = traceback.format_exc()
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(answer, pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            answer = pickle.load(pipe)
        os.waitpid(child, 0)
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def _resolve_here(self, line: list[str]) -> Resolved:
        import torch
        from sglang.srt.server_args import prepare_server_args

        built: list[str] = []
        init = torch.nn.Module.__init__

        def watched(module: Any, *args: Any, **kwargs: Any) -> None:
            built.append(type(module).__name__)
            init(module, *args, **kwargs)

        torch.nn.Module.__init__ = watched  # type: ignore[method-assign]
        before = dict(os.environ)
        error, fields = "", {}
        sys.stderr.flush()
        try:
            server_args = prepare_server_args(line)
            fields = {
                field.name: _ADDRESS.sub("", repr(getattr(server_args, field.name)))
                for field in dataclasses.fields(server_args)
            }
        except (Exception, SystemExit) as refused:
            error = f"{type(refused).__name__}: {refused}"
        names = before.keys() | os.environ.keys()
        changed = {name: os.environ.get(name) for name in names if before.get(name) != os.environ.get(name)}
        return Resolved(error, fields, changed, bool(built))
