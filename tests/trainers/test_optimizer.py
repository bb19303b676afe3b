"""AdamW with a rising rate and clipped gradients."""

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from torch import nn
from transformers import LlamaForSequenceClassification

from astraflow.config.recipe import Optimizer
from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.optimizer import WeightOptimizer, flat_state, read_state, try_own_optimizer
from tests.trainers.conftest import llama_config


def holding(parameter):
    return nn.ParameterList([parameter])


def reference(weights, gradients, settings, rates):
    """Return the weights after AdamW steps, f64, from the paper."""
    first, second = np.zeros_like(weights), np.zeros_like(weights)
    low, high = settings.betas
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        norm = np.linalg.norm(gradient)
        clipped = gradient * min(1.0, settings.max_grad_norm / norm)
        first = low * first + (1 - low) * clipped
        second = high * second + (1 - high) * clipped**2
        mean, spread = first / (1 - low**step), np.sqrt(second / (1 - high**step))
        decayed = weights * (1 - rate * settings.weight_decay)
        weights = decayed - rate * mean / (spread + settings.eps)
    return weights


def test_steps_are_those_of_the_paper():
    settings = Optimizer(
        learning_rate=1e-2, warm_up_steps=3, weight_decay=0.1, max_grad_norm=0.5, eps=1e-6
    )
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=(4, 3)), rng.normal(size=(6, 4, 3))
    parameter = nn.Parameter(torch.tensor(start, dtype=torch.float32))
    optimizer = WeightOptimizer(holding(parameter), settings)
    for step, gradient in enumerate(gradients, start=1):
        parameter.grad = torch.tensor(gradient, dtype=torch.float32)
        assert optimizer.step(step) == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
        assert parameter.grad is None
    rates = [1e-2 * min(1, step / 3) for step in range(1, 7)]
    wanted = reference(start, gradients, settings, rates)
    np.testing.assert_allclose(parameter.detach().numpy(), wanted, atol=1e-6)


def test_rate_rises_then_stays():
    optimizer = WeightOptimizer(
        holding(nn.Parameter(torch.zeros(1))), Optimizer(learning_rate=1.0, warm_up_steps=4)
    )
    assert [optimizer.rate(step) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_rate_is_full_at_once_without_a_rise():
    optimizer = WeightOptimizer(holding(nn.Parameter(torch.zeros(1))), Optimizer(learning_rate=0.5))
    assert optimizer.rate(1) == 0.5


def test_rate_falls_to_a_tenth_between_two_steps():
    settings = Optimizer(learning_rate=1.0, warm_up_steps=2, decay=(4, 6))
    optimizer = WeightOptimizer(holding(nn.Parameter(torch.zeros(1))), settings)
    rates = [round(optimizer.rate(step), 6) for step in range(1, 9)]
    assert rates == [0.5, 1.0, 1.0, 1.0, 0.55, 0.1, 0.1, 0.1]


def test_a_decay_that_ends_before_it_begins_is_refused():
    with pytest.raises(ValueError, match="decay needs two steps"):
        Optimizer(warm_up_steps=5, decay=(4, 9))


def trained(make_model, settings, *, steps, resumed_at=None):
    """Return the weights after steps with gradients of a fixed seed, and the optimizer."""
    module, chance = make_model().module, torch.Generator().manual_seed(1)
    optimizer = WeightOptimizer(module, settings)
    for step in range(1, steps + 1):
        for each in module.parameters():
            each.grad = torch.randn(each.shape, generator=chance)
        optimizer.step(step)
        if step == resumed_at:
            state = optimizer.state()
            optimizer = WeightOptimizer(module, settings)
            optimizer.load(state)
    return module, optimizer


MUON = Optimizer(kind="muon", learning_rate=1e-2, weight_decay=0.1)


def test_muon_changes_hidden_matrices_and_adamw_the_rest(make_model):
    start, (module, optimizer) = make_model().module, trained(make_model, MUON, steps=1)
    before = dict(start.named_parameters())
    muon = {id(p) for p in optimizer._parts[0].param_groups[0]["params"]}
    for name, parameter in module.named_parameters():
        is_hidden = parameter.ndim == 2 and "embed" not in name
        assert (id(parameter) in muon) == is_hidden, name
        moved = parameter.detach() - before[name] * (1 - 1e-2 * 0.1)
        if is_hidden:
            # Newton-Schulz leaves most singular values between 0.7 and 1.2; 0.2 sqrt(n) scales.
            values = torch.linalg.svdvals(moved) / (1e-2 * 0.2 * max(parameter.shape) ** 0.5)
            assert 0.6 < values.median() < values.max() < 1.3, name
        else:
            torch.testing.assert_close(moved.abs(), torch.full_like(moved, 1e-2), rtol=1e-2, atol=0)


def test_muon_leaves_the_head_of_a_reward_model_to_adamw():
    module = LlamaForSequenceClassification(llama_config(num_labels=1))
    muon, adamw = WeightOptimizer(module, MUON)._parts
    heads = [
        any(each is module.score.weight for each in part.param_groups[0]["params"])
        for part in (muon, adamw)
    ]
    assert heads == [False, True]


RISING = Optimizer(learning_rate=1e-2, warm_up_steps=3, decay=(3, 6))


@pytest.mark.parametrize("settings", [MUON, Optimizer(learning_rate=1e-2), RISING])
def test_a_resumed_optimizer_goes_on_to_the_bit(make_model, settings):
    whole, _ = trained(make_model, settings, steps=4)
    resumed, _ = trained(make_model, settings, steps=4, resumed_at=2)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_state_of_another_kind_is_refused(make_model):
    _, adamw = trained(make_model, Optimizer(), steps=1)
    with pytest.raises(AstraflowError, match="another kind of optimizer than muon"):
        WeightOptimizer(make_model().module, MUON).load(adamw.state())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_of_ranks_may_have_numbers_that_are_no_tensors(tmp_path):
    """As that of transformers' Adafactor."""
    fields = {"step": 2, "exp_avg_sq": torch.arange(6.0).view(3, 2)}
    state = flat_state({"step_count": 2, "state": {0: fields}}, ["weight"], [])
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "optimizer", no_dist=True)
    found = read_state(tmp_path, {"weight": torch.zeros(3, 2)}, {})
    assert found["state"][0]["step"] == 2
    assert torch.equal(found["state"][0]["exp_avg_sq"], fields["exp_avg_sq"])


