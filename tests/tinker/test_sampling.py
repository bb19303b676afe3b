"""Sampling sessions: whose weights they sample from, and how."""

import asyncio
import string

import numpy as np
import pytest

from astraflow.tinker import service
from astraflow.tinker.app import serving
from astraflow.tinker.checkpoints import SNAPSHOT_COUNT
from astraflow_proto.tinker.v1 import tinker_pb2 as pb

from .conftest import (
    END,
    LETTERS,
    NAME,
    PAD,
    START,
    VOCABULARY,
    Peer,
    RefusedError,
    datum,
    made_data,
    sampled,
    to_data,
)

PROMPT = [*b"the quick"]


async def changed(model, seed=0):
    await model.forward_backward(to_data(made_data(4, seed=seed), "weights"))
    await model.optim_step(learning_rate=0.05)


async def likelihoods(model, prompt, tokens):
    """Return what training says of a completion."""
    row = [*prompt, *tokens]
    one = datum(row[:-1], target_tokens=row[1:], weights=[1.0] * (len(row) - 1))
    (found,), _ = await model.forward_backward([one], forward_only=True)
    return found[len(prompt) - 1 :]


@pytest.mark.parametrize("rank", [4, 0])
async def test_log_probabilities_of_samples_are_those_of_training(peer, rank):
    model = await peer.create_model(rank=rank)
    await changed(model)
    sampler = await model.sampler()
    answer = await sampler.sample(PROMPT, num_samples=4, max_tokens=12, seed=5)
    assert len({tuple(tokens) for tokens, _ in sampled(answer)}) > 1
    for tokens, logprobs in sampled(answer):
        expected = await likelihoods(model, PROMPT, tokens)
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


async def test_every_token_can_be_drawn(peer):
    """Padding and beginning of text, too: training knows of no other distribution."""
    sampler = await peer.sampler()
    answer = await sampler.sample(PROMPT, max_tokens=1, topk_sample_logprobs=20)
    likeliest = answer.sequences[0].likeliest_tokens
    assert (likeliest.length, likeliest.k) == (1, 20)
    scored = await sampler.sample(PROMPT, prompt_logprobs=True, topk_prompt_logprobs=3)
    assert scored.likeliest_prompt_tokens.length == len(PROMPT)
    options = {"max_tokens": 1, "temperature": 1e6, "num_samples": 1024, "stop": []}
    answers = [await sampler.sample(PROMPT, seed=seed, **options) for seed in (0, 5000)]
    drawn = {tokens[0] for answer in answers for tokens, _ in sampled(answer)}
    assert drawn >= {PAD, START, END}
    assert max(drawn) < VOCABULARY


async def test_a_session_samples_from_the_weights_of_its_time(peer, model):
    """However many sessions there are, and although the engine has three at once."""
    samplers = [await peer.sampler()]
    for seed in range(5):
        await changed(model, seed)
        samplers.append(await model.sampler())
    first = [sampled(await sampler.sample(PROMPT, seed=7)) for sampler in samplers]
    assert len({str(each) for each in first}) == len(samplers)
    for sampler, before in zip(reversed(samplers), reversed(first), strict=True):
        ((tokens, logprobs),) = sampled(await sampler.sample(PROMPT, seed=7))
        assert tokens == before[0][0]
        np.testing.assert_array_equal(logprobs, before[0][1])
    answers = await asyncio.gather(*(each.sample(PROMPT, seed=7) for each in samplers * 3))
    assert [sampled(each)[0][0] for each in answers] == [each[0][0] for each in first] * 3


async def test_only_the_last_snapshots_of_a_model_are_kept(model):
    samplers = [await model.sampler() for _ in range(SNAPSHOT_COUNT + 1)]
    await samplers[1].sample(PROMPT)
    with pytest.raises(RefusedError, match="CHECKPOINT_UNKNOWN") as refused:
        await samplers[0].sample(PROMPT)
    assert refused.value.category == "user"


async def test_prompts_are_scored_by_the_weights_of_the_session(peer, model):
    await changed(model)
    sampler = await model.sampler()
    expected = await likelihoods(model, PROMPT[:1], PROMPT[1:])
    await changed(model, 1)
    answer = await sampler.sample(PROMPT, max_tokens=1, prompt_logprobs=True)
    found = np.frombuffer(answer.prompt_logprobs, "<f4")
    assert np.isnan(found[0])
    np.testing.assert_allclose(found[1:], expected, atol=1e-5)
    answer = await sampler.sample(
        PROMPT, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=3, topk_prompt_logprobs=2
    )
    found = np.frombuffer(answer.prompt_logprobs, "<f4")
    assert np.isnan(found[:-3]).all()
    np.testing.assert_allclose(found[-3:], expected[-3:], atol=1e-5)
    best = np.frombuffer(answer.likeliest_prompt_tokens.logprobs, "<f4").reshape(-1, 2)
    assert (best[:-3] == -99999).all()
    assert (best[-3:, 0] >= found[-3:] - 1e-6).all()


