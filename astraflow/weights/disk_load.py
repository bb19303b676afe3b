"""Disk load: the newest state that a node's folder holds, verified, or nothing.

Every file may be torn, missing, or of another time: what is loaded had its digest compared at every
step, and what cannot be is a cold join with its reason in the log.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import structlog
from google.protobuf.message import DecodeError

from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError, Reason
from astraflow.weights.disk_files import (
    LAYOUT,
    RECORD,
    FoundPatch,
    Record,
    Step,
    base_file,
    patch_file,
    read_patch,
)
from astraflow.weights.frame import Frame
from astraflow.weights.incoming import VerifiedChunks
from astraflow.weights.state import CompletePatch, HeldState, stage
from astraflow.wire.weights import decode_layout
from astraflow_proto.weights.v1 import layout_pb2

# json, numpy and the file system have errors of their own for what is damaged.
_DAMAGE: Final = (AstraflowError, DecodeError, OSError, ValueError, KeyError, TypeError)

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """What was found.

    Attributes:
        frame: Of the layout; None: nothing was found.
        held: The newest state that could be verified; None: none.
        record: Which files make it.
        chunks: Verified ones of patches that are not in it.
    """

    frame: Frame | None = None
    held: HeldState | None = None
    record: Record | None = None
    chunks: VerifiedChunks


def load(folder: Path) -> Loaded:
    """Return what a folder holds; nothing is written."""
    frame = _frame(folder)
    if frame is None:
        return Loaded(chunks={})
    held, record = _state(folder, frame)
    used = set[str]() if record is None else record.names
    found = (read_patch(path) for path in folder.glob("*.patch") if path.name not in used)
    chunks = {each.index.patch.root_digest: each.chunks for each in found if each is not None}
    return Loaded(frame=frame, held=held, record=record, chunks=chunks)


def _frame(folder: Path) -> Frame | None:
    try:
        content = (folder / LAYOUT).read_bytes()
        return Frame(decode_layout(layout_pb2.Layout.FromString(content)))
    except FileNotFoundError:
        return None
    except _DAMAGE as error:
        _cold(folder, error)
        return None


def _state(folder: Path, frame: Frame) -> tuple[HeldState | None, Record | None]:
    """Go from the base as far as everything is true."""
    held: HeldState | None = None
    done: tuple[Step, ...] = ()
    try:
        record = Record.from_bytes((folder / RECORD).read_bytes())
        if record.layout_digest != frame.digest:
            raise AstraflowError(Reason.LAYOUT_MISMATCH, "the record is of another layout")
        held = _base(folder, frame, record)
    except FileNotFoundError:
        return None, None
    except _DAMAGE as error:
        _cold(folder, error)
        return None, None
    try:
        for step in record.steps:
            held = _after(folder, frame, held, step)
            done = (*done, step)
    except _DAMAGE as error:
        if held is None:
            _cold(folder, error)
            return None, None
        log.warning(
            "the copy on disk is damaged, going on from an older version",
            folder=str(folder),
            version=held.version,
            why=str(error),
        )
    return held, replace(record, steps=done)


def _base(folder: Path, frame: Frame, record: Record) -> HeldState | None:
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


def _after(folder: Path, frame: Frame, held: HeldState | None, step: Step) -> HeldState:
    patches = [_complete(folder, root) for root in step.roots]
    for index, chunks in patches:
        for chunk in chunks:
            frame.runs.check(chunk.header)
        if index.patch.version != step.version:
            raise AstraflowError(Reason.CHUNK_INVALID, "a patch leads to another version")
    return stage(frame, held, patches, {step.version: step.digest}).commit()


def _complete(folder: Path, root: bytes) -> CompletePatch:
    found: FoundPatch | None = read_patch(folder / patch_file(root))
    if found is None or not found.is_complete:
        raise AstraflowError(Reason.DIGEST_MISMATCH, f"patch {root.hex()} is not there whole")
    return found.index, tuple(found.chunks[number] for number in range(len(found.chunks)))


def _cold(folder: Path, error: Exception) -> None:
    log.warning("the copy on disk cannot be used", folder=str(folder), why=str(error))
