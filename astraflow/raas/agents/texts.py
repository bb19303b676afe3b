"""Text completions: requests become talks, answers become OpenAI's JSON."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from astraflow.raas.agents.asked import TextAsked
from astraflow.raas.agents.chats import token_logprobs, usage_of
from astraflow.raas.agents.talk import Choice, Talk
from astraflow.workflows.agents.session import AgentSession


def text_talk(session: AgentSession, asked: TextAsked) -> Talk:
    """Return the talk of a request.

    Raises:
        AstraflowError: INVALID_FIELD, or POLICY_UNKNOWN for the model.
    """
    capture, given = session.capture_of(asked.model), asked.one_prompt

    def keep(choice: Choice) -> None:
        if isinstance(given, str):
            capture.texts.keep(given, choice.turn)

    return Talk(
        session=session,
        capture=capture,
        prompt=capture.texts.prompt(given) if isinstance(given, str) else given,
        knobs=asked,
        has_tools=False,
        keep=keep,
        overrides=asked.overrides(capture.port.sampling, session.rules.sampling),
    )


def text_body(talk: Talk, asked: TextAsked, choices: Sequence[Choice]) -> dict[str, Any]:
    """Return whole answers as a body."""
    ordered = sorted(choices, key=lambda choice: choice.index)
    made = [_choice(talk, asked, choice, choice.text) for choice in ordered]
    return {**_head(asked), "choices": made, "usage": usage_of(talk, choices)}


async def text_chunks(talk: Talk, asked: TextAsked) -> AsyncIterator[dict[str, Any]]:
    """Yield answers as chunks of a stream; log-probabilities come with the last one of each."""
    head = _head(asked)
    done: list[Choice] = []
    async for one in talk.pieces():
        if isinstance(one, Choice):
            done.append(one)
            yield {**head, "choices": [_choice(talk, asked, one, "")]}
        else:
            piece = {"index": one.index, "text": one.text, "logprobs": None, "finish_reason": None}
            yield {**head, "choices": [piece]}
    if asked.has_usage:
        yield {**head, "choices": [], "usage": usage_of(talk, done)}


def _choice(talk: Talk, asked: TextAsked, choice: Choice, text: str) -> dict[str, Any]:
    logprobs = _logprobs(talk, choice) if asked.logprobs is not None else None
    made = {"index": choice.index, "text": text, "logprobs": logprobs}
    return {**made, "finish_reason": choice.finish}


def _logprobs(talk: Talk, choice: Choice) -> dict[str, Any]:
    pairs = token_logprobs(talk.capture.port.tokenizer, choice)
    texts = [text for text, _ in pairs]
    offsets = [sum(map(len, texts[:index])) for index in range(len(texts))]
    logprobs = [logprob for _, logprob in pairs]
    made = {"tokens": texts, "token_logprobs": logprobs}
    return {**made, "top_logprobs": None, "text_offset": offsets}


def _head(asked: TextAsked) -> dict[str, Any]:
    made = {"object": "text_completion", "created": int(time.time()), "model": asked.model}
    return {"id": f"cmpl-{secrets.token_hex(12)}", **made, "system_fingerprint": None}
