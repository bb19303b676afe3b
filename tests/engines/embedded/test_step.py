"""The recorded decode step: the bits of the model, whatever the shape and the weights."""

import copy
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

from astraflow.engines.embedded import attention
from astraflow.engines.embedded.model import (
    Architecture,
    StepMasks,
    Stepper,
    build_module,
    read_architecture,
    twin_of,
)

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

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

    def __init__(self, config: Any, stepper: Stepper, device: str = "cpu") -> None:
        self.config = config
        self.device = device
        self.architecture: Architecture = read_architecture(config)
        self.masks = StepMasks(self.architecture, dtype=torch.float32)
        self.stepper = stepper

    def step(self, module: torch.nn.Module, rows: int, columns: int) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(rows * 1000 + columns)
        heads = getattr(self.config, "num_key_value_heads", self.config.num_attention_heads)
        shape = (rows, heads, columns, 8)
        count = 2 * self.architecture.layer_count
        states = [torch.randn(shape, generator=draw).to(self.device) for _ in range(count)]
        positions = torch.randint(0, columns, (rows,), generator=draw).to(self.device)
        logits = self.stepper.run(
            module,
            parameters=tuple(module.parameters()),
            ids=torch.randint(0, 24, (rows,), generator=draw).to(self.device),
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
    assert recorded.stepper._recorded is not None
    assert plain.stepper._recorded is None


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
        assert rig.stepper._recorded is None
        logits = rig.step(module, 32, 16)[0]
        plain = _Rig(config, Stepper(is_recordable=False)).step(module.inner, 32, 16)[0]
        assert torch.equal(logits, plain + 1)


@pytest.mark.parametrize("name", _CONFIGS)
def test_what_attends_by_rows_on_a_gpu_is_as_before_on_the_cpu(name: str) -> None:
    config = copy.deepcopy(_CONFIGS[name])
    plain, adopted = _module(config, 1), _module(config, 1)
    attention.adopt(adopted)
    rows = attention.DecodedRows(lengths=torch.ones(16, dtype=torch.int32), has_windows=True)
    with torch.inference_mode(), rows.attending():
        steps = [
            _Rig(config, Stepper(is_recordable=False)).step(m, 16, 48) for m in (plain, adopted)
        ]
        tokens = torch.arange(20)[None]
        assert torch.equal(plain(tokens).logits, adopted(tokens).logits)
    assert all(torch.equal(a, b) for a, b in zip(*steps, strict=True))


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("name", _CONFIGS)
def test_a_step_that_attends_to_the_keys_of_each_row_says_what_one_under_a_mask_does(
    name: str,
) -> None:
    config, draw = copy.deepcopy(_CONFIGS[name]), torch.Generator().manual_seed(0)
    architecture = read_architecture(config)
    module = build_module(config, dtype=torch.bfloat16, device=torch.device("cuda"))
    module.load_state_dict(_module(config, 1).state_dict())
    masks = StepMasks(architecture, dtype=torch.bfloat16)
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    positions = torch.randint(0, 48, (16,), generator=draw).cuda()
    begun = [
        torch.randn(20, heads, 64, 8, generator=draw, dtype=torch.bfloat16).cuda()
        for _ in range(2 * architecture.layer_count)
    ]
    found = []
    with torch.inference_mode():
        for stepper in (Stepper(is_recordable=True), Stepper(is_recordable=False)):
            logits = stepper.run(
                module,
                parameters=tuple(module.parameters()),
                ids=torch.arange(16, device="cuda"),
                positions=positions,
                masks=masks.of(positions[:, None], 48),
                states=[state.clone()[:16, :, :48] for state in begun],
            )
            found.append(logits.float())
    assert (found[0] - found[1]).norm() < 0.03 * found[1].norm()


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("name", _CONFIGS)
def test_a_captured_step_has_the_bits_of_the_model(name: str) -> None:
    config = _CONFIGS[name]
    architecture = read_architecture(config)
    stepper, module = Stepper(is_recordable=True), _module(config, 1).cuda()
    other, parameters = _module(config, 2).cuda(), tuple(module.parameters())
    masks = StepMasks(architecture, dtype=torch.float32)
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    begun = [torch.randn(16, heads, 48, 8).cuda() for _ in range(2 * architecture.layer_count)]

    def steps(taken: Stepper) -> list[torch.Tensor]:
        """Decode on, as an engine does: in one cache, at another place each time."""
        states, found = [state.clone() for state in begun], []
        for place in range(12):
            positions = torch.full((16,), place, device="cuda")
            found.append(
                taken.run(
                    module,
                    parameters=parameters,
                    ids=torch.arange(16, device="cuda") + place % 3,
                    positions=positions,
                    masks=masks.of(positions[:, None], 48),
                    states=states,
                ).clone()
            )
        return [*found, *states]

    with torch.inference_mode():
        for weights in (module, other):
            for parameter, new in zip(parameters, list(weights.parameters()), strict=True):
                parameter.data = new.data
            ours, theirs = steps(stepper), steps(Stepper(is_recordable=False))
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len(stepper._graphs._found) >= 2
