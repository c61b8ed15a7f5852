"""Shared by every test folder: no variable of this package leaks in from the caller's shell."""

from __future__ import annotations

import signal

import pytest
from hypothesis import HealthCheck, settings

from sglang_dspark_cp import config

# A shell without job control starts what runs in the background with SIGINT ignored, and programs inherit that. Tests
# that interrupt a program need the usual answer.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("tests", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start every test from the defaults of this package."""
    for name in config.NAMES:
        monkeypatch.delenv(name, raising=False)
