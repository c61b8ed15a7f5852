"""Every command in the README, in docs/ and in examples/ is one that exists; launch lines are resolved by SGLang."""

from __future__ import annotations

import os
import re
import runpy
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from spawning import Spawn
from test_doctor_resolution import DoctorRank

from sglang_dspark_cp import __version__
from sglang_dspark_cp.cli.doctor import launch_arguments
from sglang_dspark_cp.cli.doctor_resolve import OFFLINE, Answer
from sglang_dspark_cp.cli.main import build_parser
from sglang_dspark_cp.smoke.arguments import write_model_folder
from sglang_dspark_cp.smoke.processes import RankPool, RankProcess

pytestmark = pytest.mark.timeout(150)

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = runpy.run_path(str(REPOSITORY / "test" / "repo" / "test_examples.py"))
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")), REPOSITORY / "examples/README.md"]
SHELL = ("", "bash", "sh", "shell", "console")
PLAIN = {
    *("curl", "docker", "git", "ss", "ls", "env", "cd", "export", "unset", "pip", "nvidia-smi", "cp", "mkdir"),
    *("grep", "echo", "cat", "sort", "sed", "tee", "tail", "kill", "tar", "kubectl", "apt-get", "uv"),
}
"""Programs of the system, of which nothing is checked beyond the files below."""
ROUTER_FLAGS = {"--pd-disaggregation", "--prefill", "--decode", "--host", "--port"}
PYTHONS = ("python", "python3", "$BIN/python")
SEPARATORS = {";", "&&", "||", "|", "&"}
OPENERS, CLOSERS = {"{", "(", "do", "then", "!", "if", "while"}, {"}", ")", "done", "fi", "for"}


@dataclass(frozen=True)
class Command:
    """One simple command of a document."""

    where: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where}: {shlex.join(self.words)}"


