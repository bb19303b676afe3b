"""Each promise of a train engine is asked for: who breaks one fails the check of its name."""

import json
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from astraflow.cli.main import app
from astraflow.conformance.checks import CheckVerdict
from astraflow.conformance.engine import LAWS, check_engine
from astraflow.conformance.engine_bench import Bench
from astraflow.core.errors import AstraflowError, Reason
from astraflow.testing import require_train_engine
from astraflow.trainers.rows import TrainRows

SIZE = 8


class Plain:
    """A sound engine: one number per token, and a momentum."""

    def __init__(self):
        self.step_count = 0

    def prepare(self):
        self.table, self.pull = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
        self.saved = None

    def named_parameters(self):
        yield "table", self.table

    def rows(self, batch):
        rows = TrainRows.from_parts(batch.parts)
        rows.require_vocabulary(SIZE)
        return rows

    def train_step(self, batch):
        rows = self.rows(batch)
        if rows.row_is_trained.any():
            self.pull = 0.9 * self.pull + self.gradient(rows)
            self.table = self.table + 0.1 * self.pull
        self.step_count += 1
        return {"train/loss": 0.5}

    def gradient(self, rows):
        drawn, gains = rows.tokens[rows.loss.positions], rows.loss.advantages
        gradient = -gains.sum() * np.exp(self.table) / np.exp(self.table).sum()
        np.add.at(gradient, drawn, gains)
        return gradient.astype(np.float32)

    def save(self, directory):
        self.saved = directory / "table.npz"
        np.savez(self.saved, table=self.table, pull=self.pull, step_count=self.step_count)

    def wait_for_save(self):
        pass

    def restore(self, directory):
        try:
            saved = np.load(directory / "table.npz")
        except OSError as error:
            raise AstraflowError(Reason.INVALID_FIELD, str(error)) from error
        self.table, self.pull = saved["table"], saved["pull"]
        self.step_count = int(saved["step_count"])


class Table(Plain):
    """One that says how likely it finds what was sampled."""

    def likelihoods(self, batch):
        rows = self.rows(batch)
        logprobs = self.table - np.log(np.exp(self.table).sum())
        return logprobs[rows.tokens[rows.loss.positions]]


class BeginsAnywhere(Table):
    def prepare(self):
        super().prepare()
        self.table = np.random.default_rng().normal(size=SIZE).astype(np.float32)


class CountsWrong(Table):
    def train_step(self, batch):
        self.step_count += 1
        return super().train_step(batch)


class SaysNan(Table):
    def train_step(self, batch):
        return {**super().train_step(batch), "train/loss": float("nan")}


class Grows(Table):
    def named_parameters(self):
        yield "table", self.table
        if self.step_count:
            yield "more", self.table


class StandsStill(Table):
    def gradient(self, rows):
        return np.zeros(SIZE, np.float32)


class Dices(Table):
    def gradient(self, rows):
        noise = np.random.default_rng().normal(size=SIZE).astype(np.float32)
        return super().gradient(rows) + noise


class FirstPartOnly(Table):
    def rows(self, batch):
        rows = TrainRows.from_parts(batch.parts[:1])
        rows.require_vocabulary(SIZE)
        return rows


class Drifts(Table):
    def train_step(self, batch):
        rows = self.rows(batch)
        if rows.row_count and not rows.row_is_trained.any():
            self.table = self.table + 0.1 * self.pull
        return super().train_step(batch)


class NeedsRows(Table):
    def rows(self, batch):
        rows = super().rows(batch)
        assert rows.lengths.min() > 0
        return rows


class TakesNan(Table):
    def rows(self, batch):
        for part in batch.parts:
            np.nan_to_num(part.values("advantages"), copy=False)
            np.nan_to_num(part.values("logprobs"), copy=False)
        return super().rows(batch)


