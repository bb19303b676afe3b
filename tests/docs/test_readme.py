"""The pages: what they show is run, their links lead somewhere, and they can be read at once."""

import importlib
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
LINKED = sorted([*PAGES, *ROOT.glob("docs/*/*.md"), *ROOT.glob("recipes/**/README.md")])
_TITLED = re.compile(r"^```python title=\"([^\"]+)\"\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_code_on_the_front_page_is_the_code_that_the_docs_run(blocks):
    run = {title: code for _, title, code in blocks("workflows.md") if title}
    shown = dict(_TITLED.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert shown.keys() == {"my_workflows.py"}
    assert {title: run[title] for title in shown} == shown


@pytest.mark.parametrize("path", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_page_and_a_heading(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(path)):
        place, _, anchor = link.partition("#")
        if ":" in place:
            continue
        target = (path.parent / place).resolve() if place else path
        assert target.exists(), f"{path.name} links {link}"
        assert not anchor or anchor in anchors(target), f"{path.name} links {link}"


def anchors(path):
    headings = re.findall(r"^#+ (.+)$", without_code(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_code(path):
    text = path.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_can_be_read_at_once(path):
    assert len(path.read_text(encoding="utf-8").split()) <= 1500


def test_every_page_has_one_place_in_the_site(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    site = importlib.import_module("build_docs")
    known = site.sources()
    nav = site.navigation(yaml.safe_load((ROOT / "docs/mkdocs.yml").read_text())["nav"], known)
    placed = [name.replace(".md", "") for name in leaves(nav)]
    pages = {re.sub(r"\.(md|ipynb)$", "", name) for name in known if name[-4:] != ".png"}
    assert sorted(placed) == sorted(pages)
    assert all(site.page_text(name, known) for name in known if name[-4:] != ".png")


def leaves(entries):
    for each in entries:
        if isinstance(each, dict):
            [below] = each.values()
            yield from [below] if isinstance(below, str) else leaves(below)
        else:
            yield each
