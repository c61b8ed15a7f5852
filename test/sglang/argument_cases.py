"""What the tests of admission do in a process that pretends to see GPUs: SGLang resolves command lines."""

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
from sglang_dspark_cp.smoke.release import installed

PRETEND_HIP = "TEST_PRETEND_HIP"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class Resolved:
    """What became of one command line."""

    error: str
    """Type and text of what SGLang stopped with, or empty."""
    fields: dict[str, str]
    """Every field of the resolved `ServerArgs`, as `repr`; empty after an error."""
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
                    _unified_kv_gate().is_hip = lambda: True
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
            fields = {name: _ADDRESS.sub("", repr(value)) for name, value in _fields(installed().resolve(line)).items()}
        except (Exception, SystemExit) as refused:
            error = f"{type(refused).__name__}: {refused}"
        names = before.keys() | os.environ.keys()
        changed = {name: os.environ.get(name) for name in names if before.get(name) != os.environ.get(name)}
        return Resolved(error, fields, changed, bool(built))


def _fields(server_args: Any) -> dict[str, Any]:
    """What was resolved. From 0.5.23 on it stands beside the arguments as they were given."""
    if dataclasses.is_dataclass(server_args):
        return {field.name: getattr(server_args, field.name) for field in dataclasses.fields(server_args)}
    from sglang.srt.arg_groups.arg_utils import field_names
    from sglang.srt.arg_groups.overrides import resolving_view

    resolved = resolving_view(server_args)
    return {name: getattr(resolved, name) for name in sorted(field_names(type(server_args)))}


def _unified_kv_gate() -> Any:
    try:
        from sglang.srt.layers.attention.dsv4 import unified_kv_gate as gate
    except ImportError:  # 0.5.17
        from sglang.kernels.ops.attention.dsv4.unified_kv_kernels import env_gate as gate
    return gate
