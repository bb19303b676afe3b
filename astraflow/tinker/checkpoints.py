"""Checkpoints on disk: there whole or not at all, and as safe from strangers' names as from a kill.

DIR/MODEL_ID/weights/NAME/           weights and the optimizer's state
DIR/MODEL_ID/sampler_weights/NAME/   weights
DIR/MODEL_ID/snapshots/NUMBER/       weights of a sampling session; the last few of a model
DIR/samplers/ID.json                 what a sampling session samples from
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Final

from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.checkpoints import drop_drafts, placed

# Kept of each model; a session of an older one says that it is gone.
SNAPSHOT_COUNT: Final = 16
_SCHEME: Final = "tinker://"
STATE, SAMPLER, SNAPSHOT = "weights", "sampler_weights", "snapshots"
_META_FILE: Final = "checkpoint.json"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}(:(train|sample):\d{1,18}){0,2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPath:
    """Where a checkpoint is, by names that are safe to make a path of.

    Attributes:
        kind: weights, sampler_weights or snapshots.
    """

    model_id: str
    kind: str
    name: str

    @classmethod
    def parse(cls, path: str) -> "CheckpointPath":
        """Return the place that a client names.

        Raises:
            AstraflowError: INVALID_FIELD for what is no path of a checkpoint.
        """
        model_id, kind, name = [*path.removeprefix(_SCHEME).split("/"), "", "", ""][:3]
        if f"{_SCHEME}{model_id}/{kind}/{name}" != path or kind not in (STATE, SAMPLER):
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"{path[:200]!r} is no checkpoint: give tinker://MODEL_ID/weights/NAME or "
                "tinker://MODEL_ID/sampler_weights/NAME",
            )
        return cls.of(model_id, kind, name)

    @classmethod
    def of(cls, model_id: str, kind: str, name: str) -> "CheckpointPath":
        """Return the place of a name.

        Raises:
            AstraflowError: INVALID_FIELD for a name that is none.
        """
        require_id(model_id)
        if not _NAME.fullmatch(name):
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"{name[:200]!r} is no name of a checkpoint: letters, digits, '.', '_' and '-', "
                "from a letter or digit, at most 128",
            )
        return cls(model_id=model_id, kind=kind, name=name)

    @property
    def path(self) -> str:
        """What a client calls it."""
        return f"{_SCHEME}{self.model_id}/{self.kind}/{self.name}"

    @property
    def relative(self) -> Path:
        """Where it is in the directory of all checkpoints."""
        return Path(self.model_id, self.kind, self.name)


class TinkerCheckpoints:
    """The directory of all checkpoints. One thread saves; any begins a sampling session."""

    def __init__(self, root: Path, *, base_model: str, now: Callable[[], float]) -> None:
        """Open a directory, and clear what a killed process left half done; `now`: since 1970."""
        self._root = root
        self._base_model = base_model
        self._now = now
        self._samplers = root / "samplers"
        self._samplers.mkdir(parents=True, exist_ok=True)
        # A client whose answer is late asks again for the same session.
        self._one_at_a_time = Lock()
        for folder in root.glob("*/*/"):
            _recover(folder)
        for meta in root.glob(f"*/*/*/{_META_FILE}"):
            self._expire(meta.parent)

    def save(
        self,
        place: CheckpointPath,
        write: Callable[[Path], None],
        *,
        overwrite: bool = False,
        ttl_s: int | None = None,
    ) -> None:
        """Keep what a function writes into an empty directory, for `ttl_s` or for ever.

        Raises:
            AstraflowError: NAME_TAKEN when there is one.
        """
        target = self._root / place.relative
        if target.exists() and not overwrite:
            raise AstraflowError(
                Reason.NAME_TAKEN, f"{place.path} is there, or was: take another name"
            )
        expires = None if ttl_s is None else self._now() + ttl_s
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with placed(target) as draft:
                write(draft)
                meta = {"base_model": self._base_model, "expires": expires}
                (draft / _META_FILE).write_text(json.dumps(meta))
        except BaseException:
            drop_drafts(target.parent)
            raise
        _sync(target.parent)
        if place.kind == SNAPSHOT:
            self._drop_old(target.parent)

    def find(self, place: CheckpointPath) -> Path:
        """Return the directory of a checkpoint.

        Raises:
            AstraflowError: CHECKPOINT_UNKNOWN when there is none, or it has expired;
                MODEL_MISMATCH for one of another base model.
        """
        directory = self._root / place.relative
        meta = self._expire(directory)
        if meta is None:
            raise AstraflowError(
                Reason.CHECKPOINT_UNKNOWN, f"{place.path} is not here: never saved, or expired"
            )
        if meta["base_model"] != self._base_model:
            raise AstraflowError(
                Reason.MODEL_MISMATCH,
                f"{place.path} is of {meta['base_model']}, and this server has {self._base_model}",
            )
        return directory

    def put_sampler(self, sampler_id: str, place: CheckpointPath | None) -> None:
        """Keep what a sampling session samples from; None: the base model."""
        fields = None if place is None else list(place.relative.parts)
        path = self._samplers / f"{require_id(sampler_id)}.json"
        draft = path.with_suffix(".draft")
        with self._one_at_a_time:
            with draft.open("w") as file:
                file.write(json.dumps(fields))
                file.flush()
                os.fsync(file.fileno())
            draft.rename(path)
            _sync(self._samplers)

    def sampler(self, sampler_id: str) -> CheckpointPath | None:
        """Return what a sampling session samples from; None: the base model.

        Raises:
            AstraflowError: CHECKPOINT_UNKNOWN when there is none.
        """
        try:
            fields = json.loads((self._samplers / f"{require_id(sampler_id)}.json").read_text())
        except FileNotFoundError:
            raise AstraflowError(
                Reason.CHECKPOINT_UNKNOWN, f"there is no sampling session {sampler_id}"
            ) from None
        if fields is None:
            return None
        model_id, kind, name = fields
        return CheckpointPath(model_id=model_id, kind=kind, name=name)

    def _expire(self, directory: Path) -> dict[str, Any] | None:
        """Return what is noted of a checkpoint; None: it is gone, or goes now.

        Its name stays: a session of the one that expired never samples from another.
        """
        try:
            meta: dict[str, Any] = json.loads((directory / _META_FILE).read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        if meta["expires"] is not None and meta["expires"] <= self._now():
            for path in directory.iterdir():
                if path.name != _META_FILE:
                    path.unlink(missing_ok=True)
            return None
        return meta

    def _drop_old(self, snapshots: Path) -> None:
        numbers = sorted(path.name for path in snapshots.glob("[0-9]*"))
        for name in numbers[:-SNAPSHOT_COUNT]:
            shutil.rmtree(snapshots / name, ignore_errors=True)


def require_id(text: str) -> str:
    """Return an id of a session, a model or a sampler, which is safe to make a path of."""
    if not _ID.fullmatch(text):
        raise AstraflowError(Reason.INVALID_FIELD, f"{text[:200]!r} is no id of this server")
    return text


def _recover(folder: Path) -> None:
    """Finish what was being replaced: the older one is back unless the newer one was there."""
    drop_drafts(folder)
    for old in folder.glob(".*.old"):
        target = folder / old.name[1:].rsplit(".", 2)[0]
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)


def _sync(folder: Path) -> None:
    """Have the names in a folder outlive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
