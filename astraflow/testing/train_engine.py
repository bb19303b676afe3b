"""Checks of a train engine, from a test."""

from collections.abc import Callable
from pathlib import Path

from astraflow.conformance.checks import CheckVerdict
from astraflow.conformance.engine import check_engine
from astraflow.conformance.engine_bench import Bench
from astraflow.trainers.engine import TrainEngine


def require_train_engine(
    make: Callable[[], TrainEngine], *, vocabulary_size: int, folder: Path
) -> None:
    """Fail with what an engine does not keep of its contract, and what was seen instead.

    Args:
        make: Returns a new engine that is not prepared, with the same first weights every time.
        vocabulary_size: Tokens that it knows: 0 to below that.
        folder: Empty; for its checkpoints.

    Raises:
        AssertionError: Naming every check that failed.

    Example:
        def test_my_engine(tmp_path):
            require_train_engine(MyEngine, vocabulary_size=64, folder=tmp_path)
    """
    checks = check_engine(Bench(make=make, vocabulary_size=vocabulary_size, folder=folder))
    faults = [
        f"{check.name}: an engine {check.expected}; seen: {check.seen} [{check.source}]"
        for check in checks.all
        if check.verdict is not CheckVerdict.PASSED
    ]
    if faults:
        raise AssertionError("\n".join(faults))
