"""Chat templates: messages become text as the model's own template says."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, cast

from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.agents.messages import Message

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""For models without a template: the contents, one after the other."""

# Stands where an assistant's words stand; nothing else in a chat has it.
_MARK = "\ue000\ue001astraflow\ue001\ue000"


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

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        """Return the text before the assistant's next words.

        Raises:
            AstraflowError: INVALID_FIELD when the template refuses the messages.
        """
        return self._rendered(messages, tools)

    def tail(
        self, messages: Sequence[Message], said_at: int, tools: Sequence[Any] = ()
    ) -> str | None:
        """Return the text between what an assistant said and its next words.

        Args:
            messages: The whole chat.
            said_at: Which of them is what the assistant said.
            tools: Of the chat.

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

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        from jinja2 import TemplateError  # noqa: PLC0415 - an extra

        try:
            return _compiled(self.source).render(
                **self._variables,
                messages=messages,
                tools=list(tools) or None,
                add_generation_prompt=True,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"the model's chat template refuses the messages: {error}",
                metadata={"field": "messages"},
            ) from error


@lru_cache(maxsize=64)
def _compiled(source: str) -> Any:
    """Compile a template, once for all who use it."""
    from jinja2 import TemplateSyntaxError  # noqa: PLC0415 - an extra
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    world: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
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


def load_template(model_dir: Path) -> ChatTemplate:
    """Read the chat template of a Hugging Face directory; PLAIN where it has none."""
    settings = _read_json(model_dir / "tokenizer_config.json")
    beside = model_dir / "chat_template.jinja"
    source = beside.read_text(encoding="utf-8") if beside.is_file() else _named(settings)
    tokens = {
        name: _text(settings[name]) for name in ("bos_token", "eos_token") if settings.get(name)
    }
    return ChatTemplate(source or PLAIN, variables=tokens)


def _named(settings: Mapping[str, Any]) -> str | None:
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = cast("list[dict[str, str]]", template)
        return next((each["template"] for each in named if each["name"] == "default"), None)
    return template


def _text(token: Any) -> str:
    return str(cast("Any", token)["content"] if isinstance(token, dict) else token)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Write JSON without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError  # noqa: PLC0415 - an extra

    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now(UTC).strftime(form)
