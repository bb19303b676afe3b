import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
INI = """[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
filterwarnings = error
"""
_FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def page():
    """Returns the text of a page."""
    return lambda name: (DOCS / name).read_text(encoding="utf-8")


@pytest.fixture
def blocks(page):
    """Returns the code blocks of a page as (language, title, code)."""
    return lambda name: [match.groups() for match in _FENCE.finditer(page(name))]


@pytest.fixture
def run_example(blocks, tmp_path):
    """Writes the files that a page shows and passes the tests among them."""

    def run(name):
        for _, title, code in blocks(name):
            if title:
                (tmp_path / title).write_text(code, encoding="utf-8")
        (tmp_path / "pytest.ini").write_text(INI)
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=300"]
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, *command, str(tmp_path)],
            check=False,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
