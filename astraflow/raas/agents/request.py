"""Requests: what an agent asks for, read and checked."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Grammar, SamplingParams
from astraflow.raas.agents.detokenizer import CALL_END

_MAX_CHOICES = 64
# As OpenAI's API has it; vLLM's, too.
_MAX_LIKELIEST = 20
# Fields that ask for more than words; those that are not known ask for nothing that matters.
_UNSERVED = {
    "functions": "send tools",
    "web_search_options": "nobody here searches",
    "audio": "only text is",
}
# What engines count in.
_I32, _I64 = 2**31, 2**63


class StreamOptions(BaseModel):
    """Of a streamed answer."""

    include_usage: bool = False


class SamplingRequest(BaseModel):
    """What requests for chats and for texts have in common; other fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str = ""
    n: int | None = Field(default=None, ge=1, le=_MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=_I32)
    min_p: float | None = Field(default=None, ge=0, lt=1)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=-_I64, lt=_I64)
    logit_bias: dict[str, float] | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _asks_for_what_is_served(cls, given: Any) -> Any:
        fields = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        for field, hint in _UNSERVED.items():
            if fields.get(field):
                raise unserved(field, hint)
        return cast("Any", given)

    @property
    def count(self) -> int:
        """Choices."""
        return self.n or 1

    @property
    def given_stops(self) -> tuple[str, ...]:
        """Texts that the agent wants an answer to end with, none of them empty."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in stop if text)

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return self.given_stops

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def budget(self) -> int | None:
        """Tokens at most."""
        return self.max_tokens

    @property
    def likeliest_count(self) -> int:
        """How many of the likeliest tokens are told of beside each sampled one."""
        return 0

    @property
    def grammar(self) -> Grammar | None:
        """What an answer has to be; None: anything."""
        return None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        return []

    @property
    def forced_tool(self) -> str | None:
        """The name of the tool whose call the prompt begins; None: no call is begun."""
        return None

    def overrides(self, own: SamplingParams, *, chooses_sampling: bool) -> dict[str, Any]:
        """Return what differs from the task's sampling.

        Args:
            own: Of the task. An agent may ask for fewer tokens than it has, not for more.
            chooses_sampling: Whether temperature and its like are the agent's to choose.

        Raises:
            AstraflowError: INVALID_FIELD for what no engine here can do.
        """
        if self.logit_bias:
            raise unserved("logit_bias")
        changes: dict[str, Any] = {
            "stop_strings": (*own.stop_strings, *self.stops),
            "top_logprobs": self.likeliest_count,
            "grammar": self.grammar,
        }
        if self.budget is not None:
            most = own.max_new_tokens or self.budget
            changes["max_new_tokens"] = min(most, self.budget)
        if chooses_sampling:
            names = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty")
            chosen = {name: getattr(self, name) for name in names}
            chosen["top_k"] = self.top_k if self.top_k and self.top_k > 0 else None
            changes |= {name: value for name, value in chosen.items() if value is not None}
        return changes


class ChatRequest(SamplingRequest):
    """A request for `/v1/chat/completions`."""

    messages: list[Any]
    continue_final_message: bool = False
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=_MAX_LIKELIEST)

    @property
    def budget(self) -> int | None:
        """Tokens at most."""
        return self.max_completion_tokens or self.max_tokens

    @field_validator("tools")
    @classmethod
    def _are_functions(cls, tools: list[Any] | None) -> list[Any] | None:
        for index, tool in enumerate(tools or ()):
            match tool:
                case {"type": "function", "function": {"name": str(), **rest}} if isinstance(
                    rest.get("parameters"), dict | None
                ):
                    continue
                case _:
                    raise ValueError(f"[{index}] is no function with a name and parameters")
        return tools

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer; the end of a call, where there is to be one at a time."""
        is_one = self.parallel_tool_calls is False and self.offered_tools
        return (*self.given_stops, *((CALL_END,) if is_one else ()))

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_tool(self) -> str | None:
        """The name of the tool whose call the prompt begins; None: no call is begun.

        Raises:
            AstraflowError: INVALID_FIELD for a choice that cannot be forced on a model.
        """
        forced = self._forced
        is_begun = len(forced) == 1 and not forced[0].get("strict")
        return forced[0]["name"] if is_begun else None

    @property
    def grammar(self) -> Grammar | None:
        """What an answer has to be: JSON of its format, the call of a tool, or either.

        Raises:
            AstraflowError: INVALID_FIELD for a format that is none, or a choice of no tool.
        """
        schema, forced = self._schema, self._forced
        answer = None if schema is None or forced else json.dumps(schema)
        if self.forced_tool is not None or (answer is None and not forced):
            return None
        callable_tools = forced or [tool["function"] for tool in self.offered_tools]
        return Grammar(answer=answer, call=_calls_of(callable_tools) if callable_tools else None)

    @property
    def likeliest_count(self) -> int:
        """How many of the likeliest tokens are told of beside each sampled one.

        Raises:
            AstraflowError: INVALID_FIELD where log-probabilities are not asked for.
        """
        if self.top_logprobs and not self.logprobs:
            raise unserved("top_logprobs", "it needs logprobs: true")
        return self.top_logprobs or 0

    @property
    def _forced(self) -> list[dict[str, Any]]:
        """The functions one of which has to be called; empty: none has to."""
        functions = [tool["function"] for tool in self.tools or ()]
        match self.tool_choice:
            case None | "auto" | "none":
                return []
            case "required" if functions:
                return functions
            case {"type": "function", "function": {"name": str(name)}}:
                named = [function for function in functions if function["name"] == name]
                if named:
                    return named[:1]
            case _:
                pass
        raise unserved(
            "tool_choice", "choose auto, none, required, or one of the tools by its name"
        )

    @property
    def _schema(self) -> dict[str, Any] | None:
        """The schema of an answer that has to be JSON."""
        match self.response_format:
            case None | {"type": "text"}:
                return None
            case {"type": "json_object"}:
                return {"type": "object"}
            case {"type": "json_schema", "json_schema": {"schema": schema}} if isinstance(
                schema, dict
            ):
                return cast("dict[str, Any]", schema)
            case _:
                raise unserved(
                    "response_format", "its type is text, json_object, or json_schema with a schema"
                )


