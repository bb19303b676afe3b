"""Checks of a TrainEngine: that a run can rely on what it does with batches and checkpoints."""

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np

from astraflow.client.trainer import TrainerBatch
from astraflow.conformance.checks import Broken, CheckList, ContractCheck, show
from astraflow.conformance.engine_bench import (
    Bench,
    altered,
    difference,
    distance,
    halved,
    made_batch,
    require_count,
    require_same,
    weights_of,
)
from astraflow.core.code import load
from astraflow.core.errors import AstraflowError
from astraflow.trainers.engine import TellsLikelihoods, TrainEngine

# How far a log-probability may be above 0.
_TOLERANCE: Final = 1e-5

# Sums in another order differ in their last bits, and Adam turns these into steps.
_TOLERATED_SHARE: Final = 0.05
_NO_TOKEN: Final = 2**31 - 1

EngineLaw = Callable[[Bench], None]
"""Raises Broken where an engine does not do what is expected."""

LAWS: Final[dict[ContractCheck, EngineLaw]] = {}

_PAGE: Final = "trainers/engine.py, TrainEngine."
_OPTIONAL: Final = f"{_PAGE}likelihoods"


def _law(name: str, call: str, expected: str) -> Callable[[EngineLaw], EngineLaw]:
    """Make a law of a function."""
    check = ContractCheck(name=name, expected=expected, source=_PAGE + call)
    return lambda law: LAWS.setdefault(check, law)


@_law("engine.prepared", "prepare", "is at step 0 with its first weights, always the same ones")
def _prepared(bench: Bench) -> None:
    engine = bench.engine()
    require_count(engine, 0)
    require_same(weights_of(engine), weights_of(bench.engine()), "of two engines just made")


@_law("engine.step_count", "step_count", "counts every step, and says finite numbers of it")
def _counted(bench: Bench) -> None:
    engine = bench.engine()
    for step in (1, 2, 3):
        metrics = engine.train_step(bench.batch(step))
        require_count(engine, step)
        odd = [name for name, value in metrics.items() if not isfinite(value)]
        if odd:
            raise Broken(f"of step {step}, {odd[0]} is {metrics[odd[0]]}")


@_law("engine.parameters", "named_parameters", "keeps the names, shapes and types of its weights")
def _stable(bench: Bench) -> None:
    engine = bench.engine()
    before = {name: (each.shape, each.dtype) for name, each in weights_of(engine).items()}
    engine.train_step(bench.batch(1))
    after = {name: (each.shape, each.dtype) for name, each in weights_of(engine).items()}
    if before != after:
        name = next(iter(dict(before.items() ^ after.items())))
        raise Broken(f"{name} was {before.get(name)} and is {after.get(name)} after a step")


@_law("engine.moved", "train_step", "changes weights in a step on rows with advantages")
def _moved(bench: Bench) -> None:
    engine = bench.engine()
    before = weights_of(engine)
    engine.train_step(bench.batch(1))
    if difference(before, weights_of(engine)) is None:
        raise Broken("a step with advantages changed no weight")


@_law("engine.repeatable", "train_step", "makes the same steps of the same batches, to the bit")
def _repeatable(bench: Bench) -> None:
    require_same(
        weights_of(bench.engine(1, 2)), weights_of(bench.engine(1, 2)), "after the same two steps"
    )


@_law("engine.parts", "train_step", "does not care into how many parts the rows of a batch are cut")
def _cut(bench: Bench) -> None:
    engine, other = bench.engine(), bench.engine()
    before = weights_of(engine)
    engine.train_step(bench.batch(1))
    other.train_step(halved(bench.batch(1)))
    moved, gap = distance(before, weights_of(engine)), distance(*map(weights_of, (engine, other)))
    if gap > _TOLERATED_SHARE * moved:
        raise Broken(f"the same rows in two parts lead {gap:.2g} astray, of a step of {moved:.2g}")


@_law(
    "engine.no_advantage",
    "train_step",
    "counts a step whose advantages are all 0 and changes no weight by it: no weight"
    " decay, no momentum",
)
def _unmoved(bench: Bench) -> None:
    _stands_still(bench, bench.batch(2, advantage=0.0), "all advantages are 0")


@_law("engine.no_rows", "train_step", "counts a step on a batch without rows, and changes nothing")
def _empty(bench: Bench) -> None:
    batch = made_batch(bench.vocabulary_size, row_count=0)
    _stands_still(bench, batch, "a batch has no rows here")


def _stands_still(bench: Bench, batch: TrainerBatch, why: str) -> None:
    for seeds in ((), (1,)):
        engine = bench.engine(*seeds)
        before = weights_of(engine)
        engine.train_step(batch)
        require_same(before, weights_of(engine), f"before and after a step where {why}")
        require_count(engine, len(seeds) + 1)


@_law(
    "engine.nan",
    "train_step",
    "raises AstraflowError on NaN, with weights, gradients and count as before",
)
def _refused_nan(bench: Bench) -> None:
    batch = bench.batch(2)
    for column in ("advantages", "logprobs"):
        values = batch.parts[0].values(column).copy()
        values[batch.parts[0].values("loss_mask")] = np.nan
        _refuses(bench, altered(batch, **{column: values}), f"{column} that are NaN")


