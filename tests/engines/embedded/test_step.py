"""The recorded decode step: the bits of the model, whatever the shape and the weights."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from astraflow.engines.embedded.model import (
    Architecture,
    StepMasks,
    Stepper,
    read_architecture,
    twin_of,
)

_SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2}
_CONFIGS = {
    "llama": LlamaConfig(**_GROUPED, tie_word_embeddings=True),
    "mistral": MistralConfig(**_GROUPED, sliding_window=8),
    "qwen2": Qwen2Config(**_GROUPED),
    "qwen2-sliding": Qwen2Config(
        **_GROUPED, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**_GROUPED, head_dim=8),
    "gpt2": GPT2Config(vocab_size=24, n_positions=128, n_embd=32, n_layer=2, n_head=4),
    "gpt_neox": GPTNeoXConfig(**_SIZES),
}


def _module(config: Any, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    return model


class _Rig:
    """Runs steps of an architecture on random states."""

    def __init__(self, config: Any, stepper: Stepper) -> None:
        self.config = config
        self.architecture: Architecture = read_architecture(config)
        self.masks = StepMasks(self.architecture, dtype=torch.float32)
        self.stepper = stepper

    def step(self, module: torch.nn.Module, rows: int, columns: int) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(rows * 1000 + columns)
        heads = getattr(self.config, "num_key_value_heads", self.config.num_attention_heads)
        shape = (rows, heads, columns, 8)
        count = 2 * self.architecture.layer_count
        states = [torch.randn(shape, generator=draw) for _ in range(count)]
        positions = torch.randint(0, columns, (rows,), generator=draw)
        logits = self.stepper.run(
            module,
            parameters=tuple(module.parameters()),
            ids=torch.randint(0, 24, (rows,), generator=draw),
            positions=positions,
            masks=self.masks.of(positions[:, None], columns),
            states=states,
        )
        return [logits, *states]


@pytest.mark.parametrize("name", _CONFIGS)
def test_a_recorded_step_has_the_bits_of_the_model(name: str) -> None:
    config = _CONFIGS[name]
    recorded = _Rig(config, Stepper(is_recordable=read_architecture(config).is_static))
    plain = _Rig(config, Stepper(is_recordable=False))
    first, second = _module(config, 1), _module(config, 2)
    with torch.inference_mode():
        for module in (first, second, twin_of(first)):
            for rows, columns in ((16, 16), (17, 48), (32, 112)):
                ours = recorded.step(module, rows, columns)
                theirs = plain.step(module, rows, columns)
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert recorded.stepper.is_recorded
    assert not plain.stepper.is_recorded


def test_a_recorded_step_follows_new_weights() -> None:
    config = _CONFIGS["llama"]
    rig = _Rig(config, Stepper(is_recordable=True))
    module, other = _module(config, 1), _module(config, 2)
    with torch.inference_mode():
        rig.step(module, 16, 16)
        for parameter, new in zip(module.parameters(), other.parameters(), strict=True):
            parameter.data = new.data
        assert torch.equal(rig.step(module, 16, 16)[0], rig.step(other, 16, 16)[0])


def test_what_depends_on_data_is_not_recorded() -> None:
    experts = Qwen2MoeConfig(
        **_GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    )
    assert not read_architecture(experts).is_static
    scaled = AutoConfig.for_model(
        "llama", **_GROUPED, rope_scaling={"rope_type": "dynamic", "factor": 2.0}
    )
    assert not read_architecture(scaled).is_static


def test_a_recording_that_would_lie_is_not_used() -> None:
    """A forward pass that branches on the number of rows is found out at the second shape."""

    class Branching(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **inputs: Any) -> Any:
            output = self.inner(**inputs)
            if len(inputs["input_ids"]) > 16:
                output.logits = output.logits + 1
            return output

    config = _CONFIGS["llama"]
    rig = _Rig(config, Stepper(is_recordable=True))
    module = Branching(_module(config, 1))
    with torch.inference_mode():
        rig.step(module, 16, 16)
        assert not rig.stepper.is_recorded
        logits = rig.step(module, 32, 16)[0]
        plain = _Rig(config, Stepper(is_recordable=False)).step(module.inner, 32, 16)[0]
        assert torch.equal(logits, plain + 1)
