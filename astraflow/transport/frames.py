"""Frames: how chunks look on lanes other than gRPC. docs/lanes.md has the bytes.

What no sound peer sends is refused as CHUNK_INVALID.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from astraflow.codec.chunks import CHUNK_NBYTES, ChunkHeader, chunk_invalid
from astraflow.core.errors import AstraflowError, Reason
from astraflow.wire.common import decode_failure, encode_failure
from astraflow.wire.fields import DTYPES
from astraflow.wire.transfers import (
    TransferBound,
    TransferPlan,
    TransferSpec,
    decode_transfer_plan,
    decode_transfer_spec,
    encode_transfer_plan,
    encode_transfer_spec,
)
from astraflow.wire.weights import COMPRESSIONS, ENCODINGS, SentChunk
from astraflow_proto.common.v1 import failure_pb2
from astraflow_proto.weights.v1 import transfer_pb2

_Message = TypeVar("_Message", bound=Message)
_Result = TypeVar("_Result")

MAGIC: Final = b"AFL1"
_HEADER: Final = struct.Struct("<4sBBBBIIIIqqqqq")
HEADER_NBYTES: Final = _HEADER.size
"""64."""

PROOF_NBYTES: Final = 32
"""Of the proof that a REQUEST begins with."""

MAX_CALL_NBYTES: Final = 1 << 20
"""Largest body of a frame that a puller sends: lists of chunks that it has."""

MAX_PLAN_NBYTES: Final = 64 << 20
"""Largest body of PLAN and FAILURE."""

# Shared tables of a patch have 16 KiB for each dtype.
_PATCH_ROOM_NBYTES: Final = 128 << 10
_DIGEST_ROOM_NBYTES: Final = 40
_PLAN_ROOM_NBYTES: Final = 16 << 10


class FrameKind(IntEnum):
    """What a frame carries."""

    REQUEST = 2
    ARENA = 3
    PLAN = 4
    CHUNK = 5
    FAILURE = 6
    WAITING = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The header of a frame; `body_nbytes` bytes follow it.

    Attributes:
        kind: What it carries.
        body_nbytes: That follow the header.
        body_offset: Where in the whole payload the body belongs. CHUNK in an arena: where in the
            arena the payload begins.
        payload_nbytes: Of the whole payload, of which the body may be a part.
        patch_index: CHUNK: of which patch of the plan.
        header: CHUNK: of the chunk.
    """

    kind: FrameKind
    body_nbytes: int
    body_offset: int = 0
    payload_nbytes: int = 0
    patch_index: int = 0
    header: ChunkHeader | None = None


def pack(frame: Frame) -> bytes:
    chunk = frame.header
    if chunk is None:
        codes, places = (0, 0, 0), (0, 0, 0, 0)
    else:
        codes = (
            int(DTYPES.encode(chunk.dtype)),
            int(ENCODINGS.encode(chunk.encoding)),
            int(COMPRESSIONS.encode(chunk.compression)),
        )
        places = (chunk.index, chunk.offset, chunk.nbytes, chunk.changed_count)
    return _HEADER.pack(
        *(MAGIC, frame.kind, *codes),
        *(frame.patch_index, frame.body_nbytes, frame.payload_nbytes, 0),
        *(frame.body_offset, *places),
    )


def unpack(data: bytes | bytearray | memoryview) -> Frame:
    magic, kind, *codes = _HEADER.unpack(data)
    dtype, encoding, compression, patch_index, body, payload, _, offset, *places = codes
    if magic != MAGIC or kind not in frozenset(FrameKind):
        raise bad_frame("it does not begin as frames do")
    if offset < 0:
        raise bad_frame("its body belongs before the payload")
    header = None
    if kind == FrameKind.CHUNK:
        index, start, nbytes, changed_count = places
        if min(index, start, nbytes - 1, changed_count) < 0 or payload > CHUNK_NBYTES:
            raise bad_frame("a size or place in it cannot be")
        try:
            header = ChunkHeader(
                index=index,
                offset=start,
                nbytes=nbytes,
                dtype=DTYPES.decode(dtype),
                encoding=ENCODINGS.decode(encoding),
                compression=COMPRESSIONS.decode(compression),
                payload_nbytes=payload,
                changed_count=changed_count,
            )
        except AstraflowError as error:
            raise bad_frame(error.message) from error
    return Frame(
        kind=FrameKind(kind),
        body_nbytes=body,
        body_offset=offset,
        payload_nbytes=payload,
        patch_index=patch_index,
        header=header,
    )


