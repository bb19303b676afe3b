"""Experts are told by routers, and replayed by them."""

import weakref

import numpy as np
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import UNROUTED, joined_routes
from astraflow.engines.routers import RouteReplay, RouteTaps, mixtures_of

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
        return model(input_ids=TOKENS, use_cache=False).logits


def test_replay_of_a_models_own_routes_changes_no_bit(model):
    taps = RouteTaps(model)
    own = logits_of(model)
    routes = taps.last(2, 5)
    assert routes.dtype == np.uint16
    assert routes.shape == (2, 5, 2, 2)
    RouteReplay(model).expect(routes.reshape(10, 2, 2))
    assert torch.equal(logits_of(model), own)


class ScoresSeen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.refs = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.topk, torch.Tensor.topk):
            self.refs.append(weakref.ref(args[0]))
        return func(*args, **(kwargs or {}))


def test_what_is_told_keeps_no_scores_of_experts_alive(model):
    taps = RouteTaps(model)
    with ScoresSeen() as seen:
        logits_of(model)
    assert len(seen.refs) == len(mixtures_of(model))
    assert all(ref() is None for ref in seen.refs)
    assert taps.last(2, 5) is not None


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
    for mixture in mixtures_of(model):
        gradient = mixture.module.gate.weight.grad
        assert gradient.isfinite().all()
        assert gradient[[1, 2]].any()


# What families call the same; each takes the keys that it knows.
TINY = {
    **COMMON,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "pad_token_id"), 0),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "mamba_d_state"), 8),
    "vocab_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "interleave_moe_layer_step": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "use_mamba_kernels": False,
}
REPLAYED = (
    *("afmoe", "aria_text", "cohere2_moe", "deepseek_v2", "deepseek_v3", "exaone_moe"),
    *("flex_olmo", "glm4_moe", "gpt_oss", "granitemoe", "hunyuan_v1_moe", "jamba", "llama4_text"),
    *("minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "solar_open"),
)
REFUSED = {"jetmoe": "JetMoeMoA", "phimoe": "PhimoeSparseMoeBlock"}


def family(name: str) -> torch.nn.Module:
    known = AutoConfig.for_model(name)
    fields = {key: value for key, value in TINY.items() if hasattr(known, key)}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **fields)).eval()


@pytest.mark.parametrize("name", REPLAYED)
def test_families_replay_whatever_their_routers_are_called(name):
    model = family(name)
    taps, own = RouteTaps(model), logits_of(model)
    routes = taps.last(2, 5)
    layer_count = len(mixtures_of(model))
    assert routes.shape == (2, 5, layer_count, 2)
    replay = RouteReplay(model)
    replay.expect(routes.reshape(10, layer_count, 2))
    assert torch.equal(logits_of(model), own)
    # In another order they are the same experts, with the same weights.
    replay.expect(routes[..., ::-1].reshape(10, layer_count, 2))
    torch.testing.assert_close(logits_of(model), own)
    given = np.tile(np.array([5, 4], np.uint16), (10, layer_count, 1))
    replay.expect(given)
    taps = RouteTaps(model)
    assert (logits_of(model) != own).any()
    np.testing.assert_array_equal(taps.last(2, 5).reshape(10, layer_count, 2), given)
    model(input_ids=TOKENS, use_cache=False).logits.square().mean().backward()
    for mixture in mixtures_of(model):
        gradients = [
            weight.grad
            for weight in mixture.module.parameters()
            if weight.ndim == 2 and weight.shape[0] == 8
        ]
        assert any(each is not None and each.any() for each in gradients)


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_choose_in_another_way_are_refused_by_name(name):
    model = family(name)
    replay = RouteReplay(model)
    logits_of(model)
    with pytest.raises(AstraflowError, match=f"{REFUSED[name]} .*router_replay: never") as caught:
        replay.require_choices()
    assert caught.value.reason is Reason.INVALID_FIELD


def test_experts_of_a_form_that_is_not_known_are_refused_by_the_name_of_the_model():
    width = {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 2}
    heads = {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}
    config = AutoConfig.for_model(
        "dbrx", d_model=32, n_heads=2, n_layers=2, ffn_config=width, attn_config=heads
    )
    replay = RouteReplay(AutoModelForCausalLM.from_config(config))
    with pytest.raises(AstraflowError, match="DbrxForCausalLM"):
        replay.require_choices()


def test_a_pass_through_experts_fails_where_they_would_not_be_taken():
    model = family("phimoe")
    RouteReplay(model).expect(np.zeros((10, 2, 2), np.uint16))
    with pytest.raises(AstraflowError, match="PhimoeSparseMoeBlock"):
        logits_of(model)
    # Nothing of the pass that failed is left behind.
    assert torch.topk(torch.tensor([[1.0, 3.0]]), 1).indices.item() == 1


def test_what_is_computed_again_for_the_gradient_takes_the_same_experts():
    gradients = []
    for is_kept in (True, False):
        torch.manual_seed(0)
        model = MODELS["mixtral"]()
        if not is_kept:
            apply_activation_checkpointing(
                model, check_fn=lambda each: isinstance(each, MixtralDecoderLayer)
            )
        RouteReplay(model).expect(np.tile(np.array([2, 1], np.uint16), (10, 2, 1)))
        model(input_ids=TOKENS, use_cache=False).logits.square().mean().backward()
        gradients.append([each.grad for each in model.parameters()])
    for kept, again in zip(*gradients, strict=True):
        torch.testing.assert_close(kept, again)


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
