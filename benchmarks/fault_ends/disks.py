"""Full disks: a version that finds no room where it is written."""

from importlib.util import find_spec

from fault_ends.trial import Counts

NO_DISK = "skipped: nothing in astraflow.weights writes to a disk yet"


def fill_disks(*, quota: int, seed: int) -> dict[str, Counts] | str:
    """Return the counts; in words why there are none."""
    del quota, seed
    if find_spec("astraflow.weights.object_store") is None:
        return NO_DISK
    return "skipped: the object store has no trial here yet"
