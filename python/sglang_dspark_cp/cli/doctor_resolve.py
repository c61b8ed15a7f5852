"""What SGLang itself makes of launch arguments, asked in a process of its own.

The process does what `sglang.launch_server` does before it starts anything: load plugins, read the arguments, check
them. Without a GPU it pretends to see some (`smoke.arguments.pretend_gpus`) and says so. It uses no network. Where the
model's config.json is not on this machine, the small DeepSeek-V4 of the smoke test stands in for it, and it says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PRETENDED_GPUS = 8

RAW = {
    "model_path": ("model_path",),
    "revision": ("revision",),
    "load_format": ("load_format",),
    "tp_size": ("tp_size", "tensor_parallel_size"),
    "dp_size": ("dp_size", "data_parallel_size"),
    "pp_size": ("pp_size", "pipeline_parallel_size"),
    "nnodes": ("nnodes",),
    "base_gpu_id": ("base_gpu_id",),
    "gpu_id_step": ("gpu_id_step",),
    "enable_dp_attention": ("enable_dp_attention",),
    "speculative_algorithm": ("speculative_algorithm",),
    "speculative_draft_model_path": ("speculative_draft_model_path",),
    "disaggregation_mode": ("disaggregation_mode",),
    "disaggregation_transfer_backend": ("disaggregation_transfer_backend",),
    "disaggregation_bootstrap_port": ("disaggregation_bootstrap_port",),
    "disaggregation_ib_device": ("disaggregation_ib_device",),
    "chunked_prefill_size": ("chunked_prefill_size",),
    "page_size": ("page_size",),
    "port": ("port",),
}
"""Fact -> names under which SGLang's parser may keep it."""

RESOLVED = (
    *RAW,
    "attn_cp_size",
    "enable_prefill_cp",
    "disable_radix_cache",
    "moe_a2a_backend",
)
"""Fields of `ServerArgs` that checks look at."""

TRANSPORT_VARIABLES = ("MC_FORCE_TCP", "MC_FORCE_HCA", "MOONCAKE_PROTOCOL")

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "SGLANG_USE_MODELSCOPE": "0", "PYTHONWARNINGS": "ignore"}
"""Environment of the process: nothing is fetched."""


@dataclass
class Answer:
    """What the process found.

    Attributes:
        raw: values as the command line (and --config) gave them, by the keys of `RAW`; empty if it was not read.
        resolved: values that servers would run with, by `RESOLVED`; None if SGLang refused.
        error: type and text of what SGLang stopped with, or what happened to the process.
        where: file and line that raised it.
        traceback: first traceback of a process that broke.
        broke: the process gave no answer, or it stopped with an error that is not meant for users.
        gpus: GPUs that torch sees.
        pretended: GPUs were pretended while arguments were resolved.
        stand_in: the small model's config.json stood in for the model's.
        model_folder, draft_folder: folders on this machine with the model and the draft, None where there is none.
        architecture: of the model.
        hooks: ids of the hooks of this package that are applied.
        environment: `TRANSPORT_VARIABLES` after resolution.
        mode, mode_why, mode_error: gather mode of a CP prefill worker.
        page: page of the prefix cache, None without one.
    """

    raw: dict[str, Any] = field(default_factory=dict)
    resolved: dict[str, Any] | None = None
    error: str = ""
    where: str = ""
    traceback: str = ""
    broke: bool = False
    gpus: int | None = None
    pretended: bool = False
    stand_in: bool = False
    model_folder: str | None = None
    draft_folder: str | None = None
    architecture: str | None = None
    hooks: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    mode: str | None = None
    mode_why: str = ""
    mode_error: str = ""
    page: int | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What servers would run with, else what was asked for."""
        return self.raw if self.resolved is None else self.resolved


# ------------------------------------------------------------------------------------------------- in the process


def answer(launch: Sequence[str]) -> Answer:
    """Ask SGLang. Changes this process (hooks, environment, stand-ins): use a fresh one for each question."""
    import torch

    found = Answer(gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0)
    folder = Path(tempfile.mkdtemp(prefix="sglang-dspark-cp-doctor-"))
    try:
        with _speaking_parser():
            _ask(list(launch), found, folder)
    except (Exception, SystemExit) as error:
        _note(error, found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found.environment = {name: os.environ[name] for name in TRANSPORT_VARIABLES if name in os.environ}
    return found


def _ask(launch: list[str], found: Answer, folder: Path) -> None:
    from sglang.srt.plugins import load_plugins

    from ..smoke.arguments import fired_hooks, pretend_gpus, write_model_folder

    if not found.gpus:
        pretend_gpus(PRETENDED_GPUS)
        found.pretended = True
    load_plugins()
    found.hooks = [hook["id"] for hook in fired_hooks()]

    from sglang.srt.server_args import ServerArgs, prepare_server_args

    build = ServerArgs.from_cli_args

    def from_cli_args(namespace: Any) -> Any:
        for name, keys in RAW.items():
            found.raw[name] = next((getattr(namespace, key) for key in keys if hasattr(namespace, key)), None)
        found.model_folder = _local(found.raw["model_path"], found.raw["revision"])
        if found.model_folder is None and not Path(str(found.raw["model_path"])).is_file():
            namespace.model_path = str(write_model_folder(folder))
            found.stand_in = True
        return build(namespace)

    ServerArgs.from_cli_args = from_cli_args
    server_args = prepare_server_args(launch)
    facts, model = _resolve(server_args)
    found.architecture = model.architectures[0]
    if model.model_type == "deepseek_v41":
        found.architecture += f" of model type {model.model_type}"
    else:
        _choose_mode(server_args, facts, found)
    found.resolved = {name: facts.get(name) for name in RESOLVED}
    found.resolved["model_path"] = found.raw["model_path"]
    draft = facts["speculative_draft_model_path"]
    if draft in (None, facts["model_path"]):
        draft, found.draft_folder = found.raw["model_path"], found.model_folder
    else:
        found.draft_folder = _local(draft, None)
    found.resolved["speculative_draft_model_path"] = draft


def _resolve(server_args: Any) -> tuple[dict[str, Any], Any]:
    """Fields that servers would run with, and the model's config."""
    if not hasattr(server_args, "resolve_once"):  # before 0.5.23 reading resolves
        server_args.check_server_args()
        return vars(server_args), server_args.get_model_config().hf_config
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    server_args.resolve_once()
    server_args.check_server_args()
    facts = server_args.resolved_dict()
    # What --dp 8 --enable-dp-attention asks for is kept as a data parallel size of 1 with an attention DP of 8.
    facts["dp_size"] *= resolving_view(server_args).attn_dp_size
    return facts, model_config_of(server_args).hf_config


