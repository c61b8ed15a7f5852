"""The context-only draft on prefill: SGLang's draft class and loader, a checkpoint on disk, before and after hooks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from spawning import Spawn

from sglang_dspark_cp.core.draft_prune import is_needed
from sglang_dspark_cp.smoke.arguments import prefill_arguments
from sglang_dspark_cp.smoke.checkpoint import WEIGHTS_FILE, write_checkpoint
from sglang_dspark_cp.smoke.processes import RankPool, RankProcess, free_ports

pytestmark = pytest.mark.timeout(240)

CP = 2
INDEX = "model.safetensors.index.json"
NEEDED_FILES = ["model-needed-0.safetensors", "model-needed-1.safetensors"]


def split(folder: Path) -> None:
    """The checkpoint's one file as several; needed tensors share theirs with others."""
    tensors = load_file(folder / WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).unlink()
    weight_map = {}
    for name in tensors:
        if is_needed(name) or (name.startswith("mtp.") and ".attn." in name):
            weight_map[name] = NEEDED_FILES[0 if name.startswith("mtp.0.") else 1]
        elif name.startswith("mtp."):
            weight_map[name] = "model-draft.safetensors"
        else:
            weight_map[name] = "model-target.safetensors"
    for file in sorted(set(weight_map.values())):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@dataclass
class Group:
    """Ranks of one quantisation and their checkpoint."""

    folder: Path
    ranks: list[RankProcess]
    stock: list[dict[str, Any]]
    stock_rows: list[bytes]
    hooks: list[str]
    pool: RankPool

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        for rank in self.ranks:
            rank.start(method, *arguments)
        return self.pool.collect(self.ranks, 90.0)


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def group(
    request: pytest.FixtureRequest, pool: RankPool, spawn: Spawn, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Group]:
    """Two ranks that loaded stock's whole draft, wrote rows with it, and then got the hooks."""
    quant = request.param
    folder = tmp_path_factory.mktemp(quant)
    write_checkpoint(folder, kind="random", quant=quant)
    split(folder)
    environment = {
        "SGLANG_PLUGINS": "dspark_cp",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "SGLANG_NCCL_SO_PATH": "/nonexistent",
        **({"SGLANG_DSV4_FP4_EXPERTS": "0", "SGLANG_OPT_FP8_WO_A_GEMM": "0"} if quant == "bf16" else {}),
    }
    (resolver,) = spawn("sglang_dspark_cp.smoke.arguments:Resolver", environment=environment)
    extra = ["--fp8-gemm-backend", "triton"] if quant == "fp8" else []
    resolver.start("resolve", [*prefill_arguments(folder, CP, 512, 8998), *extra])
    (server_args,) = pool.collect([resolver], 60.0)
    assert isinstance(server_args, bytes), server_args
    (port,) = free_ports(1)
    ranks = spawn("draft_cases:DraftRank", CP, environment, cp_size=CP, server_args=server_args, port=port)
    found = Group(folder, ranks, [], [], [], pool)
    found.stock = found.ask("load")
    assert all("error" not in each for each in found.stock), found.stock[0]
    if quant == "bf16":
        found.stock_rows = found.ask("rows", 40)
    found.ask("free")
    found.hooks = found.ask("hook")[0]
    yield found
    for rank in (*ranks, resolver):
        rank.kill()
        pool.ranks.remove(rank)


def test_parameters_are_exactly_the_needed_ones(group: Group) -> None:
    assert {name for name in group.hooks if name.startswith("context-")} == {
        "context-stage",
        "context-markov",
        "context-draft",
        "context-forward",
        "context-load",
        "context-read",
        "context-worker",
    }
    parts = ["stages.0.main_proj.weight", "stages.0.main_norm.weight"]
    parts += [f"stages.{s}.self_attn.{part}.weight" for s in range(3) for part in ("wkv", "kv_norm")]
    if "fp8" in group.folder.name:
        parts += [f"{name}_scale_inv" for name in parts if "proj" in name or "wkv" in name]
    group.ask("reset")
    for stock, pruned in zip(group.stock, group.ask("load"), strict=True):
        assert "error" not in pruned, pruned
        assert set(pruned["parameters"]) == set(parts)
        for name, value in pruned["parameters"].items():
            assert stock["parameters"][name] == value
        assert pruned["bytes"] < 0.2 * stock["bytes"]  # a small draft: its experts are few