def bad_frame(why: str) -> AstraflowError:
    return chunk_invalid(f"a frame of the transfer is not sound: {why}")


def source_lost(why: str) -> AstraflowError:
    return AstraflowError(Reason.SOURCE_UNREACHABLE, why, retryable=True)


def source_late(why: str) -> AstraflowError:
    return AstraflowError(Reason.SOURCE_TIMEOUT, why, retryable=True)


def chunk_frames(sent: SentChunk, segment_nbytes: int) -> Iterator[tuple[Frame, memoryview]]:
    """Yield a chunk as frames with at most so many bytes each, so that connections share it."""
    payload = memoryview(sent.chunk.payload).cast("B")
    for offset in range(0, max(1, len(payload)), segment_nbytes):
        body = payload[offset : offset + segment_nbytes]
        yield chunk_frame(sent, body_nbytes=len(body), body_offset=offset), body


def chunk_frame(sent: SentChunk, *, body_nbytes: int, body_offset: int) -> Frame:
    return Frame(
        kind=FrameKind.CHUNK,
        body_nbytes=body_nbytes,
        body_offset=body_offset,
        payload_nbytes=len(sent.chunk.payload),
        patch_index=sent.patch_index,
        header=sent.chunk.header,
    )


def request(spec: TransferSpec, proof_of: Callable[[bytes], bytes]) -> list[bytes]:
    """Return the frame that asks for a version over connections that stand.

    Body: a proof of the run's transfer secret (32 bytes), a TransferSpec message.
    """
    message = encode_transfer_spec(spec).SerializeToString()
    return whole_frame(FrameKind.REQUEST, proof_of(message) + message)


def read_request(body: bytes, is_proven: Callable[[bytes, bytes], bool]) -> TransferSpec:
    proof, content = body[:PROOF_NBYTES], body[PROOF_NBYTES:]
    if not is_proven(proof, content):
        raise AstraflowError(
            Reason.TOKEN_INVALID, "a request does not prove the secret of the run; join it"
        )
    return decode_transfer_spec(_read(transfer_pb2.TransferSpec, lambda read: read, content))


def plan_parts(plan: TransferPlan, segment_nbytes: int) -> Iterator[tuple[bytes, memoryview]]:
    """Yield a plan, the answer to a REQUEST, as frames: headers and bodies."""
    body = memoryview(encode_transfer_plan(plan).SerializeToString())
    for offset in range(0, len(body), segment_nbytes):
        part = body[offset : offset + segment_nbytes]
        header = Frame(
            kind=FrameKind.PLAN,
            body_nbytes=len(part),
            body_offset=offset,
            payload_nbytes=len(body),
        )
        yield pack(header), part


def plan_nbytes(bound: TransferBound) -> int:
    """Return what the message of a plan has at most: digests of its chunks, tables of patches."""
    room = _PLAN_ROOM_NBYTES + bound.chunk_count * _DIGEST_ROOM_NBYTES
    return min(MAX_PLAN_NBYTES, room + bound.patch_count * _PATCH_ROOM_NBYTES)


def read_plan(body: bytes) -> TransferPlan:
    return _read(transfer_pb2.TransferPlan, decode_transfer_plan, body)


def failure_frame(error: AstraflowError) -> list[bytes]:
    return whole_frame(FrameKind.FAILURE, encode_failure(error.to_failure()).SerializeToString())


class SourceError(AstraflowError):
    """What a source has answered: it would answer the same over another lane."""


def read_failure(body: bytes) -> SourceError:
    failure = _read(failure_pb2.Failure, decode_failure, body)
    return SourceError(
        failure.reason, failure.message, retryable=failure.retryable, metadata=failure.metadata
    )


def whole_frame(kind: FrameKind, body: bytes) -> list[bytes]:
    return [pack(Frame(kind=kind, body_nbytes=len(body), payload_nbytes=len(body))), body]


def _read(kind: type[_Message], decode: Callable[[_Message], _Result], body: bytes) -> _Result:
    try:
        return decode(kind.FromString(body))
    except DecodeError as error:
        raise bad_frame(f"its {kind.__name__} cannot be read") from error
    except AstraflowError as error:
        raise bad_frame(error.message) from error
