"""Chat templates: messages become text as the model's own template says."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import structlog
from blake3 import blake3

from astraflow.config.run_dir import read_json
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.members import ModelIdentity
from astraflow.workflows.agents.messages import Message

if TYPE_CHECKING:
    from astraflow.workflows.ports import Tokenizer

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"

"""For models without a template: the contents, one after the other."""

# Stands where an assistant's words stand; nothing else in a chat has it.
_MARK = "\ue000\ue001astraflow\ue001\ue000"

_OTHER = "name another template (policies.*.model.chat_template)"

_NEEDS = {
    "system": "system messages",
    "tools": "tools",
    "tool": "messages with what a tool returned",
    "history": "chats that go on after an answer",
}

_USER: Message = {"role": "user", "content": "1"}

_SAID: Message = {"role": "assistant", "content": _MARK}

_TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": _MARK,
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCheck:
    """What a chat template does with the chats that a policy is trained on.

    Attributes:
        refused: What it cannot show, with why: `system` messages, `tools` (their schemas), `tool`
            messages (what a tool returned), `history` (earlier answers).
        rewrites: What it would make of earlier answers; here they stay as they were sampled.
    """

    refused: Mapping[str, str]
    rewrites: tuple[str, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to tell who trains on chats of several turns, each with what to do."""
        return tuple(
            f"the chat template {what}; here a chat of several turns has them as they were "
            "sampled: serve the model with a template that leaves them so, train it on chats of "
            f"one answer, or {_OTHER}"
            for what in self.rewrites
        )

    def require(self, *needs: str) -> None:
        """Refuse what the template cannot show.

        Raises:
            AstraflowError: INVALID_FIELD.
        """
        for need in needs:
            if need in self.refused:
                raise _invalid(
                    f"the model's chat template does not take {_NEEDS[need]} "
                    f"({self.refused[need]}); leave them out, or {_OTHER}"
                )