def split(line: str) -> Iterator[list[str]]:
    """The simple commands of a line, without assignments before them and without what `$(...)` would put in."""
    lexer = shlex.shlex(re.sub(r"\$\([^()]*\)", "", line), posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in SEPARATORS:
            if words or not (word in OPENERS or re.fullmatch(r"\w+=.*", word, re.DOTALL)):
                words.append(word)
            continue
        if words and words[0] not in CLOSERS:
            yield words
        words = []


def documented(path: Path) -> Iterator[Command]:
    """Commands of the fenced shell blocks of a document."""
    blocks = re.findall(r"^ *```(.*?)\n(.*?)^ *```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for kind, text in blocks:
        if kind.strip() in SHELL:
            for line in text.replace("\\\n", " ").splitlines():
                for words in split(line.strip().removeprefix("$ ")):
                    yield Command(path.relative_to(REPOSITORY).as_posix(), tuple(words))


def scripted() -> Iterator[Command]:
    for path in EXAMPLES["SCRIPTS"]:
        yield Command(path.relative_to(REPOSITORY).as_posix(), tuple(EXAMPLES["recorded"](path)))
    multi = REPOSITORY / "examples" / "multi-host"
    for transfer in ("mooncake", "mooncake_tcp"):
        for role in ("prefill", "decode"):
            words = EXAMPLES["recorded"](multi / f"{role}.sh", TRANSFER=transfer, TP="4")
            yield Command(f"examples/multi-host/{role}.sh with {transfer}, 4 GPUs", tuple(words))


def manifested() -> Iterator[Command]:
    for path in EXAMPLES["MANIFESTS"]:
        for role, words in EXAMPLES["manifest_commands"](path):
            yield Command(f"{path.name}, {role}", tuple(words))


COMMANDS = [*(command for path in DOCUMENTS for command in documented(path)), *scripted(), *manifested()]


def is_python(words: tuple[str, ...]) -> bool:
    return words[0] in PYTHONS or words[0].endswith("/bin/python")


def launch_line(command: Command) -> list[str] | None:
    """The arguments of the server that a command starts, or asks `doctor` about."""
    words = list(command.words)
    if words[0] == "sglang-dspark-cp" and "doctor" in words and "--" in words:
        return launch_arguments(words[words.index("--") + 1 :])
    starts = (is_python(command.words) and words[1:3] == ["-m", "sglang.launch_server"]) or words[:2] == [
        "sglang",
        "serve",
    ]
    return launch_arguments(words) if starts else None


# ------------------------------------------------------------------------------------------------- what SGLang says


@pytest.fixture(scope="module")
def rank(pool: RankPool, spawn: Spawn) -> Iterator[RankProcess]:
    (found,) = spawn(f"{DoctorRank.__module__}:{DoctorRank.__name__}")
    yield found
    found.kill()
    pool.ranks.remove(found)


def with_model(line: list[str], model: Path) -> tuple[str, ...]:
    words = list(line)
    words[words.index("--model-path") + 1] = str(model)
    return tuple(words)


def test_launch_lines_are_accepted(rank: RankProcess, pool: RankPool, tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model")
    lines: dict[tuple[str, ...], list[str]] = {}
    for command in COMMANDS:
        if (line := launch_line(command)) is not None:
            lines.setdefault(with_model(line, model), []).append(command.where)
    wheres = {where for places in lines.values() for where in places}
    assert {"README.md", "docs/deployment.md", "docs/troubleshooting.md"} <= wheres
    assert {f"examples/{folder}{role}.sh" for folder in ("", "multi-host/") for role in ("prefill", "decode")} <= wheres
    refused = {}
    for line, places in lines.items():
        rank.start("ask", list(line), {**OFFLINE, "SGLANG_PLUGINS": "dspark_cp"})
        (told,) = pool.collect([rank], 60.0)
        assert isinstance(told, Answer)
        if wrong := what_is_wrong(told):
            refused[", ".join(places)] = wrong
    assert refused == {}


def what_is_wrong(told: Answer) -> str:
    """Empty for a prefill server with DSPARK and CP over all its GPUs, and for a decode server with DSPARK."""
    if told.resolved is None:
        return told.error
    found = told.resolved
    if found["speculative_algorithm"] != "DSPARK":
        return f"speculation {found['speculative_algorithm']}"
    if found["disaggregation_mode"] == "prefill":
        if told.mode_error or told.mode != "window" or not 2 <= found["attn_cp_size"] == found["tp_size"] <= 8:
            return f"gather {told.mode} {told.mode_error}, attention CP {found['attn_cp_size']}, tp {found['tp_size']}"
        return ""
    if not found["enable_dp_attention"] or found["dp_size"] != found["tp_size"]:
        return f"decode with dp {found['dp_size']}, tp {found['tp_size']}"
    return "" if found["disaggregation_mode"] == "decode" else f"mode {found['disaggregation_mode']}"


# ------------------------------------------------------------------------------------------------------ other commands


def parsed(words: list[str]) -> str:
    """Empty if this package's command line takes the words."""
    try:
        build_parser().parse_args(words)
    except SystemExit as stopped:
        return "" if stopped.code == 0 else "is not parsed"
    return ""


def test_commands_of_this_package_are_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    wrong, seen = [], set()
    for command in COMMANDS:
        words = list(command.words)
        if Path(words[0]).name == "sglang-dspark-cp":
            seen.add(words[1])
            wrong += [f"{command} {text}" for text in [parsed(words[1:])] if text]
        if words[0] == "make" and "smoke" in words:
            given = next((word.partition("=")[2] for word in words if word.startswith("ARGS=")), "")
            wrong += [f"{command} {text}" for text in [parsed(["smoke", *shlex.split(given)])] if text]
    assert wrong == [], capsys.readouterr().err
    assert {"doctor", "plan", "smoke", "hooks", "--version"} <= seen


def problems(command: Command) -> Iterator[str]:
    """What does not exist of what a command names."""
    words = command.words
    name = words[0]
    targets = re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    if name == "make":
        yield from (f"no target {word}" for word in words[1:] if "=" not in word and word not in targets)
    elif is_python(words) and words[1:3] == ("-m", "sglang_router.launch_router"):
        yield from (f"unknown {flag}" for flag in EXAMPLES["flags"](words) - ROUTER_FLAGS)
    elif is_python(words) and words[1] == "-m":
        if words[2] not in ("pip", "pytest", "venv", "sglang.launch_server"):
            yield f"unknown module {words[2]}"
    elif is_python(words):
        if words[1] != "-c" and not (REPOSITORY / words[1]).is_file():
            yield f"no file {words[1]}"
    elif name in (".", "source"):
        if not (REPOSITORY / words[1]).is_file():
            yield f"no file {words[1]}"
    elif "/" in name and not name.startswith(("/", "$", ".venv/")):
        if not os.access(REPOSITORY / name, os.X_OK):
            yield f"no program {name}"
    elif name not in PLAIN and Path(name).name not in ("sglang-dspark-cp", "sglang"):
        yield "unknown program: if it exists, add it to PLAIN"
    for flag, given in pairwise(words):
        if flag in ("--constraint", "-f", "--file") and not (REPOSITORY / given).is_file():
            yield f"no file {given}"
    for word in words:
        if re.fullmatch(r"dist/.*\.whl", word) and word != f"dist/sglang_dspark_cp-{__version__}-py3-none-any.whl":
            yield f"no such wheel {word}"


def test_other_commands_exist() -> None:
    assert len(COMMANDS) > 40
    wrong = [f"{command} ({problem})" for command in COMMANDS for problem in problems(command)]
    assert wrong == [], "\n".join(wrong)


def test_a_line_is_split_as_a_shell_would() -> None:
    line = "A=1 B='x y' make smoke ARGS=\"--json --stock\" && . env.sh; ls | cat  # a comment"
    assert list(split(line)) == [["make", "smoke", "ARGS=--json --stock"], [".", "env.sh"], ["ls"], ["cat"]]
    assert list(split('PATH="$PWD:$PATH"   # nothing is run')) == []
    assert list(split('for x in 1 2; do { make "$(ls -a)"; }; done > list')) == [["make", ""]]
