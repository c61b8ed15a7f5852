"""The guard alone: what it needs of a source tree, what it hands to the installation, what it refuses."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dspark_cp import guard
from sglang_dspark_cp.adapters import REVIEWED
from sglang_dspark_cp.errors import ActivationError
from sglang_dspark_cp.guard import TARGET, install_guard
from sglang_dspark_cp.hooks.spec import Hook, Tier

REASON = "SGLang 9.9.9 was not reviewed."


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[Hook]]:
    """Every call of `install`, instead of SGLang's registry."""
    calls: list[list[Hook]] = []

    def record(hooks: Iterable[Hook]) -> None:
        calls.append(list(hooks))

    monkeypatch.setattr(guard, "install", record)
    return calls


def tree(monkeypatch: pytest.MonkeyPatch, root: Path, source: str | None) -> None:
    """Make `root` the installed SGLang; source: of the module that TARGET lies in."""
    if source is not None:
        module = root.joinpath(*TARGET.split(".")[1:-1]).with_suffix(".py")
        module.parent.mkdir(parents=True)
        module.write_text(source)
    monkeypatch.setattr(guard, "sglang_root", lambda: root)


def launch(mode: str, *, cp: bool = False, size: int = 1) -> Any:
    return SimpleNamespace(disaggregation_mode=mode, enable_prefill_cp=cp, attn_cp_size=size)


def test_one_hook_goes_to_the_installation(
    batches: list[list[Hook]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tree(monkeypatch, tmp_path, "def _handle_dspark(server_args: object) -> None:\n    raise RuntimeError\n")
    install_guard(REASON)
    ((hook,),) = batches
    assert (hook.id, hook.target, hook.parameters, hook.tier) == ("guard", TARGET, ("server_args",), Tier.EAGER)


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (launch("prefill", cp=True), True),
        (launch("prefill", size=8), True),
        (launch("prefill", cp=True, size=8), True),
        (launch("prefill"), False),
        (launch("decode", cp=True, size=8), False),
        (launch("null", cp=True, size=8), False),
        (launch("null"), False),
    ],
    ids=str,
)
def test_only_the_feature_is_refused(
    batches: list[list[Hook]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: Any, refused: bool
) -> None:
    tree(monkeypatch, tmp_path, "def _handle_dspark(server_args): ...\n")
    install_guard(REASON)
    seen: list[Any] = []

    def stock(server_args: Any) -> str:
        seen.append(server_args)
        return "stock"

    if not refused:
        assert batches[0][0].handler(stock, arguments) == "stock"
        assert seen == [arguments]
        return
    with pytest.raises(ActivationError) as error:
        batches[0][0].handler(stock, arguments)
    assert seen == []
    text = str(error.value)
    for part in (REASON, *REVIEWED, "Install one of them", "SGLANG_DSPARK_CP=0"):
        assert part in text


@pytest.mark.parametrize(
    "source",
    [
        None,
        "",
        "def handle_dspark(server_args): ...\n",
        "class _handle_dspark: ...\n",
        "def _handle_dspark(): ...\n",
        "def _handle_dspark(args): ...\n",
        "def _handle_dspark(server_args, model): ...\n",
        "def _handle_dspark(*server_args): ...\n",
    ],
)
def test_a_missing_or_different_target_ends_the_process(
    batches: list[list[Hook]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str | None
) -> None:
    tree(monkeypatch, tmp_path, source)
    with pytest.raises(ActivationError) as error:
        install_guard(REASON)
    text = str(error.value)
    for part in (REASON, TARGET, "Uninstall sglang-dspark-cp or set SGLANG_DSPARK_CP=0"):
        assert part in text
    assert batches == []


def test_the_installed_sglang_has_the_target(batches: list[list[Hook]]) -> None:
    install_guard(REASON)
    assert len(batches) == 1
