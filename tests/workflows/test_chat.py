"""Chats of a recorder: the template's text around the tokens that were sampled."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import TrajectoryId
from astraflow.core.rollouts import FinishReason, VersionSpan
from astraflow.core.tasks import SamplingParams
from astraflow.engines.protocol import Generation
from astraflow.workflows.agents.template import ChatTemplate
from astraflow.workflows.episode import Recorder
from astraflow.workflows.ports import PolicyPort
from tests.workflows.agents.conftest import ENDS, raw_tokenizer, template_of, tokenizer_for
from tests.workflows.conftest import Characters, Parrot


@dataclass
class Pieces:
    """Says ids that no tokenizer would make of the text, then the end of a turn, or not."""

    script: list[list[int]]
    asked: list[list[int]] = field(default_factory=list)
    name: str = "pieces/1"
    max_context_token_count: int = 4096

    async def generate(self, prompt, sampling, *, version=None, watch=None):
        del sampling, version, watch
        self.asked.append(list(prompt))
        tokens = self.script.pop(0)
        ends = {raw_tokenizer().token_to_id(end) for end in ENDS.values()}
        return Generation(
            tokens=np.array(tokens, np.int32),
            logprobs=np.full(len(tokens), -0.25, np.float32),
            version_spans=(VersionSpan(version=1, length=len(tokens)),),
            finish_reason=FinishReason.STOP if tokens[-1] in ends else FinishReason.LENGTH,
        )


def ids(text):
    return list(tokenizer_for("chatml").encode(text))


def end_of(name):
    return raw_tokenizer().token_to_id(ENDS[name])


def recorder(name, *script, template=None):
    engine = Pieces(script=list(script))
    port = PolicyPort(
        policy_id="solver",
        engine=engine,
        tokenizer=tokenizer_for(name),
        sampling=SamplingParams(max_new_tokens=64),
        template=template or template_of(name),
    )
    return Recorder(trajectory_id=TrajectoryId("t/0"), port=port, agent="", seed=1), engine


def user(text):
    return {"role": "user", "content": text}


def text_of(tokens):
    return raw_tokenizer().decode(list(tokens), skip_special_tokens=False)


# One letter at a time: the tokenizer would make fewer tokens of them.
LETTERS = [raw_tokenizer().token_to_id(letter) for letter in "quick"]


@pytest.mark.parametrize("name", ["chatml", "smollm2"])
async def test_a_chat_is_what_the_template_makes_of_it_and_answers_stay_as_sampled(name):
    talk, engine = recorder(name, [*LETTERS, end_of(name)], [*LETTERS[:2], end_of(name)])
    talk.chat([{"role": "system", "content": "Be brief."}, user("the fox")])
    await talk.sample()
    talk.chat([user("again")])
    await talk.sample()
    made = talk.to_trajectory(segment_index=0)
    whole = [
        {"role": "system", "content": "Be brief."},
        user("the fox"),
        {"role": "assistant", "content": "quick"},
        user("again"),
    ]
    assert list(talk.messages) == [*whole, {"role": "assistant", "content": "qu"}]
    assert text_of(engine.asked[1]) == template_of(name).render(whole)
    assert engine.asked[1][: len(engine.asked[0]) + 6] == [*engine.asked[0], *LETTERS, end_of(name)]
    assert made.tokens[made.sampled_mask].tolist() == [
        *LETTERS, end_of(name), *LETTERS[:2], end_of(name)
    ]  # fmt: skip


async def test_an_answer_that_was_cut_is_ended_for_it():
    talk, engine = recorder("chatml", LETTERS, [end_of("chatml")])
    talk.chat([user("fox")])
    await talk.sample()
    talk.chat([user("go on")])
    await talk.sample()
    tail = text_of(engine.asked[1][len(engine.asked[0]) + len(LETTERS) :])
    assert tail == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    made = talk.to_trajectory(segment_index=0)
    assert made.tokens[made.sampled_mask].tolist() == [*LETTERS, end_of("chatml")]


async def test_thinking_that_the_template_would_drop_stays():
    thought = [*ids("<think>\nfox\n</think>\n\ndogs"), end_of("qwen3_like")]
    talk, engine = recorder("qwen3_like", thought, [end_of("qwen3_like")])
    talk.chat([user("the")])
    await talk.sample()
    talk.chat([user("fox")])
    await talk.sample()
    assert "<think>\nfox\n</think>\n\ndogs<|im_end|>\n<|im_start|>user\nfox" in text_of(
        engine.asked[1]
    )


async def test_messages_told_twice_before_an_answer_are_rendered_as_one_chat():
    once, _ = recorder("chatml")
    once.chat([{"role": "system", "content": "a"}, user("b"), user("c")])
    twice, engine = recorder("chatml", [end_of("chatml")], [end_of("chatml")])
    twice.chat([{"role": "system", "content": "a"}, user("b")])
    twice.chat([user("c")])
    assert twice.token_count == once.token_count
    await twice.sample()
    twice.chat([user("d")])
    twice.chat([user("e")])
    await twice.sample()
    assert text_of(engine.asked[1]).endswith(
        "assistant\n<|im_end|>\n<|im_start|>user\nd<|im_end|>\n"
        "<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_text_in_a_chat_is_a_part_of_the_policys_own_turn():
    talk, engine = recorder("chatml", LETTERS, [*LETTERS, end_of("chatml")], [end_of("chatml")])
    talk.chat([user("fox")])
    talk.observe("So ")
    await talk.sample()
    talk.observe("<tool>")
    await talk.sample()
    talk.chat([user("dogs")])
    await talk.sample()
    assert "assistant\nSo quick<tool>quick<|im_end|>\n<|im_start|>user\ndogs" in text_of(
        engine.asked[2]
    )


async def test_tools_stay_for_the_whole_chat():
    tool = {"type": "function", "function": {"name": "lookup", "parameters": {}}}
    talk, engine = recorder("chatml", [end_of("chatml")], [end_of("chatml")])
    talk.chat([user("fox")], tools=[tool])
    await talk.sample()
    talk.chat([{"role": "tool", "content": "a fox"}])
    await talk.sample()
    assert '"lookup"' in text_of(engine.asked[0])
    assert "<tool_response>\na fox" in text_of(engine.asked[1])


@pytest.mark.parametrize(
    ("messages", "tools", "problem"),
    [
        ([{"role": "robot", "content": "x"}], (), "robot"),
        ([{"role": "user", "content": [{"type": "image"}]}], (), "only text"),
        ([], (), "at least one message"),
        ([user("x")], ({"type": "function"},), "does not take tools"),
    ],
)
def test_what_the_template_cannot_show_is_refused(messages, tools, problem):
    talk, _ = recorder("headers")
    with pytest.raises(AstraflowError, match=problem) as caught:
        talk.chat(messages, tools)
    assert caught.value.reason is Reason.INVALID_FIELD


async def test_a_template_that_does_not_show_answers_ends_the_chat_after_one():
    last_only = ChatTemplate("<|im_start|>{{ messages[-1].content }}<|im_end|>")
    talk, _ = recorder("chatml", LETTERS, template=last_only)
    talk.chat([user("fox")])
    await talk.sample()
    with pytest.raises(AstraflowError, match="go on after an answer"):
        talk.chat([user("dogs")])


async def test_plain_text_and_chats_are_not_mixed_up():
    talk, _ = recorder("chatml", LETTERS)
    talk.observe("fox")
    with pytest.raises(AstraflowError, match="began as plain text"):
        talk.chat([user("dogs")])


async def test_a_model_without_a_template_reads_the_contents(episode):
    def play(say):
        engine = Parrot(script=iter(("a", "b")))
        talk = episode(solver=engine).trajectory()
        return engine, talk, say

    async def run(engine, talk, say):
        for told in ("x>", "!"):
            say(talk, told)
            await talk.sample()
        return engine.asked, talk.to_trajectory(segment_index=0)

    asked, chat = await run(*play(lambda talk, told: talk.chat([user(told)])))
    expected, text = await run(*play(lambda talk, told: talk.observe(told)))
    assert asked == expected
    assert chat.tokens.tolist() == text.tokens.tolist()
    assert chat.tokens.tolist()[:3] == [2, ord("x"), ord(">")]
    assert Characters().decode(chat.tokens.tolist()) == "x>a!b"
