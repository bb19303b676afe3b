"""Surrogates and estimators of the user's own."""

import pytest
import torch

from astraflow.config.recipe import Kl, Loss
from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.losses import (
    LossInputs,
    clip_range_of,
    policy_loss,
    surrogate_of,
    try_own_code,
)

CODE = """
def plain(terms, settings, limits):
    return -terms.logprobs * terms.advantages

def summed(terms, settings, limits):
    return plain(terms, settings, limits).sum()

def detached(terms, settings, limits):
    return -terms.logprobs.detach() * terms.advantages

def torn(terms, settings, limits):
    return terms.no_such_thing

def scaled(terms, settings, limits):
    return plain(terms, settings, limits) * settings.options["factor"]

def k1_again(logprobs, reference_logprobs):
    return logprobs - reference_logprobs

def one_number(logprobs, reference_logprobs):
    return (logprobs - reference_logprobs).sum()
"""


@pytest.fixture(scope="module", autouse=True)
def _module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("code")
    (folder / "a_users_losses.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


def inputs(**more):
    logprobs = torch.tensor([-0.5, -1.0, -2.0], requires_grad=True)
    return LossInputs(
        logprobs=logprobs,
        sampler_logprobs=torch.tensor([-0.6, -1.0, -1.5]),
        advantages=torch.tensor([1.0, -1.0, 0.5]),
        weights=torch.ones(3),
        rows=torch.tensor([0, 0, 1]),
        row_count=2,
        **more,
    )


def loss_of(surrogate):
    settings, given = Loss(surrogate=surrogate), inputs()
    loss = policy_loss(given, settings, clip_range_of(settings), divisor=3.0)
    loss.backward()
    return loss.item(), given.logprobs.grad.tolist()


def test_a_function_of_the_users_is_a_surrogate():
    assert loss_of("a_users_losses:plain") == loss_of("reinforce")


def test_what_is_not_one_cost_per_token_is_refused():
    with pytest.raises(AstraflowError, match=r"returned \(\), not one cost for each of the 3"):
        loss_of("a_users_losses:summed")


def test_a_function_that_is_not_there_is_named():
    with pytest.raises(AstraflowError, match="a_users_losses:absent") as caught:
        surrogate_of("a_users_losses:absent")
    assert caught.value.reason is Reason.CODE_UNKNOWN


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (Loss(surrogate="a_users_losses:detached"), "nothing of its costs has a gradient"),
        (Loss(surrogate="a_users_losses:summed"), r"returned \(\), not one cost"),
        (
            Loss(surrogate="a_users_losses:torn"),
            "torn raised AttributeError: .*no_such_thing.*line",
        ),
        (Loss(surrogate="a_users_losses:scaled"), "raised KeyError: 'factor'"),
        (
            Loss(kl=Kl(coefficient=0.1, estimator="a_users_losses:one_number")),
            r"loss.kl.estimator a_users_losses:one_number returned \(\), not one estimate",
        ),
    ],
)
def test_code_that_does_not_work_is_found_before_a_run(settings, why):
    with pytest.raises(AstraflowError, match=why) as caught:
        try_own_code(settings)
    assert caught.value.reason is Reason.INVALID_FIELD


def test_options_of_the_recipe_come_with_the_settings():
    settings = Loss(surrogate="a_users_losses:scaled", options={"factor": 3.0})
    try_own_code(settings)
    given = inputs()
    loss = policy_loss(given, settings, clip_range_of(settings), divisor=3.0)
    assert loss.item() == pytest.approx(3 * loss_of("reinforce")[0])
    with pytest.raises(ValueError, match="options are those of a surrogate of your own"):
        Loss(options={"factor": 3.0})


def test_an_estimator_of_the_users_is_one():
    found = []
    for estimator, where in (("k2", "loss"), ("a_users_losses:k1_again", "token")):
        settings = Loss(kl=Kl(coefficient=0.1, estimator=estimator, where=where))
        try_own_code(settings)
        given = inputs(reference_logprobs=torch.tensor([-0.4, -1.2, -2.0]))
        found.append(policy_loss(given, settings, clip_range_of(settings), divisor=3.0).item())
    assert found[0] != found[1]
