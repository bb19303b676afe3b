"""Chat and text completions: requests are sampled, answers become OpenAI's JSON."""

import secrets
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from itertools import accumulate, zip_longest
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, ClassVar, Generic

from astraflow.core.errors import AstraflowError
from astraflow.raas.agents.completion import AgentCompletion, Asked, Choice, TextPiece
from astraflow.raas.agents.detokenizer import opened_call
from astraflow.raas.agents.formats import ApiFormat, Body, body_of, compact, event
from astraflow.raas.agents.request import ChatRequest, CompletionRequest, unserved
from astraflow.workflows.agents.messages import Message, normal_messages
from astraflow.workflows.agents.session import AgentSession, Capture

_DONE = b"data: [DONE]\n\n"


def chat_completion(session: AgentSession, body: Body) -> AgentCompletion[ChatRequest]:
    """Return the completion of a request.

    Raises:
        AstraflowError: INVALID_FIELD, or POLICY_UNKNOWN for the model.
    """
    request = ChatRequest.model_validate(body)
    capture = session.capture_of(request.model)
    messages, begun = _begun(request)

    def keep(choice: Choice) -> None:
        (answer,) = normal_messages([message_of(choice)])
        whole = {**answer, "content": begun + answer["content"]}
        capture.chats.keep(messages, request.offered_tools, whole, choice.turn)

    prompt = _prompt(capture, messages, begun, request)
    return AgentCompletion(session, capture, request, prompt=prompt, keep=keep)


def prompt_count(session: AgentSession, body: Body) -> int:
    """Return how many tokens a policy would read; nothing is sampled.

    Raises:
        AstraflowError: As `chat_completion`, but for prompts that are too long.
    """
    request = ChatRequest.model_validate(body)
    capture = session.capture_of(request.model)
    return len(_prompt(capture, *_begun(request), request))


def _begun(request: ChatRequest) -> tuple[Sequence[Message], str]:
    """Return the messages that are to be answered, and how the agent begins the answer.

    Raises:
        AstraflowError: INVALID_FIELD when it goes on with what the assistant did not say.
    """
    if not request.continue_final_message:
        return normal_messages(request.messages), ""
    (last,) = normal_messages(request.messages[-1:])
    if last["role"] != "assistant" or "tool_calls" in last:
        raise unserved("continue_final_message", "the last message is no text of the assistant")
    return normal_messages(request.messages[:-1]), last["content"]


def _prompt(
    capture: Capture, messages: Sequence[Message], begun: str, request: ChatRequest
) -> list[int]:
    chats, tools, forced = capture.chats, request.offered_tools, request.forced_tool
    before = chats.cut(messages, tools, begun) if begun else None
    rest = begun if before is None else ""
    rest += opened_call(forced) if forced else ""
    rest_ids = capture.port.tokenizer.encode(rest) if rest else ()
    return [*(before or chats.prompt(messages, tools)), *rest_ids]


def message_of(choice: Choice) -> dict[str, Any]:
    """Return an answer as a message."""
    made: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        made["tool_calls"] = list(choice.calls)
        made["content"] = choice.text or None
    return made


class OpenAIFormat(ApiFormat[Asked], Generic[Asked]):
    """Answers in OpenAI's own form: chunks of a stream differ in nothing but their choices.

    A piece of text is the event that there are most of: what stands around it is written once.

    Attributes:
        kinds: Of a whole answer, and of a chunk.
        prefix: Of the id of an answer.
        before: JSON of a choice between its index and a piece of text.
        after: The same, between that and the end of the choice.
    """

    kinds: ClassVar[tuple[str, str]]
    prefix: ClassVar[str]
    before: ClassVar[str]
    after: ClassVar[str]

    def __init__(self, completion: AgentCompletion[Asked]) -> None:
        super().__init__(completion)
        self._done: list[Choice] = []

    @abstractmethod
    def choice(self, choice: Choice) -> Body:
        """Write a whole choice."""

    def body(self, choices: Sequence[Choice]) -> Body:
        made = [self.choice(each) for each in sorted(choices, key=lambda each: each.index)]
        return {**self._head(self.kinds[0]), "choices": made, "usage": self._usage(choices)}

    def chunk(self, *choices: Mapping[str, Any], **more: Any) -> bytes:
        """Write a chunk with some choices, and more fields."""
        fields = "".join(f",{quoted(name)}:{compact(value)}" for name, value in more.items())
        return f"{self._start}{','.join(map(compact, choices))}]{fields}}}\n\n".encode()

    @cached_property
    def _start(self) -> str:
        """What all chunks begin with, up to their choices."""
        return f'data: {compact(self._head(self.kinds[1]))[:-1]},"choices":['

    def show(self, piece: TextPiece) -> bytes:
        text = quoted(piece.text)
        told = f'{self._start}{{"index":{piece.index}{self.before}{text}{self.after}}}]}}\n\n'
        return told.encode()

    def close(self, choice: Choice) -> bytes:
        """Count its tokens."""
        self._done.append(choice)
        return b""

    def end(self) -> bytes:
        """Write the token counts, if they were asked for, and the end."""
        counts = self.chunk(usage=self._usage(self._done)) if self.request.has_usage else b""
        return counts + _DONE

    def fail(self, error: AstraflowError) -> bytes:
        return event(body_of(error)) + _DONE

    def _head(self, kind: str) -> Body:
        made = {"object": kind, "created": int(time.time()), "model": self.request.model}
        return {"id": f"{self.prefix}-{secrets.token_hex(12)}", **made, "system_fingerprint": None}

    def _usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        sampled = sum(len(choice.turn.generation.tokens) for choice in choices)
        read = len(self.completion.prompt)
        return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}

    def _prompt_token_ids(self) -> dict[str, list[int]]:
        """Return the ids of what was read, as vLLM has them, if they were asked for."""
        asked = self.request.return_token_ids
        return {"prompt_token_ids": self.completion.prompt} if asked else {}

    def _token_ids(self, choice: Choice) -> dict[str, list[int]]:
        """Return the ids of what was sampled, as vLLM has them, if they were asked for."""
        asked = self.request.return_token_ids
        return {"token_ids": choice.turn.generation.tokens.tolist()} if asked else {}


