"""What passes the tests that pages show, forked where all that they need has been imported."""

import os
import sys

import pytest

import astraflow.testing  # noqa: F401 - they take its fixtures

sys.dont_write_bytecode = True


def pass_tests(folder: str) -> None:
    """Pass the tests of a folder; the exit code is pytest's."""
    os.chdir(folder)
    raise SystemExit(pytest.main(["-q", "-p", "no:cacheprovider", "--timeout=300", "."]))