CODE = """
import torch

def sgd(parameters, settings):
    return torch.optim.SGD(parameters.values(), lr=settings.learning_rate, **settings.options)

def two_rates(parameters, settings):
    fast, *slow = parameters.values()
    groups = [{"params": [fast], "lr": 10 * settings.learning_rate}, {"params": slow}]
    return torch.optim.SGD(groups, lr=settings.learning_rate)

# Finds its rate by itself, and keeps it in its groups, as Prodigy does.
class Growing(torch.optim.SGD):
    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        for group in self.param_groups:
            group.update(k=0, d=1e-3)

    def step(self, closure=None):
        for group in self.param_groups:
            group.update(k=group["k"] + 1, d=2 * group["d"])
            for each in group["params"]:
                each.data -= group["d"] * each.grad

def growing(parameters, settings):
    return Growing(parameters.values(), lr=settings.learning_rate, **settings.options)

def nothing(parameters, settings):
    return None

def of_others(parameters, settings):
    return torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
"""


@pytest.fixture(scope="module")
def _module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("code")
    (folder / "a_users_optimizers.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


@pytest.mark.usefixtures("_module")
def test_an_optimizer_of_the_users_follows_the_schedule_with_its_own_proportions():
    module = nn.ParameterList([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))])
    settings = Optimizer(kind="a_users_optimizers:two_rates", learning_rate=0.1, warm_up_steps=2)
    optimizer = WeightOptimizer(module, settings)
    for each in module:
        each.grad = torch.full((1,), 0.5)
    optimizer.step(1)
    assert [each.item() for each in module] == pytest.approx([-0.25, -0.025])


@pytest.mark.usefixtures("_module")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_of_ranks", [False, True])
def test_what_an_optimizer_of_the_users_keeps_in_its_groups_is_resumed(tmp_path, is_of_ranks):
    kind = "a_users_optimizers:growing"

    def begin(**options):
        module = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(1))})
        return module["weight"], WeightOptimizer(module, Optimizer(kind=kind, options=options))

    def step(weight, optimizer):
        weight.grad = torch.ones(1)
        optimizer.step(1)
        return weight.item()

    weight, optimizer = begin()
    assert step(weight, optimizer) == pytest.approx(-0.002)
    state = {"step_count": 1, **optimizer.state()}
    if is_of_ranks:
        flat, folder = flat_state(state, ["weight"], []), tmp_path / "optimizer"
        torch.distributed.checkpoint.save(flat, checkpoint_id=folder, no_dist=True)
    else:
        torch.save(state, tmp_path / "optimizer.pt")
    again, resumed = begin(weight_decay=0.5)
    resumed.load(read_state(tmp_path, {"weight": again}, {}))
    assert step(again, resumed) == pytest.approx(-0.004)
    groups = resumed.state()["param_groups"]
    # What the settings say is theirs.
    assert groups == [{"k": 2, "d": pytest.approx(4e-3)}]


@pytest.mark.usefixtures("_module")
@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("nothing", {}, "returned NoneType, not a torch.optim.Optimizer"),
        ("of_others", {}, "of other tensors than the parameters"),
        ("sgd", {"momentun": 0.9}, "raised TypeError: .*momentun"),
        ("absent", {}, "cannot be loaded"),
    ],
)
def test_an_optimizer_that_does_not_work_is_found_before_a_run(kind, options, why):
    with pytest.raises(AstraflowError, match=why) as caught:
        try_own_optimizer(Optimizer(kind=f"a_users_optimizers:{kind}", options=options))
    assert caught.value.reason in (Reason.INVALID_FIELD, Reason.CODE_UNKNOWN)
    try_own_optimizer(Optimizer(kind="a_users_optimizers:sgd", options={"momentum": 0.9}))