async def test_a_completion_ends_where_it_was_told_to(peer):
    sampler = await peer.sampler()
    (free,) = sampled(await sampler.sample(PROMPT, max_tokens=40, stop=[], seed=3))
    assert len(free[0]) == 40
    ids = await sampler.sample(PROMPT, max_tokens=40, stop=[free[0][5]], seed=3)
    ((tokens, _),) = sampled(ids)
    assert tokens == free[0][: free[0].index(free[0][5]) + 1]
    assert ids.sequences[0].stop_reason == 0
    letter = next(token for token in free[0] if LETTERS[token] in string.ascii_letters)
    text = await sampler.sample(PROMPT, max_tokens=40, stop=[LETTERS[letter]], seed=3)
    ((tokens, _),) = sampled(text)
    assert tokens == free[0][: free[0].index(letter) + 1]
    short = await sampler.sample(PROMPT, max_tokens=2, stop=[], seed=3)
    assert short.sequences[0].stop_reason == 1


async def test_an_end_token_ends_unless_it_is_taken_away(peer):
    sampler = await peer.sampler()
    options = {"num_samples": 256, "max_tokens": 20, "temperature": 50.0}
    ended = sampled(await sampler.sample(PROMPT, **options))
    assert any(tokens[-1] == END for tokens, _ in ended)
    assert all(END not in tokens[:-1] for tokens, _ in ended)
    endless = sampled(await sampler.sample(PROMPT, stop=[], **options))
    assert {len(tokens) for tokens, _ in endless} == {20}


async def test_the_same_seed_draws_the_same_and_knobs_are_the_engines(peer):
    sampler = await peer.sampler()
    first, second = [sampled(await sampler.sample(PROMPT, num_samples=3, seed=11)) for _ in "ab"]
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in second]
    greedy = sampled(await sampler.sample(PROMPT, num_samples=2, temperature=0.0))
    likeliest = sampled(await sampler.sample(PROMPT, num_samples=2, top_k=1))
    nucleus = sampled(await sampler.sample(PROMPT, num_samples=2, top_p=1e-6))
    assert len({str(tokens) for tokens, _ in [*greedy, *likeliest, *nucleus]}) == 1


async def test_a_request_that_is_sent_again_is_sampled_once(peer):
    sampler = await peer.sampler()
    told = await sampler.ask(PROMPT)
    sampler.seq_id -= 1
    assert await sampler.ask(PROMPT) == told
    sampler.seq_id -= 1
    with pytest.raises(AssertionError, match="409"):
        await sampler.ask([*PROMPT, 1])


async def test_prompts_that_wait_take_no_more_than_they_may(peer, monkeypatch):
    sampler = await peer.sampler()
    monkeypatch.setattr(service, "_QUEUED_NBYTES", 4000)
    with pytest.raises(AssertionError, match="429"):
        await sampler.ask([1] * 2000)
    answer = await sampler.sample(PROMPT)
    assert answer.sequences


async def test_named_weights_are_sampled_from_by_their_path(peer, model):
    await changed(model)
    path = await model.save_for_sampler("best")
    own, named = await model.sampler(), await peer.sampler(path)
    answers = [sampled(await each.sample(PROMPT, seed=1)) for each in (own, named)]
    assert answers[0][0][0] == answers[1][0][0]
    told = (await peer.http.get(f"samplers/{named.sampler_id}")).json()
    assert told == {"sampler_id": named.sampler_id, "base_model": NAME, "model_path": path}


async def test_adapters_of_another_server_that_are_too_wide_are_refused(make_settings):
    async with serving(make_settings()) as address, Peer(address) as peer:
        path = await (await peer.create_model(rank=8)).save_for_sampler("wide")
    async with serving(make_settings(max_rank=4)) as address, Peer(address) as peer:
        with pytest.raises(RefusedError, match=r"rank 8.*--max-rank") as refused:
            await (await peer.sampler(path)).sample(PROMPT)
    assert refused.value.category == "user"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"record_stability_info": True}, "record_stability_info"),
        ({"target_prompt_logprobs": {"data": [1]}}, "target_prompt_logprobs"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(peer, options, why):
    sampler = await peer.sampler()
    with pytest.raises(RefusedError, match=f"{why} is not served") as refused:
        await sampler.sample(PROMPT, **options)
    assert refused.value.category == "user"


async def test_prompts_that_cannot_be_sampled_from_are_refused(peer):
    sampler = await peer.sampler()
    for prompt in ([], [VOCABULARY], [1] * 4096):
        with pytest.raises(RefusedError) as refused:
            await sampler.sample(prompt)
        assert refused.value.category == "user"
    fields = {
        "sampling_session_id": sampler.sampler_id,
        "seq_id": 99,
        "prompt": {"chunks": [{"type": "image", "data": "aGVsbG8=", "format": "png"}]},
        "sampling_params": {},
    }
    with pytest.raises(RefusedError, match="image"):
        await peer.done("asample", **fields)


def test_a_ragged_choice_of_likeliest_tokens_is_padded():
    from astraflow.tinker.wire import sample_output  # noqa: PLC0415

    body = sample_output([], prompt_likeliest=[(), [(3, -1.0), (4, -2.0)], [(5, -0.5)]])
    told = pb.SampleResponse.FromString(body).likeliest_prompt_tokens
    ids = np.frombuffer(told.token_ids, "<i4").reshape(3, 2)
    np.testing.assert_array_equal(ids, [[0, 0], [3, 4], [5, 0]])
