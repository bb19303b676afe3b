"""What SGLang is asked for."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import SamplingParams
from astraflow.engines.served.dialect import ServerRequest

_NEVER = -1e9


def generate_body(request: ServerRequest, *, salt: str) -> dict[str, Any]:
    """Return the body of `/generate`.

    Args:
        request: Checked.
        salt: Of the prefix cache: only requests of the same salt share what it holds.

    Raises:
        AstraflowError: INVALID_FIELD for a knob that the server cannot honour.
    """
    _check(request.sampling)
    return {
        "input_ids": list(request.prompt),
        "sampling_params": _sampling(request),
        "rid": request.request_id,
        "return_logprob": True,
        "top_logprobs_num": request.sampling.top_logprobs,
        "stream": request.is_streamed,
        "extra_key": salt,
        "return_routed_experts": request.tells_experts,
        "lora_path": request.adapter,
    }


def until_least(request: ServerRequest) -> ServerRequest:
    """Return the part of a completion in which nothing may end it.

    The server's own `min_new_tokens` needs a tokenizer, and it is asked with ids alone.
    """
    sampling = request.sampling
    count = min(sampling.min_new_tokens, sampling.max_new_tokens)
    return replace(
        request,
        sampling=replace(sampling, max_new_tokens=count),
        stop_ids=(),
        never_sampled=(*request.never_sampled, *request.stop_ids),
    )


def after_least(request: ServerRequest, tokens: Sequence[int]) -> ServerRequest:
    """Return the part of a completion that follows on some tokens of it."""
    left = request.sampling.max_new_tokens - len(tokens)
    return replace(
        request,
        prompt=(*request.prompt, *tokens),
        sampling=replace(request.sampling, max_new_tokens=left, min_new_tokens=0),
    )


def _sampling(request: ServerRequest) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(request.stop_ids),
        "ignore_eos": not request.stop_ids,
        "logit_bias": {str(token): _NEVER for token in request.never_sampled} or None,
    }


def _check(sampling: SamplingParams) -> None:
    """Refuse what would be done silently in another way."""
    truncated = {
        "top_p": sampling.top_p < 1,
        "top_k": sampling.top_k is not None,
        "min_p": sampling.min_p > 0,
    }
    for name, is_set in truncated.items():
        if is_set and sampling.temperature > 0:
            raise _refused(name, "its log-probabilities would be those before the cut")
    if sampling.grammar is not None:
        raise _refused("grammar", "it is asked with ids alone and reads no tokenizer; take vLLM")


def _refused(name: str, why: str) -> AstraflowError:
    return AstraflowError(
        Reason.INVALID_FIELD,
        f"sampling.{name} cannot be honoured by SGLang: {why}",
        metadata={"field": f"sampling.{name}"},
    )
