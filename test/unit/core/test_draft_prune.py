"""Which tensors make draft KV, and what happens when they are not there."""

from __future__ import annotations

import pytest
import torch

from sglang_dspark_cp.core.draft_prune import (
    DecodeOnly,
    DraftLoad,
    checkpoint_name,
    is_needed,
    needed_files,
    parameter_bytes,
)
from sglang_dspark_cp.errors import DraftLoadError, PrunedDraftError

NEEDED = [
    "mtp.0.main_proj.weight",
    "mtp.0.main_proj.scale",
    "mtp.0.main_norm.weight",
    "mtp.2.attn.wkv.weight",
    "mtp.12.attn.kv_norm.weight",
]
OTHERS = [
    "layers.0.attn.wkv.weight",
    "mtp.0.attn.wq_a.weight",
    "mtp.0.attn.wkv_extra.weight",
    "mtp.0.ffn.experts.3.w1.weight",
    "mtp.2.markov_head.markov_w1.weight",
    "mtp.2.norm.weight",
    "mtp.0.attn_norm.weight",
    "xmtp.0.main_proj.weight",
    "mtp.0.main_proj.weight.part",
]


def test_names() -> None:
    assert [name for name in (*NEEDED, *OTHERS) if is_needed(name)] == NEEDED


def test_files_of_an_index() -> None:
    weight_map = {NEEDED[0]: "a", NEEDED[3]: "b", OTHERS[0]: "a", OTHERS[3]: "c"}
    assert needed_files(weight_map) == {"a", "b"}


def parameters() -> dict[str, torch.nn.Parameter]:
    shapes = {
        "stages.0.main_norm.weight": (8,),
        "stages.1.self_attn.wkv.weight": (4, 8),
        "stages.1.self_attn.wkv.weight_scale_inv": (1, 1),
    }
    return {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}


def remap(name: str) -> str | None:
    return name.replace("mtp.", "stages.").replace(".attn.", ".self_attn.").replace(".scale", ".weight_scale_inv")


def test_a_complete_load() -> None:
    load = DraftLoad(parameters(), remap, check_shapes=True)
    given = {
        "mtp.0.main_norm.weight": torch.ones(8),
        "mtp.1.attn.wkv.weight": torch.ones(4, 8),
        "mtp.1.attn.wkv.scale": torch.ones(1, 1),
        "mtp.1.ffn.experts.0.w1.weight": torch.ones(3),
    }
    assert [name for name, _ in load.needed(given.items())] == list(given)[:3]
    assert load.skipped == 1
    load.require_complete()


def test_what_is_missing_is_named_as_in_the_checkpoint() -> None:
    load = DraftLoad(parameters(), remap, check_shapes=True)
    list(load.needed([("mtp.0.main_norm.weight", torch.ones(8))]))
    with pytest.raises(DraftLoadError, match=r"lacks 2 tensor\(s\) .*: mtp\.1\.attn\.wkv\.scale, mtp\.1\.attn\.wkv\.w"):
        load.require_complete()
    assert checkpoint_name("stages.0.main_proj.weight") == "mtp.0.main_proj.weight"


def test_shapes_are_checked_at_the_first_load_only() -> None:
    wrong = [("mtp.1.attn.wkv.weight", torch.ones(4, 9))]
    with pytest.raises(DraftLoadError, match=r"mtp\.1\.attn\.wkv\.weight .* \(4, 9\), allowed is \(4, 8\)"):
        list(DraftLoad(parameters(), remap, check_shapes=True).needed(wrong))
    assert list(DraftLoad(parameters(), remap, check_shapes=False).needed(wrong)) == wrong


def test_a_stand_in_refuses_and_holds_nothing() -> None:
    stand_in = DecodeOnly("the confidence head")
    assert list(stand_in.parameters()) == []
    with pytest.raises(PrunedDraftError, match=r"the confidence head of the DSpark draft .* decode workers"):
        stand_in(torch.zeros(1), anything=1)


def test_shared_parameters_count_once() -> None:
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.zeros(4))
    module.b = module.a
    module.c = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    assert parameter_bytes(module) == 16 + 6
