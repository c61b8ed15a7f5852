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
    (packed,) = capture.take()
    assert packed.format.addressed is addressed
    means = []
    for index in LAYER_IDS:
        finished = layers[index].finished
        assert finished is not None
        means.append(finished.mean(dim=1))
    assert means[0].dtype == dtype
    assert torch.equal(payload_of(packed.buffer, packed.format), torch.cat(means, dim=-1))
    assert capture.captured == dict.fromkeys(LAYER_IDS, 5)
    assert capture.missing_rows() == 0
    assert capture.positions is positions


@pytest.mark.parametrize("select", [None, [0, 2, 3], [4, 1, 1, 0, 7, 2]], ids=["all", "some", "some twice"])
@pytest.mark.parametrize("odd", [{}, {"drop": 1}, {"drop": 4}, {"drop": 5}, {"add": 2}], ids=str)
@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_blocks_hold_the_rows_of_one_buffer(select: list[int] | None, odd: dict[str, int], first: int) -> None:
    rows = 5 if select is None else len(select)
    taken = []
    for blocks in (None, (first, rows - first)):
        layers = make_layers(fused=True, **odd)
        chosen = None if select is None else torch.tensor(select)
        capture = AuxCapture(
            layers, LAYER_IDS, finish, expected_rows=5, addressed=True, select=chosen, tail=7, blocks=blocks
        )
        with capture:
            run(layers, 5, torch.float32, torch.arange(5))
        taken.append(capture.take())
        assert capture.take() == []
    (whole,), parts = taken
    assert [part.rows for part in parts] == [first, rows - first]
    assert [part.tail_rows for part in parts] == [0, whole.tail_rows]
    # Rows that a short layer did not deliver hold whatever was there.
    delivered = 5 - odd.get("drop", 0)
    there = min(rows, delivered) if select is None else rows * (delivered > 0)
    ours = torch.cat([part.payload() for part in parts])
    assert torch.equal(ours[:there], whole.payload()[:there])


def test_blocks_must_hold_all_rows() -> None:
    with pytest.raises(ValueError, match=r"blocks of \(2, 2\) rows do not hold the 5 rows to capture"):
        AuxCapture(make_layers(fused=False), LAYER_IDS, finish, expected_rows=5, addressed=True, blocks=(2, 2))


def test_slots_follow_the_drafts_order() -> None:
    layers = make_layers(fused=False)
    with AuxCapture(layers, (4, 1), finish, expected_rows=2, addressed=False) as capture:
        run(layers, 2, torch.float32, torch.arange(2))
    (packed,) = capture.take()
    for slot, index in enumerate((4, 1)):
        finished = layers[index].finished
        assert finished is not None
        assert torch.equal(packed.slot(slot), finished.mean(dim=1))


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
    (packed,) = capture.take()
    assert packed.rows == 5
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
    assert capture.take() == []
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
