"""Smoke checkpoints: the layout that the engine loads, and the oracle's promise in a CPU simulation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from sglang_dspark_cp.smoke.checkpoint import (
    WEIGHTS_FILE,
    CheckpointInfo,
    Kind,
    Quant,
    quantize_block_fp8,
    read_checkpoint_info,
    score_profile,
    write_checkpoint,
)
from sglang_dspark_cp.smoke.checkpoint_sim import CONTROLS, CheckpointSim, Prompt, accept_length, run_target, store_row

EXPERTS = 2
HIDDEN = 1024
VOCAB = 1024
QUANTS: tuple[Quant, ...] = ("bf16", "fp8")
Layout = dict[str, tuple[str, tuple[int, ...]]]


def expected_layout(quant: Quant, experts: int) -> Layout:
    """Names, types and shapes of every tensor, written out apart from the code under test."""
    out: Layout = {}

    def linear(name: str, n: int, k: int) -> None:
        out[f"{name}.weight"] = ("BF16" if quant == "bf16" else "F8_E4M3", (n, k))
        if quant == "fp8":
            out[f"{name}.scale"] = ("F32", (n // 128, k // 128))

    def plain(name: str, *shape: int, dtype: str = "BF16") -> None:
        out[name] = (dtype, shape)

    def hyper_head(prefix: str) -> None:
        plain(f"{prefix}hc_head_fn", 4, 4 * HIDDEN, dtype="F32")
        plain(f"{prefix}hc_head_base", 4, dtype="F32")
        plain(f"{prefix}hc_head_scale", 1, dtype="F32")

    def compressor(prefix: str, ratio: int, dim: int) -> None:
        width = 2 * dim if ratio == 4 else dim
        plain(f"{prefix}.wkv.weight", width, HIDDEN)
        plain(f"{prefix}.wgate.weight", width, HIDDEN)
        plain(f"{prefix}.ape", ratio, width, dtype="F32")
        plain(f"{prefix}.norm.weight", dim)

    for name in ("embed", "head"):
        plain(f"{name}.weight", VOCAB, HIDDEN)
    plain("norm.weight", HIDDEN)
    hyper_head("")
    layers = [(f"layers.{i}", ratio, i < 3) for i, ratio in enumerate((0, 0, 4, 128, 4, 128))]
    for prefix, ratio, hashed in [*layers, *((f"mtp.{s}", 0, False) for s in range(3))]:
        linear(f"{prefix}.attn.wq_a", 256, HIDDEN)
        linear(f"{prefix}.attn.wq_b", 64 * 512, 256)
        linear(f"{prefix}.attn.wkv", 512, HIDDEN)
        linear(f"{prefix}.attn.wo_a", 8 * 128, 64 * 512 // 8)
        linear(f"{prefix}.attn.wo_b", HIDDEN, 8 * 128)
        plain(f"{prefix}.attn.q_norm.weight", 256)
        plain(f"{prefix}.attn.kv_norm.weight", 512)
        plain(f"{prefix}.attn.attn_sink", 64, dtype="F32")
        if ratio:
            compressor(f"{prefix}.attn.compressor", ratio, 512)
        if ratio == 4:
            linear(f"{prefix}.attn.indexer.wq_b", 64 * 128, 256)
            plain(f"{prefix}.attn.indexer.weights_proj.weight", 64, HIDDEN)
            compressor(f"{prefix}.attn.indexer.compressor", ratio, 128)
        plain(f"{prefix}.ffn.gate.weight", experts, HIDDEN)
        if hashed:
            plain(f"{prefix}.ffn.gate.tid2eid", VOCAB, 2, dtype="I64")
        else:
            plain(f"{prefix}.ffn.gate.bias", experts, dtype="F32")
        for expert in (*(f"experts.{e}" for e in range(experts)), "shared_experts"):
            linear(f"{prefix}.ffn.{expert}.w1", 256, HIDDEN)
            linear(f"{prefix}.ffn.{expert}.w3", 256, HIDDEN)
            linear(f"{prefix}.ffn.{expert}.w2", HIDDEN, 256)
        for site in ("attn", "ffn"):
            plain(f"{prefix}.hc_{site}_fn", 24, 4 * HIDDEN, dtype="F32")
            plain(f"{prefix}.hc_{site}_base", 24, dtype="F32")
            plain(f"{prefix}.hc_{site}_scale", 3, dtype="F32")
            plain(f"{prefix}.{site}_norm.weight", HIDDEN)
    linear("mtp.0.main_proj", HIDDEN, 3 * HIDDEN)
    plain("mtp.0.main_norm.weight", HIDDEN)
    plain("mtp.2.norm.weight", HIDDEN)
    hyper_head("mtp.2.")
    plain("mtp.2.markov_head.markov_w1.weight", VOCAB, 64)
    plain("mtp.2.markov_head.markov_w2.weight", VOCAB, 64)
    plain("mtp.2.confidence_head.proj.weight", 1, HIDDEN + 64, dtype="F32")
    return out


def read_layout(path: Path) -> Layout:
    with safe_open(str(path / WEIGHTS_FILE), framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for checkpoints of some hundred MB, emptied at the end."""
    path = tmp_path_factory.mktemp("checkpoints")
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def oracles(folder: Path) -> dict[Quant, CheckpointInfo]:
    return {q: write_checkpoint(folder / f"oracle-{q}", kind="oracle", quant=q, experts=EXPERTS) for q in QUANTS}


