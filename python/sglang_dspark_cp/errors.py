"""The errors that this package raises. Standard library only."""

from __future__ import annotations


class DsparkCpError(Exception):
    """Base of every error of this package that ordinary code may catch."""


class ConfigError(DsparkCpError, ValueError):
    """An environment variable of this package holds a value that is not allowed."""


class TopologyError(DsparkCpError, ValueError):
    """The launch arguments ask for a context-parallel prefill that this package does not support."""


class AlignmentError(DsparkCpError, RuntimeError):
    """Hidden rows, positions and KV cache locations of one prefill batch do not describe the same tokens."""


class TransferError(DsparkCpError, RuntimeError):
    """Draft KV of a request cannot be sent: not injected completely, not registered, or not what decode expects."""


class DraftLoadError(DsparkCpError, ValueError):
    """The checkpoint does not hold what draft KV is made with, or not in the right shape."""


class PrunedDraftError(DsparkCpError, RuntimeError):
    """A prefill worker whose draft holds only what makes draft KV was asked to draft."""


class ActivationError(SystemExit):
    """The plugin was asked for and cannot be installed completely.

    It derives from `SystemExit` because SGLang's plugin loader logs and swallows every `Exception` and then
    serves unpatched. The message becomes the text that Python prints; the exit status is 1.
    """

    def __init__(self, message: str) -> None:
        super().__init__(f"sglang-dspark-cp: {message}")