def _choose_mode(server_args: Any, facts: Mapping[str, Any], found: Answer) -> None:
    """What a CP prefill worker does when it is created."""
    if facts["speculative_algorithm"] != "DSPARK" or facts["disaggregation_mode"] != "prefill":
        return
    from .. import adapters, config
    from ..adapters.gather_mode import choose
    from ..errors import TopologyError
    from ..hooks.check import sglang_release

    read = getattr(adapters.find(sglang_release()), "cache_setup_of", None)
    if facts["attn_cp_size"] <= 1 or read is None:
        return
    setup = read(server_args)
    found.page = setup.cache_page
    try:
        mode, found.mode_why = choose(config.from_environment().gather, setup)
        found.mode = mode.value
    except TopologyError as error:
        found.mode_error = str(error)


def _local(model: str, revision: str | None) -> str | None:
    """Folder of a model on this machine: the path itself, or a snapshot in the Hugging Face cache."""
    if Path(model).is_dir():
        return str(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with contextlib.suppress(HFValidationError):
        file = try_to_load_from_cache(model, "config.json", revision=revision)
        if isinstance(file, str):
            return str(Path(file).parent)
    return None


@contextlib.contextmanager
def _speaking_parser() -> Iterator[None]:
    """Command line errors carry their text instead of printing it."""

    def error(parser: argparse.ArgumentParser, message: str) -> None:
        raise SystemExit(message)

    held = argparse.ArgumentParser.error
    argparse.ArgumentParser.error = error  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        argparse.ArgumentParser.error = held  # type: ignore[method-assign]


MEANT_FOR_USERS = ("ValueError", "AssertionError", "NotImplementedError", "RuntimeError", "SystemExit")


def _note(error: BaseException, found: Answer) -> None:
    from ..errors import DsparkCpError

    found.error = f"{type(error).__name__}: {error}".removesuffix(": ")
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        found.where = f"{_short(frames[-1].filename)}:{frames[-1].lineno}"
    meant = isinstance(error, SystemExit | DsparkCpError) or type(error).__name__ in MEANT_FOR_USERS
    if not meant:
        found.broke = True
        found.traceback = first_traceback("".join(traceback.format_exception(error)))


def _short(file: str) -> str:
    parts = Path(file).parts
    return str(Path(*parts[parts.index("site-packages") + 1 :])) if "site-packages" in parts else file


def main() -> None:
    """Read arguments (a JSON list) from standard input, write the answer (JSON) to standard output."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes with the log
    with out:
        json.dump(asdict(answer(json.load(sys.stdin))), out)


# ---------------------------------------------------------------------------------------------- outside of the process


def resolve(
    launch: Sequence[str],
    timeout: float,
    environ: Mapping[str, str] = os.environ,
    command: Sequence[str] = (sys.executable, "-m", __name__),
) -> Answer:
    """Start the process, wait for its answer; whatever happens to it ends as an `Answer`."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**environ, **OFFLINE},
        start_new_session=True,
        text=True,
        errors="replace",
    )
    try:
        out, log = process.communicate(json.dumps(list(launch)), timeout=timeout)
    except subprocess.TimeoutExpired:
        _end(process)
        _, log = process.communicate()
        return Answer(error=f"no answer within {timeout:g} s", traceback=first_traceback(log) or tail(log), broke=True)
    except BaseException:
        _end(process)
        raise
    try:
        return Answer(**json.loads(out))
    except (ValueError, TypeError):
        return Answer(
            error=f"the process ended with status {process.returncode} and no answer",
            traceback=first_traceback(log) or tail(log),
            broke=True,
        )


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def first_traceback(log: str) -> str:
    """The first Python traceback of a log, with its exception line; empty if there is none."""
    lines = log.splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call")), None)
    if start is None:
        return ""
    end = next((i for i in range(start + 1, len(lines)) if lines[i] and not lines[i][0].isspace()), len(lines) - 1)
    return "\n".join(lines[start : end + 1])


def tail(log: str, lines: int = 8) -> str:
    """Last lines of a log."""
    return "\n".join(log.splitlines()[-lines:])


if __name__ == "__main__":
    main()
