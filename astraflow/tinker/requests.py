"""Bodies in JSON: what clients ask for, field by field.

An unknown field is refused: it would ask for something that is not done. What a client tells of
itself alone (sessions, heartbeats, telemetry) is not looked at.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from astraflow.core.tasks import SamplingParams
from astraflow.tinker.wire import unserved

_I31, _I63 = 2**31, 2**63
# As served engines have it, which look for more only when they are told to at their start.
_MAX_LIKELIEST = 20
_MAX_SAMPLES = 1024

Number = Annotated[int, Field(ge=0, lt=_I31)]
OptimizerConfig = dict[Literal["type"], Literal["adamw"]]
SessionId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,79}$")]
Text = Annotated[str, Field(max_length=4096)]
Token = Annotated[int, Field(ge=0, lt=_I31)]


class TinkerFields(BaseModel):
    """Of a request."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    type: Text | None = None


class Ordered(TinkerFields):
    """A request that has its place among those of a model."""

    model_id: Text
    seq_id: Annotated[int, Field(ge=1, lt=_I31)]


class LoraConfig(TinkerFields):
    """Adapters of a new model; rank 0: it has none, and all weights are trained."""

    rank: Annotated[int, Field(ge=0, le=1 << 12)] = 32
    seed: Annotated[int, Field(ge=-_I63, lt=_I63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(TinkerFields):
    """Begin to train a model."""

    session_id: SessionId
    model_seq_id: Number
    base_model: Text
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None


class LoadWeights(TinkerFields):
    """Go on from a checkpoint: with a new model (`session_id`), or an old one (`model_id`)."""

    path: Text
    optimizer: bool
    session_id: SessionId | None = None
    model_seq_id: Number | None = None
    model_id: Text | None = None
    seq_id: Annotated[int, Field(ge=1, lt=_I31)] | None = None
    base_model: Text | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: Text | None = None


class AdamParams(TinkerFields):
    """One step of AdamW (arXiv 1711.05101, algorithm 2).

    The norm of all gradients together is clipped; 0: it is not.
    """

    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


class OptimStep(Ordered):
    """Use the gradients."""

    adam_params: AdamParams


class SaveWeights(Ordered):
    """Keep weights and optimizer by a name."""

    path: Text | None = None
    ttl_seconds: Annotated[int, Field(ge=1, lt=_I31)] | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class SaveWeightsForSampler(Ordered):
    """Keep weights to sample from: by a name, or for a sampling session."""

    path: Text | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Annotated[int, Field(ge=1, lt=_I31)] | None = None
    user_metadata: dict[str, Any] | None = None


class CreateSamplingSession(TinkerFields):
    """Begin to sample: from a checkpoint, or from the base model."""

    session_id: SessionId
    sampling_session_seq_id: Number
    base_model: Text | None = None
    model_path: Text | None = None


class OfModel(TinkerFields):
    """A request about a model, out of order."""

    model_id: Text


class PromptChunk(TinkerFields):
    """A part of a prompt."""

    type: Text = "encoded_text"  # pyright: ignore[reportIncompatibleVariableOverride] - never null
    tokens: list[Token] = []


class LooseChunk(BaseModel):
    """A part of a prompt that is no text."""

    model_config = ConfigDict(extra="allow")

    type: Text


class PromptChunks(TinkerFields):
    """A prompt."""

    chunks: list[PromptChunk | LooseChunk]

    @property
    def tokens(self) -> list[int]:
        """All of it."""
        tokens: list[int] = []
        for chunk in self.chunks:
            if not isinstance(chunk, PromptChunk) or chunk.type != "encoded_text":
                raise unserved(f"a prompt's chunk of type {chunk.type!r}", "give encoded_text")
            tokens += chunk.tokens
        return tokens


class SamplingFields(TinkerFields):
    """How to sample."""

    max_tokens: Annotated[int, Field(ge=1, lt=_I31)] | None = None
    seed: Annotated[int, Field(ge=-_I63, lt=_I63)] | None = None
    stop: str | list[str] | list[Token] | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=_I31)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    def params(self, *, likeliest_count: int) -> SamplingParams:
        """Return what an engine takes."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k if self.top_k > 0 else None,
            max_new_tokens=self.max_tokens or 0,
            stop_token_ids=tuple(each for each in stops if isinstance(each, int)),
            stop_strings=tuple(each for each in stops if isinstance(each, str) and each),
            seed=None if self.seed is None else self.seed % _I63,
            ignore_eos=self.stop == [],
            top_logprobs=likeliest_count,
        )


class SampleRequest(TinkerFields):
    """Sample from a session, or score a prompt."""

    sampling_session_id: Text
    seq_id: Annotated[int, Field(ge=0, lt=_I63)]
    num_samples: Annotated[int, Field(ge=1, le=_MAX_SAMPLES)] = 1
    prompt: PromptChunks
    sampling_params: SamplingFields
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=_MAX_LIKELIEST)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=_MAX_LIKELIEST)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None
    base_model: Text | None = None
    model_path: Text | None = None

    def require_served(self) -> None:
        """Refuse what is not served."""
        for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
            if getattr(self, name):
                raise unserved(name, "leave it out")


class RetrieveFuture(TinkerFields):
    """Ask for a result."""

    request_id: Text
    allow_metadata_only: bool = False
