"""Chat and text completions: requests are sampled, answers become OpenAI's JSON."""

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from astraflow.core.errors import AstraflowError
from astraflow.raas.agents.completion import AgentCompletion, Choice, TextPiece
from astraflow.raas.agents.detokenizer import opened_call
from astraflow.raas.agents.formats import ApiFormat, body_of, compact, event
from astraflow.raas.agents.request import ChatRequest, CompletionRequest, SamplingRequest
from astraflow.workflows.agents.messages import Message, normal_messages
from astraflow.workflows.agents.session import AgentSession, Capture
from astraflow.workflows.ports import Tokenizer

_DONE = b"data: [DONE]\n\n"


def chat_completion(session: AgentSession, request: ChatRequest) -> AgentCompletion:
    """Return the completion of a request.

    Raises:
        AstraflowError: INVALID_FIELD, or POLICY_UNKNOWN for the model.
    """
    capture = session.capture_of(request.model)
    messages, tools = normal_messages(request.messages), request.offered_tools

    def keep(choice: Choice) -> None:
        (answer,) = normal_messages([message_of(choice)])
        capture.chats.keep(messages, tools, answer, choice.turn)

    return AgentCompletion(
        session=session,
        capture=capture,
        prompt=_prompt(capture, messages, request),
        request=request,
        has_tools=bool(tools),
        keep=keep,
        overrides=request.overrides(
            capture.port.sampling, chooses_sampling=session.chooses_sampling
        ),
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
    completion: AgentCompletion, request: ChatRequest, choices: Sequence[Choice]
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


class ChunkWriter:
    """Writes answers as chunks, in OpenAI's own form: they differ in nothing but their choices.

    A piece of text is the event that there are most of: what stands around it is written once.
    """

    def __init__(
        self,
        completion: AgentCompletion,
        request: SamplingRequest,
        head: Mapping[str, Any],
        *,
        before: str,
        after: str,
    ) -> None:
        """Encode once what all chunks of the stream share.

        Args:
            completion: The answers.
            request: What was asked for.
            head: Fields of every chunk.
            before: JSON of a choice between its index and a piece of text.
            after: The same, between that and the end of the choice.
        """
        self.completion = completion
        self._has_usage = request.has_usage
        self._done: list[Choice] = []
        self._start = f'data: {compact(head)[:-1]},"choices":['
        self._before = f'{self._start}{{"index":'
        self._between, self._after = before, f"{after}}}]}}\n\n"

    def chunk(self, *choices: Mapping[str, Any], **more: Any) -> bytes:
        """Write a chunk with some choices, and more fields."""
        fields = "".join(f",{quoted(name)}:{compact(value)}" for name, value in more.items())
        return f"{self._start}{','.join(map(compact, choices))}]{fields}}}\n\n".encode()

    def begin(self) -> bytes:
        """Write nothing."""
        return b""

    def show(self, piece: TextPiece) -> bytes:
        """Write some text."""
        text = quoted(piece.text)
        return f"{self._before}{piece.index}{self._between}{text}{self._after}".encode()

    def close(self, choice: Choice) -> bytes:
        """Count its tokens."""
        self._done.append(choice)
        return b""

    def end(self) -> bytes:
        """Write the token counts, if they were asked for, and the end."""
        usage = usage_of(self.completion, self._done)
        return (self.chunk(usage=usage) if self._has_usage else b"") + _DONE

    def fail(self, error: AstraflowError) -> bytes:
        """Write an error, and the end."""
        return event(body_of(error)) + _DONE


class ChatWriter(ChunkWriter):
    """Writes a chat; log-probabilities and token ids come with the last chunk of each choice."""

    def __init__(self, completion: AgentCompletion, request: ChatRequest) -> None:
        head = _head("chat.completion.chunk", request)
        before, after = ',"delta":{"content":', '},"logprobs":null,"finish_reason":null'
        super().__init__(completion, request, head, before=before, after=after)
        self._request = request

    def begin(self) -> bytes:
        """Open every choice."""
        opened = {"role": "assistant", "content": "", "refusal": None}
        indexes, read = range(self._request.count), prompt_token_ids(self.completion)
        return b"".join(self.chunk(_delta(index, opened), **read) for index in indexes)

    def close(self, choice: Choice) -> bytes:
        """Write tool calls, and why the choice ended."""
        told = super().close(choice)
        calls = [{"index": number, **call} for number, call in enumerate(choice.calls)]
        if calls:
            told += self.chunk(_delta(choice.index, {"tool_calls": calls}))
        logprobs = _logprobs(self.completion, choice) if self._request.logprobs else None
        last = _delta(choice.index, {}, finish_reason=choice.finish, logprobs=logprobs)
        return told + self.chunk({**last, **token_ids(self._request, choice)})


def _delta(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}


def usage_of(completion: AgentCompletion, choices: Sequence[Choice]) -> dict[str, int]:
    """Return how many tokens were read and sampled."""
    sampled = sum(len(choice.turn.generation.tokens) for choice in choices)
    read = len(completion.prompt)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def prompt_token_ids(completion: AgentCompletion) -> dict[str, list[int]]:
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


def logprobs_of(completion: AgentCompletion, choice: Choice) -> list[dict[str, Any]]:
    """Return each sampled token with its log-probability, and with the likeliest beside it."""
    tokenizer = completion.capture.port.tokenizer
    beside = zip_longest(token_logprobs(tokenizer, choice), likeliest_of(tokenizer, choice))
    return [
        {**_token_entry(own), "top_logprobs": [_token_entry(pair) for pair in likeliest or ()]}
        for own, likeliest in beside
    ]


def _logprobs(completion: AgentCompletion, choice: Choice) -> dict[str, Any]:
    return {"content": logprobs_of(completion, choice), "refusal": None}


def _token_entry(pair: tuple[str, float]) -> dict[str, Any]:
    text, logprob = pair
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _head(kind: str, request: ChatRequest) -> dict[str, Any]:
    made = {"object": kind, "created": int(time.time()), "model": request.model}
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", **made, "system_fingerprint": None}


def text_completion(session: AgentSession, request: CompletionRequest) -> AgentCompletion:
    """Return the completion of a request.

    Raises:
        AstraflowError: INVALID_FIELD, or POLICY_UNKNOWN for the model.
    """
    capture, given = session.capture_of(request.model), request.one_prompt

    def keep(choice: Choice) -> None:
        if isinstance(given, str):
            capture.texts.keep(given, choice.turn)

    return AgentCompletion(
        session=session,
        capture=capture,
        prompt=capture.texts.prompt(given) if isinstance(given, str) else given,
        request=request,
        has_tools=False,
        keep=keep,
        overrides=request.overrides(
            capture.port.sampling, chooses_sampling=session.chooses_sampling
        ),
    )


def text_body(
    completion: AgentCompletion, request: CompletionRequest, choices: Sequence[Choice]
) -> dict[str, Any]:
    """Return whole answers as a body."""
    ordered = sorted(choices, key=lambda choice: choice.index)
    made = [_text_choice(completion, request, choice, choice.text) for choice in ordered]
    return {**_text_head(request), "choices": made, "usage": usage_of(completion, choices)}


class TextWriter(ChunkWriter):
    """Writes texts; log-probabilities come with the last chunk of each choice."""

    def __init__(self, completion: AgentCompletion, request: CompletionRequest) -> None:
        before, after = ',"text":', ',"logprobs":null,"finish_reason":null'
        super().__init__(completion, request, _text_head(request), before=before, after=after)
        self._request = request

    def close(self, choice: Choice) -> bytes:
        """Write why a choice ended."""
        told = super().close(choice)
        return told + self.chunk(_text_choice(self.completion, self._request, choice, ""))


def _text_choice(
    completion: AgentCompletion, request: CompletionRequest, choice: Choice, text: str
) -> dict[str, Any]:
    logprobs = _text_logprobs(completion, choice) if request.logprobs is not None else None
    made = {"index": choice.index, "text": text, "logprobs": logprobs}
    ids = {**prompt_token_ids(completion), **token_ids(request, choice)}
    return {**made, "finish_reason": choice.finish, **ids}


def _text_logprobs(completion: AgentCompletion, choice: Choice) -> dict[str, Any]:
    tokenizer = completion.capture.port.tokenizer
    pairs = token_logprobs(tokenizer, choice)
    texts = [text for text, _ in pairs]
    offsets = [sum(map(len, texts[:index])) for index in range(len(texts))]
    logprobs = [logprob for _, logprob in pairs]
    made = {"tokens": texts, "token_logprobs": logprobs}
    likeliest = [dict(pairs) for pairs in likeliest_of(tokenizer, choice)] or None
    return {**made, "top_logprobs": likeliest, "text_offset": offsets}


def _text_head(request: CompletionRequest) -> dict[str, Any]:
    made = {"object": "text_completion", "created": int(time.time()), "model": request.model}
    return {"id": f"cmpl-{secrets.token_hex(12)}", **made, "system_fingerprint": None}


def chat_format(**fields: Any) -> ApiFormat[ChatRequest]:
    """Return an API of chats."""
    return ApiFormat(request=ChatRequest, complete=chat_completion, **fields)


CHATS = chat_format(path="v1/chat/completions", body=chat_body, writer=ChatWriter)

TEXTS = ApiFormat(
    path="v1/completions",
    request=CompletionRequest,
    complete=text_completion,
    body=text_body,
    writer=TextWriter,
)
