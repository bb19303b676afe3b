"""What vLLM's answers say."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import FinishReason
from astraflow.engines.protocol import Likeliest
from astraflow.engines.served.dialect import Piece
from astraflow.engines.served.told_routes import from_npy

_ENDS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
# What it tells of a token whose log-probability is not finite.
_NO_LOGPROB = -9999.0


def piece_of(choice: Mapping[str, Any], *, top_count: int = 0) -> Piece:
    """Return what one choice of an answer holds.

    Args:
        choice: Of the answer.
        top_count: Likeliest tokens that were asked for.

    Raises:
        AstraflowError: ENGINE_FAILED for one that ended in a way of its own.
    """
    spans = choice["weight_versions"] or ()
    logprobs: Mapping[str, Any] = choice["logprobs"] or {}
    content: Sequence[Mapping[str, Any]] = logprobs.get("content") or ()
    reason = choice.get("finish_reason")
    if reason is not None and reason not in _ENDS:
        raise _failed(f"a completion ended by {reason}")
    return Piece(
        tokens=choice["token_ids"] or (),
        logprobs=[_logprob(said["logprob"]) for said in content],
        versions=[_span(said) for said in spans if said["version"].isdecimal()],
        finish_reason=None if reason is None else _ENDS[reason],
        likeliest=[_likeliest(said["top_logprobs"], top_count) for said in content]
        if top_count
        else (),
        experts=from_npy(choice.get("routed_experts")),
    )


def _span(said: Mapping[str, Any]) -> tuple[int, int]:
    return int(said["version"]), said["end"] - said["start"]


def _logprob(said: float | None) -> float:
    return math.nan if said is None or said <= _NO_LOGPROB else said


def _likeliest(said: Sequence[Mapping[str, Any]], count: int) -> Likeliest:
    """Return the likeliest tokens; the one that was sampled is told too, before them."""
    pairs = [(int(each["token"].removeprefix("token_id:")), each["logprob"]) for each in said]
    finite = [pair for pair in pairs if pair[1] > _NO_LOGPROB]
    return sorted(finite, key=lambda pair: -pair[1])[:count]


def event_of(line: str) -> Any:
    """Return what a line of a stream says.

    Raises:
        AstraflowError: ENGINE_FAILED for an error.
    """
    said = json.loads(line.removeprefix("data: "))
    if "error" in said:
        raise _failed(str(said["error"]))
    return said


def gauge(page: str, name: str) -> float:
    """Return the sum over all engines of one family of a Prometheus page."""
    lines = (line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _failed(message: str) -> AstraflowError:
    return AstraflowError(Reason.ENGINE_FAILED, f"vLLM: {message}", retryable=True)
