"""Text completions: requests are sampled, answers become OpenAI's JSON."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from astraflow.raas.agents.chats import (
    ChunkScript,
    likeliest_of,
    prompt_token_ids,
    token_ids,
    token_logprobs,
    usage_of,
)
from astraflow.raas.agents.completion import Choice, Completion
from astraflow.raas.agents.request import CompletionRequest
from astraflow.raas.agents.script import Chunks
from astraflow.workflows.agents.session import AgentSession


def text_completion(session: AgentSession, request: CompletionRequest) -> Completion:
    """Return the completion of a request.

    Raises:
        AstraflowError: INVALID_FIELD, or POLICY_UNKNOWN for the model.
    """
    capture, given = session.capture_of(request.model), request.one_prompt

    def keep(choice: Choice) -> None:
        if isinstance(given, str):
            capture.texts.keep(given, choice.turn)

    return Completion(
        session=session,
        capture=capture,
        prompt=capture.texts.prompt(given) if isinstance(given, str) else given,
        request=request,
        has_tools=False,
        keep=keep,
        overrides=request.overrides(capture.port.sampling, session.rules.sampling),
    )


def text_body(
    completion: Completion, request: CompletionRequest, choices: Sequence[Choice]
) -> dict[str, Any]:
    """Return whole answers as a body."""
    ordered = sorted(choices, key=lambda choice: choice.index)
    made = [_choice(completion, request, choice, choice.text) for choice in ordered]
    return {**_head(request), "choices": made, "usage": usage_of(completion, choices)}


class TextScript(ChunkScript):
    """Writes texts; log-probabilities come with the last chunk of each choice."""

    def __init__(self, completion: Completion, request: CompletionRequest) -> None:
        before, after = ',"text":', ',"logprobs":null,"finish_reason":null'
        super().__init__(completion, request, Chunks(_head(request), before=before, after=after))
        self._request = request

    def close(self, choice: Choice) -> bytes:
        """Write why a choice ended."""
        told = super().close(choice)
        return told + self.chunks.chunk(_choice(self.completion, self._request, choice, ""))


def _choice(
    completion: Completion, request: CompletionRequest, choice: Choice, text: str
) -> dict[str, Any]:
    logprobs = _logprobs(completion, choice) if request.logprobs is not None else None
    made = {"index": choice.index, "text": text, "logprobs": logprobs}
    ids = {**prompt_token_ids(completion), **token_ids(request, choice)}
    return {**made, "finish_reason": choice.finish, **ids}


def _logprobs(completion: Completion, choice: Choice) -> dict[str, Any]:
    tokenizer = completion.capture.port.tokenizer
    pairs = token_logprobs(tokenizer, choice)
    texts = [text for text, _ in pairs]
    offsets = [sum(map(len, texts[:index])) for index in range(len(texts))]
    logprobs = [logprob for _, logprob in pairs]
    made = {"tokens": texts, "token_logprobs": logprobs}
    likeliest = [dict(pairs) for pairs in likeliest_of(tokenizer, choice)] or None
    return {**made, "top_logprobs": likeliest, "text_offset": offsets}


def _head(request: CompletionRequest) -> dict[str, Any]:
    made = {"object": "text_completion", "created": int(time.time()), "model": request.model}
    return {"id": f"cmpl-{secrets.token_hex(12)}", **made, "system_fingerprint": None}
