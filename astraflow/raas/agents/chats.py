"""Chat completions: requests are sampled, answers become OpenAI's JSON."""

import secrets
import time
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from astraflow.core.errors import AstraflowError
from astraflow.raas.agents.completion import Choice, Completion, Piece
from astraflow.raas.agents.detokenizer import opened_call
from astraflow.raas.agents.request import ChatRequest, SamplingRequest
from astraflow.raas.agents.script import Chunks
from astraflow.workflows.agents.messages import Message, normal_messages
from astraflow.workflows.agents.session import AgentSession, Capture
from astraflow.workflows.ports import Tokenizer


def chat_completion(session: AgentSession, request: ChatRequest) -> Completion:
    """Return the completion of a request.

    Raises:
        AstraflowError: INVALID_FIELD, or POLICY_UNKNOWN for the model.
    """
    capture = session.capture_of(request.model)
    messages, tools = normal_messages(request.messages), request.offered_tools

    def keep(choice: Choice) -> None:
        (answer,) = normal_messages([message_of(choice)])
        capture.chats.keep(messages, tools, answer, choice.turn)

    return Completion(
        session=session,
        capture=capture,
        prompt=_prompt(capture, messages, request),
        request=request,
        has_tools=bool(tools),
        keep=keep,
        overrides=request.overrides(capture.port.sampling, session.rules.sampling),
        forced_tool=request.forced_tool,
    )


def prompt_count(session: AgentSession, request: ChatRequest) -> int:
    """Return how many tokens a policy would read; nothing is sampled.

    Raises:
        AstraflowError: As `chat_completion`, but for prompts that are too long.
    """
    capture = session.capture_of(request.model)
    return len(_prompt(capture, normal_messages(request.messages), request))


def _prompt(capture: Capture, messages: Sequence[Message], request: ChatRequest) -> list[int]:
    forced = request.forced_tool
    begun = capture.port.tokenizer.encode(opened_call(forced)) if forced else ()
    return [*capture.chats.prompt(messages, request.offered_tools), *begun]


def message_of(choice: Choice) -> dict[str, Any]:
    """Return an answer as a message."""
    made: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        made["tool_calls"] = list(choice.calls)
        made["content"] = choice.text or None
    return made


def chat_body(
    completion: Completion, request: ChatRequest, choices: Sequence[Choice]
) -> dict[str, Any]:
    """Return whole answers as a body."""
    ordered = sorted(choices, key=lambda choice: choice.index)
    made = [
        {
            "index": choice.index,
            "message": message_of(choice),
            "logprobs": _logprobs(completion, choice) if request.logprobs else None,
            "finish_reason": choice.finish,
            **token_ids(request, choice),
        }
        for choice in ordered
    ]
    head = {**_head("chat.completion", request), **prompt_token_ids(completion)}
    return {**head, "choices": made, "usage": usage_of(completion, choices)}


class ChunkScript:
    """Writes answers as chunks, in OpenAI's own form.

    Attributes:
        completion: The answers.
        chunks: Writes a chunk.
    """

    def __init__(self, completion: Completion, request: SamplingRequest, chunks: Chunks) -> None:
        self.completion = completion
        self.chunks = chunks
        self._has_usage = request.has_usage
        self._done: list[Choice] = []

    def begin(self) -> bytes:
        """Write nothing."""
        return b""

    def show(self, piece: Piece) -> bytes:
        """Write some text."""
        return self.chunks.piece(piece)

    def close(self, choice: Choice) -> bytes:
        """Count its tokens."""
        self._done.append(choice)
        return b""

    def end(self) -> bytes:
        """Write the token counts, if they were asked for, and the end."""
        told = (
            self.chunks.chunk(usage=usage_of(self.completion, self._done))
            if self._has_usage
            else b""
        )
        return told + self.chunks.end()

    def fail(self, error: AstraflowError) -> bytes:
        """Write an error."""
        return self.chunks.fail(error)


