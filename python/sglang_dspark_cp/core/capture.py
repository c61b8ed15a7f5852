"""Capture of the auxiliary hidden states on the shard, while the target layers run.

A target layer of DeepSeek-V4 yields `hc_mult` residual streams; the draft wants their mean (DSpark's definition).
The mean of each captured layer is written straight into its slot of the packed buffer, or of several buffers that are
let go of one after the other (`core.project.capture_blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from .pack import PackedRows, RowFormat
from .rows import mean_streams

Streams = Callable[[torch.nn.Module, Any], torch.Tensor]
"""(layer, its output) -> finished residual streams [P, hc_mult, H] of that layer."""


class AuxCapture:
    """Context manager: forward hooks on the captured layers fill `PackedRows`.

    Args:
        layers: the target's layers, indexed by global layer id.
        layer_ids: the captured layers, in the order of the draft's input slots.
        streams: how to get the finished streams from a layer's output.
        expected_rows: P, rows that this rank must deliver.
        addressed: whether packed rows carry an address.
        select: [rows] int64 on the layers' device, the local rows to keep; None: all P.
        tail: elements that the last buffer holds behind the rows.
        blocks: rows of each of up to two buffers, in the order of the rows; None: one buffer.

    After the forward, `take` hands over the rows, `captured` is the number of rows that each layer delivered, and
    `positions` the positions [rows] that the layers themselves were run with.

    Cost: one kernel per captured layer, no concatenation, no host sync.
    """

    def __init__(
        self,
        layers: Sequence[torch.nn.Module],
        layer_ids: Sequence[int],
        streams: Streams,
        *,
        expected_rows: int,
        addressed: bool,
        select: torch.Tensor | None = None,
        tail: int = 0,
        blocks: Sequence[int] | None = None,
    ) -> None:
        self._layers = layers
        self._layer_ids = tuple(layer_ids)
        self._streams = streams
        self._expected_rows = expected_rows
        self._addressed = addressed
        self._select = select
        self._tail = tail
        rows = expected_rows if select is None else select.shape[0]
        self._blocks = (rows,) if blocks is None else tuple(blocks)
        if sum(self._blocks) != rows:
            raise ValueError(f"blocks of {self._blocks} rows do not hold the {rows} rows to capture")
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._packed: list[PackedRows] = []
        self.captured: dict[int, int] = {}
        self.positions: torch.Tensor | None = None

    def __enter__(self) -> AuxCapture:
        captured = [self._layers[layer_id] for layer_id in self._layer_ids]  # before any hook: an id may be wrong
        for slot, (layer, layer_id) in enumerate(zip(captured, self._layer_ids, strict=True)):
            self._handles.append(layer.register_forward_hook(self._hook(slot, layer_id), with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, slot: int, layer_id: int) -> Callable[..., None]:
        def store(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
            streams = self._streams(layer, output)
            if not self._packed:
                row_format = RowFormat(len(self._layer_ids), streams.shape[-1], streams.dtype, self._addressed)
                tails = [0] * (len(self._blocks) - 1) + [self._tail]
                for rows, tail in zip(self._blocks, tails, strict=True):
                    self._packed.append(PackedRows(row_format, rows, streams.device, tail))
            self._store_mean(streams, [packed.slot(slot) for packed in self._packed])
            self.captured[layer_id] = streams.shape[0]
            self.positions = kwargs["positions"]

        return store

    def _store_mean(self, streams: torch.Tensor, slots: list[torch.Tensor]) -> None:
        # A short layer is reported by `missing_rows`; here it only must not be read beyond its end.
        if self._select is None:
            left = streams.shape[0]
            for index, slot in enumerate(slots):
                slots[index] = slot[:left]
                left = max(0, left - slot.shape[0])
            mean_streams(streams, slots)
        elif streams.shape[0]:
            mean_streams(streams, slots, self._select)

    def take(self) -> list[PackedRows]:
        """The captured rows, a buffer per block; none if no captured layer ran. They are the caller's alone then."""
        taken, self._packed = self._packed, []
        return taken

    def missing_rows(self) -> int:
        """How many rows the worst captured layer failed to deliver (negative: it delivered too many)."""
        counts = [self.captured.get(layer_id, 0) for layer_id in self._layer_ids]
        worst = max(counts, key=lambda rows: abs(self._expected_rows - rows))
        return self._expected_rows - worst
