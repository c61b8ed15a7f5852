"""Prefill launch arguments, resolved by SGLang's own `ServerArgs` in a process that pretends to see one GPU model.

Runs in a process of its own: what is replaced below stands in for the missing hardware and never reaches a rank.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import geometry
from .processes import RankConfig
from .release import installed
from .set_ups import flags

GPU_MEMORY_GIB = 141


def write_model_folder(folder: Path) -> Path:
    """A folder with the small model's `config.json`; no weights are read from it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(geometry.MODEL_CONFIG, indent=1))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": geometry.CONTEXT}))
    return folder


def prefill_arguments(model: Path, cp_size: int, chunk: int, bootstrap_port: int) -> list[str]:
    """The documented launch arguments of a CP prefill worker, plus what a small run needs."""
    return [
        *("--model-path", str(model), "--skip-tokenizer-init", "--trust-remote-code", "--host", "127.0.0.1"),
        *("--device", "cuda", "--tensor-parallel-size", str(cp_size)),
        *flags().cp,
        *("--speculative-algorithm", "DSPARK", "--chunked-prefill-size", str(chunk)),
        *("--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mooncake"),
        *("--disaggregation-bootstrap-port", str(bootstrap_port)),
    ]


def pretend_gpus(count: int = 8) -> None:
    """Make SGLang's argument code see `count` H200 GPUs. Imports what looks at the real hardware first."""
    import sglang.srt.layers.quantization
    import sglang.srt.managers.scheduler
    import sglang.srt.models.deepseek_v4_dspark  # noqa: F401
    import torch

    gib = 2**30
    properties = SimpleNamespace(
        major=9, minor=0, total_memory=GPU_MEMORY_GIB * gib, name="NVIDIA H200", multi_processor_count=132
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": count,
        "current_device": 0,
        "get_device_name": properties.name,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "mem_get_info": ((GPU_MEMORY_GIB - 1) * gib, GPU_MEMORY_GIB * gib),
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, _constant(value))
    for module in [module for name, module in sys.modules.items() if name.startswith("sglang")]:
        for name in ("get_device_memory_capacity", "get_nvgpu_memory_capacity"):
            if hasattr(module, name):
                setattr(module, name, _constant(GPU_MEMORY_GIB * 1024))


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


class Resolver:
    """The `resolve` rank: SGLang with (or without) the plugin reads launch arguments."""

    def __init__(self, config: RankConfig, report: Callable[[Any], None]) -> None:
        from sglang.srt.plugins import load_plugins

        pretend_gpus()
        load_plugins()

    def resolve(self, arguments: list[str]) -> bytes | str:
        """A pickled `ServerArgs` for a command line, or the text of the error that SGLang stops with."""
        try:
            return pickle.dumps(installed().resolve(arguments))
        except (Exception, SystemExit) as error:
            return f"{type(error).__name__}: {error}"

    def resolve_past_dspark_check(self, arguments: list[str]) -> bytes | str:
        """The same with one check of stock bypassed: DSPARK under the DP attention that CP resolution sets."""
        import sglang.srt.arg_groups.speculative_hook as speculative_hook

        checked = speculative_hook._handle_dspark

        def bypassed(server_args: Any) -> None:
            held, server_args.enable_dp_attention = server_args.enable_dp_attention, False
            checked(server_args)
            server_args.enable_dp_attention = held

        speculative_hook._handle_dspark = bypassed
        try:
            return self.resolve(arguments)
        finally:
            speculative_hook._handle_dspark = checked

    def hooks(self) -> list[dict[str, Any]]:
        """Hooks of this process and how often they fired."""
        return fired_hooks()


def fired_hooks() -> list[dict[str, Any]]:
    """Installed hooks of this process: id, target, how often each fired."""
    from ..hooks import install

    return [
        {"id": hook.id, "target": hook.target, "fired": install.fired[hook.id]} for hook in install.installed.values()
    ]
