"""Pieces that all packages use: enums, times, spans, tensors, JSON, optional fields."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype
from astraflow_proto.common.v1 import tensor_pb2

Member = TypeVar("Member", bound=StrEnum)

TABLES: dict[type[StrEnum], "EnumTable[Any]"] = {}
"""The tables that there are, by the core enum."""


class _Members(dict[int, Any]):
    """The member of each number of the wire; another number is refused."""

    what: str = ""

    def __missing__(self, number: int) -> Any:
        why, where = f"{number} is no {self.what}", {"field": self.what}
        raise AstraflowError(Reason.INVALID_FIELD, why, metadata=where)


class EnumTable(Generic[Member]):
    """Maps the members of a core enum to the numbers of a wire enum by their names.

    `Dtype.BF16` goes with `DTYPE_BF16` for the prefix `DTYPE`.

    Attributes:
        numbers: The wire's number of each member.
        members: The member of each number of the wire.
        encode: Returns the number of a member.
        decode: Returns the member of a number; INVALID_FIELD for one without.
    """

    encode: Callable[[Member], Any]
    decode: Callable[[int], Member]

    def __init__(
        self, core: type[Member], wire: Any, prefix: str, *, unspecified: Member | None = None
    ) -> None:
        """Make the table; `unspecified` is what number 0 means, where it means something.

        Raises:
            KeyError: When one side has a name that the other lacks.
        """
        values: Mapping[str, int] = dict(wire.items())
        self.numbers: Mapping[Member, int] = {
            member: values[f"{prefix}_{member.name}"]
            for member in core
            if member is not unspecified
        }
        self.members = _Members({number: member for member, number in self.numbers.items()})
        self.members.what = prefix.lower()
        unknown = set(values.values()) - self.members.keys() - {0}
        if unknown:
            raise KeyError(f"{core.__name__} lacks numbers {sorted(unknown)} of {prefix}")
        if unspecified is not None:
            self.numbers = {**self.numbers, unspecified: 0}
            self.members[0] = unspecified
        # Without a call of ours: they are asked for every field of every message.
        self.encode, self.decode = self.numbers.__getitem__, self.members.__getitem__
        TABLES[core] = self

    def refuse(self, number: int, field: str) -> Member:
        """Raise INVALID_FIELD for what a field has in a member's place."""
        why = f"{number} is no {self.members.what}"
        raise AstraflowError(Reason.INVALID_FIELD, why, metadata={"field": field})


def enum_table(core: Any, wire: EnumDescriptor) -> EnumTable[Any]:
    """Return the table of a core enum; without one, the one by the name of the wire's enum."""
    if core not in TABLES:
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", wire.name).upper()
        EnumTable(core, EnumTypeWrapper(wire), prefix)
    return TABLES[core]


DTYPES = EnumTable(Dtype, tensor_pb2.Dtype, "DTYPE")

# Of vectors: number on the wire, numpy's type, bytes per element; looked up at once.
_ELEMENTS = {each: (DTYPES.encode(each), each.numpy, each.itemsize) for each in Dtype}
_NUMBERS = {each.numpy: DTYPES.encode(each) for each in Dtype if Dtype.of(each.numpy) is each}
# As numpy has.
_MOST_AXES = 64
_NO_BOOL = "a bool is neither 0 nor 1"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY_S = 86_400
_SECOND_NS = 1_000_000_000


def invalid(field: str, why: str) -> AstraflowError:
    """Return the error for a field that cannot be taken."""
    return AstraflowError(Reason.INVALID_FIELD, f"{field}: {why}", metadata={"field": field})


def required(value: str, field: str) -> str:
    """Return a string that must not be empty."""
    if not value:
        raise invalid(field, "is empty")
    return value


def at_least(value: int, least: int, field: str) -> int:
    if value < least:
        raise invalid(field, f"{value} is below {least}")
    return value


def encode_time(moment: datetime) -> Timestamp:
    """Return a moment as a Timestamp."""
    stamp = Timestamp()
    set_time(stamp, moment)
    return stamp


def decode_time(stamp: Timestamp) -> datetime:
    """Return a Timestamp as an aware datetime, to the microsecond."""
    return moment_of(stamp.seconds, stamp.nanos)


