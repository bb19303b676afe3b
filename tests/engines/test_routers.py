"""Experts are told by routers, and replayed by them."""

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import UNROUTED, joined_routes
from astraflow.engines.routers import RouteReplay, RouteTaps, routers_of

COMMON = {
    "vocab_size": 14,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "num_experts_per_tok": 2,
}
QWEN = {**COMMON, "moe_intermediate_size": 24, "num_experts": 8, "head_dim": 16}
MODELS = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(num_local_experts=4, **COMMON)),
    "qwen3": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(norm_topk_prob=True, **QWEN)),
    "qwen3-plain": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(norm_topk_prob=False, **QWEN)),
}
TOKENS = torch.tensor([[3, 9, 4, 12, 7], [5, 5, 8, 3, 11]])


@pytest.fixture(params=list(MODELS))
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def test_replay_of_a_models_own_routes_changes_no_bit(model):
    taps = RouteTaps(model)
    own = logits_of(model)
    routes = taps.last(2, 5)
    assert routes.dtype == np.uint16
    assert routes.shape == (2, 5, 2, 2)
    RouteReplay(model).expect(routes.reshape(10, 2, 2))
    assert torch.equal(logits_of(model), own)


def test_other_experts_are_taken_with_the_routers_weights(model):
    own, replay = logits_of(model), RouteReplay(model)
    taps = RouteTaps(model)
    given = np.tile(np.array([2, 1], np.uint16), (10, 2, 1))
    replay.expect(given)
    assert (logits_of(model) != own).any()
    np.testing.assert_array_equal(taps.last(2, 5).reshape(10, 2, 2), given)
    replay.expect(None)
    assert torch.equal(logits_of(model), own)


def test_tokens_without_a_route_take_their_own(model):
    own, replay = logits_of(model), RouteReplay(model)
    given = np.full((10, 2, 2), UNROUTED, np.uint16)
    replay.expect(given)
    assert torch.equal(logits_of(model), own)
    given[9] = [2, 1]
    replay.expect(given)
    torch.testing.assert_close(logits_of(model)[0], own[0])
    assert not torch.equal(logits_of(model)[1, 4], own[1, 4])


def test_the_router_learns_through_replayed_experts(model):
    replay = RouteReplay(model)
    replay.expect(np.tile(np.array([2, 1], np.uint16), (10, 2, 1)))
    model(input_ids=TOKENS).logits.square().mean().backward()
    for router in routers_of(model):
        gradient = router.weight.grad
        assert gradient.isfinite().all()
        assert gradient[[1, 2]].any()


def test_a_model_without_routers_cannot_replay():
    dense = {k: v for k, v in COMMON.items() if k != "num_experts_per_tok"}
    model = LlamaForCausalLM(LlamaConfig(**dense))
    assert RouteTaps(model).last(2, 5) is None
    with pytest.raises(AstraflowError, match="no routers") as caught:
        RouteReplay(model).expect(np.zeros((10, 2, 2), np.uint16))
    assert caught.value.reason is Reason.INVALID_FIELD


@pytest.mark.parametrize(
    ("shape", "expert", "fault"),
    [((10, 3, 2), 0, "has 3 layers and the model 2"), ((10, 2, 2), 600, "names expert 600 of")],
)
def test_routes_of_another_model_are_refused(model, shape, expert, fault):
    with pytest.raises(AstraflowError, match=fault) as caught:
        RouteReplay(model).require(np.full(shape, expert, np.uint16))
    assert caught.value.reason is Reason.INVALID_FIELD


def test_a_token_keeps_the_route_under_which_the_next_one_was_sampled():
    def part(*experts):
        return np.array(experts, np.uint16).reshape(-1, 1, 1)

    joined = joined_routes(5, [part(1, 2, UNROUTED), part(7, 7, 3, 4)])
    assert joined.ravel().tolist() == [1, 2, 3, 4, UNROUTED]
    assert joined_routes(5, []) is None
