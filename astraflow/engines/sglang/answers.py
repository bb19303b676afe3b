"""What SGLang answers."""

from typing import Any

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import FinishReason
from astraflow.engines.served.dialect import Piece
from astraflow.engines.served.told_routes import from_i32

_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


def piece_of(answer: dict[str, Any], *, is_adapted: bool = False) -> Piece:
    """Return an answer of `/generate`, which in a stream holds what is new.

    Only the last answer has the versions, of all tokens. Those before name the live one, which may
    be newer or older than their tokens: they tell none.

    Args:
        answer: Of the route.
        is_adapted: Whether it is of an adapter: it says nothing of the version of that.

    Raises:
        AstraflowError: ENGINE_FAILED for weights of no version.
    """
    meta = answer["meta_info"]
    spans = () if is_adapted else meta.get("weight_versions") or ()
    return Piece(
        tokens=answer["output_ids"],
        logprobs=[value for value, *_ in meta["output_token_logprobs"]],
        versions=[(_number(span["version"]), span["end"] - span["start"]) for span in spans],
        finish_reason=_finish_reason(meta["finish_reason"]),
        likeliest=[
            [(token, logprob) for logprob, token, *_ in said or ()]
            for said in meta.get("output_top_logprobs") or ()
        ],
        experts=from_i32(meta.get("routed_experts")),
    )


def _number(said: str) -> int:
    if not said.isdecimal():
        raise AstraflowError(
            Reason.ENGINE_FAILED, f"SGLang sampled with weights of no version: it says {said!r}"
        )
    return int(said)


def _finish_reason(said: dict[str, Any] | None) -> FinishReason | None:
    return None if said is None else _REASONS[said["type"]]
