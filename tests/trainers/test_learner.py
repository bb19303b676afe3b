"""One optimizer step from one batch."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from astraflow.config.recipe import Kl, Loss, Optimizer, TrainerConfig
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype
from astraflow.trainers.causal_model import CausalModel
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.likelihood import PassTokens, log_softmax_of
from astraflow.trainers.losses import LossInputs, clip_range_of, policy_loss
from astraflow.trainers.mismatch import export_bits
from astraflow.trainers.passes import passes_of
from astraflow.trainers.router_balance import RouterBalance, imbalance
from astraflow.trainers.rows import TrainRows
from tests.trainers.conftest import UNCLIPPED, seen_gradients

SETTINGS = TrainerConfig(optimizer=Optimizer(learning_rate=1e-2))


@pytest.fixture
def rows(make_rows, to_part):
    return TrainRows.from_parts([to_part(make_rows(16))])


def weights(model):
    return export_bits(model.module, Dtype.F32)


def assert_same(left, right):
    for name, bits in left.items():
        np.testing.assert_array_equal(bits, right[name], err_msg=name)


def gradients(model, rows, *, max_tokens):
    """Return the gradient that one step adds up."""
    optimizer = Optimizer(max_grad_norm=UNCLIPPED)
    settings = TrainerConfig(optimizer=optimizer, max_tokens_per_pass=max_tokens)
    with seen_gradients(model.module) as seen:
        PolicyLearner(model, settings).step(rows, divisor=len(rows.loss))
    return seen[0]


def test_same_batch_and_weights_give_the_same_bits(make_model, rows):
    models = [make_model(), make_model()]
    metrics = []
    for model in models:
        learner = PolicyLearner(model, SETTINGS)
        metrics.append([learner.step(rows, divisor=len(rows.loss)) for _ in range(3)])
    assert_same(weights(models[0]), weights(models[1]))
    assert metrics[0] == metrics[1]


def test_order_of_rows_does_not_change_a_bit(make_model, make_rows, to_part):
    batch, moved = make_rows(24), []
    for rows in (batch, batch[::-1], batch[7:] + batch[:7]):
        model = make_model()
        learner = PolicyLearner(model, SETTINGS.model_copy(update={"max_tokens_per_pass": 64}))
        losses = [
            learner.step(TrainRows.from_parts([to_part(rows)]), divisor=200)["train/loss"]
            for _ in range(2)
        ]
        moved.append((losses, weights(model)))
    for losses, bits in moved[1:]:
        assert losses == moved[0][0]
        assert_same(bits, moved[0][1])


def test_order_of_rows_of_the_same_tokens_does_not_change_a_bit(make_model, make_row, to_part):
    rng, batch = np.random.default_rng(3), []
    for _ in range(12):
        batch.append(make_row(rng, prompt=2, advantage=float(rng.normal())))
        batch[-1]["tokens"] = batch[0]["tokens"]
    moved = []
    for rows in (batch, batch[::-1]):
        model = make_model()
        learner = PolicyLearner(model, SETTINGS.model_copy(update={"share_prefixes": "never"}))
        learner.step(TrainRows.from_parts([to_part(rows)]), divisor=100)
        moved.append(weights(model))
    assert_same(*moved)


def test_gradients_of_passes_add_up_to_that_of_the_batch(make_model, rows):
    whole = gradients(make_model(), rows, max_tokens=10_000)
    parts = gradients(make_model(), rows, max_tokens=32)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-6)


def test_gradient_is_that_of_rows_alone(make_model, rows):
    """The whole step against a plain loop over rows through the bare module."""
    found, model = gradients(make_model(), rows, max_tokens=64), make_model()
    for row in range(rows.row_count):
        tokens = rows.tokens[rows.offsets[row] : rows.offsets[row + 1]].astype(np.int64)
        chosen = rows.loss.rows == row
        at = torch.from_numpy(rows.loss.positions[chosen] - rows.offsets[row])
        inputs = torch.from_numpy(tokens)
        logprobs = model.module(input_ids=inputs[None]).logits[0].log_softmax(-1)
        of_row = LossInputs(
            logprobs=logprobs[at - 1, inputs[at]],
            sampler_logprobs=torch.from_numpy(rows.loss.sampler_logprobs[chosen]),
            advantages=torch.from_numpy(rows.loss.advantages[chosen]),
            weights=torch.from_numpy(rows.loss.weights[chosen]),
            rows=torch.zeros(len(at), dtype=torch.long),
            row_count=1,
        )
        limits = clip_range_of(Loss())
        policy_loss(of_row, Loss(), limits, divisor=len(rows.loss)).backward()
    for name, parameter in model.module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_sequence_moves_by_a_token_that_weighs_nothing(make_model, make_row, to_part):
    row = make_row(np.random.default_rng(0), length=8)
    row["advantages"] = np.where(np.arange(8) == 4, 2.0, 0.0).astype(np.float32)
    row["loss_weights"] = (np.arange(8) != 4).astype(np.float32)
    rows = TrainRows.from_parts([to_part([row])])
    model = make_model()
    loss = Loss(ratio="sequence", clip_high=100.0)
    with seen_gradients(model.module) as seen:
        optimizer = Optimizer(max_grad_norm=UNCLIPPED)
        PolicyLearner(model, TrainerConfig(loss=loss, optimizer=optimizer)).step(rows, divisor=4)
    plain, tokens = make_model().module, torch.from_numpy(rows.tokens).long()
    said = plain(input_ids=tokens[None]).logits[0, 3:-1].log_softmax(-1)
    gap = said.gather(1, tokens[4:, None])[:, 0] - torch.from_numpy(rows.loss.sampler_logprobs)
    # Three tokens weigh 1, and the advantage of all four is 2 / 4.
    (-gap.mean().exp() * 0.5 * 3 / 4).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(seen[0][name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_rows_without_advantage_are_left_out(make_model, make_rows, to_part):
    flat = make_rows(4, seed=1)
    for row in flat:
        row["advantages"] = np.zeros_like(row["advantages"])
    some, moved = make_rows(8), []
    for batch in (some, some + flat):
        model = make_model()
        rows = TrainRows.from_parts([to_part(batch)])
        metrics = dict(PolicyLearner(model, SETTINGS).step(rows, divisor=100))
        moved.append((weights(model), metrics, metrics.pop("train/trained_rows_frac")))
    assert_same(moved[0][0], moved[1][0])
    assert moved[0][1] == moved[1][1]
    assert moved[1][2] == pytest.approx(8 / 12)


def test_batch_without_any_advantage_is_a_step_that_moves_nothing(make_model, make_rows, to_part):
    batch = make_rows(4)
    for row in batch:
        row["advantages"] = np.zeros_like(row["advantages"])
    model = make_model()
    before, learner = weights(model), PolicyLearner(model, SETTINGS)
    rows = TrainRows.from_parts([to_part(batch)])
    metrics = learner.step(rows, divisor=len(rows.loss))
    assert metrics["train/grad_norm"] == 0.0
    assert metrics["mismatch/logp_abs_max"] > 0
    assert learner.step_count == 1
    assert_same(before, weights(model))


def test_steps_raise_what_had_an_advantage(make_model, make_row, to_part):
    rng = np.random.default_rng(0)
    batch = [make_row(rng, advantage=1.0), make_row(rng, advantage=-1.0)]
    rows, model = TrainRows.from_parts([to_part(batch)]), make_model()
    learner = PolicyLearner(model, SETTINGS)
    everything = np.ones(2, np.bool_)
    before = learner.likelihoods(rows, everything).logprobs
    rows.loss.sampler_logprobs[:] = before
    for _ in range(5):
        learner.step(rows, divisor=len(rows.loss))
    risen = learner.likelihoods(rows, everything).logprobs - before
    assert risen[rows.loss.rows == 0].mean() > 0.05
    assert risen[rows.loss.rows == 1].mean() < -0.05


def test_log_is_of_the_weights_before_the_step(make_model, rows):
    learner = PolicyLearner(make_model(), SETTINGS)
    seen = learner.likelihoods(rows, np.ones(rows.row_count, np.bool_))
    metrics = learner.step(rows, divisor=len(rows.loss))
    gap = np.abs(seen.logprobs.astype(np.float64) - rows.loss.sampler_logprobs)
    assert metrics["mismatch/logp_abs_max"] == pytest.approx(gap.max(), rel=1e-4)
    assert metrics["train/entropy"] == pytest.approx(seen.entropies.mean(), rel=1e-4)


def test_nan_names_the_step_and_leaves_the_weights(make_model, rows):
    model = make_model()
    learner = PolicyLearner(model, SETTINGS)
    learner.step(rows, divisor=len(rows.loss))
    before, sound = weights(model), rows.loss.advantages[3]
    rows.loss.advantages[3] = np.nan
    with pytest.raises(AstraflowError, match=r"step 2: .*learning_rate") as caught:
        learner.step(rows, divisor=len(rows.loss))
    assert caught.value.reason is Reason.INTERNAL
    assert_same(before, weights(model))
    assert learner.step_count == 1
    assert all(parameter.grad is None for parameter in model.module.parameters())
    rows.loss.advantages[3] = sound
    assert np.isfinite(learner.step(rows, divisor=len(rows.loss))["train/grad_norm"])


def test_fine_tuning_trains_on_every_target_whatever_its_row_earned(make_model, make_rows, to_part):
    batch = make_rows(4)
    for row in batch:
        row["advantages"] = np.zeros_like(row["advantages"])
    rows, model = TrainRows.from_parts([to_part(batch)]), make_model()
    learner = PolicyLearner(model, SETTINGS.model_copy(update={"loss": Loss(surrogate="sft")}))
    losses = [learner.step(rows, divisor=len(rows.loss))["train/loss"] for _ in range(5)]
    everything = np.ones(rows.row_count, np.bool_)
    left = -learner.likelihoods(rows, everything).logprobs.mean()
    assert losses[0] > losses[-1] > left > 0


def test_token_outside_the_vocabulary_is_named(make_model, rows):
    rows.tokens[2] = 99
    with pytest.raises(AstraflowError, match=r"token 99 .* same tokenizer"):
        PolicyLearner(make_model(), SETTINGS).step(rows, divisor=len(rows.loss))


def test_kl_term_pulls_back_to_the_reference(make_model, make_rows, to_part):
    """Without any advantage, steps lead from other weights towards those of the reference."""
    batch = make_rows(8)
    for row in batch:
        row["advantages"] = np.zeros_like(row["advantages"])
    rows = TrainRows.from_parts([to_part(batch)])
    model, reference = make_model(), make_model()
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    settings = SETTINGS.model_copy(update={"loss": Loss(kl=Kl(coefficient=1.0))})
    learner = PolicyLearner(model, settings, reference=reference)
    losses = [learner.step(rows, divisor=len(rows.loss))["train/loss"] for _ in range(20)]
    assert losses[0] > 10 * losses[-1] > 0


def test_m2po_range_does_not_depend_on_passes(make_model, make_rows, to_part):
    batch = make_rows(16)
    for row in batch:
        row["logprobs"] = row["logprobs"] + 0.5
    found = []
    for max_tokens in (32, 10_000):
        rows = TrainRows.from_parts([to_part(batch)])
        settings = SETTINGS.model_copy(
            update={"loss": Loss(m2_threshold=0.04), "max_tokens_per_pass": max_tokens}
        )
        metrics = PolicyLearner(make_model(), settings).step(rows, divisor=len(rows.loss))
        found.append((metrics["train/clip_low"], metrics["train/clip_high"]))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_groups_whose_prompt_is_computed_once_give_the_same_step(make_model, make_row, to_part):
    rng, batch = np.random.default_rng(0), []
    for _ in range(4):
        rows = [make_row(rng, prompt=6, length=9, advantage=float(rng.normal())) for _ in range(6)]
        for row in rows:
            row["tokens"][:6] = rows[0]["tokens"][:6]
        batch += rows
    moved = []
    for choice, order in (("never", 1), ("auto", 1), ("auto", -1)):
        model = make_model()
        settings = TrainerConfig(optimizer=Optimizer(learning_rate=1e-4), share_prefixes=choice)
        rows = TrainRows.from_parts([to_part(batch[::order])])
        metrics = PolicyLearner(model, settings).step(rows, divisor=72)
        moved.append((metrics, weights(model)))
    (plain, _), (shared, bits), (turned, others) = moved
    assert_same(bits, others)
    assert shared == pytest.approx(turned, rel=1e-12)
    assert shared["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=1e-5)
    assert shared["train/loss"] == pytest.approx(plain["train/loss"], rel=1e-5, abs=1e-7)


def test_a_bonus_keeps_entropy_up(make_model, rows):
    ends = []
    for coefficient in (0.0, 0.5):
        loss = Loss(entropy_coefficient=coefficient)
        learner = PolicyLearner(make_model(), SETTINGS.model_copy(update={"loss": loss}))
        for _ in range(10):
            metrics = learner.step(rows, divisor=len(rows.loss))
        ends.append(metrics["train/entropy"])
    assert ends[1] > ends[0] + 0.05


@pytest.mark.parametrize("fuse_above", [1 << 24, 0])
def test_entropies_have_the_gradient_of_their_definition(make_model, rows, fuse_above):
    found, other = make_model(never_sampled=[0, 5]), make_model(never_sampled=[0, 5])
    (one,) = passes_of(rows, np.ones(rows.row_count, np.bool_), max_tokens=10_000)
    tokens = PassTokens.of(rows, one)
    _, entropies = log_softmax_of(found, tokens, fuse_above=fuse_above, needs_entropy_gradient=True)
    entropies.sum().backward()
    logits = other.logits(torch.from_numpy(tokens.tokens), torch.from_numpy(tokens.chosen))
    allowed = [each for each in range(14) if each not in (0, 5) or each in tokens.targets]
    right = torch.distributions.Categorical(logits=logits[:, allowed]).entropy()
    right.sum().backward()
    torch.testing.assert_close(entropies, right, rtol=1e-5, atol=1e-6)
    pairs = zip(found.module.parameters(), other.module.parameters(), strict=True)
    for one, two in pairs:
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-5)


def test_a_loss_evens_out_the_choice_of_experts(make_mixture, rows):
    def imbalances(coefficient):
        model = CausalModel(make_mixture(num_experts=8), never_sampled=(0,))
        loss = Loss(router_balance_coefficient=coefficient)
        learner = PolicyLearner(model, SETTINGS.model_copy(update={"loss": loss}))
        steps = [learner.step(rows, divisor=len(rows.loss)) for _ in range(15)]
        return [step["train/router_imbalance"] for step in steps]

    weak, strong = imbalances(1e-9), imbalances(1.0)
    assert strong[0] == weak[0] > 1
    assert strong[-1] - 1 < 0.7 * (weak[-1] - 1)


def test_imbalance_is_that_of_the_formula():
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert float(imbalance(torch.zeros(2, 3), torch.tensor([[0], [1]]))) == pytest.approx(1)
    first, second = logits.softmax(-1)
    right = 3 * (0.5 * (first[0] + second[0]) / 2 + 0.5 * (first[1] + second[1]) / 2)
    assert float(imbalance(logits, torch.tensor([[0], [1]]))) == pytest.approx(float(right))


# They score experts by softmax, by sigmoids with a bias and in groups, and by logits.
@pytest.mark.parametrize("name", ["mixtral", "olmoe", "glm4_moe", "granitemoe", "gpt_oss"])
def test_a_family_is_balanced_however_it_scores_its_experts(name):
    known = AutoConfig.for_model(name)
    fields = {key: value for key, value in TINY.items() if hasattr(known, key)}
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **fields))
    balance = RouterBalance(module, 1.0)
    with balance.recording():
        module(input_ids=torch.arange(12)[None])
    loss, found = balance.loss(np.arange(12), share=1.0)
    loss.backward()
    assert found > 1 - 1e-6
    moved = {key for key, each in module.named_parameters() if each.grad is not None}
    assert any("router" in key or "gate" in key for key in moved)


def test_a_family_that_chooses_in_an_unknown_way_is_not_balanced():
    known = AutoConfig.for_model("phimoe")
    fields = {key: value for key, value in TINY.items() if hasattr(known, key)}
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model("phimoe", **fields))
    balance = RouterBalance(module, 1.0)
    with balance.recording():
        module(input_ids=torch.arange(12)[None])
    with pytest.raises(AstraflowError, match="chooses its experts in a way that is not known"):
        balance.loss(np.arange(12), share=1.0)


def test_a_layer_that_chooses_twice_does_not_stand_for_one_that_does_not():
    known = AutoConfig.for_model("mixtral")
    fields = {key: value for key, value in TINY.items() if hasattr(known, key)}
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **fields))
    balance = RouterBalance(module, 1.0)
    module.model.layers[1] = module.model.layers[0]
    with balance.recording():
        module(input_ids=torch.arange(12)[None], use_cache=False)
    with pytest.raises(AstraflowError, match="chooses its experts in a way that is not known"):
        balance.loss(np.arange(12), share=1.0)


def test_experts_are_balanced_in_the_first_pass_of_more_logits_than_are_made_whole(
    make_row, to_part
):
    known = AutoConfig.for_model("mixtral")
    sizes = {**TINY, "vocab_size": 1 << 20, "hidden_size": 16}
    fields = {key: value for key, value in sizes.items() if hasattr(known, key)}
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **fields))
    settings = SETTINGS.model_copy(update={"loss": Loss(router_balance_coefficient=0.1)})
    learner = PolicyLearner(CausalModel(module), settings)
    rng = np.random.default_rng(0)
    rows = TrainRows.from_parts([to_part([make_row(rng, prompt=2, length=20)])])
    assert learner.step(rows, divisor=len(rows.loss))["train/router_imbalance"] > 1 - 1e-6


TINY = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "pad_token_id"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "first_k_dense_replace": 0,
    "head_dim": 16,
    "vocab_size": 64,
}


def test_a_dense_model_has_no_experts_to_balance(make_model):
    settings = SETTINGS.model_copy(update={"loss": Loss(router_balance_coefficient=0.1)})
    with pytest.raises(AstraflowError, match="LlamaForCausalLM has no experts"):
        PolicyLearner(make_model(), settings)
