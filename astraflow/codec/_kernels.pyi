"""The compiled loops; `kernels.py` says when they are there. All raise ValueError: why not."""

from collections.abc import Sequence

import numpy as np

Buffer = np.ndarray | bytes | memoryview

def highest_level() -> int: ...
def encode_fast(
    level: int, old: Buffer, new: Buffer, size: int, first: int, limit: int, /
) -> tuple[int, int, int, tuple[bytes, bytes, bytes, bytes, bytes] | None]: ...
def decode_fast(
    level: int,
    old: Buffer,
    size: int,
    back: int,
    first: int,
    streams: tuple[Buffer, Buffer, Buffer, Buffer, Buffer],
    indices: Buffer,
    before: Buffer,
    values: Buffer,
    /,
) -> tuple[int, int]: ...
def digest_array(level: int, bits: Buffer, size: int, first: int, /) -> tuple[int, int]: ...
def digest_changes(
    level: int, positions: Buffer, before: Buffer, values: Buffer, size: int, /
) -> tuple[int, int]: ...
def scatter(bits: Buffer, indices: Buffer, values: Buffer, size: int, /) -> None: ...
def round_bf16(level: int, values: Buffer, bits: Buffer, /) -> None: ...
def exponents(
    level: int, old: Buffer, new: Buffer, size: int, shift: int, field: int, histogram: Buffer, /
) -> None: ...
def scan_classes(
    level: int,
    old: Buffer,
    new: Buffer,
    size: int,
    first: int,
    shift: int,
    field: int,
    low: int,
    top: int,
    histogram: Buffer,
    /,
) -> tuple[int, int, bytes, bytes, bytes]: ...
def decode_compact(
    level: int,
    old: Buffer,
    size: int,
    first: int,
    shift: int,
    field: int,
    low: int,
    top: int,
    payload: Buffer,
    slots: Buffer,
    indices: Buffer,
    before: Buffer,
    values: Buffer,
    /,
) -> tuple[int, int]: ...
def split_planes(
    level: int, bits: Buffer, size: int, rotate: bool, planes: Buffer, histograms: Buffer, /
) -> None: ...
def join_planes(
    level: int, planes: Sequence[Buffer], size: int, rotate: bool, bits: Buffer, /
) -> None: ...
def rans_encode(
    level: int,
    symbols: Buffer,
    counts: Buffer,
    tables: Buffer,
    frequencies: Buffer,
    starts: Buffer,
    lanes: int,
    /,
) -> tuple[bytes, bytes] | tuple[None, None]: ...
def rans_decode(
    level: int,
    states: Buffer,
    words: Buffer,
    counts: Buffer,
    tables: Buffer,
    slots: Buffer,
    out: Buffer,
    /,
) -> None: ...