@_law(
    "engine.unknown_token",
    "train_step",
    "raises AstraflowError on a token that its model has not, and changes nothing",
)
def _refused_token(bench: Bench) -> None:
    batch = bench.batch(2)
    tokens = batch.parts[0].values("tokens").copy()
    tokens[3] = _NO_TOKEN
    _refuses(bench, altered(batch, tokens=tokens), f"the token {_NO_TOKEN}")


def _refuses(bench: Bench, batch: TrainerBatch, what: str) -> None:
    """Require an error that leaves no trace: the next step is as if the batch had never come."""
    engine = bench.engine(1)
    before = weights_of(engine)
    try:
        engine.train_step(batch)
    except AstraflowError:
        pass
    else:
        raise Broken(f"a batch with {what} was trained on")
    require_same(before, weights_of(engine), f"before and after a batch with {what}")
    require_count(engine, 1)
    engine.train_step(bench.batch(3))
    require_same(weights_of(engine), weights_of(bench.engine(1, 3)), f"a step after {what}")


@_law("engine.saved", "save", "saves the weights of the call, though the next step comes at once")
def _saved(bench: Bench) -> None:
    engine, folder = bench.engine(1), bench.new_folder("saved")
    before = weights_of(engine)
    engine.save(folder)
    engine.train_step(bench.batch(2))
    engine.wait_for_save()
    other = bench.engine()
    other.restore(folder)
    require_same(before, weights_of(other), "when save was called and in what it wrote")


@_law(
    "engine.restored",
    "restore",
    "restores weights, optimizer and step count so that the next step is the same to the bit",
)
def _restored(bench: Bench) -> None:
    engine, folder = bench.engine(1, 2), bench.new_folder("restored")
    engine.save(folder)
    engine.wait_for_save()
    metrics = engine.train_step(bench.batch(3))
    for other in (bench.engine(), bench.engine(4)):
        other.restore(folder)
        require_count(other, 2)
        again = other.train_step(bench.batch(3))
        require_same(weights_of(engine), weights_of(other), "of the step after a restore")
        if again != metrics:
            raise Broken(f"the step after a restore said {dict(again)}, not {dict(metrics)}")


@_law("engine.no_checkpoint", "restore", "raises AstraflowError on an empty directory")
def _refused_folder(bench: Bench) -> None:
    engine = bench.engine(1)
    before = weights_of(engine)
    try:
        engine.restore(bench.new_folder("nothing"))
    except AstraflowError:
        require_same(before, weights_of(engine), "before and after a restore that failed")
        return
    raise Broken("an empty directory was restored")


@_law("engine.likelihoods", "likelihoods", "finds a finite log-probability for each loss token")
def _likely(bench: Bench) -> None:
    engine, batch = bench.engine(1), bench.batch(2)
    before = weights_of(engine)
    found = _likelihoods(engine, batch)
    count = batch.header.loss_token_count
    if found.shape != (count,) or found.dtype != np.float32:
        raise Broken(f"likelihoods are {found.dtype}{list(found.shape)}, not float32[{count}]")
    if not np.isfinite(found).all() or found.max() > _TOLERANCE:
        raise Broken(f"likelihoods reach from {found.min()} to {found.max()}")
    require_same(before, weights_of(engine), "before and after likelihoods were asked for")


@_law("engine.likelier", "likelihoods", "makes likelier what has an advantage")
def _likelier(bench: Bench) -> None:
    engine, batch = bench.engine(), bench.batch(1)
    (part,) = batch.parts
    advantages = part.values("advantages")[part.values("loss_mask")]
    before = _likelihoods(engine, batch)
    for _ in range(3):
        engine.train_step(batch)
    risen = float(((_likelihoods(engine, batch) - before) * advantages).sum())
    if risen <= 0:
        raise Broken(f"advantages times what log-probabilities rose in three steps is {risen:.4g}")


def _likelihoods(engine: TrainEngine, batch: TrainerBatch) -> np.ndarray:
    if not isinstance(engine, TellsLikelihoods):
        raise Broken("an engine that has likelihoods made one that has not")
    return engine.likelihoods(batch)


def check_engine(bench: Bench) -> CheckList:
    """Look at an engine; what it raises unasked is a finding, too."""
    try:
        tells_likelihoods = isinstance(bench.make(), TellsLikelihoods)
    # The checks say what it is.
    except (Exception, SystemExit):  # noqa: BLE001
        tells_likelihoods = False
    checks = CheckList(each for each in LAWS if tells_likelihoods or each.source != _OPTIONAL)
    for check in checks.all:
        try:
            LAWS[check](bench)
        except Broken as finding:
            checks.failed(check.name, str(finding))
        # Code of others: whatever it is, it is shown.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            checks.failed(check.name, f"it raised {type(error).__name__}: {error}")
        else:
            checks.passed(check.name)
    return checks


def check_train_engine(factory: str, *, vocabulary_size: int, as_json: bool) -> bool:
    """Look at an engine, show what was found, and return whether it keeps the contract.

    Raises:
        AstraflowError: CODE_UNKNOWN when the factory is not there.
    """
    make = load(factory, what=f"the engine {factory}")
    with TemporaryDirectory() as folder:
        checks = check_engine(
            Bench(make=make, vocabulary_size=vocabulary_size, folder=Path(folder))
        )
    show(checks, as_json=as_json)
    return checks.are_kept
