"""What is particular to the embedded engine."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.rollouts import FinishReason, KvPolicy
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import Dtype, TensorUpdate
from astraflow.engines.embedded import EmbeddedEngine

POLICY = PolicyId("sort")
SMALL = {
    "vocab_size": 14,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@asynccontextmanager
async def running(model: Any, **settings: Any):
    engine = EmbeddedEngine.from_directory(
        model.folder, EngineSettings(**{"device": "cpu", **settings}), POLICY
    )
    try:
        await engine.load_directory(0)
        yield engine
    finally:
        await engine.close()


def knobs(length: int = 20, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": length, "seed": 1, "ignore_eos": True, **fields})


def lengths_read(decoder: Any) -> list[int]:
    """Return the lengths of the passes over prompts, as they come."""
    plain, found = decoder._prefill, []

    def prefill(requests: Any, length: int) -> Any:
        found.append(length)
        return plain(requests, length)

    decoder._prefill = prefill
    return found


async def test_prompts_of_unlike_lengths_are_read_together_where_that_pays(model: Any):
    prompts = [[3 + (i * j) % 11 for j in range(1 + 3 * i)] for i in range(20)]
    found, lengths = [], []
    for pads_coarsely in (False, True):
        async with running(model, max_batch=32) as engine:
            decoder = engine._base.worker._live
            decoder._settings = replace(decoder._settings, pads_coarsely=pads_coarsely)
            read = lengths_read(decoder)
            asked = [engine.generate(each, knobs(30)) for each in prompts]
            found.append(await asyncio.gather(*asked))
            lengths.append(sorted(read))
    assert lengths == [[16, 32, 48, 64], [64]]
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [1, 4])
async def test_in_f32_the_company_changes_no_bit(model: Any, group_size: int):
    names = [i - i % group_size for i in range(22)]
    prompts = [[3 + (i * j) % 11 for j in range(1, 2 + 3 * i)] for i in names]
    asked = [knobs(3 + i, seed=i) for i in range(22)]
    async with running(model, max_batch=20) as engine:
        alone = [await engine.generate(p, s) for p, s in zip(prompts, asked, strict=True)]
        together = await asyncio.gather(*map(engine.generate, prompts, asked))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs.view(np.uint32), other.logprobs.view(np.uint32))


@asynccontextmanager
async def counted_reads():
    """Yield a list that gets how many tokens each pass of any model reads."""
    reads: list[int] = []

    def note(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            reads.append(given[0].numel())

    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield reads
    finally:
        hook.remove()


CHAT = [3 + (i * i) % 11 for i in range(100)]


async def turns_of(engine: EmbeddedEngine, count: int):
    """Return the generations of some chats of two turns; the second one quotes the first."""
    chats = [[*CHAT, 3 + i] for i in range(count)]
    first = await asyncio.gather(
        *(engine.generate(c, knobs(9, seed=i)) for i, c in enumerate(chats))
    )
    longer = [
        [*c, *turn.tokens, 5, 4 + i] for i, (c, turn) in enumerate(zip(chats, first, strict=True))
    ]
    async with counted_reads() as reads:
        second = await asyncio.gather(
            *(engine.generate(c, knobs(9, seed=i)) for i, c in enumerate(longer))
        )
    return longer, second, reads


@pytest.mark.parametrize("count", [1, 3])
async def test_the_next_turn_of_a_chat_is_read_from_where_it_ended(model: Any, count: int):
    async with running(model) as engine:
        longer, second, reads = await turns_of(engine, count)
    assert max(reads) <= 16 * max(1, count)
    for i, (chat, turn) in enumerate(zip(longer, second, strict=True)):
        async with running(model) as engine:
            anew = await engine.generate(chat, knobs(9, seed=i))
        np.testing.assert_array_equal(turn.tokens, anew.tokens)
        np.testing.assert_allclose(turn.logprobs, anew.logprobs, atol=1e-5)


async def test_after_a_new_version_a_chat_is_read_anew(model: Any):
    async with running(model) as engine:
        first = await engine.generate(CHAT, knobs(9))
        await engine.load_directory(1)
        async with counted_reads() as reads:
            await engine.generate([*CHAT, *first.tokens, 5], knobs(9))
    assert max(reads) > len(CHAT)


async def test_a_turn_that_fills_the_context_is_as_good_as_any(model: Any):
    async with running(model, max_context=120) as engine:
        first = await engine.generate(CHAT, knobs(9))
        chat = [*CHAT, *first.tokens, 5, 6]
        turn = await engine.generate(chat, knobs(9))
    async with running(model, max_context=120) as engine:
        anew = await engine.generate(chat, knobs(9))
    np.testing.assert_array_equal(turn.tokens, anew.tokens)


async def test_who_comes_late_is_not_kept_waiting_for_company(model: Any):
    async with running(model) as engine:
        others = [asyncio.ensure_future(engine.generate([3, i], knobs(200))) for i in range(8)]
        await engine.generate([4], knobs(2))
        assert engine.load().running_count == len(others)
        await asyncio.gather(*others)


@pytest.mark.parametrize(
    ("config", "model_class"),
    [
        (Qwen2Config(**SMALL, tie_word_embeddings=False), Qwen2ForCausalLM),
        (Qwen3Config(**SMALL, head_dim=16), Qwen3ForCausalLM),
        (MistralConfig(**SMALL, sliding_window=8), MistralForCausalLM),
        (Gemma2Config(**SMALL, head_dim=16, sliding_window=8), Gemma2ForCausalLM),
    ],
    ids=["qwen2", "qwen3", "mistral-sliding", "gemma2-alternating"],
)
async def test_models_of_other_families_agree_with_transformers(
    make_model: Callable[..., Any], config: Any, model_class: Any
):
    model = make_model(config, model_class)
    prompts = [[3, 4, 5], [6] * 20, [7, 8]]
    async with running(model) as engine:
        for _ in range(2):  # The second turn goes on from the first.
            generations = await asyncio.gather(
                *(engine.generate(p, knobs(30, seed=i)) for i, p in enumerate(prompts))
            )
            for prompt, generation in zip(prompts, generations, strict=True):
                expected = model.logprobs(0, prompt, generation.tokens)
                np.testing.assert_allclose(generation.logprobs, expected, atol=2e-5)
                prompt.extend([*generation.tokens, 5, 9])


async def test_rows_are_no_longer_than_where_longrope_changes_all_rows(
    make_model: Callable[..., Any],
):
    """Beyond that transformers scales the positions of every row by the longest of them."""
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    fields = {"original_max_position_embeddings": 32, "rope_parameters": scaling}
    model = make_model(Phi3Config(**SMALL, **fields), Phi3ForCausalLM)
    prompts = [[3, 4, 5], [6] * 25]
    async with running(model) as engine:
        assert engine.max_context_token_count == 32
        asked = [engine.generate(each, knobs(0)) for each in prompts]
        for prompt, generation in zip(prompts, await asyncio.gather(*asked), strict=True):
            assert len(prompt) + len(generation.tokens) == 32
            expected = model.logprobs(0, prompt, generation.tokens)
            np.testing.assert_allclose(generation.logprobs, expected, atol=2e-5)
    with pytest.raises(AstraflowError, match="max_context 64 is more than the model's 32"):
        EmbeddedEngine.from_directory(
            model.folder, EngineSettings(device="cpu", max_context=64), POLICY
        )


async def test_a_model_without_keys_and_values_is_refused(make_model: Callable[..., Any]):
    config = MambaConfig(vocab_size=14, hidden_size=16, num_hidden_layers=1, state_size=4)
    model = make_model(config, MambaForCausalLM)
    with pytest.raises(AstraflowError) as caught:
        EmbeddedEngine.from_directory(model.folder, EngineSettings(device="cpu"), POLICY)
    assert caught.value.reason is Reason.INVALID_FIELD


async def test_a_stop_string_ends_and_stays(model: Any):
    async with running(model) as engine:
        free = await engine.generate([3], knobs(60))
        letters = "".join("abcdefghij>"[t - 3] for t in free.tokens.tolist() if t > 2)
        stop = letters[20:22]
        end = letters.index(stop) + 2
        generation = await engine.generate([3], knobs(60, stop_strings=(stop, "zz")))
    text = "".join("abcdefghij>"[t - 3] for t in generation.tokens.tolist() if t > 2)
    assert text == letters[:end]
    assert generation.finish_reason is FinishReason.STOP


async def test_sampling_that_leaves_no_token_fails_its_own_request_alone(model: Any):
    async with running(model) as engine:
        others = [engine.generate([n], knobs(200, seed=n)) for n in (3, 4, 5)]
        impossible = engine.generate([6], knobs(temperature=1e-40))
        *generations, error = await asyncio.gather(*others, impossible, return_exceptions=True)
    assert isinstance(error, AstraflowError)
    assert error.reason is Reason.INVALID_FIELD
    assert "leaves no token" in error.message
    assert [len(each.tokens) for each in generations] == [200, 200, 200]


async def test_numbers_beyond_64_bits_mean_all(model: Any):
    prompt, huge = [3, 4, 5], 10**20
    async with running(model) as engine:
        found, plain = await asyncio.gather(
            engine.generate(prompt, knobs(9, top_k=huge, min_new_tokens=huge)),
            engine.generate(prompt, knobs(9)),
        )
    np.testing.assert_array_equal(found.tokens, plain.tokens)


async def test_stop_strings_need_a_tokenizer(model: Any):
    (model.folder / "tokenizer.json").unlink()
    async with running(model) as engine:
        with pytest.raises(AstraflowError, match=r"tokenizer\.json"):
            await engine.generate([3], knobs(stop_strings=("a",)))


async def test_names_are_those_of_the_checkpoint_without_the_tied_head(model: Any):
    async with running(model) as engine:
        assert engine.named_tensors == {n: b.shape for n, b in model.bits(0).items()}
        assert "lm_head.weight" not in engine.named_tensors


async def test_a_tied_head_may_be_named_instead_of_the_embeddings(model: Any):
    update = model.update(1, seed=1)
    renamed = tuple(
        replace(part, spec=replace(part.spec, name="lm_head.weight"))
        if part.spec.name == "model.embed_tokens.weight"
        else part
        for part in update.tensors
    )
    async with running(model) as engine:
        await engine.swap(replace(update, tensors=renamed))
        generation = await engine.generate([3], knobs())
    expected = model.logprobs(1, [3], generation.tokens)
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-5)


async def test_bf16_values_are_computed_with_in_f32(model: Any):
    update, reference = model.update(1, seed=1), model.reference(1)
    parts: list[TensorUpdate] = []
    for part in update.tensors:
        parameter = reference.get_parameter(part.spec.name)
        rounded = parameter.detach().to(torch.bfloat16)
        parameter.data = rounded.float()
        values = rounded.view(torch.int16).numpy().view(np.uint16).reshape(-1)
        parts.append(replace(part, spec=replace(part.spec, dtype=Dtype.BF16), values=values))
    async with running(model) as engine:
        await engine.swap(replace(update, tensors=tuple(parts)))
        generation = await engine.generate([3], knobs())
    ids = torch.tensor([[3, *generation.tokens.tolist()]])
    with torch.no_grad():
        logits = reference(ids).logits[0, :-1]
    logits[:, :2] = -torch.inf
    expected = torch.log_softmax(logits, -1)[torch.arange(20), ids[0, 1:]]
    np.testing.assert_allclose(generation.logprobs, expected.numpy(), atol=1e-5)


async def test_computing_in_bf16_follows_f32(model: Any):
    async with running(model, dtype="bf16") as engine:
        generation = await engine.generate([3, 4], knobs())
    expected = model.logprobs(0, [3, 4], generation.tokens)
    np.testing.assert_allclose(generation.logprobs, expected, atol=0.3)


async def test_read_only_arrays_are_fine(model: Any):
    update = model.update(1, seed=1)
    for part in update.tensors:
        part.values.flags.writeable = False
    async with running(model) as engine:
        assert (await engine.swap(update)).version == 1


async def test_the_cache_is_kept_across_versions_and_says_so(model: Any):
    async with running(model) as engine:
        task = asyncio.ensure_future(engine.generate([3], knobs(80)))
        await engine.generate([3], knobs(2))
        await engine.swap(model.update(1, seed=1))
        spans = (await task).version_spans
    assert [span.kv for span in spans] == [KvPolicy.UNKNOWN, KvPolicy.KEEP]


async def test_a_missing_directory_is_named(tmp_path: Any):
    with pytest.raises(AstraflowError, match=r"nowhere/config\.json does not exist"):
        EmbeddedEngine.from_directory(tmp_path / "nowhere", EngineSettings(), POLICY)


async def test_a_context_beyond_the_model_is_refused(model: Any):
    with pytest.raises(AstraflowError, match="more than the model's 512"):
        EmbeddedEngine.from_directory(model.folder, EngineSettings(max_context=1024), POLICY)


async def test_a_directory_without_weights_cannot_be_loaded(model: Any):
    (model.folder / "model.safetensors").unlink()
    engine = EmbeddedEngine.from_directory(model.folder, EngineSettings(device="cpu"), POLICY)
    with pytest.raises(AstraflowError) as caught:
        await engine.load_directory(0)
    assert caught.value.reason is Reason.APPLY_FAILED
    await engine.close()


async def test_what_is_computed_with_is_the_version_to_the_bit(model: Any):
    bits = model.bits(1)
    async with running(model) as engine:
        await engine.swap(model.update(1, seed=1))
        for name, live in engine._versions.weights.tensors.items():
            np.testing.assert_array_equal(live.numpy().view("u4"), bits[name])


async def test_a_sliding_window_is_recomputed_too(make_model: Callable[..., Any]):
    config = MistralConfig(**SMALL, sliding_window=8)
    model = make_model(config, MistralForCausalLM)
    async with running(model, kv="recompute") as engine:
        task = asyncio.ensure_future(engine.generate([3, 4, 5], knobs(100)))
        await engine.generate([3], knobs(2))
        await engine.swap(model.update(1, seed=1))
        generation = await task
    first, second = generation.version_spans
    assert (second.version, second.kv) == (1, KvPolicy.RECOMPUTE)
    new = model.logprobs(1, [3, 4, 5], generation.tokens)[first.length :]
    np.testing.assert_allclose(generation.logprobs[first.length :], new, atol=1e-4)
