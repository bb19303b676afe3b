import subprocess
import sys

PROGRAM = """
import gc
from astraflow.telemetry.garbage import collect_rarely, expect_imports, keep_for_good
before = gc.get_threshold()
expect_imports()
assert gc.get_threshold() > before
keep_for_good()
assert gc.get_threshold() == before
collect_rarely()
assert gc.get_freeze_count() > 1000
assert all(now >= then for now, then in zip(gc.get_threshold(), before))
assert gc.isenabled()
"""


def test_what_exists_is_left_alone_and_the_rest_is_looked_through_rarely():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
