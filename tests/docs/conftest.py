import re
from pathlib import Path
from typing import NamedTuple

import pytest

from crash_ends.nursery import Nursery

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RECIPES = ROOT / "recipes"
PAGES = sorted(
    [
        *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"),
        *(*DOCS.rglob("*.md"), *RECIPES.rglob("README.md")),
    ]
)
INI = """[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
filterwarnings = error
"""
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INFO = re.compile(r"(\w*)(?: title=\"([^\"]+)\")?")


class Fence(NamedTuple):
    """A fenced block of a page; `title` names the file that it is, or what it shows."""

    language: str
    title: str | None
    code: str


def fences(path: Path) -> list[Fence]:
    found = []
    for info, code in _FENCE.findall(path.read_text(encoding="utf-8")):
        known = _INFO.fullmatch(info)
        assert known, f"{path.name}: a fence begins with ```{info}"
        found.append(Fence(known[1], known[2], code))
    return found


def files(path: Path) -> dict[str, str]:
    """Return the files that a page shows, by their names."""
    return {title: code for _, title, code in fences(path) if title and "." in title}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture
def page():
    """Returns the text of a page."""
    return lambda name: (DOCS / name).read_text(encoding="utf-8")


@pytest.fixture
def blocks():
    """Returns the code blocks of a page as (language, title, code)."""
    return lambda name: fences(DOCS / name)


@pytest.fixture(scope="module")
def passing():
    """Yields what passes tests in processes of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(RECIPES / "trainers")
        patch.syspath_prepend(Path(__file__).parent)
        nursery = Nursery("passes")
    with nursery:
        yield nursery


@pytest.fixture
def run_example(tmp_path, passing):
    """Writes the files that a page shows and passes the tests among them."""

    def run(path):
        for title, code in files(path).items():
            (tmp_path / title).write_text(code, encoding="utf-8")
        (tmp_path / "pytest.ini").write_text(INI)
        output = tmp_path / "said"
        code = passing.wait(passing.start("pass_tests", str(tmp_path), output=output))
        said = output.read_text()
        assert code == 0, said
        return said

    return run
