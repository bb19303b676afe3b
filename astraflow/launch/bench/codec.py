"""How small and how fast weights are coded here: patches between two versions, and whole ones."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from astraflow.codec.chunks import Chunk, Profile, Runs
from astraflow.codec.decode import decode_change, decode_whole
from astraflow.codec.encode import Encoded, EncodedPatch, encode_patch, encode_whole, flat_bits
from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.layout import Layout
from astraflow.wire.weights import digest_of, encode_chunk_header, root_digest

Work = Callable[[], Any]
_DIGEST_NBYTES = 32
_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TwoVersions:
    """Two versions of one model.

    Attributes:
        layout: Of both.
        old: u8[layout.nbytes].
        new: u8[layout.nbytes].
    """

    layout: Layout
    old: np.ndarray
    new: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Coding:
    """One way of coding the new version.

    Attributes:
        name: For people.
        nbytes: Of what travels: payloads, headers, digests, tables.
        encode: Does it, every digest included.
        prepare: Comes before each decoding, and is not timed.
        decode: Verifies everything and leaves the new version in `state`.
        state: u8[layout.nbytes].
    """

    name: str
    nbytes: int
    encode: Work
    prepare: Work
    decode: Work
    state: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRate:
    """What a way of coding is worth on this machine.

    Attributes:
        name: Of the way.
        nbytes: Of what travels.
        encode_gb_per_s: Bytes of one copy of the model by CPU seconds of one core.
        decode_gb_per_s: The same of decoding.
    """

    name: str
    nbytes: int
    encode_gb_per_s: float
    decode_gb_per_s: float


def codings(versions: TwoVersions) -> Iterator[Coding]:
    """Yield all ways; each is checked first to give the new version back bit by bit.

    Raises:
        AstraflowError: INTERNAL when one does not.
    """
    for profile in Profile:
        yield _checked(patch_coding(versions, profile), versions)
    for profile in Profile:
        yield _checked(whole_coding(versions, profile), versions)


def measure(coding: Coding, *, copy_nbytes: int, repeats: int) -> CodecRate:
    """Return the best of some repeats."""
    encode_s = best_cpu_s(coding.encode, repeats)
    decode_s = best_cpu_s(coding.decode, repeats, coding.prepare)
    return CodecRate(
        name=coding.name,
        nbytes=coding.nbytes,
        encode_gb_per_s=copy_nbytes / encode_s / _GB,
        decode_gb_per_s=copy_nbytes / decode_s / _GB,
    )


def best_cpu_s(work: Work, repeats: int, prepare: Work | None = None) -> float:
    """Return the least CPU time of this thread, in seconds."""
    best = float("inf")
    for _ in range(repeats):
        if prepare is not None:
            prepare()
        start = time.thread_time()
        work()
        best = min(best, time.thread_time() - start)
    return best


def patch_coding(versions: TwoVersions, profile: Profile) -> Coding:
    """Return how a patch of a profile is made and applied."""
    runs, start = Runs(versions.layout), StateDigest.of(versions.layout, versions.old)

    def encode() -> tuple[EncodedPatch, bytes]:
        new, old = flat_bits(versions.new), flat_bits(versions.old)
        patch = encode_patch(runs, new, old, start, profile=profile)
        return patch, _root_of(patch)

    (patch, root), state = encode(), versions.old.copy()
    return Coding(
        name=profile.value,
        nbytes=_wire_nbytes(patch),
        encode=encode,
        prepare=partial(np.copyto, state, versions.old),
        decode=partial(_apply, patch, root, start, state),
        state=state,
    )


def whole_coding(versions: TwoVersions, profile: Profile) -> Coding:
    """Return how a version of a profile is made from nothing and read."""
    runs = Runs(versions.layout)

    def encode() -> tuple[Encoded, bytes]:
        whole = encode_whole(runs, flat_bits(versions.new), profile=profile)
        return whole, _root_of(whole)

    (whole, root), state = encode(), np.zeros_like(versions.new)
    return Coding(
        name=f"whole, {profile.value}",
        nbytes=_wire_nbytes(whole),
        encode=encode,
        prepare=lambda: None,
        decode=partial(_read, whole, root, versions.layout, state),
        state=state,
    )


def _apply(patch: EncodedPatch, root: bytes, start: StateDigest, state: np.ndarray) -> None:
    """Verify and apply a patch as a puller does: chunks, root, resulting state, then the write."""
    digests = [digest_of(chunk) for chunk in patch.chunks]
    _require(root_digest(digests, patch.shared_tables) == root)
    tables, digest = patch.shared_tables, start
    decoded = (decode_change(chunk, _bits_of(chunk, state), tables) for chunk in patch.chunks)
    changes = [change for change in decoded if change is not None]
    for change in changes:
        digest = digest.after(change)
    _require(digest == patch.digest)
    for change in changes:
        change.apply(state)


def _read(whole: Encoded, root: bytes, layout: Layout, state: np.ndarray) -> None:
    _require(root_digest([digest_of(chunk) for chunk in whole.chunks]) == root)
    for chunk in whole.chunks:
        _bits_of(chunk, state)[:] = decode_whole(chunk)
    StateDigest.of(layout, state)


def _checked(coding: Coding, versions: TwoVersions) -> Coding:
    coding.prepare()
    coding.decode()
    _require(np.array_equal(coding.state, versions.new))
    return coding


def _require(is_true: bool) -> None:
    if not is_true:
        raise AstraflowError(Reason.INTERNAL, "what was decoded is not what was encoded")


def _bits_of(chunk: Chunk, flat: np.ndarray) -> np.ndarray:
    return flat[chunk.header.offset : chunk.header.end].view(chunk.header.dtype.bits)


def _root_of(patch: Encoded | EncodedPatch) -> bytes:
    return root_digest([digest_of(chunk) for chunk in patch.chunks], patch.shared_tables)


def _wire_nbytes(patch: Encoded | EncodedPatch) -> int:
    headers = (encode_chunk_header(chunk.header).ByteSize() for chunk in patch.chunks)
    payloads = sum(len(chunk.payload) for chunk in patch.chunks)
    digests = _DIGEST_NBYTES * len(patch.chunks)
    return sum(headers) + digests + payloads + len(patch.shared_tables)
