"""Disk files: how a node's copy of a policy lies in its folder.

    layout              a Layout
    base-{version}      the flat state of a version; or the chain begins with a whole patch
    {root}.patch        a patch as it was pulled: its index, then its chunks in the order they came
    record              what of it makes the newest state; replaced once all of that is there

Patches are only ever appended to: what a kill leaves is a file whose end is torn, and is cut off.

What is loaded is the newest state that a folder holds, verified, or nothing.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

import numpy as np
import structlog
from blake3 import blake3
from google.protobuf.message import DecodeError

from astraflow.codec.chunks import Chunk
from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import PatchInfo
from astraflow.weights.patches.incoming import VerifiedChunks
from astraflow.weights.patches.layouts import LayoutFrame
from astraflow.weights.patches.patch import Patch
from astraflow.weights.patches.state import HeldState, stage
from astraflow.wire.weights import (
    PatchIndex,
    decode_chunk_header,
    decode_layout,
    decode_patch_index,
    digest_of,
    encode_chunk_header,
    encode_patch_index,
)
from astraflow_proto.weights.v1 import layout_pb2, patch_pb2

LAYOUT: Final = "layout"
RECORD: Final = "record"
LOCK: Final = "lock"
_MAGIC: Final = b"afpatch1"
_LENGTH: Final = struct.Struct("<I")
_DIGEST_NBYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordStep:
    """A version that follows from the one before by its patches, and the state digest then."""

    version: int
    digest: bytes
    roots: tuple[bytes, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What makes the newest state.

    Attributes:
        layout_digest: Of all versions.
        base: Version and state digest of the base file; None: the first step is whole.
        steps: In the order in which they are applied.
    """

    layout_digest: bytes
    base: tuple[int, bytes] | None
    steps: tuple[RecordStep, ...]

    @property
    def version(self) -> int | None:
        if self.steps:
            return self.steps[-1].version
        return None if self.base is None else self.base[0]

    @property
    def names(self) -> set[str]:
        names = {patch_file(root) for step in self.steps for root in step.roots}
        return names if self.base is None else {*names, base_file(self.base[0])}

    @property
    def patch_nbytes(self) -> int:
        """Payload to be applied when it is loaded, a first whole one left out."""
        return sum(step.nbytes for step in self.steps[self.base is None :])

    def to_bytes(self) -> bytes:
        body = json.dumps(
            {
                "layout": self.layout_digest.hex(),
                "base": self.base and [self.base[0], self.base[1].hex()],
                "steps": [
                    [s.version, s.digest.hex(), [r.hex() for r in s.roots], s.nbytes]
                    for s in self.steps
                ],
            }
        ).encode()
        return blake3(body).digest() + body

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        body = content[_DIGEST_NBYTES:]
        if blake3(body).digest() != content[:_DIGEST_NBYTES]:
            raise AstraflowError(Reason.DIGEST_MISMATCH, "the record is torn")
        tree = json.loads(body)
        base = tree["base"]
        return cls(
            layout_digest=bytes.fromhex(tree["layout"]),
            base=None if base is None else (base[0], bytes.fromhex(base[1])),
            steps=tuple(
                RecordStep(
                    version=version,
                    digest=bytes.fromhex(digest),
                    roots=tuple(map(bytes.fromhex, roots)),
                    nbytes=nbytes,
                )
                for version, digest, roots, nbytes in tree["steps"]
            ),
        )


def base_file(version: int) -> str:
    return f"base-{version}"


def patch_file(root: bytes) -> str:
    return f"{root.hex()}.patch"


def replace_file(path: Path, content: bytes) -> None:
    """Put a file in the place of another, or of none: at no instant there is a part of it."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


class PatchWriter:
    """Appends the chunks of one patch to its file, or goes on with one that is there.

    Attributes:
        indexes: Of the chunks that lie there.
    """

    def __init__(self, folder: Path, index: PatchIndex) -> None:
        self.path = folder / patch_file(index.patch.root_digest)
        found = read_patch(self.path)
        self.indexes: set[int] = set() if found is None else {*found[0].chunks}
        self._chunk_count = index.patch.chunk_count
        self._file = self.path.open("r+b" if found else "wb")
        if found is not None:
            self._file.truncate(found[1])
            self._file.seek(found[1])
            return
        self._file.write(_MAGIC)
        self._append(encode_patch_index(index).SerializeToString())
        self._file.flush()

    @property
    def is_complete(self) -> bool:
        return len(self.indexes) == self._chunk_count

    def append(self, chunk: Chunk) -> None:
        """Append a verified chunk; one that lies there is left out."""
        if chunk.header.index in self.indexes:
            return
        self._append(encode_chunk_header(chunk.header).SerializeToString())
        self._file.write(chunk.payload)
        self._file.flush()
        self.indexes.add(chunk.header.index)

    def close(self) -> None:
        self._file.close()

    def _append(self, content: bytes) -> None:
        self._file.write(_LENGTH.pack(len(content)))
        self._file.write(content)


def read_patch(path: Path) -> tuple[Patch, int] | None:
    """Return what of a patch lies in a file and is true, and where that ends; None: nothing."""
    try:
        return _parsed(path, memoryview(path.read_bytes()))
    except OSError:
        return None


def _parsed(path: Path, content: memoryview) -> tuple[Patch, int] | None:
    if bytes(content[: len(_MAGIC)]) != _MAGIC:
        return None
    try:
        body, end = _taken(content, len(_MAGIC))
        index = decode_patch_index(patch_pb2.PatchIndex.FromString(bytes(body)))
    except (AstraflowError, DecodeError):
        return None
    root = index.patch.root_digest
    if index.root_digest != root or path.name != patch_file(root):
        return None
    patch = Patch(index)
    for chunk, chunk_end in _chunks(content, end, index):
        patch.add(chunk)
        end = chunk_end
    return patch, end


def _chunks(content: memoryview, at: int, index: PatchIndex) -> Iterator[tuple[Chunk, int]]:
    """Yield chunks and where they end, up to the first that is torn or not the patch's."""
    while at < len(content):
        try:
            body, at = _taken(content, at)
            header = decode_chunk_header(patch_pb2.ChunkHeader.FromString(bytes(body)))
        except (AstraflowError, DecodeError):
            return
        chunk = Chunk(header=header, payload=content[at : at + header.payload_nbytes])
        at += header.payload_nbytes
        number = header.index
        if number >= len(index.chunk_digests) or digest_of(chunk) != index.chunk_digests[number]:
            return
        yield chunk, at


