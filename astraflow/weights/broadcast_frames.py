"""Frames of a broadcast: what `Pull` would send of a version, many messages at a time.

A body is a series of `PullResponse` messages, each after its length (u32, little-endian): the plan
of one patch, then its chunks. The number of a frame is the newest version that is through, which
is the version itself in its last frame; -1 before there is one. A frame without a body is a sign of
life.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from google.protobuf.message import DecodeError

from astraflow.core.errors import AstraflowError, Reason
from astraflow.transport.grpc_lane import decode_response
from astraflow.wire.transfers import SentItem
from astraflow_proto.weights.v1.transfer_service_pb2 import PullResponse

FRAME_NBYTES: Final = 16 << 20
"""A body has so many bytes, or a message more."""

_LENGTH: Final = struct.Struct("<I")


def bodies(messages: Iterable[PullResponse]) -> Iterator[np.ndarray]:
    """Yield the bodies, u8[n], that carry messages."""
    body = bytearray()
    for message in messages:
        content = message.SerializeToString()
        body += _LENGTH.pack(len(content)) + content
        if len(body) >= FRAME_NBYTES:
            yield np.frombuffer(body, np.uint8)
            body = bytearray()
    if body:
        yield np.frombuffer(body, np.uint8)


def items(body: np.ndarray) -> Iterator[SentItem]:
    """Yield what a body, u8[n], carries.

    Raises:
        AstraflowError: CHUNK_INVALID when it is none.
    """
    view, at = body.data, 0
    while at < len(view):
        start = at + _LENGTH.size
        if start > len(view):
            raise _torn()
        at = start + _LENGTH.unpack_from(view, at)[0]
        if at > len(view):
            raise _torn()
        try:
            yield decode_response(PullResponse.FromString(bytes(view[start:at])))
        except DecodeError as error:
            raise _torn() from error


def _torn() -> AstraflowError:
    return AstraflowError(Reason.CHUNK_INVALID, "a frame of the broadcast is torn")
