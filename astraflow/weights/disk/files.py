"""Disk files: how a node's copy of a policy lies in its folder.

    layout              a Layout
    base-{version}      the flat state of a version; or the chain begins with a whole patch
    {root}.patch        a patch as it was pulled: its plan, then its chunks in the order they came
    record              what of it makes the newest state; replaced once all of that is there

Patches are only ever appended to: what a kill leaves is a file whose end is torn, and is cut off.

What is loaded is the newest state that a folder holds, verified, or nothing.
"""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

import numpy as np
import structlog
from google.protobuf.message import DecodeError

from astraflow.codec.chunks import Chunk
from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import PatchInfo, VersionInfo
from astraflow.weights.patches.incoming import VerifiedChunks
from astraflow.weights.patches.layouts import ShardLayout
from astraflow.weights.patches.patch import Patch, packed, plan_of, unpacked
from astraflow.weights.patches.state import HeldState, stage
from astraflow.wire.transfers import SentItem, TransferPlan
from astraflow.wire.versions import (
    decode_version_info,
    encode_version_info,
    with_digest,
    without_digest,
)
from astraflow.wire.weights import PatchIndex, SentChunk, decode_layout
from astraflow_proto.weights.v1 import layout_pb2
from astraflow_proto.weights.v1 import version_service_pb2 as pb

LAYOUT: Final = "layout"
RECORD: Final = "record"
LOCK: Final = "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What makes the newest state.

    Attributes:
        versions: Each with the patches that lead to it from the one before; a first one without
            patches lies in the base file.
    """

    versions: tuple[VersionInfo, ...] = ()

    @property
    def version(self) -> int | None:
        return self.versions[-1].version if self.versions else None

    @property
    def base(self) -> VersionInfo | None:
        return next((each for each in self.versions[:1] if not each.patches), None)

    @property
    def steps(self) -> tuple[VersionInfo, ...]:
        return self.versions[self.base is not None :]

    @property
    def patches(self) -> tuple[PatchInfo, ...]:
        return tuple(patch for step in self.steps for patch in step.patches)

    @property
    def names(self) -> set[str]:
        names = {patch_file(patch.root_digest) for patch in self.patches}
        return names if self.base is None else {*names, base_file(self.base.version)}

    @property
    def patch_nbytes(self) -> int:
        """Payload to be applied when it is loaded, a first whole one left out."""
        return sum(each.payload_nbytes for each in self.patches if each.base_version is not None)

    def to_bytes(self) -> bytes:
        message = pb.ListVersionsResponse(versions=map(encode_version_info, self.versions))
        return with_digest(message.SerializeToString())

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        message = pb.ListVersionsResponse.FromString(without_digest(content, "record"))
        return cls(versions=tuple(map(decode_version_info, message.versions)))


def base_file(version: int) -> str:
    return f"base-{version}"


def patch_file(root: bytes) -> str:
    return f"{root.hex()}.patch"


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Give a file that takes the place of another, or of none: there is never a part of it."""
    part = path.with_name(path.name + ".part")
    try:
        yield part
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


def replace_file(path: Path, content: bytes) -> None:
    with replacing(path) as part:
        part.write_bytes(content)


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
        if found is None:
            self._append(plan_of([Patch(index)]))
        else:
            self._file.truncate(found[1])
            self._file.seek(found[1])

    @property
    def is_complete(self) -> bool:
        return len(self.indexes) == self._chunk_count

    def append(self, chunk: Chunk) -> None:
        """Append a verified chunk; one that lies there is left out."""
        if chunk.header.index not in self.indexes:
            self._append(SentChunk(patch_index=0, chunk=chunk))
            self.indexes.add(chunk.header.index)

    def close(self) -> None:
        self._file.close()

    def _append(self, item: SentItem) -> None:
        self._file.write(packed(item))
        self._file.flush()


