"""The hook table, and what is patched in which process of SGLang."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from sglang_dspark_cp import adapters
from sglang_dspark_cp.adapters import REVIEWED
from sglang_dspark_cp.hooks.check import problems, sglang_release, sglang_root
from sglang_dspark_cp.smoke.processes import RankPool, RankProcess

pytestmark = pytest.mark.timeout(150)

ADAPTER = adapters.find(sglang_release())
assert ADAPTER is not None, "these tests run in a reviewed release"
ALL_HOOKS = (*ADAPTER.EAGER_HOOKS, *ADAPTER.WORKER_HOOKS)
EAGER_IDS = [hook.id for hook in ADAPTER.EAGER_HOOKS]
EAGER = {hook.target for hook in ADAPTER.EAGER_HOOKS}
WORKER = {hook.target for hook in ADAPTER.WORKER_HOOKS}
GUARD = "sglang.srt.arg_groups.speculative_hook._handle_dspark"
STOCK_WAS_ASKED = "ValueError: DSpark speculative decoding only supports CUDA"

Case = Callable[..., dict[str, Any]]


@pytest.fixture
def case(pool: RankPool, spawn: Callable[..., list[RankProcess]]) -> Case:
    """Run one method of `hook_cases.Cases` in a fresh process."""

    def run(method: str, *arguments: Any, environment: dict[str, str] | None = None) -> dict[str, Any]:
        (rank,) = spawn("hook_cases:Cases", environment={"SGLANG_PLUGINS": "dspark_cp", **(environment or {})})
        try:
            rank.start(method, *arguments)
            (answer,) = pool.collect([rank], 30.0)
            return answer
        finally:
            rank.kill()
            pool.ranks.remove(rank)

    return run


def assert_stock(state: dict[str, Any], but: set[str] | frozenset[str] = frozenset()) -> None:
    assert set(state["changed"]) == but
    assert set(state["patched"]) == but


# ------------------------------------------------------------------------------------------------------- the table


def test_every_digest_is_that_of_the_installed_release() -> None:
    assert sglang_release() in REVIEWED
    assert [str(problem) for problem in problems(ALL_HOOKS, sglang_root())] == []


@pytest.mark.parametrize("hook", ALL_HOOKS, ids=lambda hook: hook.id)
def test_drift_is_noticed_per_hook(hook: Any) -> None:
    name, _, last = hook.target.rpartition(".")
    cases = {
        f"reviewed body {'0' * 12}": dataclasses.replace(hook, digest="0" * 12),
        "no such definition": dataclasses.replace(hook, target=f"{name}.{last}_renamed"),
        "expected parameters not_a_parameter": dataclasses.replace(hook, parameters=("not_a_parameter",)),
    }
    for text, drifted in cases.items():
        (problem,) = problems([drifted], sglang_root())
        assert problem.hook_id == hook.id
        assert text in str(problem)


def test_ids_and_targets_are_unique() -> None:
    assert len({hook.id for hook in ALL_HOOKS}) == len(EAGER | WORKER) == len(ALL_HOOKS)


# ---------------------------------------------------------------------------------------------------- plugin load


def test_load_plugins_installs_eager_hooks_only(case: Case) -> None:
    state = case("load")
    assert state["escaped"] is None
    assert state["entry_points"]["dspark_cp"] == "sglang_dspark_cp.plugin:register"
    assert_stock(state, EAGER)
    assert set(state["changed"]).isdisjoint(WORKER)
    assert state["installed"] == EAGER_IDS
    assert state["stale"] == [], "a module of SGLang still calls the stock function under another name"
    assert state["fired"] == {}


def test_beside_other_plugins(case: Case) -> None:
    """The plugins that come with SGLang's dependencies are loaded too."""
    state = case("load", environment={"SGLANG_PLUGINS": ""})
    assert state["escaped"] is None
    assert len(state["entry_points"]) > 1, "there is no other plugin here: this test shows nothing"
    assert set(state["changed"]) == EAGER
    assert state["installed"] == EAGER_IDS


def test_registering_twice_changes_nothing(case: Case) -> None:
    state = case("load_twice")
    assert state["same"]
    assert_stock(state, EAGER)


