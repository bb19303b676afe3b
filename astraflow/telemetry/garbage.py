"""Garbage collection: what a process keeps for good is not looked through again and again."""

import gc


def keep_for_good() -> None:
    """Leave all that exists now out of later collections; call it once a process is ready.

    With torch and its libraries loaded a full collection walks a million objects, a third of a
    second in which nothing else runs.
    """
    gc.collect()
    gc.freeze()


def collect_rarely() -> None:
    """Have the collector look less often, for a process that makes many objects and few cycles.

    A hub keeps thousands of rollouts: a walk over all of them takes longer than a call may wait.
    The young are looked through every 10,000 objects, a millisecond each; all of them a thousand
    times less often.
    """
    gc.set_threshold(10_000, 10, 100)
