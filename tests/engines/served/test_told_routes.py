"""What servers tell of experts becomes routes."""

import base64
import io

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeForCausalLM

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import UNROUTED
from astraflow.engines.building import build_engine
from astraflow.engines.served.routed_experts import ExpertLayout, from_i32, from_npy

FIELDS = {"num_hidden_layers": 3, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
TOLD = np.arange(4 * 3 * 2, dtype=np.int32).reshape(4, 3, 2)


def test_a_dense_model_has_no_experts():
    assert ExpertLayout.of({"num_hidden_layers": 3}) is None


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "dots1", "axk1", "qwen3_moe"])
def test_layers_that_have_experts_are_those_of_the_model(family):
    known = AutoConfig.for_model(family)
    fields = {name: value for name, value in TINY.items() if hasattr(known, name)}
    config = AutoConfig.for_model(family, **fields)
    found = ExpertLayout.of(config.to_dict())
    names = [name for name, _ in AutoModelForCausalLM.from_config(config).named_modules()]
    sparse = [layer for layer in range(4) if f"model.layers.{layer}.mlp.experts" in names]
    assert found.sparse_layers == tuple(sparse)
    assert 0 < len(sparse) < 4


TINY = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 32),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "first_k_dense_replace", "pad_token_id"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    "mlp_only_layers": [1],
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
    "vocab_size": 64,
}


@pytest.mark.parametrize("told", [TOLD, TOLD.ravel(), TOLD[:, 1:].astype(np.uint8)])
def test_routes_are_of_the_layers_that_have_experts(told):
    routes = ExpertLayout.of(FIELDS).routes(told, 5)
    assert routes.dtype == np.uint16
    np.testing.assert_array_equal(routes[:4], TOLD[:, 1:])
    assert (routes[4] == UNROUTED).all()


def test_what_is_behind_the_end_is_left_out_and_what_is_not_told_is_unrouted():
    experts = ExpertLayout.of(FIELDS)
    np.testing.assert_array_equal(experts.routes(TOLD, 3)[:2], TOLD[:2, 1:])
    assert (experts.routes(TOLD, 3)[2] == UNROUTED).all()
    assert (experts.routes(TOLD, 9)[4:] == UNROUTED).all()


@pytest.mark.parametrize("told", [TOLD.ravel()[:-1], TOLD[:, :, :1], TOLD - 9])
def test_experts_of_another_model_are_refused(told):
    with pytest.raises(AstraflowError, match="of another model") as caught:
        ExpertLayout.of(FIELDS).routes(told, 5)
    assert caught.value.reason is Reason.ENGINE_FAILED


def test_both_ways_of_telling_are_read():
    file = io.BytesIO()
    np.save(file, TOLD)
    np.testing.assert_array_equal(from_npy(base64.b64encode(file.getvalue()).decode()), TOLD)
    np.testing.assert_array_equal(from_i32(base64.b64encode(TOLD.tobytes()).decode()), TOLD.ravel())
    assert from_npy(None) is None
    assert from_i32(None) is None


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_dense_model_tells_nothing(model, kind):
    settings = EngineSettings(
        kind=kind, device="cpu", routed_experts=True, url="http://127.0.0.1:9"
    )
    with pytest.raises(AstraflowError, match="has no experts") as caught:
        build_engine(model.folder, settings, "sort")
    assert caught.value.reason is Reason.INVALID_FIELD


async def test_servers_tell_nothing_on_a_cpu(make_model, make_mixture):
    model = make_model(make_mixture().config, Qwen3MoeForCausalLM)
    settings = EngineSettings(
        kind="sglang", device="cpu", routed_experts=True, url="http://127.0.0.1:9"
    )
    with pytest.raises(AstraflowError, match="on GPUs only") as caught:
        build_engine(model.folder, settings, "sort")
    assert caught.value.reason is Reason.INVALID_FIELD