@pytest.fixture(scope="module", params=QUANTS)
def sim(request: pytest.FixtureRequest, oracles: dict[Quant, CheckpointInfo]) -> CheckpointSim:
    return CheckpointSim(oracles[request.param].path)


@pytest.fixture(scope="module")
def pair(sim: CheckpointSim) -> tuple[Prompt, Prompt]:
    """Two prompts of one length, run through the target."""
    first, second = (run_target(sim, sim.info.sample_prompt(170, seed), 24) for seed in (0, 1))
    return first, second


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("kind", ["oracle", "random"])
def test_layout(kind: Kind, quant: Quant, folder: Path, oracles: dict[Quant, CheckpointInfo]) -> None:
    path = folder / f"{kind}-{quant}"
    if kind == "random":
        write_checkpoint(path, kind=kind, quant=quant, experts=EXPERTS)
    assert read_layout(path) == expected_layout(quant, EXPERTS)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(expected_layout(quant, EXPERTS))
    info = read_checkpoint_info(path)
    assert info.num_tensors == len(index["weight_map"])
    assert index["metadata"]["total_size"] == info.num_bytes <= (path / WEIGHTS_FILE).stat().st_size
    assert (info.kind, info.quant, info.period) == (kind, quant, 120 if kind == "oracle" else None)


def test_config(oracles: dict[Quant, CheckpointInfo]) -> None:
    for quant, info in oracles.items():
        assert read_checkpoint_info(info.path) == info
        config = json.loads((Path(info.path) / "config.json").read_text())
        assert config["compress_ratios"] == [0, 0, 4, 128, 4, 128, 0, 0, 0]
        assert tuple(config["dspark_target_layer_ids"]) == info.target_layers == (1, 3, 5)
        assert config["dspark_block_size"] == info.gamma == 4
        assert ("quantization_config" in config) is (quant == "fp8")


def test_tokenizer(oracles: dict[Quant, CheckpointInfo]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(oracles["bf16"].path) / "tokenizer.json"))
    prompt = oracles["bf16"].sample_prompt(20)
    assert tokenizer.encode(" ".join(f"w{token}" for token in prompt)).ids == prompt
    assert tokenizer.get_vocab_size() == VOCAB


def test_expected_continuation(oracles: dict[Quant, CheckpointInfo]) -> None:
    info = oracles["bf16"]
    prompt = info.sample_prompt(150)
    whole = prompt + info.expected_continuation(prompt, 300)
    assert all(whole[i] == whole[i - 120] for i in range(150, 450))
    assert info.sample_prompt(150) == prompt != info.sample_prompt(150, seed=1)
    with pytest.raises(ValueError, match="shorter than the period"):
        info.expected_continuation(prompt[:119], 1)
    with pytest.raises(ValueError, match="special"):
        info.expected_continuation([*prompt, 1], 1)


