"""Checks of a TrainEngine: that a run can rely on what it does with batches and checkpoints."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from astraflow.conformance.checks import Broken, Check, CheckList
from astraflow.conformance.engine_bench import Bench
from astraflow.conformance.engine_laws import LAWS
from astraflow.conformance.report import show
from astraflow.core.code import load
from astraflow.trainers.engine import TellsLikelihoods
from astraflow.workflows.registry import see_working_directory

_PAGE: Final = "trainers/engine.py, TrainEngine."
_OPTIONAL: Final = frozenset({"engine.likelihoods", "engine.likelier"})

_EXPECTED: Final = (
    ("engine.prepared", "prepare", "is at step 0 with its first weights, always the same ones"),
    ("engine.step_count", "step_count", "counts every step, and says finite numbers of it"),
    ("engine.parameters", "named_parameters", "keeps the names, shapes and types of its weights"),
    ("engine.moved", "train_step", "changes weights in a step on rows with advantages"),
    ("engine.repeatable", "train_step", "makes the same steps of the same batches, to the bit"),
    ("engine.parts", "train_step", "does not care into how many parts the rows of a batch are cut"),
    (
        "engine.no_advantage",
        "train_step",
        "counts a step whose advantages are all 0 and changes no weight by it: no weight decay, no"
        " momentum",
    ),
    ("engine.no_rows", "train_step", "counts a step on a batch without rows, and changes nothing"),
    (
        "engine.nan",
        "train_step",
        "raises AstraflowError on NaN, with weights, gradients and count as before",
    ),
    (
        "engine.unknown_token",
        "train_step",
        "raises AstraflowError on a token that its model has not, and changes nothing",
    ),
    ("engine.saved", "save", "saves the weights of the call, though the next step comes at once"),
    (
        "engine.restored",
        "restore",
        "restores weights, optimizer and step count so that the next step is the same to the bit",
    ),
    ("engine.no_checkpoint", "restore", "raises AstraflowError on an empty directory"),
    ("engine.likelihoods", "likelihoods", "finds a finite log-probability for each loss token"),
    ("engine.likelier", "likelihoods", "makes likelier what has an advantage"),
)

CHECKS: Final = tuple(
    Check(name=name, expected=expected, source=_PAGE + call) for name, call, expected in _EXPECTED
)


def check_engine(bench: Bench) -> CheckList:
    """Look at an engine; what it raises unasked is a finding, too."""
    is_asked = _tells_likelihoods(bench)
    chosen = {name: law for name, law in LAWS.items() if is_asked or name not in _OPTIONAL}
    checks = CheckList(check for check in CHECKS if check.name in chosen)
    for name, law in chosen.items():
        try:
            law(bench)
        except Broken as finding:
            checks.failed(name, str(finding))
        # Code of others: whatever it is, it is shown.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            checks.failed(name, f"it raised {type(error).__name__}: {error}")
        else:
            checks.passed(name)
    return checks


def _tells_likelihoods(bench: Bench) -> bool:
    try:
        return isinstance(bench.make(), TellsLikelihoods)
    # The checks say what it is.
    except (Exception, SystemExit):  # noqa: BLE001
        return False


def look_at_engine(factory: str, *, vocabulary_size: int, as_json: bool) -> bool:
    """Look at an engine, show what was found, and return whether it keeps the contract.

    Args:
        factory: module:attribute; called without arguments.
        vocabulary_size: Tokens that it knows.
        as_json: Whether the findings are for machines.

    Raises:
        AstraflowError: CODE_UNKNOWN when the factory is not there.
    """
    see_working_directory()
    make = load(factory, what=f"the engine {factory}")
    with TemporaryDirectory() as folder:
        checks = check_engine(
            Bench(make=make, vocabulary_size=vocabulary_size, folder=Path(folder))
        )
    show(checks, as_json=as_json)
    return checks.are_kept
