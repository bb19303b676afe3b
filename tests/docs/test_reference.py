"""docs/reference is what is declared, and its links lead somewhere."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))


@pytest.mark.parametrize("name", ["make_api_docs.py", "make_reference.py"])
def test_the_reference_is_what_is_declared(name: str) -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / name, "--check"], check=False)
    assert done.returncode == 0, f"docs/reference is stale: run scripts/{name}"


def test_every_metric_has_words() -> None:
    rows = re.findall(r"^\| `.*$", (ROOT / "docs/reference/metrics.md").read_text(), re.MULTILINE)
    assert len(rows) > 60
    assert [row for row in rows if row.endswith("|  |")] == []


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
