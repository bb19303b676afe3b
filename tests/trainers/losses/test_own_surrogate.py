"""A surrogate of the user's own."""

import pytest
import torch

from astraflow.config.recipe import Loss
from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.losses import LossInputs, clip_range_of, policy_loss, surrogate_of

CODE = """
def plain(terms, settings, limits):
    return -terms.logprobs * terms.advantages

def summed(terms, settings, limits):
    return plain(terms, settings, limits).sum()
"""


@pytest.fixture(scope="module", autouse=True)
def _module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("code")
    (folder / "a_users_losses.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


def inputs():
    logprobs = torch.tensor([-0.5, -1.0, -2.0], requires_grad=True)
    return LossInputs(
        logprobs=logprobs,
        sampler_logprobs=torch.tensor([-0.6, -1.0, -1.5]),
        advantages=torch.tensor([1.0, -1.0, 0.5]),
        weights=torch.ones(3),
        rows=torch.tensor([0, 0, 1]),
        row_count=2,
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
