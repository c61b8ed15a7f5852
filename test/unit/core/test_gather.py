"""The one collective, with C ranks played in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark_cp.core.gather import ArrivedRows, gather_rows
from sglang_dspark_cp.core.layout import rows_per_rank, shard
from sglang_dspark_cp.core.pack import PackedRows, RowFormat

torch.set_num_threads(1)

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Group:
    """An all-gather over the buffers of all ranks; counts its calls."""

    def __init__(self, ranks: list[PackedRows]) -> None:
        self.ranks = ranks
        self.calls = 0

    def member(self, rank: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
        def all_gather(output: torch.Tensor, local: torch.Tensor) -> None:
            assert local.data_ptr() == self.ranks[rank].buffer.data_ptr()
            assert output.is_contiguous()
            self.calls += 1
            torch.cat([packed.buffer for packed in self.ranks], out=output)

        return all_gather


def ranks_of(tokens: int, cp_size: int, row_format: RowFormat) -> list[PackedRows]:
    """Row g holds its number in every element (exact below 256 in bf16); padding is NaN with address -7."""
    rows = torch.arange(tokens)
    out = []
    for rank in range(cp_size):
        packed = PackedRows(row_format, rows_per_rank(tokens, cp_size), CPU)
        packed.buffer.fill_(float("nan"))
        mine = shard(rows, cp_size, rank)
        for layer in range(row_format.layers):
            packed.slot(layer)[: mine.shape[0]] = (mine * (layer + 1) % 256).to(row_format.dtype).unsqueeze(1)
        if row_format.addressed:
            packed.address().fill_(-7)
            packed.address()[: mine.shape[0]] = torch.stack((mine + 1000, mine * 3 + 5), dim=1)
        out.append(packed)
    return out


def gather_all(tokens: int, cp_size: int, row_format: RowFormat) -> list[ArrivedRows]:
    group = Group(ranks_of(tokens, cp_size, row_format))
    arrived = [gather_rows(group.ranks[rank], tokens, cp_size, group.member(rank)) for rank in range(cp_size)]
    assert group.calls == cp_size  # one collective per rank
    return arrived


@given(st.integers(0, 300), st.integers(1, 8), st.sampled_from(DTYPES), st.integers(1, 9), st.booleans())
def test_every_rank_gets_all_rows_in_global_order(
    tokens: int, cp_size: int, dtype: torch.dtype, hidden: int, addressed: bool
) -> None:
    row_format = RowFormat(3, hidden, dtype, addressed)
    rows = torch.arange(tokens)
    wanted = torch.cat(
        [(rows * (layer + 1) % 256).to(dtype).unsqueeze(1).expand(tokens, hidden) for layer in range(3)], dim=1
    )
    for arrived in gather_all(tokens, cp_size, row_format):
        assert torch.equal(arrived.hidden, wanted)  # NaN never equals: no padding came back
        if addressed:
            assert arrived.address is not None
            assert torch.equal(arrived.address, torch.stack((rows + 1000, rows * 3 + 5), dim=1))
        else:
            assert arrived.address is None
        assert arrived.wire_bytes == (cp_size - 1) * rows_per_rank(tokens, cp_size) * row_format.row_bytes


def test_thirteen_tokens_on_eight_ranks() -> None:
    arrived = gather_all(13, 8, RowFormat(1, 1, torch.bfloat16))[5]
    assert arrived.hidden.squeeze(1).tolist() == list(range(13))
    assert arrived.address is not None
    assert arrived.address[:, 0].tolist() == list(range(1000, 1013))
    # 7 other ranks x 2 rows x (1 element filled to 4, then 16 bytes of address)
    assert arrived.wire_bytes == 7 * 2 * 24


@pytest.mark.parametrize(("tokens", "cp_size"), [(13, 8), (16, 8), (5, 2), (8, 8), (2, 2), (3, 4), (6, 1)])
@pytest.mark.parametrize("addressed", [False, True])
def test_hidden_is_contiguous(tokens: int, cp_size: int, addressed: bool) -> None:
    """As `ArrivedRows` promises, also when each rank holds a single row."""
    arrived = gather_all(tokens, cp_size, RowFormat(3, 6, torch.bfloat16, addressed))[0]
    assert arrived.hidden.is_contiguous()


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_wrong_buffer_size(rows: int) -> None:
    packed = PackedRows(RowFormat(1, 4, torch.float32), rows, CPU)

    def never(output: torch.Tensor, local: torch.Tensor) -> None:
        raise AssertionError("no collective with a wrong size")

    with pytest.raises(ValueError, match=f"sends 2 rows for 13 tokens and CP 8, got {rows}"):
        gather_rows(packed, 13, 8, never)


def test_an_address_that_was_forgotten_arrives_as_such() -> None:
    group = Group(ranks_of(5, 2, RowFormat(1, 4, torch.float16)))
    group.ranks[1].forget_address()
    arrived = gather_rows(group.ranks[0], 5, 2, group.member(0))
    assert arrived.address is not None
    assert arrived.address[:, 0].tolist() == [1000, -1, 1002, -1, 1004]
