"""Environment variables: each value, and the text for each bad one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from sglang_dspark_cp import config
from sglang_dspark_cp.config import AlignLevel, Config, DraftParts, Fault, FaultKind, GatherMode, from_environment
from sglang_dspark_cp.errors import ConfigError


def test_defaults() -> None:
    assert from_environment({}) == Config(True, AlignLevel.ROWS, GatherMode.AUTO, DraftParts.CONTEXT, None, None)


def test_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DSPARK_CP_ALIGN", "shape")
    assert from_environment().align is AlignLevel.SHAPE


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        from_environment({}).enabled = False  # type: ignore[misc]


def test_names_lists_every_variable_of_the_module_and_the_docstring_too() -> None:
    variables = {value for name, value in vars(config).items() if name.isupper() and isinstance(value, str)}
    assert set(config.NAMES) == variables
    assert set(re.findall(r"SGLANG_DSPARK_CP\w*", config.__doc__ or "")) == variables


@pytest.mark.parametrize(("text", "enabled"), [("1", True), ("0", False), ("", True), (" 0 ", False)])
def test_enabled(text: str, enabled: bool) -> None:
    assert from_environment({"SGLANG_DSPARK_CP": text}).enabled is enabled


@pytest.mark.parametrize("mode", list(GatherMode))
def test_gather_modes(mode: GatherMode) -> None:
    assert from_environment({"SGLANG_DSPARK_CP_GATHER": mode.value}).gather is mode


@pytest.mark.parametrize("parts", list(DraftParts))
def test_draft_parts(parts: DraftParts) -> None:
    assert from_environment({"SGLANG_DSPARK_CP_DRAFT": parts.value}).draft is parts
    assert from_environment({}).draft is DraftParts.CONTEXT


@pytest.mark.parametrize("level", list(AlignLevel))
def test_align_levels(level: AlignLevel) -> None:
    assert from_environment({"SGLANG_DSPARK_CP_ALIGN": level.value}).align is level


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("SGLANG_DSPARK_CP", "true", ["1", "0"]),
        ("SGLANG_DSPARK_CP", "2", ["1", "0"]),
        ("SGLANG_DSPARK_CP_ALIGN", "ROWS", ["rows", "shape", "off"]),
        ("SGLANG_DSPARK_CP_ALIGN", "1", ["rows", "shape", "off"]),
        ("SGLANG_DSPARK_CP_GATHER", "all", ["auto", "window", "kv", "context", "packed"]),
        ("SGLANG_DSPARK_CP_DRAFT", "pruned", ["context", "full"]),
    ],
)
def test_bad_choice_names_variable_value_and_allowed_ones(name: str, value: str, allowed: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        from_environment({name: value})
    text = str(caught.value)
    assert f"{name}={value!r}" in text
    assert f"allowed are {', '.join(allowed)}" in text
    assert f"unset means {allowed[0]}" in text


@pytest.mark.parametrize("kind", list(FaultKind))
@pytest.mark.parametrize(
    ("suffix", "cp_rank", "forwards"),
    [("", None, None), ("@0", 0, None), ("@7", 7, None), ("#3", None, 3), ("@0#1", 0, 1)],
)
def test_fault_forms(kind: FaultKind, suffix: str, cp_rank: int | None, forwards: int | None) -> None:
    assert from_environment({"SGLANG_DSPARK_CP_FAULT": kind.value + suffix}).fault == Fault(kind, cp_rank, forwards)


@pytest.mark.parametrize(
    "value", ["drop", "DROP-ROW", "drop-row@", "drop-row@x", "drop-row@-1", "drop-row#0", "drop-row#1@0", "drop-row 1"]
)
def test_bad_fault_names_every_kind(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_environment({"SGLANG_DSPARK_CP_FAULT": value})
    text = str(caught.value)
    assert f"SGLANG_DSPARK_CP_FAULT={value!r}" in text
    for kind in FaultKind:
        assert kind.value in text
    assert "Unset it to serve" in text


def test_empty_fault_is_none() -> None:
    assert from_environment({"SGLANG_DSPARK_CP_FAULT": "  "}).fault is None


def test_a_fault_hits_its_rank_or_all() -> None:
    one, every = Fault(FaultKind.DROP_ROW, 0), Fault(FaultKind.DROP_ROW)
    assert [one.hits(rank) for rank in range(3)] == [True, False, False]
    assert [every.hits(rank) for rank in range(3)] == [True, True, True]


def test_dump_dir() -> None:
    assert from_environment({"SGLANG_DSPARK_CP_DUMP_DIR": "/some/folder"}).dump_dir == Path("/some/folder")
    assert from_environment({"SGLANG_DSPARK_CP_DUMP_DIR": ""}).dump_dir is None
