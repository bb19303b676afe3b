"""Requests: what an agent asks for, read and checked."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import SamplingParams
from astraflow.workflows.agents.session import SamplingSource

_MAX_CHOICES = 64
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

    @property
    def count(self) -> int:
        """Choices."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer, none of them empty."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in stop if text)

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def budget(self) -> int | None:
        """Tokens at most."""
        return self.max_tokens

    def overrides(self, own: SamplingParams, source: SamplingSource) -> dict[str, Any]:
        """Return what differs from the task's sampling.

        Args:
            own: Of the task. An agent may ask for fewer tokens than it has, not for more.
            source: Whether temperature and its like are the agent's to choose.

        Raises:
            AstraflowError: INVALID_FIELD for what no engine here can do.
        """
        if self.logit_bias:
            raise unserved("logit_bias")
        changes: dict[str, Any] = {"stop_strings": (*own.stop_strings, *self.stops)}
        if self.budget is not None:
            most = own.max_new_tokens or self.budget
            changes["max_new_tokens"] = min(most, self.budget)
        if source is SamplingSource.AGENT:
            names = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty")
            chosen = {name: getattr(self, name) for name in names}
            chosen["top_k"] = self.top_k if self.top_k and self.top_k > 0 else None
            changes |= {name: value for name, value in chosen.items() if value is not None}
        return changes


class ChatRequest(SamplingRequest):
    """A request for `/v1/chat/completions`."""

    messages: list[Any]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

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

    def offered_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the model is told of.

        Raises:
            AstraflowError: INVALID_FIELD for what no engine here can do.
        """
        if (self.response_format or {}).get("type", "text") != "text":
            raise unserved("response_format")
        if self.top_logprobs:
            raise unserved("top_logprobs")
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_tool(self) -> str | None:
        """The name of the tool that has to be called; None: the model may call any, or none.

        Raises:
            AstraflowError: INVALID_FIELD for a choice that cannot be forced on a model.
        """
        names = [tool["function"]["name"] for tool in self.tools or ()]
        match self.tool_choice:
            case None | "auto" | "none":
                return None
            case "required" if len(names) == 1:
                return names[0]
            case {"type": "function", "function": {"name": str(name)}} if name in names:
                return name
            case _:
                raise unserved("tool_choice", "choose auto, none, or one of the tools by its name")


class CompletionRequest(SamplingRequest):
    """A request for `/v1/completions`."""

    prompt: str | list[Annotated[int, Field(ge=0, lt=_I32)]] | list[str]
    echo: Literal[False] | None = None
    suffix: None = None
    logprobs: int | None = None

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


def unserved(field: str, hint: str = "leave it out") -> AstraflowError:
    """Return that a field asks for what is not served."""
    return AstraflowError(
        Reason.INVALID_FIELD, f"{field} is not served here; {hint}", metadata={"field": field}
    )