def test_random_has_no_continuation() -> None:
    info = CheckpointInfo("", "random", "bf16", 0, HIDDEN, VOCAB, 4, 128, (1, 3, 5), None, 1, 1)
    with pytest.raises(ValueError, match="oracle"):
        info.expected_continuation(info.sample_prompt(200), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "other"}, "unknown kind"),
        ({"kind": "oracle", "hidden": 896}, "hidden >= 1024"),
        ({"kind": "random", "hidden": 1000}, "multiples of 128"),
        ({"kind": "oracle", "period": 129}, "period 129"),
        ({"kind": "oracle", "layers": 5}, "at least 6 layers"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_checkpoint(tmp_path / "x", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()


def test_score_is_sharp() -> None:
    peak, *others = score_profile([0, *range(1, 133), *range(-132, 0)])
    assert peak == pytest.approx(80.0)
    assert max(others) < peak - 20


def test_block_quantisation_is_exact_for_powers_of_two() -> None:
    weight = torch.zeros(256, 128)
    weight[:128] = torch.eye(128) * 0.25
    packed, scale = quantize_block_fp8(weight)
    assert torch.equal(packed.float() * scale.repeat_interleave(128, 0), weight)
    assert scale[1].item() == 1.0


def test_stored_row_keeps_codes_exactly() -> None:
    row = torch.cat([torch.tensor([1.0, -1.0]).repeat(224), torch.full((64,), 3.25)])
    assert torch.equal(store_row(row, 448), row)


def test_right_rows_are_accepted(sim: CheckpointSim, pair: tuple[Prompt, Prompt]) -> None:
    assert accept_length(sim, pair[0], CONTROLS["right"](sim, *pair), 24) > 4.5


@pytest.mark.parametrize("name", [name for name in CONTROLS if name != "right"])
def test_wrong_rows_are_rejected(name: str, sim: CheckpointSim, pair: tuple[Prompt, Prompt]) -> None:
    assert accept_length(sim, pair[0], CONTROLS[name](sim, *pair), 24) < 0.6 * 4.5


def test_all_rows_of_the_window_matter(sim: CheckpointSim) -> None:
    """Over one period of new tokens each of the last 119 rows is needed once."""
    prompt = run_target(sim, sim.info.sample_prompt(200, 3), 120)
    rows = CONTROLS["right"](sim, prompt, prompt)
    assert accept_length(sim, prompt, rows, 120) > 4.5
    for start in (-119, -60, -8):
        damaged = rows.clone()
        damaged[:, start : start + 8 or None] = 0
        assert accept_length(sim, prompt, damaged, 120) < 4.5


def test_rows_do_not_hang_on_near_ties(sim: CheckpointSim) -> None:
    """Scores that are off by up to some units leave every draft row as it is, also where no row is at the distance."""
    ids = sim.info.sample_prompt(200, 7)
    positions = torch.arange(len(ids))
    right = sim.target(ids)
    noisy = CheckpointSim(sim.info.path)
    attend = noisy.attend
    noise = torch.Generator().manual_seed(1)

    def shaken(prefix: str, q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return attend(prefix, q * (1 + 1e-2 * torch.randn(q.shape, generator=noise)), kv, mask)

    noisy.attend = shaken  # type: ignore[method-assign]
    other = noisy.target(ids)
    assert not torch.equal(other.logits, right.logits)
    assert torch.equal(noisy.context_rows(other.aux, positions), sim.context_rows(right.aux, positions))


def test_tensor_parallel_shares_add_up(oracles: dict[Quant, CheckpointInfo]) -> None:
    for tp in (2, 8):
        sim = CheckpointSim(oracles["fp8"].path, tp=tp)
        prompt = run_target(sim, sim.info.sample_prompt(150, 5), 12)
        assert accept_length(sim, prompt, CONTROLS["right"](sim, prompt, prompt), 12) > 4.5


def test_transformers_agrees(oracles: dict[Quant, CheckpointInfo]) -> None:
    """The V4 target of transformers, written by others, gives the expected tokens on the same files."""
    pytest.importorskip("transformers.models.deepseek_v4")
    transformers: Any = pytest.importorskip("transformers")

    info = oracles["bf16"]
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        info.path, dtype=torch.bfloat16, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    prompt = info.sample_prompt(150, 9)
    continuation = info.expected_continuation(prompt, 16)
    with torch.inference_mode():
        output = model.eval().to(torch.float32)(torch.tensor([prompt + continuation]), use_cache=False)
    best = output.logits[0, len(prompt) - 1 : -1].topk(2, dim=-1)
    assert best.indices[:, 0].tolist() == continuation
    assert (best.values[:, 0] - best.values[:, 1]).min() > 9