class ChatTemplate:
    """A Jinja template, run in a sandbox."""

    def __init__(self, source: str = PLAIN, *, variables: Mapping[str, Any] | None = None) -> None:
        """Keep it; it is compiled at its first use.

        Args:
            source: As in `chat_template` of a Hugging Face model.
            variables: Such as bos_token, and options of the template's own.
        """
        self.source = source
        self._variables = dict(variables or {})
        self.has_start = source != PLAIN
        """Whether the text has the model's start token where it wants one."""
        self._has_warned = False

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        """Return the text before the assistant's next words.

        Without a template of the model's own, the first chat of several messages is logged: who
        says what is lost.

        Raises:
            AstraflowError: INVALID_FIELD when the template refuses the messages.
        """
        if not self.has_start and len(messages) > 1 and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the model has no chat template, so messages follow each other without roles; give "
                f"the prompt as text, or {_OTHER}"
            )
        return self._rendered(messages, tools)

    def tail(
        self, messages: Sequence[Message], said_at: int, tools: Sequence[Any] = ()
    ) -> str | None:
        """Return the text between what an assistant said and its next words.

        Returns:
            None where the template does not show plainly what the assistant said.

        Example: of user, assistant, user in ChatML: the end of the assistant's turn, the
            second user's turn and the start of the next answer.
        """
        marked = [*messages]
        marked[said_at] = {"role": "assistant", "content": _MARK}
        try:
            before, *rest = self._rendered(marked, tools).split(_MARK)
        except AstraflowError:
            return None
        return rest[0] if before and len(rest) == 1 else None

    @cached_property
    def check(self) -> TemplateCheck:
        """What became of marked words in a few chats that were rendered to see.

        Raises:
            AstraflowError: INVALID_FIELD when it cannot even show what a user says.
        """
        refused = {need: why for need, chat in _probes().items() if (why := self._lost(need, chat))}
        if "user" in refused:
            raise _invalid(
                f"the model's chat template does not show what a user says ({refused['user']}); "
                f"{_OTHER}",
                "chat_template",
            )
        if self.tail([_USER, _SAID, _USER], 1) is None:
            refused["history"] = "it does not show an earlier answer as it was given"
        rewrites = () if "history" in refused else tuple(self._rewrites())
        return TemplateCheck(refused=refused, rewrites=rewrites)

    def turn_end_id(self, tokenizer: "Tokenizer") -> int | None:
        """Return the special token that ends an assistant's turn, if there is one."""
        # No more messages: a vocabulary need not have what they would say.
        tail = self.tail([_USER, _SAID], 1) if self.has_start else None
        first = list(tokenizer.encode(tail))[:1] if tail else []
        return first[0] if first and not tokenizer.decode(first) else None

    def _lost(self, need: str, chat: Sequence[Message]) -> str:
        """Say why a chat with one marked word cannot be shown; empty: it can."""
        try:
            text = self._rendered(chat, [_TOOL] if need == "tools" else [])
        except AstraflowError as error:
            return str(error.__cause__ or error)
        return "" if text.count(_MARK) == 1 else "it leaves them out"

    def _rewrites(self) -> Iterator[str]:
        """Yield what it makes of earlier answers that go on in another way than they were said."""
        said = {
            "changes the text around earlier answers": _MARK,
            "drops the thinking of earlier answers": f"<think>\nWhy.\n</think>\n\n{_MARK}",
            "strips the white space around earlier answers": f" {_MARK} \n",
        }
        asked = self.render([_USER])
        for what, words in said.items():
            chat = [_USER, {"role": "assistant", "content": words}, _USER]
            if not self._rendered(chat, ()).startswith(asked + words):
                yield what
                if words == _MARK:
                    return

    @cached_property
    def _takes_late_system(self) -> bool:
        """Whether it shows system messages that are not the first; logs it once if not."""
        try:
            text = self._text([_USER, {"role": "system", "content": _MARK}], ())
        except AstraflowError:
            text = ""
        if text.count(_MARK) == 1:
            return True
        log.warning(
            "the chat template takes a system message at the beginning only; further ones join it "
            f"there, and are shown as a user's later on. To keep them, {_OTHER}"
        )
        return False

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        has_late = any(message["role"] == "system" for message in messages[1:])
        if self.has_start and has_late and not self._takes_late_system:
            messages = _with_one_system(messages)
        return self._text(messages, tools)

    def _text(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        if not self.has_start:  # the same as PLAIN gives, where Jinja is not installed
            return "".join(message["content"] for message in messages)
        from jinja2 import TemplateError  # noqa: PLC0415 - an extra

        try:
            return _compiled(self.source).render(
                **self._variables,
                messages=messages,
                tools=list(tools) or None,
                add_generation_prompt=True,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise _invalid(f"the model's chat template refuses the messages: {error}") from error


def _invalid(why: str, field: str = "messages") -> AstraflowError:
    return AstraflowError(Reason.INVALID_FIELD, why, metadata={"field": field})


def _with_one_system(messages: Sequence[Message]) -> list[Message]:
    """Return messages with no system message but the first; agents send some, at any place."""
    first = list(takewhile(lambda message: message["role"] == "system", messages))
    joined = "\n\n".join(message["content"] for message in first)
    later = [
        {**message, "role": "user"} if message["role"] == "system" else message
        for message in messages[len(first) :]
    ]
    return [*([{"role": "system", "content": joined}] if first else []), *later]


def _probes() -> Mapping[str, list[Message]]:
    """Return a chat with one marked word for everything that not every template shows."""
    function = {"name": "lookup", "arguments": {"word": "1"}}
    calls = [{"id": "abcdefgh1", "type": "function", "function": function}]
    return {
        "user": [{"role": "user", "content": _MARK}],
        "system": [{"role": "system", "content": _MARK}, _USER],
        "tools": [_USER],
        "tool": [
            _USER,
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": _MARK, "tool_call_id": "abcdefgh1", "name": "lookup"},
        ],
    }


@lru_cache(maxsize=64)
def _compiled(source: str) -> Any:
    """Compile a template, once for all who use it."""
    from jinja2 import TemplateSyntaxError  # noqa: PLC0415 - an extra
    from jinja2.ext import Extension  # noqa: PLC0415
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    class Generation(Extension):
        """Keeps what stands between `generation` and `endgeneration`, marks for masks."""

        tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

        def parse(self, parser: Any) -> Any:
            """Return what stands inside."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    world: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    world.filters["tojson"] = _to_json
    world.globals["raise_exception"] = _refuse
    world.globals["strftime_now"] = _now
    try:
        return world.from_string(source)
    except TemplateSyntaxError as error:
        raise AstraflowError(
            Reason.INVALID_FIELD, f"the chat template is no Jinja template: {error}"
        ) from error


def load_template(
    model_dir: Path,
    *,
    chat_template: Path | None = None,
    variables: Mapping[str, Any] | None = None,
) -> ChatTemplate:
    """Read the chat template of a Hugging Face directory; PLAIN where it has none.

    Args:
        model_dir: Has `chat_template.jinja`, or one in `tokenizer_config.json`.
        chat_template: A Jinja file that stands in for it.
        variables: Beside the texts of the start and end token.

    Raises:
        AstraflowError: INVALID_FIELD when `chat_template` is no file.
    """
    settings = read_json(model_dir / "tokenizer_config.json")
    if chat_template is not None and not chat_template.is_file():
        why = f"model.chat_template: {chat_template} is no file; name a Jinja file"
        raise _invalid(why, "chat_template")
    beside = chat_template or model_dir / "chat_template.jinja"
    source = beside.read_text(encoding="utf-8") if beside.is_file() else _named(settings)
    tokens = {
        name: _text(settings[name]) for name in ("bos_token", "eos_token") if settings.get(name)
    }
    return ChatTemplate(source or PLAIN, variables={**tokens, **(variables or {})})


def _named(settings: Mapping[str, Any]) -> str | None:
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = cast("list[dict[str, str]]", template)
        return next((each["template"] for each in named if each["name"] == "default"), None)
    return template


def _text(token: Any) -> str:
    return str(cast("Any", token)["content"] if isinstance(token, dict) else token)


def _to_json(
    value: Any, indent: int | None = None, *, ensure_ascii: bool = False, **options: Any
) -> str:
    """Write JSON without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError  # noqa: PLC0415 - an extra

    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now(UTC).strftime(form)


def read_identity(model_dir: Path) -> ModelIdentity:
    """Return the name of a Hugging Face directory and the digests of its text encoding.

    The digest of config.json stays empty: each release of a library writes that file in another
    way for the same model, and layouts of weights are compared anyhow.

    Raises:
        AstraflowError: INVALID_FIELD when the chat template cannot be read.
    """
    tokenizer = model_dir / "tokenizer.json"
    template = load_template(model_dir).source
    return ModelIdentity(
        name=model_dir.name,
        tokenizer_digest=blake3(tokenizer.read_bytes()).digest() if tokenizer.is_file() else b"",
        chat_template_digest=b"" if template == PLAIN else blake3(template.encode()).digest(),
    )
