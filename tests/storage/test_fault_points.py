"""A process dies where it was told to, and nowhere else."""

import signal
import subprocess
import sys

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.storage.fault_points import VARIABLE, FaultPoint, arm, hit

_REACHES = """
from astraflow.storage.fault_points import FaultPoint, arm, hit
arm()
for number in range(1, 4):
    hit(FaultPoint.JOURNAL_WRITTEN)
    print(number, flush=True)
    hit(FaultPoint.TRIM_STARTED)
"""


def test_a_process_dies_at_its_place_for_the_time_that_was_named():
    done = subprocess.run(
        [sys.executable, "-c", _REACHES],
        env={VARIABLE: "journal_written:3", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == [b"1", b"2"]


def test_nothing_happens_where_nobody_asked():
    arm({})
    for point in FaultPoint:
        hit(point)


@pytest.mark.parametrize("asked", ["nowhere", "trim_started:0", "trim_started:x"])
def test_what_is_no_place_is_refused_with_the_places(asked):
    with pytest.raises(AstraflowError, match="the places are recovery_opened, ") as caught:
        arm({VARIABLE: asked})
    assert caught.value.reason is Reason.INVALID_FIELD
