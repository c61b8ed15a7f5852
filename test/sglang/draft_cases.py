"""What `test_draft` does inside ranks: SGLang's own draft class and loader, whole and context-only, on a CPU."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sglang_dspark_cp.core import reference
from sglang_dspark_cp.core.draft_prune import DecodeOnly, parameter_bytes
from sglang_dspark_cp.smoke.processes import RankConfig
from sglang_dspark_cp.smoke.ranks import join_groups, without_gpu
from sglang_dspark_cp.smoke.release import installed

PAGE = 256


class DraftRank:
    """A prefill rank without hooks until `hook` is called."""

    def __init__(self, config: RankConfig, report: Callable[[Any], None]) -> None:
        from sglang.srt.plugins import load_plugins

        options = config.options
        self.server_args = pickle.loads(options["server_args"])
        load_plugins()
        without_gpu()
        installed().publish_prefill(self.server_args, config.rank)
        join_groups(options["cp_size"], config.rank, options["port"], dp_size=1, cp_size=options["cp_size"])
        self.opened: list[str] = []
        self.draft: Any = None

    def hook(self) -> list[str]:
        """Install the worker hooks; their ids."""
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        from sglang_dspark_cp.hooks.install import installed as hooks

        SpeculativeAlgorithm.DSPARK.create_worker(self.server_args)
        return sorted(hooks)

    def load(self, folder: str | None = None) -> dict[str, Any]:
        """Build and load the draft with SGLang's own loader; what it holds, and which files were opened."""
        import safetensors
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.model_loader.loader import DefaultModelLoader

        path = folder or self.server_args.model_path
        config = ModelConfig.from_server_args(self.server_args, model_path=path, is_draft_model=True)
        original, self.opened = safetensors.safe_open, []

        def traced(file: Any, *args: Any, **kwargs: Any) -> Any:
            self.opened.append(Path(file).name)
            return original(file, *args, **kwargs)

        safetensors.safe_open = traced
        try:
            self.draft = DefaultModelLoader(LoadConfig()).load_model(
                model_config=config, device_config=DeviceConfig("cpu")
            )
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        finally:
            safetensors.safe_open = original
        return {
            "parameters": {name: (tuple(p.shape), str(p.dtype)) for name, p in self.draft.named_parameters()},
            "bytes": parameter_bytes(self.draft),
            "opened": sorted(set(self.opened)),
            "largest": max(p.numel() for p in self.draft.parameters()),
        }

    @torch.no_grad()
    def rows(self, tokens: int) -> bytes:
        """Pool bytes after the draft's own KV writer wrote `tokens` rows of known hidden states."""
        config = self.draft.config
        generator = torch.Generator().manual_seed(tokens)
        features = self.draft.num_target_features * config.hidden_size
        hidden = torch.randn(tokens, features, generator=generator).to(torch.bfloat16)
        slots = torch.randperm(2 * PAGE, generator=generator)[:tokens].int()
        pages = torch.zeros(self.draft.num_stages, 2, reference.page_bytes(PAGE), dtype=torch.uint8)

        def write(
            *, layer_id: int, swa_loc: torch.Tensor, kv: torch.Tensor, kv_weight: torch.Tensor, eps: float, **rest: Any
        ) -> None:
            rows = reference.make_rows(kv, kv_weight, eps, rest["freqs_cis"], rest["positions"])
            reference.write_rows(pages[layer_id], PAGE, swa_loc, rows)

        self.draft.write_target_hidden_kv(
            main_hidden=hidden,
            swa_loc=slots,
            positions=torch.arange(300, 300 + tokens),
            pool=SimpleNamespace(set_swa_key_buffer_radix_fused_norm_rope=write, uniform_fp8=False),
        )
        assert pages.any()
        return pages.numpy().tobytes()

    def update(self, names: list[str], factor: float) -> dict[str, float]:
        """A run-time update through `load_weights` with needed and other tensors; largest value of each after it."""
        parameters = dict(self.draft.named_parameters())
        given = {name: torch.full(parameters[self._parameter(name)].shape, factor) for name in names}
        extra = {"mtp.0.ffn.experts.0.w1.weight": torch.ones(4, 4), "layers.0.attn.wkv.weight": torch.ones(4, 4)}
        self.draft.load_weights(iter({**extra, **given}.items()))
        return {name: float(parameters[self._parameter(name)].detach().float().max()) for name in names}

    def _parameter(self, name: str) -> str:
        found = self.draft._remap_dspark_weight_name(name)
        assert isinstance(found, str)
        return found

    def draft_something(self) -> list[str]:
        """What the pruned draft says to the ways of asking it to draft."""
        stand_in = DecodeOnly("the confidence head")
        calls: list[Callable[[], Any]] = [
            lambda: self.draft.forward(torch.zeros(1), torch.zeros(1), None),
            lambda: self.draft(torch.zeros(1), torch.zeros(1), None),
            lambda: stand_in(torch.zeros(1)),
        ]
        found = []
        for call in calls:
            try:
                call()
                found.append("answered")
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
        return found

    def estimate(self) -> dict[str, int]:
        """`skipped_bytes` from a target layer that SGLang builds here with the same config."""
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.model_loader.loader import _get_quantization_config
        from sglang.srt.models import deepseek_v4

        from sglang_dspark_cp.adapters.draft import skipped_bytes

        config = ModelConfig.from_server_args(self.server_args)
        quant = _get_quantization_config(config, LoadConfig())
        # Read from the environment when the module is imported, which the fork server did before this process began.
        deepseek_v4._FP8_WO_A_GEMM = quant is not None
        deepseek_v4.get_rope_wrapper = lambda *args, **kwargs: None  # holds no parameter; its CPU form wants vLLM
        torch.set_default_dtype(torch.bfloat16)
        layer = deepseek_v4.DeepseekV4DecoderLayer(config.hf_config, 0, quant, prefix="model.layers.0")
        torch.set_default_dtype(torch.float32)
        return skipped_bytes(SimpleNamespace(model=SimpleNamespace(layers=[layer])), self.draft)

    def free(self) -> None:
        """Drop the draft."""
        self.draft = None
        gc.collect()

    def reset(self) -> None:
        """As in a new process: the next load is the first."""
        from sglang_dspark_cp.adapters.runtime import runtime

        runtime().draft_loaded = False
