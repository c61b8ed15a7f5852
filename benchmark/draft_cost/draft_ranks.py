"""What `draft_cost` does inside ranks: SGLang's own draft class and loader on a CPU, before and after hooks."""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sglang_dspark_cp.smoke.processes import RankConfig
from sglang_dspark_cp.smoke.ranks import join_groups, without_gpu

PARTS: tuple[tuple[str, str], ...] = (
    ("mlp.experts.", "routed experts"),
    ("mlp.shared_experts.", "shared experts"),
    ("mlp.gate.", "router"),
    ("self_attn.wq_a.", "query path"),
    ("self_attn.wq_b.", "query path"),
    ("self_attn.q_norm.", "query path"),
    ("self_attn.wo_a.", "output path"),
    ("self_attn.wo_b.", "output path"),
    ("self_attn.wkv.", "wkv, kv_norm"),
    ("self_attn.kv_norm.", "wkv, kv_norm"),
    ("main_proj.", "main_proj, main_norm"),
    ("main_norm.", "main_proj, main_norm"),
    ("markov_head.", "Markov head"),
    ("confidence_head.", "confidence head"),
)
"""Part of a parameter's name -> name of the part in `core.costs.draft_parts`."""
REST = "mHC, norms, attention sink"


def part_of(parameter: str) -> str:
    """Which part of the draft a parameter belongs to."""
    return next((part for text, part in PARTS if text in parameter), REST)


def held_bytes(tensors: Iterable[tuple[str, torch.Tensor]], part: Callable[[str], str]) -> dict[str, int]:
    """Bytes by part; storage that several tensors share counts once, for the first."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    for name, tensor in tensors:
        place = tensor.untyped_storage().data_ptr() or id(tensor)
        if place not in seen:
            seen.add(place)
            found[part(name)] = found.get(part(name), 0) + tensor.numel() * tensor.element_size()
    return found


class CostRank:
    """A prefill rank with SGLang's groups and settings; stock until `hook`."""

    def __init__(self, config: RankConfig, report: Callable[[Any], None]) -> None:
        from sglang.srt import runtime_context
        from sglang.srt.layers.moe.utils import initialize_moe_config
        from sglang.srt.plugins import load_plugins

        self.server_args = pickle.loads(config.options["server_args"])
        load_plugins()
        without_gpu()
        runtime_context.publish(self.server_args, role="scheduler")
        self.server_args.__dict__["device"] = "cpu"
        runtime_context.get_context().config_bag("device")._set("device", "cpu")
        size, port = self.server_args.tp_size, config.options["port"]
        join_groups(size, config.rank, port, dp_size=1, cp_size=self.server_args.attn_cp_size)
        initialize_moe_config(self.server_args)
        self._as_the_target_decides()

    def _as_the_target_decides(self) -> None:
        """The target, built before the draft, decides whether shared experts are fused into the routed ones."""
        from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM

        target = SimpleNamespace(config=self._model_config().hf_config)
        DeepseekV4ForCausalLM.determine_num_fused_shared_experts(target)

    def hook(self) -> list[str]:
        """Install the plugin's worker hooks as a prefill worker does; ids of those that prune the draft."""
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        from sglang_dspark_cp.hooks import install

        SpeculativeAlgorithm.DSPARK.create_worker(self.server_args)
        return sorted(name for name in install.installed if name.startswith("context-"))

    def settings(self) -> dict[str, Any]:
        """What SGLang made of the launch arguments, as far as it decides about bytes."""
        from sglang.srt.layers.moe.utils import get_moe_runner_backend
        from sglang.srt.runtime_context import get_exec, get_parallel

        parallel = get_parallel()
        return {
            "tp_size": parallel.tp_size,
            "attn_tp_size": parallel.attn_tp_size,
            "attn_cp_size": self.server_args.attn_cp_size,
            "ep_size": self.server_args.ep_size,
            "moe_runner_backend": get_moe_runner_backend().value,
            "shared_experts_fused": not get_exec().moe.disable_shared_experts_fusion,
        }

    def build(self) -> dict[str, Any]:
        """Build the draft without loading it; bytes of parameters and buffers by part."""
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader import loader

        config, load = self._model_config(), LoadConfig()
        quant = loader._get_quantization_config(config, load)
        before = torch.get_default_dtype()
        torch.set_default_dtype(config.dtype)
        started = time.perf_counter()
        try:
            draft = loader._initialize_model(config, load, quant)
        finally:
            torch.set_default_dtype(before)
        seconds = time.perf_counter() - started
        parts = held_bytes(draft.named_parameters(), part_of)
        buffers = held_bytes(draft.named_buffers(), lambda name: name.rpartition(".")[2])
        found = {
            "class": type(draft).__name__,
            "stages": draft.num_stages,
            "parameters": sum(1 for _ in draft.parameters()),
            "parameter_bytes": sum(parts.values()),
            "parts": parts,
            "buffer_bytes": sum(buffers.values()),
            "buffers": buffers,
            "expert_dtypes": sorted({str(p.dtype) for name, p in draft.named_parameters() if "mlp.experts." in name}),
            "build_seconds": round(seconds, 3),
        }
        del draft
        gc.collect()
        return found

    def load(self) -> dict[str, Any]:
        """Build and load the draft with SGLang's loader: seconds, bytes, files that were opened, bytes off the disk."""
        import safetensors
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader.loader import DefaultModelLoader

        from sglang_dspark_cp.adapters.runtime import runtime

        runtime().draft_loaded = False  # as in a new process: the check for missing tensors is part of the cost
        library: Any = safetensors
        original = library.safe_open
        opened: set[str] = set()

        def traced(file: Any, *args: Any, **kwargs: Any) -> Any:
            opened.add(Path(file).name)
            return original(file, *args, **kwargs)

        config = self._model_config()
        library.safe_open = traced
        read, started = disk_bytes(), time.perf_counter()
        try:
            draft = DefaultModelLoader(LoadConfig()).load_model(model_config=config, device_config=DeviceConfig("cpu"))
        finally:
            library.safe_open = original
        seconds = time.perf_counter() - started
        found = {
            "seconds": seconds,
            "parameter_bytes": sum(held_bytes(draft.named_parameters(), part_of).values()),
            "files_opened": len(opened),
            "disk_bytes": disk_bytes() - read,
        }
        del draft
        gc.collect()
        return found

    def _model_config(self) -> Any:
        from sglang.srt.configs.model_config import ModelConfig

        return ModelConfig.from_server_args(
            self.server_args, model_path=self.server_args.model_path, is_draft_model=True
        )


def disk_bytes() -> int:
    """Bytes that this process caused to be fetched from storage so far, page faults of mapped files included."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0
