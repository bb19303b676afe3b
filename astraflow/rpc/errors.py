"""Errors on the wire: one table from reasons to status codes, and the way there and back.

An error of a call is a status with `google.rpc.ErrorInfo`: domain `astraflow`, the reason's
name, metadata. Errors worth a wait carry `google.rpc.RetryInfo` too.
"""

from bisect import bisect_right
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Final, cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode
from grpc.aio import AioRpcError

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.auth import MetadataPairs

DOMAIN: Final = "astraflow"
DETAILS_KEY: Final = "grpc-status-details-bin"

# Trailers share one header block of 8 KiB by default; a longer text would cost the whole error. It
# goes in there twice, and once with three bytes for each that is no printable ASCII.
_MAX_TEXT: Final = 1024
_MAX_KEY: Final = 64
_MAX_VALUE: Final = 256
_MAX_VALUES: Final = 8
_RETRY_DELAY: Final = Duration(seconds=1)

_BY_CODE: Final[Mapping[StatusCode, tuple[Reason, ...]]] = {
    StatusCode.UNAUTHENTICATED: (
        Reason.TOKEN_INVALID,
        Reason.SESSION_ENDED,
        Reason.SESSION_FENCED,
    ),
    StatusCode.PERMISSION_DENIED: (Reason.ROLE_NOT_ALLOWED,),
    StatusCode.INVALID_ARGUMENT: (
        Reason.INVALID_FIELD,
        Reason.ROLLOUT_INVALID,
        Reason.CHUNK_INVALID,
        Reason.CONTEXT_TOO_LONG,
    ),
    StatusCode.RESOURCE_EXHAUSTED: (
        Reason.MESSAGE_TOO_LARGE,
        Reason.OVERLOADED,
        Reason.JOURNAL_FAILED,
        Reason.CAPACITY_EXCEEDED,
        Reason.BUFFER_FULL,
    ),
    StatusCode.UNAVAILABLE: (
        Reason.NOT_READY,
        Reason.MEMBER_DRAINING,
        Reason.MEMBER_LOST,
        Reason.SOURCE_UNREACHABLE,
    ),
    StatusCode.DEADLINE_EXCEEDED: (
        Reason.TASK_EXPIRED,
        Reason.ROLLOUT_TIMEOUT,
        Reason.SCORER_TIMEOUT,
        Reason.SOURCE_TIMEOUT,
    ),
    StatusCode.NOT_FOUND: (
        Reason.MEMBER_UNKNOWN,
        Reason.POLICY_UNKNOWN,
        Reason.PROMPT_UNKNOWN,
        Reason.TASK_UNKNOWN,
        Reason.BATCH_UNKNOWN,
        Reason.CHECKPOINT_UNKNOWN,
        Reason.VERSION_UNKNOWN,
        Reason.VERSION_EVICTED,
        Reason.LAYOUT_UNKNOWN,
        Reason.PATCH_UNKNOWN,
        Reason.EVAL_UNKNOWN,
    ),
    StatusCode.ALREADY_EXISTS: (
        Reason.REQUEST_CONFLICT,
        Reason.NAME_TAKEN,
        Reason.POLICY_TAKEN,
        Reason.DUPLICATE,
    ),
    StatusCode.FAILED_PRECONDITION: (
        Reason.CONTRACT_UNSUPPORTED,
        Reason.RUN_ENDED,
        Reason.MODEL_MISMATCH,
        Reason.CODE_UNKNOWN,
        Reason.CODE_MISMATCH,
        Reason.LEASE_LOST,
        Reason.VERSION_NOT_NEXT,
        Reason.VERSION_NOT_SERVED,
        Reason.LAYOUT_MISMATCH,
        Reason.LANE_UNAVAILABLE,
        Reason.MEMORY_EXCEEDED,
        Reason.STALE,
        Reason.FILTERED,
        Reason.GROUP_INCOMPLETE,
        Reason.BATCH_DISCARDED,
        Reason.PROMPT_POISONED,
        Reason.POLICY_FAULT,
    ),
    StatusCode.CANCELLED: (Reason.TASK_CANCELLED,),
    StatusCode.DATA_LOSS: (
        Reason.DIGEST_MISMATCH,
        Reason.PAYLOAD_LOST,
        Reason.SIGNATURE_INVALID,
    ),
    StatusCode.INTERNAL: (
        Reason.INTERNAL,
        Reason.ENGINE_FAILED,
        Reason.ENVIRONMENT_FAILED,
        Reason.SCORER_FAILED,
        Reason.APPLY_FAILED,
    ),
    StatusCode.UNIMPLEMENTED: (Reason.CAPABILITY_MISSING,),
}

STATUS: Final[Mapping[Reason, StatusCode]] = {
    reason: code for code, reasons in _BY_CODE.items() for reason in reasons
}
"""The status code of every reason."""

