"""Rows end to end, without padding, say and learn what they do alone."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from astraflow.config.policies import Fsdp
from astraflow.config.recipe import CriticConfig, Kl, Lora, Loss, Optimizer, TrainerConfig
from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers import blocks, packed_rows
from astraflow.trainers.blocks import prepare_blocks
from astraflow.trainers.causal_model import CausalModel
from astraflow.trainers.critic import CriticLearner, valued
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.likelihood import PassTokens, log_softmax_of
from astraflow.trainers.lora import add_adapters
from astraflow.trainers.packed_rows import PackedRows
from astraflow.trainers.passes import PassPlanner, pack, passes_of
from astraflow.trainers.rows import TrainRows

# From then on they ask transformers for their attention.
RENEWED = ("gptj", "codegen")
ARE_RENEWED = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
PACKED = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi", "phi3", "gpt2"),
    *("gpt_neox", "opt", "olmo", "olmo2", "olmo3", "stablelm", "starcoder2", "granite"),
    *("cohere", "cohere2", "smollm3", "glm", "glm4", "gpt_bigcode", "nemotron", "persimmon"),
    *("mixtral", "qwen3_moe"),
    *(RENEWED if ARE_RENEWED else ()),
)
PADDED = {
    **dict.fromkeys(("gemma2", "gpt_neo", "gpt_oss", "bloom", "mpt", "mamba"), "eager, not sdpa"),
    **dict.fromkeys(() if ARE_RENEWED else RENEWED, "eager, not sdpa"),
    "falcon": "attention is its own",
    **dict.fromkeys(("jamba", "qwen3_next", "lfm2"), "does not heed the mask"),
    "llama4_text": "attend to parts of what was before",
}
HYBRIDS = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}


@pytest.fixture
def rows(make_rows, to_part) -> TrainRows:
    made = make_rows(9, seed=3)
    for number, row in enumerate(made):
        row["group"], row["reward"] = number // 3, float(number % 2)
    return TrainRows.from_parts([to_part(made)])


def learned(model, rows, *, is_packed, max_tokens=60, fuse_above=1 << 24):
    """Return f32[K] log-probabilities and the gradients of a loss made of them."""
    model.module.zero_grad()
    everything = np.ones(rows.row_count, np.bool_)
    found = torch.zeros(len(rows.loss))
    for one in passes_of(rows, everything, max_tokens=max_tokens, is_packed=is_packed):
        assert one.is_packed == is_packed
        tokens = PassTokens.of(rows, one)
        part, _ = log_softmax_of(model, tokens, fuse_above=fuse_above)
        part.square().sum().backward()
        found[torch.from_numpy(tokens.loss_indices)] = part.detach().cpu()
    named = model.module.named_parameters()
    return found, {name: each.grad.clone() for name, each in named if each.grad is not None}


def require_same(model, rows, *, rounding=1e-4, **knobs):
    plain, slopes = learned(model, rows, is_packed=False, **knobs)
    assert not model.unpacked
    found, packed = learned(model, rows, is_packed=True, **knobs)
    torch.testing.assert_close(found, plain, rtol=rounding / 100, atol=rounding / 10)
    assert packed.keys() == slopes.keys()
    largest = max(each.norm() for each in slopes.values())
    for name, each in slopes.items():
        assert (packed[name] - each).norm() <= rounding * each.norm() + 1e-6 * largest, name
    return found


@pytest.mark.parametrize("name", PACKED)
def test_a_family_says_and_learns_of_packed_rows_what_it_does_of_each_alone(
    name, make_family, rows
):
    # Shorter than some rows, where the family has a window.
    has_window = name in ("mistral", "gemma3_text", "phi3", "olmo3", "cohere2", "starcoder2")
    window = {"sliding_window": 4} if has_window else {}
    require_same(CausalModel(make_family(name, **window), never_sampled=[0, 1]), rows)


@pytest.mark.parametrize("name", PADDED)
def test_a_family_that_cannot_be_packed_is_padded_or_refused_by_name(name, make_family):
    module = make_family(name, **HYBRIDS.get(name, {}))
    model = CausalModel(module)
    before = module.config._attn_implementation
    with capture_logs() as logs:
        PassPlanner([model], max_tokens=64, packing="auto")
    assert not logs  # on the CPU rows are padded
    with pytest.raises(AstraflowError, match=type(module).__name__) as caught:
        PassPlanner([model], max_tokens=64, packing="always")
    assert caught.value.reason is Reason.CAPABILITY_MISSING
    assert PADDED[name] in caught.value.message
    assert module.config._attn_implementation == before


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_blocks_may_round_and_compute_again(compute, checkpointing, make_model, rows):
    model = make_model(num_key_value_heads=1)
    prepare_blocks(model.module, Fsdp(compute=compute, checkpointing=checkpointing))
    require_same(model, rows, rounding=1e-4 if compute == "f32" else 0.1, fuse_above=0)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])]
)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.long)])
def test_compiled_blocks_say_and_learn_what_plain_ones_do(
    checkpointing, device, make_model, rows, monkeypatch
):
    monkeypatch.setattr(blocks, "_FEW", 0)
    # Helpers of the compiler would import torch, each of them.
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    is_gpu = device == "cuda"
    found = []
    for is_compiled in (False, True):
        model = make_model(num_key_value_heads=1)
        model.module.to(device)
        # The kernel of packed rows takes no f32.
        compute = "bf16" if is_gpu else "f32"
        fsdp = Fsdp(compute=compute, checkpointing=checkpointing, compile=is_compiled)
        prepare_blocks(model.module, fsdp)
        assert not is_gpu or not model.unpacked
        found.append(learned(model, rows, is_packed=is_gpu, max_tokens=24))
    (plain, slopes), (compiled, compiled_slopes) = found
    rounding = 0.1 if is_gpu else 1e-4
    torch.testing.assert_close(compiled, plain, rtol=rounding, atol=rounding)
    largest = max(each.norm() for each in slopes.values())
    for name, each in slopes.items():
        assert (compiled_slopes[name] - each).norm() <= rounding * largest, name


@pytest.mark.slow
def test_a_machine_without_a_compiler_is_told_of(tmp_path, run_apart):
    with run_apart("compile_without_a_compiler", tmp_path / "cache") as output:
        said = output.read()
    assert "torch cannot compile" in said
    assert "No working C++ compiler" in said
    assert said.endswith("False\n")


def test_adapters_learn_from_packed_rows(make_model, rows):
    model = make_model()
    add_adapters(model.module, Lora(rank=2, alpha=4))
    with torch.no_grad():
        for each in model.module.parameters():
            if each.requires_grad:
                each.add_(0.1)
    require_same(model, rows)


def test_packed_rows_take_the_experts_that_the_sampler_took(make_family, rows):
    model = CausalModel(make_family("qwen3_moe"))
    own = require_same(model, rows)
    routes = np.random.default_rng(0).permuted(
        np.tile(np.arange(8, dtype=np.uint16), (len(rows.tokens), 2, 1)), axis=2
    )[..., :2]
    told = require_same(model, replace(rows, routed_experts=routes))
    assert (told - own).abs().max() > 1e-3


@pytest.mark.parametrize(
    "fields",
    [
        {"minibatches": 2, "epochs": 2, "loss": Loss(old="recomputed")},
        {"loss": Loss(kl=Kl(coefficient=0.1), entropy_coefficient=0.01)},
        {"loss": Loss(surrogate="dpo")},
        {"loss": Loss(router_balance_coefficient=0.1)},
    ],
    ids=["minibatches", "kl", "dpo", "experts"],
)
def test_steps_on_packed_rows_are_those_on_padded_ones(fields, make_model, make_family, rows):
    make = partial(make_family, "qwen3_moe") if "router" in str(fields) else make_model
    seen = []
    for packing in ("never", "always"):
        model, reference = (
            each if isinstance(each, CausalModel) else CausalModel(each)
            for each in (make(), make())
        )
        settings = TrainerConfig(
            optimizer=Optimizer(learning_rate=1e-4),
            max_tokens_per_pass=64,
            packing=packing,
            **fields,
        )
        needed = reference if settings.loss.has_reference else None
        learner = PolicyLearner(model, settings, reference=needed)
        seen.append(learner.step(rows, divisor=float(len(rows.loss))))
    assert seen[0].keys() == seen[1].keys()
    assert seen[1] == pytest.approx(seen[0], rel=1e-4, abs=1e-6)
    assert seen[1]["train/loss"] == pytest.approx(seen[0]["train/loss"], abs=1e-6)


def test_a_critic_values_packed_rows_as_padded_ones(make_model, rows):
    found = []
    for packing in ("never", "always"):
        critic = CriticLearner(
            valued(make_model().module), CriticConfig(), max_tokens=64, packing=packing
        )
        with torch.no_grad():
            torch.manual_seed(1)
            critic._model.module.get_output_embeddings().weight.normal_()
        values, _, returns = critic.estimate(rows)
        with critic.stepping(rows, values, returns, 1) as metrics:
            pass
        found.append((values, metrics))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-4, atol=1e-5)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-4, abs=1e-6)


def test_rows_of_one_length_attend_together_and_within_a_window():
    rng = torch.Generator().manual_seed(0)
    lengths = np.array([7, 3, 3, 5])
    query, key, value = (torch.randn(1, n, 18, 4, generator=rng) for n in (4, 2, 2))
    rows = PackedRows(
        lengths=tuple(lengths.tolist()),
        longest=7,
        offsets=torch.tensor([0, 7, 10, 13, 18]),
        window=3,
    )
    found = rows.attend(query, key, value, 0.3)
    row = np.repeat(np.arange(4), lengths)
    index = np.arange(18)
    behind = index[:, None] - index
    sees = (row[:, None] == row) & (behind >= 0) & (behind < 3)
    right = torch.nn.functional.scaled_dot_product_attention(
        *(query, key, value), torch.from_numpy(sees), scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(found, right.transpose(1, 2))


@pytest.mark.skipif(packed_rows.varlen is None, reason="torch 2.9 has no such kernel")
@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_of_a_gpu_takes_what_it_is_given(window):
    """On the meta device: shapes, grouped keys and values of another size, there and back."""
    shapes = ((1, 4, 18, 16), (1, 2, 18, 16), (1, 2, 18, 8))
    given = [
        torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for shape in shapes
    ]
    offsets = torch.empty(3, dtype=torch.int32, device="meta")
    rows = PackedRows(lengths=(11, 7), longest=11, offsets=offsets, window=window)
    found = rows.attend(*given, 0.25)
    assert found.shape == (1, 18, 4, 8)
    found.sum().backward()
    assert [each.grad.shape for each in given] == [*shapes]


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "qwen3_moe"])
def test_a_gpu_says_and_learns_of_packed_rows_what_it_does_of_each_alone(name, make_family, rows):
    window = {"sliding_window": 4} if name == "mistral" else {}
    model = CausalModel(make_family(name, **window).cuda())
    prepare_blocks(model.module, Fsdp(compute="bf16", checkpointing=True))
    require_same(model, rows, rounding=0.1)


def test_a_model_of_its_own_attention_is_padded(make_model):
    model = make_model()
    model.module.config._attn_implementation = "eager"
    assert model.unpacked == "the model's attention is eager, not sdpa"


def test_what_is_not_packed_is_computed_as_before(make_model, rows):
    plain, packing = make_model(), make_model()
    packed_rows.adopt(packing.module)
    both = [learned(model, rows, is_packed=False) for model in (plain, packing)]
    assert torch.equal(both[0][0], both[1][0])
    assert packing.takes_branches


@given(
    lengths=st.lists(st.integers(1, 300), max_size=60),
    max_tokens=st.integers(1, 2000),
)
def test_every_row_is_in_one_pass_without_padding(lengths, max_tokens):
    array = np.array(lengths, np.int64)
    plan = pack(array, max_tokens=max_tokens)
    assert sorted(row for one in plan for row in one.rows) == list(range(len(lengths)))
    for one in plan:
        assert one.padded_token_count == array[one.rows].sum()
        assert one.padded_token_count <= max_tokens or len(one.rows) == 1
    # Two passes that would fit one are not made.
    sizes = sorted(one.padded_token_count for one in plan)
    assert all(a + b > max_tokens for a, b in pairwise(sizes))


def test_tokens_of_packed_rows_lie_end_to_end(rows):
    (one,) = passes_of(rows, np.ones(9, np.bool_), max_tokens=10_000, is_packed=True)
    tokens = PassTokens.of(rows, one)
    assert tokens.tokens.shape == (1, rows.lengths.sum())
    assert tokens.row_lengths.tolist() == sorted(rows.lengths, reverse=True)
    spans = [slice(*rows.offsets[row : row + 2]) for row in one.rows]
    assert tokens.tokens[0].tolist() == [each for span in spans for each in rows.tokens[span]]
    assert tokens.targets.tolist() == tokens.tokens[0][tokens.chosen + 1].tolist()
    assert tokens.slots.tolist() == [*range(tokens.tokens.size)]