class ChatFormat(OpenAIFormat[ChatRequest]):
    """Chats; log-probabilities and token ids come with the last chunk of each choice."""

    path = "v1/chat/completions"
    complete = staticmethod(chat_completion)
    kinds = ("chat.completion", "chat.completion.chunk")
    prefix = "chatcmpl"
    before, after = ',"delta":{"content":', '},"logprobs":null,"finish_reason":null'

    def body(self, choices: Sequence[Choice]) -> Body:
        return {**super().body(choices), **self._prompt_token_ids()}

    def choice(self, choice: Choice) -> Body:
        return {"index": choice.index, "message": message_of(choice), **self._end(choice)}

    def begin(self) -> bytes:
        """Open every choice."""
        opened = {"role": "assistant", "content": "", "refusal": None}
        indexes, read = range(self.request.count), self._prompt_token_ids()
        return b"".join(self.chunk(_delta(index, opened), **read) for index in indexes)

    def close(self, choice: Choice) -> bytes:
        """Write tool calls, and why the choice ended."""
        told = super().close(choice)
        calls = [{"index": number, **call} for number, call in enumerate(choice.calls)]
        if calls:
            told += self.chunk(_delta(choice.index, {"tool_calls": calls}))
        return told + self.chunk({**_delta(choice.index, {}), **self._end(choice)})

    def _end(self, choice: Choice) -> Body:
        content = logprobs_of(self.completion, choice) if self.request.logprobs else None
        return {
            "logprobs": None if content is None else {"content": content, "refusal": None},
            "finish_reason": choice.finish,
            **self._token_ids(choice),
        }


def _delta(index: int, delta: Body) -> Body:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


class TextFormat(OpenAIFormat[CompletionRequest]):
    """Texts; log-probabilities come with the last chunk of each choice."""

    path = "v1/completions"
    kinds = ("text_completion", "text_completion")
    prefix = "cmpl"
    before, after = ',"text":', ',"logprobs":null,"finish_reason":null'

    @staticmethod
    def complete(session: AgentSession, body: Body) -> AgentCompletion[CompletionRequest]:
        request = CompletionRequest.model_validate(body)
        capture, given = session.capture_of(request.model), request.one_prompt

        def keep(choice: Choice) -> None:
            if isinstance(given, str):
                capture.texts.keep(given, choice.turn)

        prompt = capture.texts.prompt(given) if isinstance(given, str) else given
        return AgentCompletion(session, capture, request, prompt=prompt, keep=keep)

    def choice(self, choice: Choice) -> Body:
        logprobs = self._logprobs(choice) if self.request.logprobs is not None else None
        made = {"index": choice.index, "text": choice.text, "logprobs": logprobs}
        ids = {**self._prompt_token_ids(), **self._token_ids(choice)}
        return {**made, "finish_reason": choice.finish, **ids}

    def close(self, choice: Choice) -> bytes:
        """Write why a choice ended."""
        return super().close(choice) + self.chunk({**self.choice(choice), "text": ""})

    def _logprobs(self, choice: Choice) -> Body:
        own, likeliest = token_texts(self.completion, choice)
        texts = [text for text, _ in own]
        return {
            "tokens": texts,
            "token_logprobs": [logprob for _, logprob in own],
            "top_logprobs": [dict(pairs) for pairs in likeliest] or None,
            "text_offset": [0, *accumulate(map(len, texts))][: len(texts)],
        }


Pairs = list[tuple[str, float]]


def token_texts(completion: AgentCompletion[Any], choice: Choice) -> tuple[Pairs, list[Pairs]]:
    """Return each sampled token as a text, with its log-probability.

    Returns:
        These, and the same of the likeliest tokens beside each one; empty: they are not told.
    """
    generation, tokenizer = choice.turn.generation, completion.capture.port.tokenizer

    @cache
    def text_of(token: int) -> str:
        return tokenizer.decode([token])

    own = zip(generation.tokens.tolist(), generation.logprobs.tolist(), strict=True)
    told, *beside = (
        [(text_of(token), logprob) for token, logprob in pairs]
        for pairs in (own, *generation.likeliest)
    )
    return told, beside


def logprobs_of(completion: AgentCompletion[Any], choice: Choice) -> list[Body]:
    """Return each sampled token with its log-probability, and with the likeliest beside it."""
    return [
        {**_token_entry(own), "top_logprobs": [_token_entry(pair) for pair in likeliest or ()]}
        for own, likeliest in zip_longest(*token_texts(completion, choice))
    ]


def _token_entry(pair: tuple[str, float]) -> Body:
    text, logprob = pair
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
