"""Is the draft in the checkpoint? Looks at config.json, the index and safetensors headers; loads no tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..core.costs import CostInputError, ModelShape, shape_from_config
from ..core.draft_prune import is_needed, needed_files
from .doctor_check import Check, failed, not_checked, passed
from .doctor_resolve import Answer

CHECKPOINT = "Checkpoint"
INDEX = "model.safetensors.index.json"
FIX = "use a DeepSeek-V4 checkpoint with its DSpark draft (mtp.*), complete on this machine"
LONGEST_HEADER = 100_000_000
"""The format allows no longer one."""


def load_config(folder: Path) -> dict[str, Any] | str:
    """A parsed config.json, or why there is none."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        return f"{folder / 'config.json'}: {error.strerror}"
    except ValueError as error:
        return f"{folder / 'config.json'} is not JSON ({error})"
    return found if isinstance(found, dict) else f"{folder / 'config.json'} is not a JSON object"


def shape_of(folder: Path) -> ModelShape | str:
    """Numbers of the model in a folder, or why they are not known."""
    config = load_config(folder)
    if isinstance(config, str):
        return config
    try:
        return shape_from_config(config, folder.name, str(folder / "config.json"))
    except CostInputError as error:
        return str(error)


def expected_tensors(shape: ModelShape) -> dict[str, tuple[int, ...] | None]:
    """Tensor that draft KV is made with -> its shape; None for scales, whose layout depends on the quantisation."""
    found: dict[str, tuple[int, ...] | None] = {
        "mtp.0.main_proj.weight": (shape.hidden, shape.targets * shape.hidden),
        "mtp.0.main_norm.weight": (shape.hidden,),
    }
    linear = ["mtp.0.main_proj"]
    for stage in range(shape.stages):
        found[f"mtp.{stage}.attn.wkv.weight"] = (shape.head_dim, shape.hidden)
        found[f"mtp.{stage}.attn.kv_norm.weight"] = (shape.head_dim,)
        linear.append(f"mtp.{stage}.attn.wkv")
    if shape.linear == "fp8":
        found.update(dict.fromkeys((f"{name}.scale" for name in linear), None))
    assert all(map(is_needed, found))
    return found


def header(file: Path) -> dict[str, Any]:
    """Tensors of a safetensors file by name.

    Raises:
        ValueError: it is not one, or bytes are missing at its end.
    """
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if not 2 <= size <= LONGEST_HEADER:
            raise ValueError("not a safetensors file (a Git LFS pointer?)")
        try:
            found = json.loads(opened.read(size))
        except ValueError:
            raise ValueError("its header is cut off or not JSON") from None
    tensors = {name: value for name, value in found.items() if name != "__metadata__"}
    end = 8 + size + max((value["data_offsets"][1] for value in tensors.values()), default=0)
    if file.stat().st_size < end:
        raise ValueError(f"{file.stat().st_size:,} of {end:,} bytes")
    return tensors


def _read_headers(folder: Path, names: Iterable[str]) -> tuple[dict[str, tuple[str, Any]], list[str]]:
    """(tensor -> file and entry, files with what is wrong with them)."""
    tensors: dict[str, tuple[str, Any]] = {}
    wrong = []
    for name in sorted(names):
        try:
            tensors.update({tensor: (name, entry) for tensor, entry in header(folder / name).items()})
        except OSError as error:
            wrong.append(f"{name}: {error.strerror}")
        except ValueError as error:
            wrong.append(f"{name}: {error}")
    return tensors, wrong


def _weight_map(folder: Path) -> Mapping[str, str] | str | None:
    """The index, why it cannot be read, or None if there is none."""
    if not (folder / INDEX).is_file():
        return None
    try:
        found = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{INDEX} cannot be read: {type(error).__name__} {error}"
    return found if isinstance(found, dict) else f"{INDEX} has no weight_map"


def draft_checks(answer: Answer) -> list[Check]:
    """Whether every tensor that draft KV is made with is in the checkpoint, with the right shape, in whole files."""
    name, where = "draft tensors", answer.draft_folder or answer.model_folder
    model = answer.facts.get("speculative_draft_model_path") or answer.facts.get("model_path")
    if answer.facts.get("load_format") == "dummy":
        return [not_checked(CHECKPOINT, name, "--load-format dummy", "no weights are read")]
    if where is None:
        why = "it is not a folder on this machine" if model else "the arguments were not read"
        fix = "--model-path with the folder of the downloaded checkpoint" if model else ""
        return [not_checked(CHECKPOINT, name, str(model or "no model"), why, fix)]
    folder = Path(where)
    shape = shape_of(folder)
    if isinstance(shape, str):
        return [failed(CHECKPOINT, "config.json", shape, "config.json of a model with a DSpark draft", _WHY, FIX)]
    config = passed(CHECKPOINT, "config.json", f"{shape.stages} draft stages, {shape.linear} weights, {folder}")
    return [config, *_tensor_checks(folder, shape)]


_WHY = "draft KV is made with these tensors before decode can draft"


def _tensor_checks(folder: Path, shape: ModelShape) -> list[Check]:
    name, expected = "draft tensors", expected_tensors(shape)
    index = _weight_map(folder)
    if isinstance(index, str):
        return [failed(CHECKPOINT, "index", index, "a readable index", "SGLang finds tensors by it", FIX)]
    checks = []
    if index is None:
        files = {path.name for path in folder.glob("*.safetensors")}
        if not files:
            return [not_checked(CHECKPOINT, name, "no *.safetensors file", "other formats are not looked into")]
    else:
        files = needed_files(index)
        gone = sorted(file for file in set(index.values()) if not (folder / file).is_file())
        if gone:
            found = f"{len(gone)} of {len(set(index.values()))} files of the index are missing: {', '.join(gone[:5])}"
            checks.append(failed(CHECKPOINT, "files", found, "all of them", "weights cannot be loaded", FIX))
        files -= set(gone)
    tensors, wrong = _read_headers(folder, files)
    if wrong:
        why = "weights cannot be loaded"
        checks.append(failed(CHECKPOINT, "files", "; ".join(wrong), "whole safetensors files", why, FIX))
    missing = [each for each in expected if each not in tensors]
    bent = [
        f"{each} {tensors[each][1]['shape']} instead of {list(size)}"
        for each, size in expected.items()
        if size is not None and each in tensors and tuple(tensors[each][1]["shape"]) != size
    ]
    if missing:
        found = f"{len(missing)} of {len(expected)} missing: {', '.join(missing)}"
        return [*checks, failed(CHECKPOINT, name, found, "all of them", _WHY, FIX)]
    if bent:
        found, why = "; ".join(bent), "the files do not belong to this config.json"
        return [*checks, failed(CHECKPOINT, name, found, "shapes of config.json", why, FIX)]
    held = sorted({tensors[each][0] for each in expected})
    return [*checks, passed(CHECKPOINT, name, f"all {len(expected)} in {', '.join(held)}")]
