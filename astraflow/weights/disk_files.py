"""Disk files: how a node's copy of a policy lies in its folder.

    layout              a Layout
    base-{version}      the flat state of a version; or the chain begins with a whole patch
    {root}.patch        a patch as it was pulled: its index, then its chunks in the order they came
    record              what of it makes the newest state; replaced once all of that is there

Patches are only ever appended to: what a kill leaves is a file whose end is torn, and is cut off.
"""

import json
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from blake3 import blake3
from google.protobuf.message import DecodeError

from astraflow.codec.chunks import Chunk
from astraflow.core.errors import AstraflowError, Reason
from astraflow.wire.patches import (
    PatchIndex,
    decode_chunk_header,
    decode_patch_index,
    digest_of,
    encode_chunk_header,
    encode_patch_index,
)
from astraflow_proto.weights.v1 import patch_pb2

LAYOUT: Final = "layout"
RECORD: Final = "record"
LOCK: Final = "lock"

_MAGIC: Final = b"afpatch1"
_LENGTH: Final = struct.Struct("<I")
_DIGEST_NBYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A version that follows from the one before.

    Attributes:
        version: Which.
        digest: Of the state that it leaves.
        roots: Of its patches.
        nbytes: Of their payloads.
    """

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
    steps: tuple[Step, ...]

    @property
    def version(self) -> int | None:
        """Where it leads to."""
        if self.steps:
            return self.steps[-1].version
        return None if self.base is None else self.base[0]

    @property
    def names(self) -> set[str]:
        """Of the files that it needs."""
        names = {patch_file(root) for step in self.steps for root in step.roots}
        return names if self.base is None else {*names, base_file(self.base[0])}

    @property
    def patch_nbytes(self) -> int:
        """Payload to be applied when it is loaded, a first whole one left out."""
        return sum(step.nbytes for step in self.steps[self.base is None :])

    def to_bytes(self) -> bytes:
        """Return it as a file's content."""
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
        """Read what `to_bytes` wrote.

        Raises:
            AstraflowError: DIGEST_MISMATCH when it is torn.
        """
        body = content[_DIGEST_NBYTES:]
        if blake3(body).digest() != content[:_DIGEST_NBYTES]:
            raise AstraflowError(Reason.DIGEST_MISMATCH, "the record is torn")
        tree = json.loads(body)
        base = tree["base"]
        return cls(
            layout_digest=bytes.fromhex(tree["layout"]),
            base=None if base is None else (base[0], bytes.fromhex(base[1])),
            steps=tuple(
                Step(
                    version=version,
                    digest=bytes.fromhex(digest),
                    roots=tuple(map(bytes.fromhex, roots)),
                    nbytes=nbytes,
                )
                for version, digest, roots, nbytes in tree["steps"]
            ),
        )


def base_file(version: int) -> str:
    """Return the name of a base's file."""
    return f"base-{version}"


def patch_file(root: bytes) -> str:
    """Return the name of a patch's file."""
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
        """Open the file.

        Raises:
            OSError: No room, no rights.
        """
        self.path = folder / patch_file(index.patch.root_digest)
        found = read_patch(self.path)
        self.indexes: set[int] = set() if found is None else {*found.chunks}
        self._chunk_count = index.patch.chunk_count
        self._file = self.path.open("r+b" if found else "wb")
        if found is not None:
            self._file.truncate(found.nbytes)
            self._file.seek(found.nbytes)
            return
        self._file.write(_MAGIC)
        self._append(encode_patch_index(index).SerializeToString())
        self._file.flush()

    @property
    def is_complete(self) -> bool:
        """Whether every chunk lies there."""
        return len(self.indexes) == self._chunk_count

    def append(self, chunk: Chunk) -> None:
        """Append a verified chunk; one that lies there is left out.

        Raises:
            OSError: No room.
        """
        if chunk.header.index in self.indexes:
            return
        self._append(encode_chunk_header(chunk.header).SerializeToString())
        self._file.write(chunk.payload)
        self._file.flush()
        self.indexes.add(chunk.header.index)

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: No room for what was not written yet.
        """
        self._file.close()

    def _append(self, content: bytes) -> None:
        self._file.write(_LENGTH.pack(len(content)))
        self._file.write(content)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundPatch:
    """What a patch's file holds.

    Attributes:
        index: Adds up to the root that the file is named by.
        chunks: By index, verified.
        nbytes: Of the file, without a torn end.
    """

    index: PatchIndex
    chunks: dict[int, Chunk]
    nbytes: int

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is there."""
        return len(self.chunks) == self.index.patch.chunk_count


def read_patch(path: Path) -> FoundPatch | None:
    """Return what of a patch lies in a file and is true; None: nothing."""
    try:
        return _parsed(path, memoryview(path.read_bytes()))
    except OSError:
        return None


def _parsed(path: Path, content: memoryview) -> FoundPatch | None:
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
    chunks: dict[int, Chunk] = {}
    for chunk, chunk_end in _chunks(content, end, index):
        chunks[chunk.header.index] = chunk
        end = chunk_end
    return FoundPatch(index=index, chunks=chunks, nbytes=end)


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
    start = at + _LENGTH.size
    if start > len(content):
        raise AstraflowError(Reason.CHUNK_INVALID, "the file ends")
    (nbytes,) = _LENGTH.unpack(content[at:start])
    if start + nbytes > len(content):
        raise AstraflowError(Reason.CHUNK_INVALID, "the file ends")
    return content[start : start + nbytes], start + nbytes
