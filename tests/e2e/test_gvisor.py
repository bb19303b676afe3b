"""Within gVisor, which many rented GPU machines are: another kernel, with less in it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNSC = ("runsc", "--rootless", "--network=none", "--platform=ptrace", "do")
HERE = {
    "codec": ("tests/codec/test_rates.py", ""),
    "lanes": ("tests/transport/test_lane_contract.py", "grpc or tcp or shm"),
    # Its kernel bounds no memory by RLIMIT_DATA.
    "programs": ("tests/workflows/kept", "not hostile and not gigabytes and not means_harm"),
    "sandbox": ("tests/workflows/sandbox/test_contract.py", "unsafe_process"),
}


@pytest.fixture(autouse=True)
def runsc():
    if shutil.which(RUNSC[0]) is None:
        pytest.skip("needs gVisor (Debian: apt-get install runsc)")


def inside(*command, timeout_s):
    """Run a command; its files are gone afterwards, and its output comes through a pipe."""
    env = os.environ | {"TMPDIR": "/tmp"}
    done = subprocess.run(
        [*RUNSC, sys.executable, *command],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", HERE)
def test_what_depends_on_the_kernel_holds(name):
    path, chosen = HERE[name]
    chosen = ("-k", chosen) if chosen else ()
    inside("-m", "pytest", "-q", "-p", "no:cacheprovider", path, *chosen, timeout_s=280)


@pytest.mark.long
def test_a_run_trains():
    steps = ("--set", "policies.solver.trainer.step_count=2")
    said = inside("-m", "astraflow", "run", "recipes/sort.yaml", *steps, timeout_s=280)
    assert "a lane cannot be served" not in said
    assert "Traceback" not in said
