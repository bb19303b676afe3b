"""Garbage collection: what a process keeps for good is not looked through again and again."""

import gc


def keep_for_good() -> None:
    """Leave all that exists now out of later collections; call it once a process is ready.

    With torch and its libraries loaded a full collection walks a million objects, a third of a
    second in which nothing else runs.
    """
    gc.collect()
    gc.freeze()