def test_only_files_with_needed_tensors_are_opened(group: Group) -> None:
    assert "model-target.safetensors" in group.stock[0]["opened"]
    intact = {}
    for name in ("model-target.safetensors", "model-draft.safetensors"):
        intact[name] = (group.folder / name).read_bytes()
        (group.folder / name).write_bytes(b"not a safetensors file: whoever opens it fails")
    group.ask("reset")
    try:
        for found in group.ask("load"):
            assert found.get("opened") == NEEDED_FILES, found
    finally:
        for name, content in intact.items():
            (group.folder / name).write_bytes(content)


@pytest.mark.parametrize("group", ["bf16"], indirect=True)  # fp8 projections have GPU kernels only
def test_rows_are_those_of_the_whole_draft(group: Group) -> None:
    group.ask("reset")
    group.ask("load")
    assert group.ask("rows", 40) == group.stock_rows


def test_drafting_is_refused(group: Group) -> None:
    group.ask("reset")
    group.ask("load")
    for text in group.ask("draft_something")[0]:
        assert text.startswith("PrunedDraftError: ")
        assert "decode workers" in text
        assert "SGLANG_DSPARK_CP_DRAFT=full" in text


def test_updates_at_run_time_reach_what_exists(group: Group) -> None:
    if "fp8" in group.folder.name:
        names = ["mtp.0.main_norm.weight", "mtp.1.attn.kv_norm.weight"]
    else:
        names = ["mtp.0.main_proj.weight", "mtp.2.attn.wkv.weight", "mtp.1.attn.kv_norm.weight"]
    group.ask("reset")
    group.ask("load")
    assert group.ask("update", names, 3.0) == [dict.fromkeys(names, 3.0)] * CP


def broken(group: Group, tmp_path: Path, name: str, change: Any) -> str:
    """The error of a load from a copy of the checkpoint with one tensor changed or gone (None)."""
    folder = Path(shutil.copytree(group.folder, tmp_path / "broken"))
    index = json.loads((folder / INDEX).read_text())
    file = folder / index["weight_map"][name]
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    if changed is None:
        del index["weight_map"][name]
        (folder / INDEX).write_text(json.dumps(index))
    else:
        tensors[name] = changed
    save_file(tensors, file, metadata={"format": "pt"})
    group.ask("reset")
    errors = [found.get("error", "") for found in group.ask("load", str(folder))]
    assert len(set(errors)) == 1
    assert isinstance(errors[0], str)
    return errors[0]


@pytest.mark.parametrize("name", ["mtp.0.main_norm.weight", "mtp.2.attn.wkv.weight", "mtp.1.attn.kv_norm.weight"])
def test_a_missing_tensor_is_named(group: Group, tmp_path: Path, name: str) -> None:
    text = broken(group, tmp_path, name, lambda tensor: None)
    assert text.startswith("DraftLoadError: the checkpoint lacks 1 tensor(s)")
    assert name in text


@pytest.mark.parametrize("group", ["fp8"], indirect=True)
def test_a_missing_scale_is_named(group: Group, tmp_path: Path) -> None:
    assert "mtp.1.attn.wkv.scale" in broken(group, tmp_path, "mtp.1.attn.wkv.scale", lambda tensor: None)


def test_a_tensor_of_another_shape_is_named(group: Group, tmp_path: Path) -> None:
    text = broken(group, tmp_path, "mtp.1.attn.kv_norm.weight", lambda tensor: torch.ones(256, dtype=tensor.dtype))
    assert text.startswith("DraftLoadError: tensor mtp.1.attn.kv_norm.weight of the draft has shape (256,)")
    assert "(512,)" in text


def test_the_bytes_that_the_log_names_are_those_of_stock(group: Group) -> None:
    group.ask("reset")
    pruned = group.ask("load")
    for stock, kept, skipped in zip(group.stock, pruned, group.ask("estimate"), strict=True):
        difference = stock["bytes"] - kept["bytes"]
        # What is not counted: norm and stream mixing in front of the LM head, and the confidence head.
        assert 0.99 * difference < sum(skipped.values()) <= difference
