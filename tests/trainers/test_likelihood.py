"""Log-probabilities pass by pass are those of one row after the other."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3MoeConfig,
)

from astraflow.config.recipe import TrainerConfig
from astraflow.trainers.causal_model import CausalModel
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.likelihood import PassTokens, log_softmax_of
from astraflow.trainers.passes import passes_of, plan_passes
from astraflow.trainers.rows import TrainRows

SMALL = {
    "vocab_size": 14,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "tied head and grouped keys": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "sliding window": MistralConfig(**SMALL, sliding_window=4),
    "soft caps on logits": Gemma2Config(
        **SMALL, head_dim=16, final_logit_softcapping=2.0, sliding_window=4
    ),
    "absolute positions": GPT2Config(
        vocab_size=14, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    ),
}


def row_by_row(module, rows: TrainRows) -> np.ndarray:
    """Return log-probabilities of the loss tokens from one plain forward pass per row."""
    found = []
    for row in range(rows.row_count):
        start, end = rows.offsets[row], rows.offsets[row + 1]
        tokens = torch.from_numpy(rows.tokens[start:end].astype(np.int64))[None]
        logprobs = module(input_ids=tokens).logits[0].double().log_softmax(-1)
        at = rows.loss.positions[rows.loss.rows == row] - start
        found.append(logprobs[at - 1, tokens[0, at]].numpy())
    return np.concatenate(found)


def in_passes(model: CausalModel, rows: TrainRows, *, max_tokens: int) -> np.ndarray:
    found = np.full(len(rows.loss), np.nan, np.float32)
    for one in plan_passes(rows.lengths, max_tokens=max_tokens):
        tokens = PassTokens.of(rows, one)
        found[tokens.loss_indices] = log_softmax_of(model, tokens)[0].numpy()
    return found


@torch.no_grad()
@pytest.mark.parametrize("max_tokens", [16, 64, 10_000])
@pytest.mark.parametrize("name", CONFIGS)
def test_passes_equal_rows_alone(name, max_tokens, make_rows, to_part):
    torch.manual_seed(0)
    model = CausalModel(AutoModelForCausalLM.from_config(CONFIGS[name]))
    rows = TrainRows.from_parts([to_part(make_rows(12))])
    passes = in_passes(model, rows, max_tokens=max_tokens)
    np.testing.assert_allclose(passes, row_by_row(model.module, rows), atol=1e-5)


@torch.no_grad()
def test_long_rows_among_short_ones(make_model, make_row, to_part):
    rng = np.random.default_rng(0)
    lengths = [5, 2000, 7, 900, 6]
    parts = [to_part([make_row(rng, prompt=2, length=n) for n in lengths])]
    rows = TrainRows.from_parts(parts)
    model = make_model()
    passes = in_passes(model, rows, max_tokens=1024)
    np.testing.assert_allclose(passes, row_by_row(model.module, rows), atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("sharing", [{}, {"packing": "always"}, {"share_prefixes": "always"}])
def test_a_row_among_longer_ones_keeps_its_frequencies(sharing, make_row, to_part):
    factors = {"short_factor": [1.0] * 8, "long_factor": [8.0] * 8}
    config = Phi3Config(
        **SMALL,
        original_max_position_embeddings=32,
        rope_parameters={"rope_type": "longrope", **factors},
    )
    torch.manual_seed(0)
    model = CausalModel(AutoModelForCausalLM.from_config(config))
    rng = np.random.default_rng(0)
    made = [make_row(rng, prompt=12, length=n) for n in (16, 31, 32, 33, 34, 50)]
    for row in made:
        row["tokens"][:12] = made[0]["tokens"][:12]
    rows = TrainRows.from_parts([to_part(made)])
    learner = PolicyLearner(model, TrainerConfig.model_validate(sharing))
    found = learner.likelihoods(rows, np.ones(rows.row_count, np.bool_)).logprobs
    np.testing.assert_allclose(found, row_by_row(model.module, rows), atol=1e-5)


@torch.no_grad()
def test_temperature_divides_the_logits(make_model, make_row, to_part):
    rng = np.random.default_rng(0)
    part = to_part([make_row(rng, temperature=0.5), make_row(rng, temperature=1.0)])
    rows, model = TrainRows.from_parts([part]), make_model()
    found = in_passes(model, rows, max_tokens=1024)
    tokens = torch.from_numpy(rows.tokens[:9].astype(np.int64))[None]
    wanted = (model.module(input_ids=tokens).logits[0] / 0.5).log_softmax(-1)
    at = rows.loss.positions[rows.loss.rows == 0]
    np.testing.assert_allclose(found[: len(at)], wanted[at - 1, tokens[0, at]], atol=1e-5)


@torch.no_grad()
def test_what_is_never_sampled_is_no_part_of_the_distribution(make_model, make_rows, to_part):
    rows = TrainRows.from_parts([to_part(make_rows(3))])
    model = make_model(never_sampled=[0, 1])
    tokens = PassTokens.of(rows, plan_passes(rows.lengths, max_tokens=1024)[0])
    logits = model.logits(torch.from_numpy(tokens.tokens), torch.from_numpy(tokens.chosen))
    wanted = logits[:, 2:].log_softmax(-1)
    logprobs, entropies = log_softmax_of(model, tokens)
    np.testing.assert_allclose(
        logprobs, wanted.gather(1, torch.from_numpy(tokens.targets)[:, None] - 2)[:, 0], atol=1e-6
    )
    np.testing.assert_allclose(entropies, -(wanted.exp() * wanted).sum(-1), atol=1e-6)


@torch.no_grad()
def test_what_another_engine_did_sample_counts(make_model, make_row, to_part):
    row = make_row(np.random.default_rng(0))
    row["tokens"][-1] = 0
    rows = TrainRows.from_parts([to_part([row])])
    found = in_passes(make_model(never_sampled=[0, 1]), rows, max_tokens=1024)
    assert np.isfinite(found).all()


@torch.no_grad()
def test_head_sees_only_positions_of_the_loss(make_model, make_rows, to_part):
    rows, model = TrainRows.from_parts([to_part(make_rows(6))]), make_model()
    seen = []
    model.module.lm_head.register_forward_hook(lambda _m, _args, out: seen.append(out.shape))
    in_passes(model, rows, max_tokens=10_000)
    assert sum(shape[1] for shape in seen) == len(rows.loss)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_fused_head_gives_the_same_numbers_and_gradients(name, make_rows, to_part):
    """A model that caps its logits is not fused."""
    torch.manual_seed(0)
    model = CausalModel(AutoModelForCausalLM.from_config(CONFIGS[name]), never_sampled=[0, 1])
    rows = TrainRows.from_parts([to_part(make_rows(12))])
    [one] = plan_passes(rows.lengths, max_tokens=10_000, overhead_tokens=10_000)
    found = []
    for fuse_above in (0, 1 << 40):
        model.module.zero_grad()
        logprobs, entropies = log_softmax_of(model, PassTokens.of(rows, one), fuse_above=fuse_above)
        logprobs.square().sum().backward()
        gradients = [each.grad.clone() for each in model.module.parameters()]
        found.append([logprobs.detach(), entropies, *gradients])
    for fused, plain in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
    assert (model.linear_head is None) == (name == "soft caps on logits")


SHARING = {
    "grouped keys": LlamaConfig(**SMALL),
    "tied head": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "absolute positions": CONFIGS["absolute positions"],
    "experts": Qwen3MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=16
    ),
}


@pytest.fixture
def groups(make_row, to_part):
    """Three groups of four rows each; two rows of the last one are the same."""
    rng, made = np.random.default_rng(0), []
    for prompt in (5, 9, 1):
        start = rng.integers(3, 14, prompt)
        made += [make_row(rng, prompt=prompt, length=prompt + n) for n in (2, 4, 3, 4)]
        for row in made[-4:]:
            row["tokens"][:prompt] = start
    made[-1]["tokens"] = made[-3]["tokens"].copy()
    return TrainRows.from_parts([to_part(made)])


@pytest.mark.parametrize("fuse_above", [0, 1 << 40])
@pytest.mark.parametrize("name", SHARING)
def test_shared_prefixes_change_neither_numbers_nor_gradients(name, fuse_above, groups):
    torch.manual_seed(0)
    model = CausalModel(AutoModelForCausalLM.from_config(SHARING[name]), never_sampled=[0, 1])
    assert model.takes_branches
    found, counts = [], []
    for attention_tokens in (None, 1000.0):
        model.module.zero_grad()
        plan = passes_of(
            groups, np.ones(12, np.bool_), max_tokens=64, attention_tokens=attention_tokens
        )
        counts.append(sum(one.padded_token_count for one in plan))
        logprobs = torch.zeros(len(groups.loss))
        for one in plan:
            tokens = PassTokens.of(groups, one)
            part, _ = log_softmax_of(model, tokens, fuse_above=fuse_above)
            part.square().sum().backward()
            logprobs[torch.from_numpy(tokens.loss_indices)] = part.detach()
        found.append([logprobs, *(each.grad.clone() for each in model.module.parameters())])
    assert counts[1] < counts[0] / 1.5
    for plain, shared in zip(*found, strict=True):
        assert (shared - plain).norm() <= 1e-5 * plain.norm()


@pytest.mark.parametrize("name", ["sliding window", "soft caps on logits"])
def test_a_model_with_a_window_shares_nothing(name):
    model = CausalModel(AutoModelForCausalLM.from_config(CONFIGS[name]))
    assert not model.takes_branches


def test_a_model_that_ignores_its_mask_shares_nothing(make_model):
    model = make_model()
    whole = model.module.forward
    model.module.forward = lambda **given: whole(**(given | {"attention_mask": None}))
    assert not model.takes_branches


def test_a_model_that_takes_no_mask_shares_nothing(make_model):
    model = make_model()
    whole = model.module.forward
    model.module.forward = lambda *, input_ids, use_cache: whole(
        input_ids=input_ids, use_cache=use_cache
    )
    assert not model.takes_branches


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_of_either_type_shares(make_model, dtype):
    model = make_model()
    model.module.to(dtype)
    assert model.takes_branches
