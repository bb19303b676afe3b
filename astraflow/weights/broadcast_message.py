"""Weight updates as bytes for a broadcast group: a header, then one flat payload.

The header is JSON. The payload has, for each tensor in turn, its indices (i64) when it has any,
then its values; each array begins at a multiple of 8 bytes. Little-endian. BLAKE3 over the
payload stands in the header: it finds faults of the fabric, not a peer that lies.
"""

import json
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from blake3 import blake3

from astraflow.core.dtype import Dtype
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.layout import TensorSpec
from astraflow.core.updates import TensorUpdate, WeightUpdate

_ALIGNMENT = 8


def pack(update: WeightUpdate) -> tuple[bytes, np.ndarray]:
    """Return header and payload (u8[n]) of an update."""
    payload = np.zeros(_end(update), np.uint8)
    at = 0
    for array in _arrays(update):
        payload[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        at += _aligned(array.nbytes)
    header = {
        "policy_id": update.policy_id,
        "version": update.version,
        "base_version": update.base_version,
        "blake3": blake3(payload.data).hexdigest(),
        "tensors": [_described(part) for part in update.tensors],
    }
    return json.dumps(header, separators=(",", ":")).encode(), payload


def unpack(header: bytes, payload: np.ndarray) -> WeightUpdate:
    """Return the update, whose arrays are views of the payload.

    Args:
        header: As packed.
        payload: u8[n].

    Raises:
        AstraflowError: DIGEST_MISMATCH when the payload is not what was packed; CHUNK_INVALID
            when it does not have the size that the header tells.
    """
    fields = cast("dict[str, Any]", json.loads(header))
    if blake3(payload.data).hexdigest() != fields["blake3"]:
        raise AstraflowError(
            Reason.DIGEST_MISMATCH,
            f"version {fields['version']} was damaged on its way through the broadcast group",
        )
    reader = _Reader(payload)
    tensors = tuple(reader.part(described) for described in fields["tensors"])
    reader.finish()
    return WeightUpdate(
        policy_id=PolicyId(fields["policy_id"]),
        version=fields["version"],
        base_version=fields["base_version"],
        tensors=tensors,
    )


class _Reader:
    def __init__(self, payload: np.ndarray) -> None:
        self._payload = payload
        self._at = 0

    def part(self, described: list[Any]) -> TensorUpdate:
        name, dtype, shape, offset, count = described
        spec = TensorSpec(name=name, dtype=Dtype(dtype), shape=tuple(shape), offset=offset)
        indices = None if count is None else self._take(count, np.dtype("<i8"))
        values = self._take(spec.element_count if count is None else count, spec.dtype.bits)
        return TensorUpdate(spec=spec, indices=indices, values=values)

    def finish(self) -> None:
        if self._at != len(self._payload):
            raise _wrong_size(len(self._payload), self._at)

    def _take(self, count: int, dtype: np.dtype[Any]) -> np.ndarray:
        end = self._at + count * dtype.itemsize
        if count < 0 or end > len(self._payload):
            raise _wrong_size(len(self._payload), end)
        taken = self._payload[self._at : end].view(dtype)
        self._at += _aligned(taken.nbytes)
        return taken


def _described(part: TensorUpdate) -> list[Any]:
    spec, count = part.spec, None if part.indices is None else len(part.indices)
    return [spec.name, spec.dtype.value, spec.shape, spec.offset, count]


def _arrays(update: WeightUpdate) -> Iterator[np.ndarray]:
    for part in update.tensors:
        if part.indices is not None:
            yield np.ascontiguousarray(part.indices, "<i8")
        yield np.ascontiguousarray(part.values, part.spec.dtype.bits)


def _end(update: WeightUpdate) -> int:
    return sum(_aligned(array.nbytes) for array in _arrays(update))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _wrong_size(found: int, wanted: int) -> AstraflowError:
    return AstraflowError(
        Reason.CHUNK_INVALID, f"a broadcast of {found} bytes should have {wanted} by its header"
    )