def _taken(content: memoryview, at: int) -> tuple[memoryview, int]:
    """Return a part with its length before it, and where it ends."""
    start = end = at + _LENGTH.size
    if start <= len(content):
        end += _LENGTH.unpack_from(content, at)[0]
    if end > len(content):
        raise AstraflowError(Reason.CHUNK_INVALID, "the file ends")
    return content[start:end], end


# json, numpy and the file system have errors of their own for what is damaged.
_DAMAGE: Final = (AstraflowError, DecodeError, OSError, ValueError, KeyError, TypeError)

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """What was found.

    Attributes:
        frame: Of the layout; None: nothing was found.
        held: The newest state that could be verified.
        record: Which files make it.
        chunks: Verified ones of patches that are not in it.
        patches: That made the state from nothing; empty: it lay in a file of its own.
    """

    frame: LayoutFrame | None = None
    held: HeldState | None = None
    record: Record | None = None
    chunks: VerifiedChunks
    patches: tuple[PatchInfo, ...] = ()


def load(folder: Path) -> Loaded:
    frame = _frame(folder)
    if frame is None:
        return Loaded(chunks={})
    held, record, patches = _state(folder, frame)
    used = set[str]() if record is None else record.names
    found = (read_patch(path) for path in folder.glob("*.patch") if path.name not in used)
    chunks = {each[0].root: each[0].chunks for each in found if each is not None}
    return Loaded(frame=frame, held=held, record=record, chunks=chunks, patches=patches)


def _frame(folder: Path) -> LayoutFrame | None:
    try:
        content = (folder / LAYOUT).read_bytes()
        return LayoutFrame(decode_layout(layout_pb2.Layout.FromString(content)))
    except FileNotFoundError:
        return None
    except _DAMAGE as error:
        _cold(folder, error)
        return None


def _state(
    folder: Path, frame: LayoutFrame
) -> tuple[HeldState | None, Record | None, tuple[PatchInfo, ...]]:
    """Go from the base as far as everything is true; return the patches, too, from nothing."""
    held: HeldState | None = None
    done: tuple[RecordStep, ...] = ()
    infos: tuple[PatchInfo, ...] = ()
    try:
        record = Record.from_bytes((folder / RECORD).read_bytes())
        if record.layout_digest != frame.digest:
            raise AstraflowError(Reason.LAYOUT_MISMATCH, "the record is of another layout")
        held = _base(folder, frame, record)
    except FileNotFoundError:
        return None, None, ()
    except _DAMAGE as error:
        _cold(folder, error)
        return None, None, ()
    try:
        for step in record.steps:
            patches = [_complete(folder, root) for root in step.roots]
            held = _after(frame, held, step, patches)
            done = (*done, step)
            infos = (*infos, *(patch.info for patch in patches))
    except _DAMAGE as error:
        if held is None:
            _cold(folder, error)
            return None, None, ()
        log.warning(
            "the copy on disk is damaged, going on from an older version",
            folder=str(folder),
            version=held.version,
            why=str(error),
        )
    return held, replace(record, steps=done), () if record.base else infos


def _base(folder: Path, frame: LayoutFrame, record: Record) -> HeldState | None:
    if record.base is None:
        return None
    version, registered = record.base
    flat = np.fromfile(folder / base_file(version), np.uint8)
    if len(flat) != frame.layout.nbytes:
        raise AstraflowError(Reason.DIGEST_MISMATCH, "the base has another size than the layout")
    frame.check_padding(flat)
    digest = StateDigest.of(frame.layout, flat)
    if digest.to_bytes() != registered:
        raise AstraflowError(Reason.DIGEST_MISMATCH, f"the base is not version {version}")
    return HeldState(frame=frame, version=version, flat=flat, digest=digest)


def _after(
    frame: LayoutFrame,
    held: HeldState | None,
    step: RecordStep,
    patches: Sequence[Patch],
) -> HeldState:
    for patch in patches:
        for chunk in patch.chunks.values():
            frame.runs.check(chunk.header)
        if patch.info.version != step.version:
            raise AstraflowError(Reason.CHUNK_INVALID, "a patch leads to another version")
    return stage(frame, held, patches, {step.version: step.digest}).commit()


def _complete(folder: Path, root: bytes) -> Patch:
    found = read_patch(folder / patch_file(root))
    if found is None or not found[0].is_complete:
        raise AstraflowError(Reason.DIGEST_MISMATCH, f"patch {root.hex()} is not there whole")
    return found[0]


def _cold(folder: Path, error: Exception) -> None:
    log.warning("the copy on disk cannot be used", folder=str(folder), why=str(error))