class CountsBeforeItLooks(Table):
    def train_step(self, batch):
        self.pull = self.pull + np.float32(1)
        metrics = super().train_step(batch)
        self.pull = self.pull - np.float32(1)
        return metrics


class TakesAnyToken(Table):
    def rows(self, batch):
        rows = TrainRows.from_parts(batch.parts)
        np.minimum(rows.tokens, SIZE - 1, out=rows.tokens)
        return rows


class SavesLate(Table):
    def save(self, directory):
        self.directory = directory

    def wait_for_save(self):
        super().save(self.directory)


class ForgetsMomentum(Table):
    def restore(self, directory):
        super().restore(directory)
        self.pull = np.zeros(SIZE, np.float32)


class BeginsAnew(Table):
    def restore(self, directory):
        if any(directory.iterdir()):
            super().restore(directory)


class Certain(Table):
    def likelihoods(self, batch):
        return -super().likelihoods(batch)


class Backwards(Table):
    def gradient(self, rows):
        return -super().gradient(rows)


class CannotBeMade(Table):
    def __init__(self):
        raise RuntimeError("no accelerator")


class Exits(Table):
    def train_step(self, batch):
        sys.exit(1)


class SaysWords(Table):
    def train_step(self, batch):
        return {**super().train_step(batch), "train/loss": "low"}


class HasLists(Table):
    def named_parameters(self):
        yield "table", self.table.tolist()


class SavesNothing(Table):
    def save(self, directory):
        pass


BROKEN = {
    CannotBeMade: "engine.prepared",
    HasLists: "engine.prepared",
    Exits: "engine.step_count",
    SaysWords: "engine.step_count",
    SavesNothing: "engine.saved",
    BeginsAnywhere: "engine.prepared",
    CountsWrong: "engine.step_count",
    SaysNan: "engine.step_count",
    Grows: "engine.parameters",
    StandsStill: "engine.moved",
    Dices: "engine.repeatable",
    FirstPartOnly: "engine.parts",
    Drifts: "engine.no_advantage",
    NeedsRows: "engine.no_rows",
    TakesNan: "engine.nan",
    CountsBeforeItLooks: "engine.nan",
    TakesAnyToken: "engine.unknown_token",
    SavesLate: "engine.saved",
    ForgetsMomentum: "engine.restored",
    BeginsAnew: "engine.no_checkpoint",
    Certain: "engine.likelihoods",
    Backwards: "engine.likelier",
}


def failed(make, folder):
    checks = check_engine(Bench(make=make, vocabulary_size=SIZE, folder=folder))
    return {check.name for check in checks.all if check.verdict is CheckVerdict.FAILED}


def test_a_sound_engine_passes(tmp_path):
    require_train_engine(Table, vocabulary_size=SIZE, folder=tmp_path)


@pytest.mark.parametrize(("make", "name"), BROKEN.items(), ids=lambda each: str(each)[-30:])
def test_who_breaks_a_promise_fails_its_check(make, name, tmp_path):
    assert name in failed(make, tmp_path)


def test_every_promise_has_an_engine_that_breaks_it():
    assert set(BROKEN.values()) == {check.name for check in LAWS}


def test_likelihoods_are_not_asked_of_who_has_none(tmp_path):
    assert failed(Plain, tmp_path) == set()


def test_what_a_test_is_told_names_check_expectation_and_finding(tmp_path):
    with pytest.raises(AssertionError, match=r"engine\.moved: an engine changes .* no weight"):
        require_train_engine(StandsStill, vocabulary_size=SIZE, folder=tmp_path)


def test_the_command_says_it_by_exit_code_and_json(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_engine", sys.modules[__name__])
    arguments = ["conformance", "engine", "my_engine:Drifts", "--vocabulary-size", "8", "--json"]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 1
    verdicts = {check["name"]: check["verdict"] for check in json.loads(found.stdout)["checks"]}
    assert verdicts["engine.no_advantage"] == "failed"
    assert verdicts["engine.saved"] == "passed"
