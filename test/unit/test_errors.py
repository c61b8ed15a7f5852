"""The errors: what catches them, and what reaches the terminal."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sglang_dspark_cp.errors import (
    ActivationError,
    AlignmentError,
    ConfigError,
    DsparkCpError,
    TopologyError,
    TransferError,
)


def test_activation_error_passes_except_exception_and_carries_its_text() -> None:
    def loader() -> None:
        try:
            raise ActivationError("hook x does not fit")
        except Exception:  # what SGLang's plugin loader does
            pytest.fail("an ActivationError must escape `except Exception`")

    with pytest.raises(SystemExit) as caught:
        loader()
    assert caught.value.code == "sglang-dspark-cp: hook x does not fit"
    assert not issubclass(ActivationError, DsparkCpError)


def test_activation_error_ends_the_process_with_status_1_and_prints_its_text() -> None:
    script = "from sglang_dspark_cp.errors import ActivationError; raise ActivationError('no adapter')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip() == "sglang-dspark-cp: no adapter"


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (ConfigError, ValueError),
        (TopologyError, ValueError),
        (AlignmentError, RuntimeError),
        (TransferError, RuntimeError),
    ],
)
def test_ordinary_errors_are_of_this_package_and_of_a_builtin_kind(
    error: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(error, DsparkCpError)
    assert issubclass(error, builtin)
