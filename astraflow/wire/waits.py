"""astraflow.dataflow.v1: why somebody waits."""

from astraflow.core.status import WaitCause, WaitReason
from astraflow.wire.enums import EnumTable
from astraflow.wire.fields import optional_time, set_time
from astraflow_proto.dataflow.v1 import wait_pb2

WAIT_CAUSES = EnumTable(WaitCause, wait_pb2.WaitCause, "WAIT_CAUSE")


def encode_wait_reason(reason: WaitReason) -> wait_pb2.WaitReason:
    """Return a WaitReason for the wire."""
    message = wait_pb2.WaitReason(
        cause=WAIT_CAUSES.encode(reason.cause),
        waiter_id=reason.waiter_id,
        subject_id=reason.subject_id,
        message=reason.message,
    )
    set_time(message.since_time, reason.since_time)
    set_time(message.resolve_time, reason.resolve_time)
    return message


def decode_wait_reason(message: wait_pb2.WaitReason) -> WaitReason:
    """Read a WaitReason.

    Raises:
        AstraflowError: INVALID_FIELD for an unknown cause.
    """
    return WaitReason(
        cause=WAIT_CAUSES.decode(message.cause),
        waiter_id=message.waiter_id,
        subject_id=message.subject_id,
        message=message.message,
        since_time=optional_time(message, "since_time"),
        resolve_time=optional_time(message, "resolve_time"),
    )
