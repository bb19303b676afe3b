import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

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


# Passes the tests of each folder that it is told, forked where all that they need was imported.
PASS_TESTS = """
import os, sys
import pytest
import astraflow.testing

for line in sys.stdin:
    if not (pid := os.fork()):
        os.chdir(line.strip())
        for number in (1, 2):
            os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        code = pytest.main(["-q", "-p", "no:cacheprovider", "--timeout=300", "."])
        sys.stdout.flush()
        os._exit(code)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def passing():
    """Yields a process that passes tests."""
    places = (os.environ.get("PYTHONPATH"), str(RECIPES / "trainers"))
    environment = os.environ | {
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
    }
    with subprocess.Popen(
        [sys.executable, "-c", PASS_TESTS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run_example(tmp_path, passing):
    """Writes the files that a page shows and passes the tests among them."""

    def run(path):
        for title, code in files(path).items():
            (tmp_path / title).write_text(code, encoding="utf-8")
        (tmp_path / "pytest.ini").write_text(INI)
        print(tmp_path, file=passing.stdin, flush=True)
        code, said = passing.stdout.readline(), (tmp_path / "said").read_text()
        assert code == "0\n", said
        return said

    return run