def read_patch(path: Path) -> tuple[Patch, int] | None:
    """Return what of a patch lies in a file and is true, and where that ends; None: nothing."""
    patch, end = None, 0
    # What a kill has torn raises, and so does damage: what comes before it is true.
    with suppress(OSError, AstraflowError), path.open("rb") as file:
        for item in unpacked(file):
            match item:
                case TransferPlan(patches=(index,)) if (
                    patch is None
                    and index.root_digest == index.patch.root_digest
                    and path.name == patch_file(index.root_digest)
                ):
                    patch = Patch(index)
                case SentChunk(chunk=chunk) if patch is not None and patch.has(chunk):
                    patch.add(chunk)
                case _:
                    break
            end = file.tell()
    return None if patch is None else (patch, end)


# numpy and the file system have errors of their own for what is damaged.
_DAMAGE: Final = (AstraflowError, DecodeError, OSError, ValueError)

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """What was found.

    Attributes:
        frame: Of the layout; None: nothing was found.
        held: The newest state that could be verified.
        record: Which files make it.
        chunks: Verified ones of patches that are not in it.
    """

    frame: ShardLayout | None = None
    held: HeldState | None = None
    record: Record
    chunks: VerifiedChunks


def load(folder: Path) -> Loaded:
    frame = _frame(folder)
    if frame is None:
        return Loaded(record=Record(), chunks={})
    held, record = _state(folder, frame)
    found = (read_patch(path) for path in folder.glob("*.patch") if path.name not in record.names)
    chunks = {each[0].root: each[0].chunks for each in found if each is not None}
    return Loaded(frame=frame, held=held, record=record, chunks=chunks)


def _frame(folder: Path) -> ShardLayout | None:
    try:
        content = (folder / LAYOUT).read_bytes()
        return ShardLayout(decode_layout(layout_pb2.Layout.FromString(content)))
    except FileNotFoundError:
        return None
    except _DAMAGE as error:
        _cold(folder, error)
        return None


def _state(folder: Path, frame: ShardLayout) -> tuple[HeldState | None, Record]:
    """Go from the first version as far as everything is true."""
    held: HeldState | None = None
    done: tuple[VersionInfo, ...] = ()
    try:
        for info in Record.from_bytes((folder / RECORD).read_bytes()).versions:
            if info.layout_digest != frame.digest:
                raise AstraflowError(Reason.LAYOUT_MISMATCH, "the record is of another layout")
            is_base = not (done or info.patches)
            held = _base(folder, frame, info) if is_base else _after(folder, frame, held, info)
            done = (*done, info)
    except FileNotFoundError:
        return None, Record()
    except _DAMAGE as error:
        if held is None:
            _cold(folder, error)
            return None, Record()
        log.warning(
            "the copy on disk is damaged, going on from an older version",
            folder=str(folder),
            version=held.version,
            why=str(error),
        )
    return held, Record(versions=done)


def _base(folder: Path, frame: ShardLayout, info: VersionInfo) -> HeldState:
    flat = np.fromfile(folder / base_file(info.version), np.uint8)
    if len(flat) != frame.layout.nbytes:
        raise AstraflowError(Reason.DIGEST_MISMATCH, "the base has another size than the layout")
    frame.check_padding(flat)
    digest = StateDigest.of(frame.layout, flat)
    if digest.to_bytes() != info.content_digest:
        raise AstraflowError(Reason.DIGEST_MISMATCH, f"the base is not version {info.version}")
    return HeldState(frame=frame, version=info.version, flat=flat, digest=digest)


def _after(
    folder: Path, frame: ShardLayout, held: HeldState | None, info: VersionInfo
) -> HeldState:
    patches = [_complete(folder, patch) for patch in info.patches]
    for patch in patches:
        for chunk in patch.chunks.values():
            frame.check(chunk.header)
    return stage(frame, held, patches, {info.version: info.content_digest}).commit()


def _complete(folder: Path, info: PatchInfo) -> Patch:
    found = read_patch(folder / patch_file(info.root_digest))
    if found is None or not found[0].is_complete or found[0].info.chunk_count != info.chunk_count:
        root = info.root_digest.hex()
        raise AstraflowError(Reason.DIGEST_MISMATCH, f"patch {root} is not there whole")
    # One file is for all patches with the same chunks, such as those that change nothing.
    return Patch(replace(found[0].index, patch=info), found[0].chunks)


def _cold(folder: Path, error: Exception) -> None:
    log.warning("the copy on disk cannot be used", folder=str(folder), why=str(error))
