"""Every benchmark can be started from a checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# In one process: each would import torch anew.
IMPORT_ALL = """
import runpy, sys, traceback
failed = 0
for path in sys.argv[1:]:
    before, sys.path[0] = list(sys.path), "benchmarks"
    try:
        runpy.run_path(path, run_name="imported")
    except BaseException:
        failed += 1
        print(path, traceback.format_exc(), file=sys.stderr)
    sys.path[:] = before
sys.exit(failed)
"""


@pytest.mark.slow
def test_every_script_finds_what_it_imports():
    paths = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("benchmarks/*.py"))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *paths],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert len(paths) > 30
    assert done.returncode == 0, done.stderr