# What a status means that no peer of this contract made: gRPC itself, a proxy, another server.
_FOREIGN: Final[Mapping[StatusCode, Reason]] = {
    StatusCode.UNAUTHENTICATED: Reason.TOKEN_INVALID,
    StatusCode.PERMISSION_DENIED: Reason.ROLE_NOT_ALLOWED,
    StatusCode.RESOURCE_EXHAUSTED: Reason.MESSAGE_TOO_LARGE,
    StatusCode.UNAVAILABLE: Reason.NOT_READY,
    StatusCode.DEADLINE_EXCEEDED: Reason.NOT_READY,
    StatusCode.CANCELLED: Reason.NOT_READY,
    StatusCode.UNIMPLEMENTED: Reason.CAPABILITY_MISSING,
}


# What gRPC says of an answer that is plain HTTP.
_HTTP_ANSWER: Final = "Received http2 header with status"


def unimplemented(capability: str) -> AstraflowError:
    """Return the error of a call that is left out here, naming what is missing."""
    return AstraflowError(
        Reason.CAPABILITY_MISSING,
        f"'{capability}' is not served here",
        metadata={"capability": capability},
    )


def status_of(error: AstraflowError) -> tuple[StatusCode, str, MetadataPairs]:
    """Return an error as status code, text and trailing metadata."""
    code = STATUS[error.reason]
    text = _cut(error.message, _MAX_TEXT)
    info = ErrorInfo(reason=error.reason, domain=DOMAIN)
    for key, value in list(error.metadata.items())[:_MAX_VALUES]:
        info.metadata[_cut(key, _MAX_KEY)] = _cut(value, _MAX_VALUE)
    status = Status(code=_number(code), message=text, details=[_pack(info)])
    if error.retryable:
        status.details.append(_pack(RetryInfo(retry_delay=_RETRY_DELAY)))
    return code, text, ((DETAILS_KEY, status.SerializeToString()),)


def raised_from(error: AioRpcError) -> AstraflowError:
    """Return what a failed call means.

    An answer of a peer comes back as it was raised there. Anything else (no connection, a
    deadline, a proxy) gets the nearest reason; `is_answer` tells the two apart.
    """
    answer = _answer(error)
    if answer is not None:
        return answer
    reason, message = _FOREIGN.get(error.code(), Reason.INTERNAL), error.details() or ""
    if message.startswith(_HTTP_ANSWER):
        # As an ingress does while what is behind it is away, or the next owner of an address.
        reason = Reason.NOT_READY
        message = f"something answers that speaks no gRPC, or stands before it ({message})"
    return AstraflowError(
        reason,
        message or error.code().name,
        retryable=reason is Reason.NOT_READY,
        metadata={"status": error.code().name},
    )


def is_answer(error: AioRpcError) -> bool:
    """Whether a peer of this contract answered, and not gRPC or something in between."""
    return _answer(error) is not None


@contextmanager
def translate_errors() -> Generator[None]:
    """Let the calls in the body raise AstraflowError.

    Raises:
        AstraflowError: What `raised_from` says.
    """
    try:
        yield
    except AioRpcError as error:
        raise raised_from(error) from error


def _answer(error: AioRpcError) -> AstraflowError | None:
    """Return the AstraflowError inside a status, None when there is none."""
    info: ErrorInfo | None = None
    is_retryable = False
    for detail in _details(error):
        if detail.type_url.endswith("/google.rpc.ErrorInfo"):
            with suppress(DecodeError):
                info = ErrorInfo.FromString(detail.value)
        is_retryable = is_retryable or detail.type_url.endswith("/google.rpc.RetryInfo")
    if info is None or info.domain != DOMAIN:
        return None
    metadata = dict(info.metadata)
    if info.reason not in Reason.__members__:
        # A newer peer: its code still says what to do.
        reason = _FOREIGN.get(error.code(), Reason.INTERNAL)
        metadata["reason"] = info.reason
    else:
        reason = Reason[info.reason]
    return AstraflowError(reason, error.details() or "", retryable=is_retryable, metadata=metadata)


def _details(error: AioRpcError) -> list[AnyMessage]:
    pairs = cast("MetadataPairs", tuple(error.trailing_metadata() or ()))
    for key, value in pairs:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return list(Status.FromString(value).details)
            except DecodeError:
                return []
    return []


def _pack(message: ErrorInfo | RetryInfo) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def _number(code: grpc.StatusCode) -> int:
    return int(code.value[0])


def _cut(text: str, size: int) -> str:
    """Return at most `size` characters that gRPC can carry, in about twice as many bytes."""
    # Half of a surrogate pair, as from JSON or the name of a file, is no UTF-8.
    text = text[: size + 1].encode(errors="replace").decode()
    fitting = bisect_right(list(accumulate(map(_nbytes_of, text))), 2 * size)
    is_whole = fitting == len(text) <= size
    return text if is_whole else f"{text[: min(fitting, size) - 1]}…"


def _nbytes_of(letter: str) -> int:
    """Return what a letter of a status message takes, percent-encoded."""
    return 1 if " " <= letter <= "~" and letter != "%" else 3 * len(letter.encode())
