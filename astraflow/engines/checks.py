"""Checks of all engines: requests before they run, updates before they touch a weight."""

import math

import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import Dtype, TensorUpdate, WeightUpdate

_FLOATS = frozenset((Dtype.F16, Dtype.BF16, Dtype.F32, Dtype.F64))


def check_sampling(sampling: SamplingParams, *, vocab_size: int, reads_text: bool) -> None:
    """Reject what the engine cannot honour.

    Raises:
        AstraflowError: INVALID_FIELD naming the knob.
    """
    claims = {
        "temperature": sampling.temperature >= 0 and math.isfinite(sampling.temperature),
        "top_p": 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k is None or sampling.top_k >= 1,
        "min_p": 0 <= sampling.min_p < 1,
        "max_new_tokens": sampling.max_new_tokens >= 0,
        "min_new_tokens": sampling.min_new_tokens >= 0,
        "stop_token_ids": all(0 <= token < vocab_size for token in sampling.stop_token_ids),
        "stop_strings": all(sampling.stop_strings) and (reads_text or not sampling.stop_strings),
        "frequency_penalty": math.isfinite(sampling.frequency_penalty),
        "presence_penalty": math.isfinite(sampling.presence_penalty),
        "repetition_penalty": 0 < sampling.repetition_penalty < math.inf,
        "top_logprobs": 0 <= sampling.top_logprobs <= vocab_size,
        "grammar": sampling.grammar is None or reads_text,
    }
    for name, is_sound in claims.items():
        if not is_sound:
            needs_text = name in ("stop_strings", "grammar")
            hint = "; the model has no tokenizer.json" if needs_text else ""
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"sampling.{name} = {getattr(sampling, name)!r} cannot be honoured{hint}",
                metadata={"field": f"sampling.{name}"},
            )


def check_prompt(prompt: np.ndarray, *, vocab_size: int, max_context: int) -> None:
    """Reject a prompt, i64[n], that cannot be sampled from.

    Raises:
        AstraflowError: INVALID_FIELD for an empty one or ids that the model does not have,
            CONTEXT_TOO_LONG when no token would fit behind it.
    """
    if not len(prompt) or prompt.min() < 0 or prompt.max() >= vocab_size:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"a prompt has at least one token, each from 0 to {vocab_size - 1}",
            metadata={"field": "prompt"},
        )
    if len(prompt) >= max_context:
        raise AstraflowError(
            Reason.CONTEXT_TOO_LONG,
            f"the prompt has {len(prompt)} tokens and the context {max_context}, which leaves no "
            "room for a completion; shorten the prompt or raise engine.max_context",
            metadata={"prompt_tokens": str(len(prompt)), "max_context": str(max_context)},
        )


def max_context_of(asked: int | None, own: int) -> int:
    """Return the tokens of prompt and completion; None asks for all that the model can.

    Raises:
        AstraflowError: INVALID_FIELD for more than the model was made for.
    """
    if asked is not None and asked > own:
        raise AstraflowError(
            Reason.INVALID_FIELD, f"engine.max_context {asked} is more than the model's {own}"
        )
    return asked or own


def check_part(part: TensorUpdate, shape: tuple[int, ...]) -> None:
    """Reject what does not fit a tensor of the model.

    Raises:
        AstraflowError: APPLY_FAILED naming the tensor.
    """
    spec = part.spec
    if spec.shape != shape:
        raise apply_failed(f"{spec.name} has shape {spec.shape}, the model's is {shape}")
    if spec.dtype not in _FLOATS:
        raise apply_failed(f"{spec.name} is {spec.dtype}, which engines do not compute with")
    if part.values.dtype != spec.dtype.bits:
        raise apply_failed(f"{spec.name} has values of {part.values.dtype}, not {spec.dtype.bits}")
    wanted = spec.element_count if part.indices is None else len(part.indices)
    if part.values.size != wanted:
        raise apply_failed(f"{spec.name} has {part.values.size} values, not {wanted}")
    indices, count = part.indices, spec.element_count
    if indices is not None and len(indices):
        if indices.dtype.kind not in "iu" or not bool((indices[1:] > indices[:-1]).all()):
            raise apply_failed(f"{spec.name} has indices that are not rising integers")
        if indices[0] < 0 or indices[-1] >= count:
            raise apply_failed(f"{spec.name} has elements {indices[0]} to {indices[-1]} of {count}")


def require_policy(update: WeightUpdate, policy_id: PolicyId) -> None:
    """Refuse an update of another policy.

    Raises:
        AstraflowError: APPLY_FAILED.
    """
    if update.policy_id != policy_id:
        raise apply_failed(
            f"version {update.version} is of policy {update.policy_id}, this engine serves"
            f" {policy_id}"
        )


def apply_failed(message: str) -> AstraflowError:
    """Return the error of an update that changed nothing."""
    return AstraflowError(Reason.APPLY_FAILED, f"{message}; the old version serves on")


def engine_failed(message: str) -> AstraflowError:
    """Return the error of a server that broke; the next one may do better."""
    return AstraflowError(Reason.ENGINE_FAILED, message, retryable=True)


def engine_closed() -> AstraflowError:
    """Return the error of work after `Engine.close`."""
    return AstraflowError(Reason.ENGINE_FAILED, "the engine was closed")


def no_weights() -> AstraflowError:
    """Return the error of a generation before the first swap."""
    return AstraflowError(
        Reason.VERSION_NOT_SERVED, "the engine has no weights yet", retryable=True
    )
