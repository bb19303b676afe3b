"""Chat completions: requests become talks, answers become OpenAI's JSON."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from astraflow.raas.agents.asked import ChatAsked
from astraflow.raas.agents.talk import Choice, Talk
from astraflow.workflows.agents.messages import normal_messages
from astraflow.workflows.agents.session import AgentSession
from astraflow.workflows.ports import Tokenizer


def chat_talk(session: AgentSession, asked: ChatAsked) -> Talk:
    """Return the talk of a request.

    Raises:
        AstraflowError: INVALID_FIELD, or POLICY_UNKNOWN for the model.
    """
    capture = session.capture_of(asked.model)
    messages, tools = normal_messages(asked.messages), asked.offered_tools()

    def keep(choice: Choice) -> None:
        (answer,) = normal_messages([message_of(choice)])
        capture.chats.keep(messages, tools, answer, choice.turn)

    return Talk(
        session=session,
        capture=capture,
        prompt=capture.chats.prompt(messages, tools),
        knobs=asked,
        has_tools=bool(tools),
        keep=keep,
        overrides=asked.overrides(capture.port.sampling, session.rules.sampling),
    )


def message_of(choice: Choice) -> dict[str, Any]:
    """Return an answer as a message."""
    made: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        made["tool_calls"] = list(choice.calls)
        made["content"] = choice.text or None
    return made


def chat_body(talk: Talk, asked: ChatAsked, choices: Sequence[Choice]) -> dict[str, Any]:
    """Return whole answers as a body."""
    ordered = sorted(choices, key=lambda choice: choice.index)
    made = [
        {
            "index": choice.index,
            "message": message_of(choice),
            "logprobs": _logprobs(talk, choice) if asked.logprobs else None,
            "finish_reason": choice.finish,
        }
        for choice in ordered
    ]
    head = _head("chat.completion", asked)
    return {**head, "choices": made, "usage": usage_of(talk, choices)}


async def chat_chunks(talk: Talk, asked: ChatAsked) -> AsyncIterator[dict[str, Any]]:
    """Yield answers as chunks of a stream; log-probabilities come with the last one of each."""
    head = _head("chat.completion.chunk", asked)
    done: list[Choice] = []

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        made = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**head, "choices": [made | more]}

    for index in range(asked.count):
        yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
    async for one in talk.pieces():
        if not isinstance(one, Choice):
            yield chunk(one.index, {"content": one.text})
            continue
        done.append(one)
        if one.calls:
            calls = [{"index": number, **call} for number, call in enumerate(one.calls)]
            yield chunk(one.index, {"tool_calls": calls})
        logprobs = _logprobs(talk, one) if asked.logprobs else None
        yield chunk(one.index, {}, finish_reason=one.finish, logprobs=logprobs)
    if asked.has_usage:
        yield {**head, "choices": [], "usage": usage_of(talk, done)}


def usage_of(talk: Talk, choices: Sequence[Choice]) -> dict[str, int]:
    """Return how many tokens were read and sampled."""
    sampled = sum(len(choice.turn.generation.tokens) for choice in choices)
    read = len(talk.prompt)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def token_logprobs(tokenizer: Tokenizer, choice: Choice) -> list[tuple[str, float]]:
    """Return the text and the log-probability of each sampled token."""
    generation = choice.turn.generation
    pairs = zip(generation.tokens.tolist(), generation.logprobs.tolist(), strict=True)
    return [(tokenizer.decode([token]), logprob) for token, logprob in pairs]


def _logprobs(talk: Talk, choice: Choice) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in token_logprobs(talk.capture.port.tokenizer, choice)
    ]
    return {"content": content, "refusal": None}


def _head(kind: str, asked: ChatAsked) -> dict[str, Any]:
    made = {"object": kind, "created": int(time.time()), "model": asked.model}
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", **made, "system_fingerprint": None}
