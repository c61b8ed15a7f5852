"""State of one process: its configuration and, in a prefill worker, its ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..config import AlignLevel, Config, Fault, GatherMode
from ..core.inject import BatchProof, Ledger
from .metrics import Metrics


@dataclass
class Runtime:
    """What the handlers of one process share."""

    config: Config
    ledger: Ledger | None = None
    mode: GatherMode = GatherMode.PACKED
    """Decided when the worker is made; never AUTO."""
    page: int | None = None
    """Tokens of a page that the prefix cache hands out whole, None without a prefix cache."""
    window: int = 0
    """W, tokens."""
    cp_rank: int = 0
    draft: Any = None
    """The draft model, from the first batch on."""
    heads: Any = None
    """Rows for the LM head of the forward that runs now (`Heads` of the adapter)."""
    last_hidden: Any = None
    """[requests, H], on its way from the forward to the logits processor."""
    passes: tuple[torch.Tensor, ...] = ()
    """Tensors of the forward that runs now which are whole on every rank, so that no gather may take them."""
    metrics: Metrics | None = None
    """With --enable-metrics, on the ranks whose metrics SGLang serves; from the first batch on."""
    draft_loading: bool = False
    """Weights are being read for the draft now."""
    draft_loaded: bool = False
    """The draft has all its weights; later loads are updates."""

    @property
    def addressed(self) -> bool:
        """Whether packed rows carry their address."""
        return self.config.align is AlignLevel.ROWS

    @property
    def check_shape(self) -> bool:
        """Whether batches are settled by all ranks."""
        return self.config.align is not AlignLevel.OFF

    def require_ledger(self, cp_rank: int) -> Ledger:
        """The ledger, made at first use."""
        if self.ledger is None:
            self.ledger = Ledger(cp_rank)
        return self.ledger

    @property
    def fault(self) -> Fault | None:
        """The fault to make in the present forward, or None."""
        fault = self.config.fault
        if fault is None or self.ledger is None:
            return None
        over = fault.forwards is not None and self.ledger.counters.cp_forwards > fault.forwards
        return None if over else fault

    @property
    def proof(self) -> BatchProof | None:
        """The proof of the batch whose forward runs now."""
        return None if self.ledger is None else self.ledger.current


_runtime: Runtime | None = None


def start(config: Config) -> None:
    """Set this process's configuration; called once, by `plugin.register`."""
    global _runtime
    _runtime = Runtime(config)


def runtime() -> Runtime:
    """This process's state.

    Raises:
        RuntimeError: `start` was not called.
    """
    if _runtime is None:
        raise RuntimeError("sglang_dspark_cp was not activated in this process (plugin.register did not run)")
    return _runtime
