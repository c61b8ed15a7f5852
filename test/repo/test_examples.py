"""The files under examples/ and the documents for operators: they parse, agree with each other, quote what is there."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_dspark_cp import adapters

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
SCRIPTS = sorted(EXAMPLES.rglob("*.sh"))
MANIFESTS = sorted([*EXAMPLES.rglob("*.yaml"), *EXAMPLES.rglob("*.yml")])
SHELL_FILES = sorted([*SCRIPTS, *(REPOSITORY / "scripts").rglob("*.sh")])
OPERATORS = [REPOSITORY / "docs" / f"{name}.md" for name in ("deployment", "tuning", "troubleshooting")]
DOCUMENTS = [*OPERATORS, EXAMPLES / "README.md"]
RESULTS = REPOSITORY / "benchmark" / "results"
ROLES = ("prefill", "decode", "router")

RECORDER = '#!/bin/sh\nfor word; do printf \'%s\\0\' "$word"; done >"$RECORD_TO/$(basename "$0")"\n'


def short(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def recorded(script: Path, *arguments: str, program: str = "python3", **variables: str) -> list[str]:
    """The command that a script ends in, with `program` replaced by one that only writes its arguments down."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("python3", "sglang-dspark-cp"):
            stand_in = Path(folder) / "bin" / name
            stand_in.parent.mkdir(exist_ok=True)
            stand_in.write_text(RECORDER)
            stand_in.chmod(0o755)
        path = f"{folder}/bin{os.pathsep}{os.environ['PATH']}"
        environment = {"PATH": path, "RECORD_TO": folder, **variables}
        done = subprocess.run(
            [script, *arguments], env=environment, capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0, done.stderr
        return [program, *(Path(folder) / program).read_text().split("\0")[:-1]]


def manifest_commands(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(role, command) of every container in a Compose file or a Kubernetes manifest."""
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        for name, service in document.get("services", {}).items():
            yield name, service["command"]
        if document.get("kind") in ("StatefulSet", "Deployment"):
            for container in document["spec"]["template"]["spec"]["containers"]:
                yield document["metadata"]["name"].rpartition("-")[2], container["command"]


def flags(command: Sequence[str]) -> set[str]:
    return {word for word in command if word.startswith("--")}


def value(command: Sequence[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def script_of(role: str, folder: str = "") -> Path:
    return EXAMPLES / folder / f"{role}.sh"


# ------------------------------------------------------------------------------------------------------- shell files


def test_the_scripts_are_there() -> None:
    assert {short(path) for path in SCRIPTS} == {
        f"examples/{folder}{role}.sh" for folder in ("", "multi-host/") for role in ROLES
    }
    assert all(os.access(path, os.X_OK) for path in SCRIPTS)


@pytest.mark.parametrize("path", SHELL_FILES, ids=short)
def test_bash_reads_every_shell_file(path: Path) -> None:
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("folder", ["", "multi-host"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_check_asks_doctor_about_the_line_that_would_be_started(role: str, folder: str) -> None:
    script = script_of(role, folder)
    asked = recorded(script, "check", program="sglang-dspark-cp")
    assert asked[1:] == ["doctor", "--", *recorded(script)]


def test_variables_and_further_arguments_reach_the_server() -> None:
    prefill = recorded(script_of("prefill"), "--log-level", "warning", TP="2", BOOTSTRAP_PORT="9000", MODEL="/m x")
    assert value(prefill, "--tp") == "2"
    assert value(prefill, "--disaggregation-bootstrap-port") == "9000"
    assert value(prefill, "--model-path") == "/m x"
    assert prefill[-2:] == ["--log-level", "warning"]
    decode = recorded(script_of("decode", "multi-host"), IB_DEVICE="mlx5_0,mlx5_1", TP="4")
    assert (value(decode, "--tp"), value(decode, "--dp")) == ("4", "4")
    assert value(decode, "--disaggregation-ib-device") == "mlx5_0,mlx5_1"
    router = recorded(script_of("router", "multi-host"), PREFILL_HOSTS="a b c", DECODE_HOSTS="d e", SERVER_PORT="1")
    assert [word for word in router if word.startswith("http")] == [f"http://{name}:1" for name in "abcde"]


def test_the_router_of_a_host_knows_the_servers_of_that_host() -> None:
    prefill, decode, router = (recorded(script_of(role)) for role in ROLES)
    assert_connected([prefill], [decode], router)
    assert value(prefill, "--disaggregation-transfer-backend") == value(decode, "--disaggregation-transfer-backend")
    assert abs(int(value(prefill, "--port")) - int(value(decode, "--port"))) >= 300, "decode uses --port + 239 too"


def assert_connected(prefill: list[list[str]], decode: list[list[str]], router: list[str]) -> None:
    """Ports of the servers are those that the router was told."""
    pairs = [router[i + 1 : i + 3] for i, word in enumerate(router) if word == "--prefill"]
    assert len(pairs) >= 1
    for url, bootstrap in pairs:
        assert {url.rpartition(":")[2]} == {value(server, "--port") for server in prefill}
        assert {bootstrap} == {value(server, "--disaggregation-bootstrap-port") for server in prefill}
    urls = [router[i + 1] for i, word in enumerate(router) if word == "--decode"]
    assert {url.rpartition(":")[2] for url in urls} == {value(server, "--port") for server in decode}


# ---------------------------------------------------------------------------------------------------------- manifests


def test_the_manifests_are_there() -> None:
    assert [short(path) for path in MANIFESTS] == ["examples/compose.yaml", "examples/kubernetes/pd-pair.yaml"]


@pytest.mark.parametrize("path", MANIFESTS, ids=short)
@pytest.mark.parametrize("role", ROLES)
def test_manifests_have_the_flags_of_the_scripts(path: Path, role: str) -> None:
    (command,) = [command for name, command in manifest_commands(path) if name == role]
    assert all(isinstance(word, str) for word in command), "numbers need quotes"
    for folder in ("", "multi-host"):
        script = recorded(script_of(role, folder))
        assert flags(command) == flags(script)
        assert command[:3] == script[:3]


@pytest.mark.parametrize("path", MANIFESTS, ids=short)
def test_the_servers_of_a_manifest_fit_together(path: Path) -> None:
    commands = dict(manifest_commands(path))
    assert_connected([commands["prefill"]], [commands["decode"]], commands["router"])
    for flag in ("--tp", "--model-path", "--disaggregation-transfer-backend", "--speculative-algorithm"):
        assert value(commands["prefill"], flag) == value(commands["decode"], flag)
    assert value(commands["decode"], "--dp") == value(commands["decode"], "--tp")


def test_compose_is_the_one_host_scripts() -> None:
    for role, command in manifest_commands(EXAMPLES / "compose.yaml"):
        assert command == recorded(script_of(role))


def test_compose_gives_each_server_its_own_gpus() -> None:
    services = yaml.safe_load((EXAMPLES / "compose.yaml").read_text(encoding="utf-8"))["services"]
    gpus = [
        device["device_ids"]
        for name in ("prefill", "decode")
        for device in services[name]["deploy"]["resources"]["reservations"]["devices"]
    ]
    assert [len(ids) for ids in gpus] == [int(value(services[name]["command"], "--tp")) for name in ROLES[:2]]
    assert not set(gpus[0]) & set(gpus[1])


def kubernetes() -> dict[tuple[str, str], dict[str, Any]]:
    text = (EXAMPLES / "kubernetes" / "pd-pair.yaml").read_text(encoding="utf-8")
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)}


def test_kubernetes_objects_name_each_other_rightly() -> None:
    objects = kubernetes()
    router = dict(manifest_commands(EXAMPLES / "kubernetes" / "pd-pair.yaml"))["router"]
    urls = [word for word in router if word.startswith("http://")]
    expected = []
    for (kind, name), each in objects.items():
        spec = each["spec"]
        if kind == "Service":
            labels = [o["spec"]["template"]["metadata"]["labels"] for (k, _), o in objects.items() if k != "Service"]
            assert spec["selector"] in labels
            continue
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        (container,) = spec["template"]["spec"]["containers"]
        volumes = {volume["name"] for volume in spec["template"]["spec"].get("volumes", [])}
        assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes
        if kind == "StatefulSet":
            assert ("Service", spec["serviceName"]) in objects
            assert container["resources"]["limits"]["nvidia.com/gpu"] == int(value(container["command"], "--tp")) == 8
            expected += [f"http://{name}-{i}.{name}:30000" for i in range(spec["replicas"])]
    assert sorted(urls) == sorted(expected)


def test_the_dockerfile_is_about_a_reviewed_release_and_moves_nothing() -> None:
    text = (EXAMPLES / "Dockerfile").read_text(encoding="utf-8")
    (release,) = re.findall(r"lmsysorg/sglang:v([\d.]+\d)\n", text)
    assert release in adapters.REVIEWED
    for line in re.findall(r"pip install (.*?)(?: \\|;|$)", text, re.MULTILINE):
        assert "--no-deps" in line or line == '"rich>=13,<16"', line
    requirement = re.search(r'"(rich>=[^"]+)"', (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert requirement is not None
    assert f'"{requirement[1]}"' in text


# ----------------------------------------------------------------------------------------------- what documents quote


def fences(path: Path, kind: str) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    yield from re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@functools.cache
def package_strings() -> tuple[str, ...]:
    """Every string constant of the package; the constant parts of f-strings one by one."""
    found = set()
    for path in (REPOSITORY / "python" / "sglang_dspark_cp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(" ".join(node.value.split()))
    return tuple(found)


@pytest.mark.parametrize("path", OPERATORS, ids=short)
def test_quoted_texts_are_those_of_the_code(path: Path) -> None:
    lines = [line for fence in fences(path, "log") for line in fence.splitlines()]
    assert lines
    gone = []
    for line in lines:
        parts = [part.strip() for part in line.split("...")]
        gone += [part for part in parts if len(part) > 3 and not any(part in text for text in package_strings())]
    assert gone == []


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("path", DOCUMENTS, ids=short)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    wrong = []
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        found = path.parent / file if file else path
        if not found.exists():
            wrong.append(target)
        elif anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            if anchor not in map(slug, headings):
                wrong.append(target)
    assert wrong == []


def test_every_example_is_in_its_readme() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    names = [path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*") if path.is_file() and path.name != "README.md"]
    assert [str(name) for name in names if f"]({name})" not in text and f"]({name.parts[0]}/)" not in text] == []


def result(name: str) -> dict[str, Any]:
    text = (REPOSITORY / "docs" / "tuning.md").read_text(encoding="utf-8")
    assert f"(../benchmark/results/{name})" in text
    loaded: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return loaded


def test_figures_of_the_draft_are_those_of_the_result_files() -> None:
    text = (REPOSITORY / "docs" / "tuning.md").read_text(encoding="utf-8")
    for model, each in result("draft_cost-bytes-2026-11-30.json")["shapes"].items():
        for experts, sides in each["experts"].items():
            stock, context = (sides["built"][side]["parameter_bytes"] / 1e6 for side in ("stock", "context"))
            figures = f"{stock:.1f} | {context:.1f} | {100 * (1 - context / stock):.1f} %"
            assert f"| {model.capitalize()}, {experts} | {figures} |" in text
            for side in ("stock", "context"):
                assert f"{sides['built'][side]['buffer_bytes'] / 1e6:.1f} MB" in text
    load = result("draft_cost-load-2026-11-30.json")
    assert f"checkpoint of {load['checkpoint']['bytes'] / 1e9:.2f} GB" in text
    for state in ("cold", "warm"):
        stock, context = (load["summary"][state]["median"][side]["seconds"] for side in ("stock", "context"))
        assert f"| {state} | {stock:.3g} s | {context:.3f} s |" in text


def test_figures_of_the_gather_are_those_of_the_result_file() -> None:
    text = (REPOSITORY / "docs" / "tuning.md").read_text(encoding="utf-8").replace("\n", " ")
    worker = result("smoke-cuda-2xh200-bf16-window-2026-11-30.json")["counters"]["prefill-cp2"]
    counters = worker["counters"]
    assert worker["mode"] == "window"
    assert f"{counters['aux_collectives']} collectives in {counters['cp_forwards']} CP forwards" in text
    assert f"{counters['rows_captured']} rows sent of {counters['rows_on_shard']} on the shard" in text