def test_switched_off(case: Case) -> None:
    state = case("load", environment={"SGLANG_DSPARK_CP": "0"})
    assert state["escaped"] is None
    assert_stock(state)
    assert state["registered"] == []
    assert not state["runtime"]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("SGLANG_DSPARK_CP_ALIGN", "strict", "rows, shape, off"),
        ("SGLANG_DSPARK_CP", "yes", "1, 0"),
        ("SGLANG_DSPARK_CP_FAULT", "drop-rows", "drop-row, swap-rows"),
    ],
)
def test_a_bad_variable_escapes_the_loader(case: Case, name: str, value: str, allowed: str) -> None:
    state = case("load", environment={name: value})
    assert state["escaped"] is not None, "SGLang would serve unpatched"
    assert state["escaped"].startswith(f"ActivationError: sglang-dspark-cp: {name}={value!r}")
    assert allowed in state["escaped"]
    assert_stock(state)


# ------------------------------------------------------------------------------------------------------- the guard


def assert_guarded(state: dict[str, Any], reason: str) -> None:
    assert state["escaped"] is None
    assert_stock(state, {GUARD})
    assert state["installed"] == ["guard"]
    answers = state["answers"]
    for asked in ("prefill, CP flag", "prefill, CP size"):
        assert answers[asked].startswith(f"ActivationError: sglang-dspark-cp: {reason}")
        assert "SGLANG_DSPARK_CP=0" in answers[asked]
        assert f"Reviewed releases: {', '.join(REVIEWED)}" in answers[asked]
    for other in ("prefill", "decode, CP", "aggregated, CP"):
        assert answers[other].startswith(STOCK_WAS_ASKED)


ONE_OF_EACH = [("EAGER_HOOKS", "admit"), ("EAGER_HOOKS", "create-worker"), ("WORKER_HOOKS", "settle")]


@pytest.mark.parametrize(("table", "hook"), ONE_OF_EACH)
def test_one_stale_digest_leads_to_the_guard(case: Case, table: str, hook: str) -> None:
    state = case("stale_digest", table, hook)
    assert_guarded(state, f"SGLang {sglang_release()} is not the code that was reviewed for that release:")
    assert f"hook {state['id']} on " in state["answers"]["prefill, CP flag"]


@pytest.mark.parametrize("release", ["0.5.99", "0.5.17.post1", "0.5.23rc1"])
def test_an_unreviewed_release_leads_to_the_guard(case: Case, release: str) -> None:
    assert_guarded(case("unreviewed", release), f"SGLang {release} was not reviewed.")


@pytest.mark.parametrize("release", adapters.NOT_SUPPORTED)
def test_a_release_that_was_looked_at_leads_to_the_guard_with_the_reason(case: Case, release: str) -> None:
    reason = f"SGLang {release} is not supported: {adapters.NOT_SUPPORTED[release]}; use 0.5.17 or 0.5.23."
    assert_guarded(case("unreviewed", release), reason)


def test_a_local_version_of_a_reviewed_release_is_that_release(case: Case) -> None:
    assert_stock(case("unreviewed", f"{sglang_release()}+cu129"), EAGER)


def test_no_place_for_the_guard(case: Case) -> None:
    state = case("no_place_for_the_guard")
    assert state["escaped"].startswith("ActivationError: sglang-dspark-cp: SGLang 0.5.99 was not reviewed.")
    assert "cannot even be refused" in state["escaped"]
    assert_stock(state)


# ----------------------------------------------------------------------------------------------------- second tier


def test_worker_hooks_only_where_the_feature_is_used(case: Case) -> None:
    state = case("create_worker")
    assert state["classes"] == state["stock_classes"]
    assert_stock(state["before"], EAGER)
    assert_stock(state["after"], EAGER | WORKER)
    assert state["after"]["installed"] == [hook.id for hook in ALL_HOOKS]
    assert state["made"] == "DSparkWorkerV2"
    assert state["same_class"]
    assert state["same"], "a second worker must not wrap the wrappers"


@pytest.mark.parametrize(("table", "hook"), ONE_OF_EACH)
def test_another_plugin_was_first(case: Case, table: str, hook: str) -> None:
    state = case("patched_before", table, hook)
    assert state["escaped"] is not None
    assert state["escaped"].startswith(f"ActivationError: sglang-dspark-cp: {state['target']} is already patched")
    assert f"hook {state['id']} would be ignored" in state["escaped"]
    assert state["kept"]
    ours = EAGER if table == "WORKER_HOOKS" else set()
    assert_stock(state, ours | {state["target"]})


def test_a_hook_that_sglang_did_not_apply(case: Case) -> None:
    state = case("not_applied")
    assert state["escaped"] is not None, "SGLang would serve half patched"
    assert state["escaped"].startswith("ActivationError: sglang-dspark-cp: SGLang's hook registry did not apply admit")
    assert state["target"] not in state["changed"]
    assert state["installed"] == []
