"""Which set-ups are admitted, and what the refusals say."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sglang_dspark_cp.core.topology import PrefillTopology, require_live_groups, require_supported, violations
from sglang_dspark_cp.errors import TopologyError

SUPPORTED = PrefillTopology(
    tp_size=8, dp_size=1, pp_size=1, attn_cp_size=8, cp_strategy="interleave", transfer_backend="mooncake"
)

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "zigzag": ({"cp_strategy": "zigzag"}, "'zigzag'", "--cp-strategy interleave"),
    "no strategy": ({"cp_strategy": None}, "'unset'", "--enable-prefill-cp"),
    "PP 2": ({"pp_size": 2}, "pipeline parallel size 2", "--pipeline-parallel-size 1"),
    "dp 2": ({"dp_size": 2, "attn_cp_size": 1}, "data parallel size 2", "--data-parallel-size 1"),
    "attention TP 2": ({"attn_cp_size": 4}, "attention TP 2 ", "--attention-context-parallel-size 8"),
    "one rank": ({"tp_size": 1, "attn_cp_size": 1}, "tensor parallel size 1", "--tensor-parallel-size"),
    "two hosts": ({"tp_size": 16, "attn_cp_size": 16}, "tensor parallel size 16", "--tensor-parallel-size"),
    "decode CP": ({"dcp_size": 2}, "decode context parallel size 2", "--dcp-size 1"),
    "nixl": ({"transfer_backend": "nixl"}, "'nixl'", "--disaggregation-transfer-backend mooncake"),
    "CP v2": ({"cp_v2": True}, "SGLANG_ENABLE_CP_V2=1", "unset SGLANG_ENABLE_CP_V2"),
    "unified KV": ({"unified_kv": True}, "unified_kv_triton", "unset SGLANG_HACK_FLASHMLA_BACKEND"),
    "HiCache": ({"hierarchical_cache": True}, "hierarchical cache", "--enable-hierarchical-cache"),
    "layer split": ({"cache_layer_split": True}, "layers split", "--enable-dsa-cache-layer-split"),
    "pdmux": ({"pdmux": True}, "PD multiplexing", "--enable-pdmux"),
    "two batches": ({"two_batch_overlap": True}, "two-batch overlap", "--enable-two-batch-overlap"),
    "prefill graph": ({"prefill_graph": True}, "CUDA graph for prefill", "--cuda-graph-backend-prefill"),
}


@pytest.mark.parametrize("tp_size", [2, 4, 8])
@pytest.mark.parametrize("derived", [False, True], ids=["size given", "size derived"])
@pytest.mark.parametrize("backend", ["mooncake", "mooncake_tcp"])
def test_supported_setups_pass(tp_size: int, derived: bool, backend: str) -> None:
    topology = dataclasses.replace(
        SUPPORTED, tp_size=tp_size, attn_cp_size=1 if derived else tp_size, transfer_backend=backend
    )
    assert violations(topology) == []
    require_supported(topology)


@pytest.mark.parametrize("name", REFUSED)
def test_each_unsupported_setting_is_refused_with_what_why_and_the_flag(name: str) -> None:
    change, found, flag = REFUSED[name]
    (violation,) = violations(dataclasses.replace(SUPPORTED, **change))
    assert found in violation.found
    assert flag in violation.fix
    assert violation.allowed
    assert violation.why
    with pytest.raises(TopologyError) as caught:
        require_supported(dataclasses.replace(SUPPORTED, **change))
    text = str(caught.value)
    assert found in text
    assert flag in text
    assert "refused before weights load, 1 setting(s)" in text


def test_every_field_can_lead_to_a_refusal() -> None:
    changed = {field for change, _, _ in REFUSED.values() for field in change}
    assert changed == {field.name for field in dataclasses.fields(PrefillTopology)}


def test_all_violations_are_named_at_once() -> None:
    worst = PrefillTopology(
        tp_size=8, dp_size=2, pp_size=2, attn_cp_size=8, cp_strategy="zigzag", transfer_backend="nixl", dcp_size=2,
        cp_v2=True, unified_kv=True, hierarchical_cache=True, cache_layer_split=True, pdmux=True,
        two_batch_overlap=True,
    )  # fmt: skip
    found = violations(worst)
    assert len(found) == 12
    with pytest.raises(TopologyError) as caught:
        require_supported(worst)
    text = str(caught.value)
    assert "12 setting(s)" in text
    for number, violation in enumerate(found, 1):
        assert f"{number}. {violation}" in text


def test_attention_tp_is_a_ratio_also_where_it_is_below_one() -> None:
    (violation,) = violations(dataclasses.replace(SUPPORTED, tp_size=4))
    assert violation.found == "attention TP 0.5 (tp 4, attention CP 8, dp 1)"


def test_live_groups() -> None:
    require_live_groups(attn_tp_size=1, attn_cp_size=8, tp_size=8, pp_size=1)


@pytest.mark.parametrize(
    "change", [{"attn_tp_size": 2}, {"attn_cp_size": 4}, {"tp_size": 16}, {"pp_size": 2}], ids=lambda c: next(iter(c))
)
def test_live_groups_of_another_shape_are_refused(change: dict[str, int]) -> None:
    sizes = {"attn_tp_size": 1, "attn_cp_size": 8, "tp_size": 8, "pp_size": 1, **change}
    with pytest.raises(TopologyError, match="--tensor-parallel-size") as caught:
        require_live_groups(**sizes)
    wanted = (
        f"attention TP {sizes['attn_tp_size']}, attention CP {sizes['attn_cp_size']}, TP {sizes['tp_size']},"
        f" PP {sizes['pp_size']}"
    )
    assert wanted in str(caught.value)
