"""The repository's files: generated documents, ignored folders, paths of one machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from sglang_dspark_cp import adapters
from sglang_dspark_cp.cli.hooks import markdown

REPOSITORY = Path(__file__).resolve().parents[2]
MACHINE_PATH = re.compile(r"(?<![\w.$}/-])/(?:home|root|Users|work|mnt|data)/\w")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout")
    return [REPOSITORY / name for name in git("ls-files", "-z").split("\0") if name]


def test_no_absolute_path_of_one_machine(tracked: list[Path]) -> None:
    assert tracked
    found = []
    for path in tracked:
        if not path.is_file():
            continue
        text = path.read_bytes().decode(errors="replace")
        found += [
            f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()[:90]}"
            for number, line in enumerate(text.splitlines(), 1)
            if MACHINE_PATH.search(line)
        ]
    assert found == []


def test_the_pattern_finds_machine_paths_and_nothing_else() -> None:
    base = "/"  # keeps this file free of what it looks for
    for text in (f"{base}home/me", f"'{base}work/main'", f"cd {base}root/x"):
        assert MACHINE_PATH.search(text)
    for text in ("docs/data/x", "$ROOT/work/x", "https://host/home/x", "/tmp/x", "/usr/bin"):
        assert not MACHINE_PATH.search(text)


@pytest.mark.parametrize("folder", ["unit", "dist", "sglang", "mooncake", "repo", "gpu", "benchmark"])
def test_git_does_not_ignore_a_test_folder(folder: str) -> None:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout")
    assert git("check-ignore", "-v", "--no-index", f"test/{folder}/test_new.py") == ""


def test_the_hook_document_is_current() -> None:
    assert (REPOSITORY / "docs" / "hooks.md").read_text(encoding="utf-8") == markdown()


@pytest.mark.parametrize("release", sorted(adapters.REVIEWED))
def test_every_reviewed_release_has_its_constraints(release: str) -> None:
    lines = (REPOSITORY / "constraints" / f"{release}.txt").read_text(encoding="utf-8").splitlines()
    assert f"sglang=={release}" in lines
