"""Prompts: what a policy is told first, made of a row's fields."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, cast

from pydantic import Field, model_validator

from astraflow.config.strict import Strict
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.workflows.agents.messages import Message
from astraflow.workflows.episode import Recorder

_BRACES = re.compile(r"\{\{(?P<kept>[^{}\n]+)\}\}|\{(?P<name>[^{}\n]+)\}")


class ChatMessage(Strict):
    """One message of a chat; its content may have the row's fields in braces."""

    role: Literal["system", "user", "assistant"]
    """Who says it."""
    content: str
    """What is said."""


class PromptOptions(Strict):
    """How a row becomes a prompt: a chat, or plain text."""

    messages: tuple[ChatMessage, ...] = ()
    """The chat, with the row's fields in braces; the model's own template renders it. Examples are
    turns of user and assistant. Left out: the row's field `messages`, where that is a list, else
    one user message, {prompt}."""
    system: str | None = None
    """System message before all others, with the row's fields in braces; a row's own `messages`
    that begin with one keep theirs."""
    tools: tuple[dict[str, Any], ...] = Field(default=())
    """Functions that the template shows, as in OpenAI's API; left out: the row's field `tools`,
    where its `messages` are used."""
    text: str | None = None
    """Plain text instead of a chat, with the row's fields in braces: for base models, and for
    examples line by line. No template is used."""

    @model_validator(mode="after")
    def _chat_or_text(self) -> Self:
        if self.text is not None and (self.messages or self.tools or self.system is not None):
            raise ValueError("give 'text', or 'messages' with 'system' and 'tools', not both")
        if self.messages and self.messages[-1].role == "assistant":
            raise ValueError("'messages' ends with the assistant's; what comes next is its own")
        return self


def show_prompt(recorder: Recorder, options: PromptOptions, prompt: Prompt) -> None:
    """Start a trajectory with the prompt that the options make of a row.

    Raises:
        AstraflowError: INVALID_FIELD when the row lacks a field that is named, has null in it, or
            has `messages` that are none.
    """
    if options.text is not None:
        recorder.observe(fill(options.text, prompt))
        return
    messages = [
        {"role": each.role, "content": fill(each.content, prompt)} for each in options.messages
    ]
    own = None if messages else _own_messages(prompt)
    chat: Sequence[Message] = (
        own or messages or [{"role": "user", "content": fill("{prompt}", prompt)}]
    )
    if options.system is not None and chat[0].get("role") != "system":
        chat = [{"role": "system", "content": fill(options.system, prompt)}, *chat]
    tools = options.tools or (own and prompt.fields.get("tools")) or ()
    recorder.chat(chat, cast("Sequence[Any]", tools))


def go_on(recorder: Recorder, text: str) -> None:
    """Tell a policy more after its answer: a user's message in a chat, else plain text."""
    if recorder.messages:
        recorder.chat([{"role": "user", "content": text}])
    else:
        recorder.observe(text)


def fill(text: str, prompt: Prompt, /, **extra: str) -> str:
    r"""Return a text with the fields of a prompt in it; `extra` ones come before these.

    Braces around a field's name are replaced by the field; a list or an object is written as JSON.
    Other braces stay, such as those of JSON or LaTeX, unless what they hold looks like a name. Two
    braces around a name stand for one.

    Raises:
        AstraflowError: INVALID_FIELD for a name that is no field, or of one that is null or NaN.

    Example: of `{a} + 1 = \boxed{}, as {"x": 1} or \boxed{{a}}` and a field a of 2:
        `2 + 1 = \boxed{}, as {"x": 1} or \boxed{a}`.
    """
    fields = {**prompt.fields, **extra}

    def filled(match: re.Match[str]) -> str:
        kept, name = match.group("kept"), match.group("name")
        if kept is not None:
            return f"{{{kept}}}" if kept in fields or kept.isidentifier() else match.group()
        if name in fields:
            return _written(prompt, name, fields[name])
        if name.isidentifier():
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"prompt {prompt.prompt_id} has no field {name!r}, only {', '.join(fields)}; "
                f"braces that are meant as such are doubled: {{{{{name}}}}}",
                metadata={"field": name},
            )
        return match.group()

    return _BRACES.sub(filled, text)


def _written(prompt: Prompt, name: str, value: Any) -> str:
    if value is None or value != value:  # noqa: PLR0124 - NaN, as a column with holes has it
        hole = "null" if value is None else "NaN"
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"prompt {prompt.prompt_id} has {hole} in its field {name!r}; write what is to be read "
            "there, such as an empty text, or leave the row out",
            metadata={"field": name},
        )
    if isinstance(value, (Mapping, list, tuple)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _own_messages(prompt: Prompt) -> Sequence[Message] | None:
    """Return the row's own chat, if it has one.

    Raises:
        AstraflowError: INVALID_FIELD when it ends with what the assistant says.
    """
    found = prompt.fields.get("messages")
    if not isinstance(found, (list, tuple)) or not found:
        return None
    messages = cast("Sequence[Any]", found)
    last = messages[-1]
    if isinstance(last, Mapping) and cast("Message", last).get("role") == "assistant":
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"prompt {prompt.prompt_id}: its field messages ends with an answer of the assistant, "
            "which the policy has to give; leave that message out of the row",
            metadata={"field": "messages"},
        )
    return messages
