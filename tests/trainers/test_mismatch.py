"""The mismatch between sampler and trainer at equal weights."""

import numpy as np
import pytest
import torch

from astraflow.config.recipe import TrainerConfig
from astraflow.core.tensors import Dtype
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.mismatch import MismatchProbe, export_bits
from astraflow.trainers.rows import TrainRows


@pytest.fixture
def batch(make_rows, to_part):
    def make(versions, logprobs=None):
        rows = make_rows(len(versions))
        for row, version in zip(rows, versions, strict=True):
            row["version"] = version
        made = TrainRows.from_parts([to_part(rows)])
        if logprobs is not None:
            made.loss.sampler_logprobs[:] = logprobs(made)
        return made

    return make


def sampled_with(model, dtype):
    """Return a function that gives the log-probabilities under weights as exported."""

    def logprobs(rows):
        learner = PolicyLearner(model, TrainerConfig())
        probe = MismatchProbe(model, learner, dtype=dtype)
        probe.keep(0)
        with probe._kept_weights():
            return learner.likelihoods(rows, np.ones(rows.row_count, np.bool_)).logprobs

    return logprobs


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.F32])
def test_rows_of_the_kept_version_match_its_exported_values(dtype, make_model, batch):
    model = make_model()
    rows = batch([10, 10, 11], sampled_with(model, dtype))
    learner = PolicyLearner(model, TrainerConfig())
    probe = MismatchProbe(model, learner, dtype=dtype)
    probe.keep(10)
    learner.step(rows, divisor=len(rows.loss))
    before = export_bits(model.module, Dtype.F32)
    seen = probe.measure(rows)
    assert seen["mismatch/same_weights_abs_max"] <= 1e-5
    assert seen["mismatch/same_weights_version"] == 10
    after = export_bits(model.module, Dtype.F32)
    assert all((after[name] == bits).all() for name, bits in before.items())


def test_mismatch_of_other_weights_is_seen(make_model, batch):
    model = make_model()
    rows = batch([0, 0], sampled_with(model, Dtype.F32))
    with torch.no_grad():
        model.module.model.norm.weight.mul_(1.01)
    probe = MismatchProbe(model, PolicyLearner(model, TrainerConfig()), dtype=Dtype.F32)
    probe.keep(0)
    assert probe.measure(rows)["mismatch/same_weights_abs_max"] > 1e-3


def test_versions_wait_for_their_rows_and_are_looked_at_once(make_model, batch):
    model = make_model()
    probe = MismatchProbe(model, PolicyLearner(model, TrainerConfig()), dtype=Dtype.BF16, every=2)
    probe.keep(1)
    assert not probe.measure(batch([1, 1]))
    probe.keep(2)
    assert not probe.measure(batch([1, 3]))
    assert probe.measure(batch([1, 2]))
    assert not probe.measure(batch([2, 2]))


def test_the_comparison_can_be_switched_off(make_model, batch):
    model = make_model()
    learner = PolicyLearner(model, TrainerConfig())
    probe = MismatchProbe(model, learner, dtype=Dtype.F32, every=None)
    probe.keep(0)
    assert probe.measure(batch([0, 0])) == {}
