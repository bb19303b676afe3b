"""docs/reference is what is declared, and its links lead somewhere."""

import re
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import pytest

from astraflow.config.keys import key_tables
from astraflow.config.loader import json_schema
from astraflow.core.code import load
from astraflow.workflows import registry
from astraflow.workflows.registry import Kind

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
BUILT_IN = [name for name in registry.names(Kind.ENVIRONMENT) if ":" not in name]


@pytest.mark.parametrize("name", ["make_api_docs.py", "make_reference.py"])
def test_the_reference_is_what_is_declared(name: str) -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / name, "--check"], check=False)
    assert done.returncode == 0, f"docs/reference is stale: run scripts/{name}"


def test_every_metric_has_words() -> None:
    rows = re.findall(r"^\| `.*$", (ROOT / "docs/reference/metrics.md").read_text(), re.MULTILINE)
    assert len(rows) > 60
    assert [row for row in rows if row.endswith("|  |")] == []


def test_what_names_a_plug_in_is_a_key_of_a_recipe() -> None:
    text = (ROOT / "docs/reference/recipe.md").read_text()
    keys = {f"{table.path}.{row.key}" for table in key_tables(json_schema()) for row in table.rows}
    named = set(re.findall(r"^Named by `([^`]+)`", text, re.MULTILINE))
    assert len(named) > 5
    assert named - keys == set()


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_is_told_of_an_environment_is_what_it_takes(name: str) -> None:
    text = (ROOT / "docs/reference/recipe.md").read_text().partition("## Environments\n")[2]
    section = text.partition(f"### {name}\n")[2].partition("\n#")[0]
    takes = signature(load(registry.target_of(Kind.ENVIRONMENT, name), what=name)).parameters
    told = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert told == {each.name for each in takes.values() if each.kind is not each.VAR_KEYWORD}


def test_brackets_of_the_command_line_are_shown_as_they_are_typed() -> None:
    assert "`hosts=[a,b]`" in (ROOT / "docs/reference/cli.md").read_text()


def test_every_link_leads_to_a_heading() -> None:
    held = {f"{page.name}{anchor}" for page in PAGES for anchor in ("", *anchors(page))}
    wanted = {target for page in PAGES for target in targets(page)}
    assert wanted - held == set()


def anchors(page: Path) -> list[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return [f"#{re.sub(r'[.`]', '', heading.lower()).replace(' ', '-')}" for heading in headings]


def targets(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("../"):
            yield page.name + target if target.startswith("#") else target
