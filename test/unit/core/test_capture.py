"""Capture on the shard: what each layer leaves behind is the mean of its finished streams, in the draft's order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_dspark_cp.core.capture import AuxCapture
from sglang_dspark_cp.core.pack import payload_of

torch.set_num_threads(1)

STREAMS = 4
HIDDEN = 6
LAYER_IDS = (1, 3, 4)


class Layer(torch.nn.Module):
    """A target layer in miniature. Fused: hands on what its successor still has to mix into finished streams."""

    def __init__(self, index: int, *, fused: bool, drop: int = 0, add: int = 0, fail: bool = False) -> None:
        super().__init__()
        self.index, self.fused, self.drop, self.add, self.fail = index, fused, drop, add, fail
        self.finished: torch.Tensor | None = None

    def hc_post(self, hidden: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: Any) -> torch.Tensor:
        assert comb == "comb"
        return residual * 2 + post.unsqueeze(-1) * hidden.unsqueeze(1)

    def forward(self, streams: torch.Tensor, *, positions: torch.Tensor) -> tuple[Any, ...]:
        if self.fail:
            raise RuntimeError("layer failed")
        residual = streams + self.index
        hidden = streams.mean(dim=1) * (self.index + 1)
        post = (positions.unsqueeze(1) + torch.arange(STREAMS)).to(streams.dtype)
        if self.drop:
            residual, hidden, post = residual[self.drop :], hidden[self.drop :], post[self.drop :]
        if self.add:
            residual, hidden, post = (torch.cat([part, part[: self.add]]) for part in (residual, hidden, post))
        self.finished = self.hc_post(hidden, residual, post, "comb")
        if self.fused:
            return hidden, residual, post, "comb"
        return self.finished, None, None, None


def finish(layer: Any, output: tuple[Any, ...]) -> torch.Tensor:
    hidden, residual, post, comb = output
    finished: torch.Tensor = layer.hc_post(hidden, residual, post, comb) if layer.fused else hidden
    return finished


def make_layers(*, fused: bool, **odd: Any) -> list[Layer]:
    return [Layer(index, fused=fused, **(odd if index == 3 else {})) for index in range(6)]


def run(layers: list[Layer], rows: int, dtype: torch.dtype, positions: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(5)
    for layer in layers:
        layer(torch.randn(rows, STREAMS, HIDDEN, generator=generator).to(dtype), positions=positions)


def hooks(layers: list[Layer]) -> int:
    return sum(len(layer._forward_hooks) for layer in layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("addressed", [False, True])
def test_packed_rows_are_the_means_side_by_side(dtype: torch.dtype, fused: bool, addressed: bool) -> None:
    layers = make_layers(fused=fused)
    positions = torch.tensor([3, 11, 19, 27, 35])
    with AuxCapture(layers, LAYER_IDS, finish, expected_rows=5, addressed=addressed) as capture:
        assert hooks(layers) == 3
        run(layers, 5, dtype, positions)
    assert hooks(layers) == 0
    assert capture.packed is not None
    assert capture.packed.format.addressed is addressed
    means = []
    for index in LAYER_IDS:
        finished = layers[index].finished
        assert finished is not None
        means.append(finished.mean(dim=1))
    assert means[0].dtype == dtype
    assert torch.equal(payload_of(capture.packed.buffer, capture.packed.format), torch.cat(means, dim=-1))
    assert capture.captured == dict.fromkeys(LAYER_IDS, 5)
    assert capture.missing_rows() == 0
    assert capture.positions is positions


def test_slots_follow_the_drafts_order() -> None:
    layers = make_layers(fused=False)
    with AuxCapture(layers, (4, 1), finish, expected_rows=2, addressed=False) as capture:
        run(layers, 2, torch.float32, torch.arange(2))
    assert capture.packed is not None
    for slot, index in enumerate((4, 1)):
        finished = layers[index].finished
        assert finished is not None
        assert torch.equal(capture.packed.slot(slot), finished.mean(dim=1))


@pytest.mark.parametrize("fused", [False, True])
def test_hooks_are_gone_after_an_exception(fused: bool) -> None:
    layers = make_layers(fused=fused, fail=True)
    capture = AuxCapture(layers, LAYER_IDS, finish, expected_rows=5, addressed=True)
    with pytest.raises(RuntimeError, match="layer failed"), capture:
        run(layers, 5, torch.float32, torch.arange(5))
    assert hooks(layers) == 0
    assert capture.captured == {1: 5}
    assert capture.missing_rows() == 5


def test_hooks_are_gone_when_a_captured_layer_does_not_exist() -> None:
    layers = make_layers(fused=False)
    with (
        pytest.raises(IndexError),
        AuxCapture(layers, (1, 3, 60), finish, expected_rows=5, addressed=True),
    ):
        pass
    assert hooks(layers) == 0


@pytest.mark.parametrize(("odd", "missing"), [({"drop": 1}, 1), ({"drop": 3}, 3), ({"add": 1}, -1), ({"add": 2}, -2)])
@pytest.mark.parametrize("fused", [False, True])
def test_missing_and_surplus_rows_are_counted(odd: dict[str, int], missing: int, fused: bool) -> None:
    layers = make_layers(fused=fused, **odd)
    with AuxCapture(layers, LAYER_IDS, finish, expected_rows=5, addressed=True) as capture:
        run(layers, 5, torch.float32, torch.arange(5))
    assert capture.missing_rows() == missing
    assert capture.captured == {1: 5, 3: 5 - missing, 4: 5}
    # The buffer keeps its size: a collective must not depend on what went wrong.
    assert capture.packed is not None
    assert capture.packed.rows == 5
    assert hooks(layers) == 0


def test_the_worst_layer_counts() -> None:
    layers = make_layers(fused=False)
    layers[1].drop, layers[4].add = 1, 3
    with AuxCapture(layers, LAYER_IDS, finish, expected_rows=5, addressed=True) as capture:
        run(layers, 5, torch.float32, torch.arange(5))
    assert capture.missing_rows() == -3


def test_no_captured_layer_ran() -> None:
    with AuxCapture(make_layers(fused=False), LAYER_IDS, finish, expected_rows=5, addressed=True) as capture:
        pass
    assert capture.packed is None
    assert capture.positions is None
    assert capture.missing_rows() == 5


def test_positions_are_those_that_the_layers_ran_with() -> None:
    """Not what the caller of the model passed: the model splits positions itself."""
    layers = make_layers(fused=False)
    outside = torch.arange(10)
    with AuxCapture(layers, LAYER_IDS, finish, expected_rows=5, addressed=True) as capture:
        run(layers, 5, torch.float32, outside[1::2])
    assert capture.positions is not None
    assert capture.positions.tolist() == [1, 3, 5, 7, 9]