def moment_of(seconds: int, nanos: int) -> datetime:
    """Return what a Timestamp of these says, as `decode_time`."""
    if not 0 <= nanos < _SECOND_NS:
        raise invalid("time", f"{nanos} is no part of a second in nanoseconds")
    try:
        return _EPOCH + timedelta(seconds=seconds, microseconds=nanos // 1000)
    except OverflowError as error:
        raise invalid("time", str(error)) from None


def encode_span(span: timedelta) -> Duration:
    duration = Duration()
    duration.FromTimedelta(span)
    return duration


def decode_span(duration: Duration) -> timedelta:
    """Return a Duration as a timedelta, to the microsecond."""
    try:
        return duration.ToTimedelta()
    except (ValueError, OverflowError) as error:
        raise invalid("duration", str(error)) from None


def optional_time(message: Message, field: str) -> datetime | None:
    """Return a Timestamp field, None when it is unset."""
    return decode_time(getattr(message, field)) if message.HasField(field) else None


# Thirty years, which can be added to a time of day; nobody waits longer.
_LONGEST = timedelta(seconds=1e9)


def optional_span(message: Message, field: str) -> timedelta | None:
    """Return a Duration field, of thirty years either way at most, None when it is unset."""
    if not message.HasField(field):
        return None
    return max(-_LONGEST, min(decode_span(getattr(message, field)), _LONGEST))


def set_time(target: Timestamp, moment: datetime | None) -> None:
    """Fill a Timestamp field; None leaves it unset."""
    if moment is not None:
        # As FromDatetime does, which is several times slower.
        since = moment - _EPOCH
        target.seconds = since.days * _DAY_S + since.seconds
        target.nanos = since.microseconds * 1000


def encode_json(fields: Mapping[str, Any]) -> bytes:
    """Return one JSON object as UTF-8; an empty one as no bytes."""
    return json.dumps(dict(fields), separators=(",", ":")).encode() if fields else b""


def decode_json(data: bytes, field: str) -> dict[str, Any]:
    """Read one JSON object; no bytes are an empty one."""
    if not data:
        return {}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid(field, "is not a JSON object")
    return value  # pyright: ignore[reportUnknownVariableType] - JSON objects have string keys


def encode_tensor(values: np.ndarray) -> tensor_pb2.Tensor:
    """Return an array as a Tensor: row-major, little-endian."""
    message = tensor_pb2.Tensor()
    fill_tensor(message, values)
    return message


def fill_tensor(message: tensor_pb2.Tensor, values: np.ndarray) -> None:
    """Fill an empty Tensor, as `encode_tensor`."""
    number = _NUMBERS.get(values.dtype)
    if number is None:
        little = values.dtype.newbyteorder("<")
        if little not in _NUMBERS:
            raise invalid("dtype", f"{values.dtype} does not travel")
        number, values = _NUMBERS[little], values.astype(little)
    message.dtype = number
    message.shape.extend(values.shape)
    base = values.base
    if isinstance(base, bytes) and len(base) == values.nbytes and values.flags.c_contiguous:
        # It lies over just these.
        message.data = base
    else:
        message.data = values.tobytes()


def decode_tensor(message: tensor_pb2.Tensor, field: str = "tensor") -> np.ndarray:
    """Return a Tensor as a read-only array over its bytes.

    bf16 and fp8 come as unsigned integers: their bits.
    """
    if len(message.shape) > _MOST_AXES:
        # Their product would have so many digits, each of which takes longer.
        raise invalid(field, f"no array has {len(message.shape)} axes")
    shape, data, dtype = tuple(message.shape), message.data, DTYPES.decode(message.dtype)
    if len(data) != prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
        raise invalid(field, f"{len(data)} bytes are no {dtype}{list(shape)}")
    if dtype is Dtype.BOOL and data.translate(None, b"\0\1"):
        raise invalid(field, _NO_BOOL)
    try:
        return np.frombuffer(data, dtype.numpy).reshape(shape)
    except ValueError as error:
        # More axes than numpy has, or an empty one beside others that are too long.
        raise invalid(field, f"no array has the shape {list(shape)}: {error}") from None


def decode_vector(message: tensor_pb2.Tensor, dtype: Dtype, field: str) -> np.ndarray:
    """Return a one-dimensional Tensor of a given dtype, as `decode_tensor`."""
    number, numpy, itemsize = _ELEMENTS[dtype]
    shape, data = message.shape, message.data
    if message.dtype != number or len(shape) != 1:
        raise invalid(field, f"must be {dtype}[n]")
    if len(data) != shape[0] * itemsize:
        raise invalid(field, f"{len(data)} bytes are no {dtype}{list(shape)}")
    if dtype is Dtype.BOOL and data.translate(None, b"\0\1"):
        raise invalid(field, _NO_BOOL)
    return np.frombuffer(data, numpy)


# Bytes with their length before them, and four bytes; all else is none of what is written here.
_WIRE_TYPES: Mapping[int, int] = {
    FieldDescriptor.TYPE_MESSAGE: 2,
    FieldDescriptor.TYPE_FIXED32: 5,
}


def tag_of(message: type[Message], name: str) -> bytes:
    """Return what goes before a field in a serialized message."""
    field = message.DESCRIPTOR.fields_by_name[name]
    return varint(field.number << 3 | _WIRE_TYPES[field.type])


def message_field(tag: bytes, pieces: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return a field that is a message, in pieces: it is serialized by joining them."""
    return [tag, varint(sum(map(len, pieces))), *pieces]


@lru_cache(maxsize=4096)
def varint(value: int) -> bytes:
    """Return a number as protobuf writes it."""
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