class ChatScript(ChunkScript):
    """Writes a chat; log-probabilities and token ids come with the last chunk of each choice."""

    def __init__(self, completion: Completion, request: ChatRequest) -> None:
        head = _head("chat.completion.chunk", request)
        before, after = ',"delta":{"content":', '},"logprobs":null,"finish_reason":null'
        super().__init__(completion, request, Chunks(head, before=before, after=after))
        self._request = request

    def begin(self) -> bytes:
        """Open every choice."""
        opened = {"role": "assistant", "content": "", "refusal": None}
        indexes, read = range(self._request.count), prompt_token_ids(self.completion)
        return b"".join(self.chunks.chunk(_delta(index, opened), **read) for index in indexes)

    def close(self, choice: Choice) -> bytes:
        """Write tool calls, and why the choice ended."""
        told = super().close(choice)
        calls = [{"index": number, **call} for number, call in enumerate(choice.calls)]
        if calls:
            told += self.chunks.chunk(_delta(choice.index, {"tool_calls": calls}))
        logprobs = _logprobs(self.completion, choice) if self._request.logprobs else None
        last = _delta(choice.index, {}, finish_reason=choice.finish, logprobs=logprobs)
        return told + self.chunks.chunk({**last, **token_ids(self._request, choice)})


def _delta(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}


def usage_of(completion: Completion, choices: Sequence[Choice]) -> dict[str, int]:
    """Return how many tokens were read and sampled."""
    sampled = sum(len(choice.turn.generation.tokens) for choice in choices)
    read = len(completion.prompt)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def prompt_token_ids(completion: Completion) -> dict[str, list[int]]:
    """Return the ids of what was read, as vLLM has them, if they were asked for."""
    return {"prompt_token_ids": completion.prompt} if completion.request.return_token_ids else {}


def token_ids(request: SamplingRequest, choice: Choice) -> dict[str, list[int]]:
    """Return the ids of what was sampled, as vLLM has them, if they were asked for."""
    return {"token_ids": choice.turn.generation.tokens.tolist()} if request.return_token_ids else {}


def token_logprobs(tokenizer: Tokenizer, choice: Choice) -> list[tuple[str, float]]:
    """Return the text and the log-probability of each sampled token."""
    generation = choice.turn.generation
    pairs = zip(generation.tokens.tolist(), generation.logprobs.tolist(), strict=True)
    return texts_of(tokenizer, pairs)


def likeliest_of(tokenizer: Tokenizer, choice: Choice) -> list[list[tuple[str, float]]]:
    """Return the same of the likeliest tokens beside each one; empty: they are not told."""
    return [texts_of(tokenizer, pairs) for pairs in choice.turn.generation.likeliest]


def texts_of(tokenizer: Tokenizer, pairs: Iterable[tuple[int, float]]) -> list[tuple[str, float]]:
    """Return tokens as texts."""
    return [(tokenizer.decode([token]), logprob) for token, logprob in pairs]


def logprobs_of(completion: Completion, choice: Choice) -> list[dict[str, Any]]:
    """Return each sampled token with its log-probability, and with the likeliest beside it."""
    tokenizer = completion.capture.port.tokenizer
    beside = zip_longest(token_logprobs(tokenizer, choice), likeliest_of(tokenizer, choice))
    return [
        {**_told(own), "top_logprobs": [_told(pair) for pair in likeliest or ()]}
        for own, likeliest in beside
    ]


def _logprobs(completion: Completion, choice: Choice) -> dict[str, Any]:
    return {"content": logprobs_of(completion, choice), "refusal": None}


def _told(pair: tuple[str, float]) -> dict[str, Any]:
    text, logprob = pair
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _head(kind: str, request: ChatRequest) -> dict[str, Any]:
    made = {"object": kind, "created": int(time.time()), "model": request.model}
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", **made, "system_fingerprint": None}
