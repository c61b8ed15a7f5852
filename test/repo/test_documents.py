"""The documents say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang_dspark_cp import adapters, config
from sglang_dspark_cp.cli.hooks import markdown, table
from sglang_dspark_cp.core.topology import TRANSFER_BACKENDS

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *(REPOSITORY / "docs").glob("*.md")])
ROW = re.compile(r"^\| `(?P<name>SGLANG_DSPARK_CP\w*)` \| (?P<values>[^|]*) \|", re.MULTILINE)


def read(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def rows(text: str) -> dict[str, str]:
    """Variable -> its values, from a Markdown table."""
    return {row["name"]: row["values"].strip() for row in ROW.finditer(text)}


def test_the_hook_document_is_current() -> None:
    assert read("docs/hooks.md") == markdown()


@pytest.mark.parametrize("release", adapters.REVIEWED)
def test_every_hook_is_in_the_hook_document(release: str) -> None:
    text = read("docs/hooks.md")
    for hook in table(release):
        for part in (f"### `{hook.id}`", hook.target, hook.digest):
            assert part in text


@pytest.mark.parametrize("name", config.NAMES)
def test_every_environment_variable_is_in_the_readme(name: str) -> None:
    assert f"`{name}`" in read("README.md")


def test_the_readme_has_no_other_environment_variable_of_this_package() -> None:
    assert set(rows(read("README.md"))) == set(config.NAMES)
    assert set(re.findall(r"SGLANG_DSPARK_CP\w*", read("README.md"))) == set(config.NAMES)


def test_the_readme_lists_the_levels_default_first() -> None:
    values = re.findall(r"`([^`]+)`", rows(read("README.md"))[config.ALIGN])
    assert set(values) == {level.value for level in config.AlignLevel}
    assert values[0] == config.Config().align.value


def test_values_are_the_same_in_readme_and_module() -> None:
    module, readme = rows(config.__doc__ or ""), rows(read("README.md"))
    plain = {name: values.replace("CP_RANK", "RANK") for name, values in readme.items()}
    assert module == plain


@pytest.mark.parametrize("backend", TRANSFER_BACKENDS)
def test_the_readme_names_every_transfer_backend(backend: str) -> None:
    assert f"`{backend}`" in read("README.md")


@pytest.mark.parametrize("release", adapters.REVIEWED)
def test_every_reviewed_release_is_in_the_support_table(release: str) -> None:
    assert re.search(rf"^\| {re.escape(release)} \|", read("README.md"), re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_inside_the_repository_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []
