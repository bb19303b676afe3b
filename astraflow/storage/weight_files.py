"""Weights in safetensors files: read without a copy, written whole or not at all, compared.

The format: u64 length of a JSON header, the header (by tensor: dtype, shape, data_offsets into
what follows), then the bytes of the tensors, little-endian. https://github.com/huggingface/safetensors
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, Layout, TensorSpec, TensorUpdate

_NAMES = {dtype.value.upper(): dtype for dtype in Dtype}
# Larger headers do not exist: the format's own reader refuses them too.
_HEADER_LIMIT = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        dtype: Of its elements.
        bits: Unsigned integers of the element size, in its shape; a view of the file.
    """

    dtype: Dtype
    bits: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """How one tensor differs.

    Attributes:
        note: Why it cannot be compared; empty: it was.
    """

    name: str
    element_count: int = 0
    changed_count: int = 0
    note: str = ""


def read_weights(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file, or of all files of a directory, by name.

    Raises:
        AstraflowError: INVALID_FIELD when there are none, or a file is not sound.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise AstraflowError(Reason.INVALID_FIELD, f"{path} has no *.safetensors")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        found = _read_file(file)
        twice = min(found.keys() & tensors.keys(), default=None)
        if twice is not None:
            raise AstraflowError(Reason.INVALID_FIELD, f"{file} has {twice}, as another file does")
        tensors.update(found)
    return tensors


def write_weights(file: Path, tensors: tuple[TensorUpdate, ...]) -> None:
    """Write whole tensors into one file; until it is complete it has another name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for part in tensors:
        start, end = end, end + part.values.nbytes
        header[part.spec.name] = {
            "dtype": part.spec.dtype.value.upper(),
            "shape": list(part.spec.shape),
            "data_offsets": [start, end],
        }
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("wb") as target:
        _write(target, header, tensors)
    partial.replace(file)


def flatten(tensors: Mapping[str, StoredTensor]) -> tuple[Layout, np.ndarray]:
    """Return the layout of tensors, and the flat state, u8[nbytes]."""
    layout = Layout.of((name, each.dtype, each.bits.shape) for name, each in tensors.items())
    flat = np.zeros(layout.nbytes, np.uint8)
    for name, each in tensors.items():
        layout.view(flat, name)[...] = each.bits
    return layout, flat


def compare(
    old: Mapping[str, StoredTensor], new: Mapping[str, StoredTensor]
) -> tuple[TensorDiff, ...]:
    """Return what differs, bit by bit, in order of name."""
    names = sorted(old.keys() | new.keys())
    diffs = (_diff(name, old.get(name), new.get(name)) for name in names)
    return tuple(diff for diff in diffs if diff.note or diff.changed_count)


def _diff(name: str, old: StoredTensor | None, new: StoredTensor | None) -> TensorDiff:
    if old is None or new is None:
        return TensorDiff(
            name=name, note="only in the second" if old is None else "only in the first"
        )
    if (old.dtype, old.bits.shape) != (new.dtype, new.bits.shape):
        note = f"{old.dtype}{list(old.bits.shape)} became {new.dtype}{list(new.bits.shape)}"
        return TensorDiff(name=name, note=note)
    changed = int(np.count_nonzero(old.bits != new.bits))
    return TensorDiff(name=name, element_count=old.bits.size, changed_count=changed)


def _read_file(file: Path) -> dict[str, StoredTensor]:
    try:
        return _tensors(np.memmap(file, np.uint8, "r"))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise AstraflowError(
            Reason.INVALID_FIELD, f"{file} is no sound safetensors file: {error}"
        ) from error


def _tensors(data: np.ndarray) -> dict[str, StoredTensor]:
    header_nbytes = int(data[:8].view("<u8")[0])
    if header_nbytes > min(_HEADER_LIMIT, len(data) - 8):
        raise ValueError(f"its header would have {header_nbytes} bytes")
    header = json.loads(data[8 : 8 + header_nbytes].tobytes())
    header.pop("__metadata__", None)
    body = data[8 + header_nbytes :]
    return {name: _tensor(body, name, fields) for name, fields in header.items()}


def _tensor(body: np.ndarray, name: str, fields: dict[str, Any]) -> StoredTensor:
    dtype = _NAMES[fields["dtype"]]
    start, end = fields["data_offsets"]
    spec = TensorSpec(name=name, dtype=dtype, shape=tuple(fields["shape"]), offset=0)
    if not 0 <= start <= end <= len(body) or end - start != spec.nbytes:
        raise ValueError(f"{name} has {spec.nbytes} bytes, which are not at {start} to {end}")
    # Readers of the format need no alignment; views of numpy do not either.
    bits = body[start:end].view(dtype.bits).reshape(spec.shape)
    return StoredTensor(dtype=dtype, bits=bits)


def _write(target: BinaryIO, header: dict[str, Any], tensors: tuple[TensorUpdate, ...]) -> None:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    target.write(len(text).to_bytes(8, "little"))
    target.write(text)
    target.writelines(np.ascontiguousarray(part.values).data for part in tensors)
