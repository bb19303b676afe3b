"""Sampling by a grammar: what may come, whether that changed the draw, and what cannot be asked."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models

import agent_fuzz
from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import FinishReason
from astraflow.core.tasks import Grammar, SamplingParams
from astraflow.engines.embedded import EmbeddedEngine
from astraflow.engines.embedded.grammars import Grammars
from astraflow.engines.embedded.rows import DecodeRows, Request
from astraflow.engines.embedded.sampler import Sampler, stream_of
from astraflow.engines.tokenizer import FastTokenizer, SpecialIds, load_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy", "zzz"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
JSON = Grammar(answer=json.dumps(SCHEMA))
VOCABULARY = 258


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    agent_fuzz.write_model(tmp_path)
    return tmp_path


@pytest.fixture
def tokenizer(folder: Path) -> FastTokenizer:
    return load_tokenizer(folder)


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[EmbeddedEngine]:
    settings = EngineSettings(kind="embedded", max_batch=16, max_context=2048)
    engine = EmbeddedEngine.from_directory(folder, settings, "p")
    await engine.load_directory(0)
    yield engine
    await engine.close()


@pytest.mark.parametrize(
    "knobs",
    [{}, {"temperature": 0.0, "max_new_tokens": 64}, {"ignore_eos": True}, {"top_p": 0.5}],
)
async def test_what_is_sampled_parses_under_the_schema(
    engine: EmbeddedEngine, tokenizer: FastTokenizer, knobs: dict
):
    # Greedily all seeds draw the same.
    seeds = range(1 if "temperature" in knobs else 20)
    asked = [SamplingParams(seed=seed, grammar=JSON, **knobs) for seed in seeds]
    for made in await asyncio.gather(*(engine.generate([70, 71], one) for one in asked)):
        if made.finish_reason is FinishReason.LENGTH and "temperature" in knobs:
            continue  # the likeliest token is white space, for ever
        said = json.loads(tokenizer.decode(made.tokens.tolist()))
        assert said["a"] in ("x", "yy", "zzz")
        assert said.keys() == {"a", "b"}
        assert made.finish_reason is FinishReason.STOP
        assert made.constrained is not None
        assert len(made.constrained) == len(made.tokens)


async def test_a_grammar_changes_nothing_of_those_beside_it(engine: EmbeddedEngine):
    free = [SamplingParams(seed=seed, max_new_tokens=20) for seed in range(4)]
    alone = await asyncio.gather(*(engine.generate([70, 71], one) for one in free))
    mixed = [*free, *(SamplingParams(seed=seed, grammar=JSON) for seed in range(4))]
    beside = await asyncio.gather(*(engine.generate([70, 71], one) for one in mixed))
    for one, other in zip(alone, beside[:4], strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.logprobs, other.logprobs)
        assert other.constrained is None


async def test_a_draw_counts_as_the_policys_own_where_the_grammar_takes_nothing_away(
    tokenizer: FastTokenizer,
):
    guide = Grammars(tokenizer, vocab_size=VOCABULARY).guide(JSON)
    table = DecodeRows(limit=16, column_limit=64)
    table.add(
        [
            Request(
                prompt=np.array([70], np.int32),
                sampling=SamplingParams(grammar=JSON),
                stream=stream_of(0),
                budget=8,
                version=None,
                reply=asyncio.get_running_loop().create_future(),
                guide=guide,
            )
        ]
    )
    sampler = Sampler(
        vocab_size=VOCABULARY, eos_ids=(1,), never_sampled_ids=(0,), device=torch.device("cpu")
    )
    for letter, height in (("{", 40.0), ('"', 0.0)):
        logits = torch.zeros(1, VOCABULARY)
        (wanted,) = tokenizer.encode(letter)
        logits[0, wanted] = height
        tokens, logprobs = sampler.draw(logits, table, slice(0, 1))
        table.append(slice(0, 1), tokens, logprobs)
        assert guide.allowed().shape == (VOCABULARY,)
    assert guide.constrained == [False, True]


async def test_the_likeliest_tokens_are_those_of_the_softmax_sampled_from(engine: EmbeddedEngine):
    knobs = {"seed": 1, "max_new_tokens": 8, "temperature": 0.7}
    some = await engine.generate([70, 71], SamplingParams(**knobs, top_logprobs=4))
    every = await engine.generate([70, 71], SamplingParams(**knobs, top_logprobs=VOCABULARY))
    assert np.array_equal(some.tokens, every.tokens)
    for token, logprob, pairs, whole in zip(
        some.tokens.tolist(), some.logprobs.tolist(), some.likeliest, every.likeliest, strict=True
    ):
        assert list(pairs) == list(whole)[:4]
        assert dict(whole)[token] == pytest.approx(logprob, abs=1e-6)
        assert np.exp([value for _, value in whole]).sum() == pytest.approx(1, abs=1e-5)
        assert len(whole) == VOCABULARY - 1  # the beginning of a text is never sampled


@pytest.mark.parametrize("schema", [{"$ref": "#/no"}, {"type": "strange"}, {"pattern": "(("}])
async def test_a_schema_that_is_none_is_refused(engine: EmbeddedEngine, schema: dict):
    with pytest.raises(AstraflowError, match="cannot be followed") as told:
        await engine.generate([70], SamplingParams(grammar=Grammar(answer=json.dumps(schema))))
    assert told.value.reason is Reason.INVALID_FIELD


@pytest.mark.parametrize("eos", [{1}, set()])
async def test_letters_spell_json_too_where_there_is_an_end(eos: set[int]):
    words = {letter: number for number, letter in enumerate(["<s>", "</s>", *'{}":, abxyz'])}
    letters = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<s>"))
    letters.decoder = decoders.Fuse()
    special = SpecialIds(eos=frozenset(eos), never_sampled=frozenset({0}))
    grammars = Grammars(FastTokenizer(letters, special), vocab_size=len(words))
    said = {"type": "object", "properties": {"a": {"enum": ["x", "yy", "zzz"]}}, "required": ["a"]}
    grammar = Grammar(answer=json.dumps({**said, "additionalProperties": False}))
    if not eos:
        with pytest.raises(AstraflowError, match="no end token"):
            grammars.guide(grammar)
        return
    guide, dice, tokens = grammars.guide(grammar), np.random.default_rng(0), []
    while not guide.is_over:
        tokens.append(int(dice.choice(np.flatnonzero(guide.allowed()))))
        guide.take(tokens[-1])
    assert json.loads(letters.decode(tokens, skip_special_tokens=True).replace("</s>", ""))["a"]


async def test_without_the_library_its_package_is_named(
    tokenizer: FastTokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(AstraflowError, match=r"pip install 'llguidance") as told:
        Grammars(tokenizer, vocab_size=VOCABULARY).guide(JSON)
    assert told.value.reason is Reason.CAPABILITY_MISSING
