"""What was sampled goes back as it was sampled, over turns without number."""

from random import Random

import numpy as np
import pytest

from astraflow.core.rollouts import FinishReason, VersionSpan
from astraflow.core.tasks import SamplingParams
from astraflow.engines.protocol import Generation
from astraflow.workflows.agents.prompts import Chats, Texts
from astraflow.workflows.turns import TurnTree
from tests.workflows.agents.conftest import (
    ENDS,
    Babbler,
    raw_tokenizer,
    template_of,
    tokenizer_for,
)

WORDS = ("fox", " dogs", "\n", "  ", "é", "the quick", "<tool>", "日本", "\t.", "</think>", "🦊")
TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {}}},)


def said(rng):
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 6)))


def one_chat(name, rng, turn_count):
    """Talk for some turns; check every prompt against everything before it."""
    tokenizer, template = tokenizer_for(name), template_of(name)
    policy = Babbler(rng, end=raw_tokenizer().token_to_id(ENDS[name]))
    chats, tree = Chats(template, tokenizer), TurnTree()
    tools = TOOLS if rng.random() < 0.3 else ()
    messages = [{"role": "user", "content": said(rng)}]
    if rng.random() < 0.5:
        messages.insert(0, {"role": "system", "content": said(rng)})
    so_far = None
    for _ in range(turn_count):
        prompt = chats.prompt(messages, tools)
        if so_far is None:
            assert prompt == tokenizer.encode(template.render(messages, tools))
        else:
            assert prompt[: len(so_far)] == so_far
            text = raw_tokenizer().decode(prompt[len(so_far) :], skip_special_tokens=False)
            assert messages[-1]["content"].strip() in text
        generation = policy.say()
        turn = tree.add(tree.open(prompt), generation, SamplingParams())
        so_far = [*prompt, *generation.tokens.tolist()]
        assert turn.tokens.tolist() == so_far
        answer = {"role": "assistant", "content": tokenizer.decode(generation.tokens)}
        chats.keep(messages, tools, answer, turn)
        echoed = answer["content"].strip() if rng.random() < 0.5 else answer["content"]
        role = "tool" if name == "chatml" and rng.random() < 0.3 else "user"
        messages += [
            {"role": "assistant", "content": echoed},
            {"role": role, "content": said(rng)},
        ]
    assert len(list(tree.paths())) == 1
    return turn_count


def fuzz(name, turn_count, seed):
    rng = Random(f"{name}/{seed}")
    done = 0
    while done < turn_count:
        done += one_chat(name, rng, rng.randint(2, 8))


@pytest.mark.parametrize("name", ENDS)
def test_nothing_that_was_sampled_is_encoded_again(name):
    fuzz(name, 40, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_nothing_is_encoded_again_in_ten_thousand_turns(name):
    fuzz(name, 2500, seed=1)


@pytest.mark.parametrize("name", ENDS)
def test_the_text_is_what_the_template_makes_of_the_whole_chat(name):
    """With words that come back as they are, prompt and template agree to the letter."""
    tokenizer, template = tokenizer_for(name), template_of(name)
    end = raw_tokenizer().token_to_id(ENDS[name])
    chats, tree, messages = Chats(template, tokenizer), TurnTree(), []
    for number in range(4):
        messages.append({"role": "user", "content": f"fox {number}"})
        prompt = chats.prompt(messages)
        text = raw_tokenizer().decode(prompt, skip_special_tokens=False)
        assert text == template.render(messages)
        policy = Babbler(Random(0), end=end)
        generation = policy.say()
        said = " dogs" if name == "brackets" else "dogs"
        tokens = np.array([*tokenizer.encode(f"{said} {number}"), end], np.int32)
        answered = type(generation)(
            tokens=tokens,
            logprobs=np.zeros(len(tokens), np.float32),
            version_spans=generation.version_spans,
            finish_reason=FinishReason.STOP,
        )
        turn = tree.add(tree.open(prompt), answered, SamplingParams())
        answer = {"role": "assistant", "content": f"dogs {number}"}
        chats.keep(messages, (), answer, turn)
        messages.append(answer)


def test_who_asks_again_what_nothing_was_said_to_does_not_begin_after_the_end_token():
    texts, tree = Texts(tokenizer_for("chatml")), TurnTree()
    end = raw_tokenizer().token_to_id(ENDS["chatml"])
    prompt = texts.prompt("the quick")
    generation = Generation(
        tokens=np.array([end], np.int32),
        logprobs=np.zeros(1, np.float32),
        version_spans=(VersionSpan(version=1, length=1),),
        finish_reason=FinishReason.STOP,
    )
    texts.keep("the quick", tree.add(tree.open(prompt), generation, SamplingParams()))
    assert texts.prompt("the quick") == prompt
    assert texts.prompt("the quick fox")[: len(prompt) + 1] == [*prompt, end]