class CompletionRequest(SamplingRequest):
    """A request for `/v1/completions`."""

    prompt: str | list[Annotated[int, Field(ge=0, lt=_I32)]] | list[str]
    echo: Literal[False] | None = None
    suffix: None = None
    logprobs: int | None = Field(default=None, ge=0, le=_MAX_LIKELIEST)

    @property
    def likeliest_count(self) -> int:
        """How many of the likeliest tokens are told of beside each sampled one."""
        return self.logprobs or 0

    @property
    def one_prompt(self) -> str | list[int]:
        """The prompt.

        Raises:
            AstraflowError: INVALID_FIELD when there are several.
        """
        match self.prompt:
            case [str(text)]:
                return text
            case [str(), *_] | []:
                raise AstraflowError(
                    Reason.INVALID_FIELD,
                    "prompt: one prompt a request, as text or as token ids",
                    metadata={"field": "prompt"},
                )
            case prompt:
                return prompt  # pyright: ignore[reportReturnType] - lists of texts are above


def _calls_of(functions: Sequence[Mapping[str, Any]]) -> str:
    """Return the schema of a call of one of some functions."""
    # A schema refers to its parts from its own root, and xgrammar finds none inside a list.
    roots = {
        f"arguments_{index}": _moved(
            function.get("parameters") or {"type": "object"}, f"#/$defs/arguments_{index}"
        )
        for index, function in enumerate(functions)
    }
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": {"$ref": f"#/$defs/{name}"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function, name in zip(functions, roots, strict=True)
    ]
    return json.dumps({"anyOf": calls, "$defs": roots})


def _moved(schema: Any, root: str) -> Any:
    """Return a schema whose references to its own root (`#/$defs/…`) find it at another place."""
    match schema:
        case dict():
            parts = cast("dict[str, Any]", schema)
            return {
                key: f"{root}{value[1:]}"
                if key == "$ref" and isinstance(value, str) and value.startswith("#")
                else _moved(value, root)
                for key, value in parts.items()
            }
        case list():
            return [_moved(part, root) for part in cast("list[Any]", schema)]
        case _:
            return schema


def unserved(field: str, hint: str = "leave it out") -> AstraflowError:
    """Return that a field asks for what is not served."""
    return AstraflowError(
        Reason.INVALID_FIELD, f"{field} is not served here; {hint}", metadata={"field": field}
    )
