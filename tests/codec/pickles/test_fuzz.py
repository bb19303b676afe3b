"""Faulty bodies by the thousand; `benchmarks/pickle_fuzz.py` has more of them."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "pickle_fuzz.py"


@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.long)])
def test_no_body_does_more_than_be_read_or_refused(count):
    """In a process of its own: a hook on what the interpreter does cannot be taken off."""
    command = [sys.executable, str(SCRIPT), "--count", str(count), "--peaks", "500"]
    subprocess.run(command, check=True, capture_output=True)
