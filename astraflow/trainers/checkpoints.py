"""Checkpoints: written whole or not at all, kept as the recipe says, and resumed from."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Self

from astraflow.client.trainer import TrainerClient
from astraflow.config.recipe import Keep, TrainerConfig
from astraflow.config.run_dir import RunDir, read_json_lines
from astraflow.core.batches import AckBatch
from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.engine import TrainEngine

STATE_FILE = "trainer_state.json"

# Libraries raise errors of their own, with these words in them; torch of a full disk without.
_FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))

_ALMOST_NOTHING = 64 << 20

# What of a checkpoint a resume alone needs: one of these.
OPTIMIZER_FILE, OPTIMIZER_DIR = "optimizer.pt", "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that there is, or the very beginning.

    Attributes:
        checkpoint_id: What the run knows it by; empty: a trainer begins with the first weights.
        step: Optimizer steps behind it.
        version: What its weights were published as; None: they were not.
        is_resumable: Whether the state of its optimizer is still there.
    """

    directory: Path = Path()
    checkpoint_id: str = ""
    step: int = 0
    version: int | None = None
    is_resumable: bool = True

    @classmethod
    def read(cls, directory: Path) -> Self:
        state = _state_of(directory)
        return cls(
            directory=directory,
            checkpoint_id=state.get("checkpoint_id", directory.name),
            step=state["step"],
            version=state["version"],
            is_resumable=state.get("is_resumable", True),
        )

    @property
    def is_named(self) -> bool:
        """Whether the run asked for it under a name of its own."""
        return self.checkpoint_id != self.directory.name


FIRST_WEIGHTS: Final = Checkpoint()


def start_points(run_dir: RunDir, policy_id: str) -> Sequence[Checkpoint]:
    """Return where a policy can be resumed, newest first; the last one is the very beginning.

    A checkpoint that was written and not acknowledged is among them: the run refuses it, and
    its predecessor is the one. One that was named anew comes under its first name, too.
    """
    starts = [
        replace(each, checkpoint_id=name)
        for each in reversed(_found(run_dir, policy_id))
        if each.step and each.is_resumable
        for name in dict.fromkeys((each.checkpoint_id, each.directory.name))
    ]
    return (*starts, FIRST_WEIGHTS)


def _found(run_dir: RunDir, policy_id: str) -> list[Checkpoint]:
    """Return the checkpoints of a policy, by rising step."""
    found = map(Checkpoint.read, run_dir.checkpoints(policy_id).glob("step_*"))
    return sorted(found, key=lambda each: each.step)


@contextmanager
def placed(target: Path) -> Generator[Path]:
    """Yield an empty directory to write into; what is in it at the end becomes the target.

    Args:
        target: A directory that is there already gives way.
    """
    draft = drafted(target)
    yield draft
    place(draft, target)


def drafted(target: Path) -> Path:
    """Make an empty directory that `place` will make the target."""
    draft = target.with_name(f".{target.name}.{os.getpid()}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    return draft


def drop_drafts(folder: Path) -> None:
    """Let go of what somebody who was killed has left half written."""
    for path in folder.glob(".*.draft"):
        shutil.rmtree(path)


def place(draft: Path, target: Path) -> None:
    """Make a directory the target, once all that is in it is on the disk."""
    for path in filter(Path.is_file, draft.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        draft.rename(target)
    except OSError:
        # One who is killed from here on leaves what `drop_drafts` lets go of.
        old = draft.with_suffix(".old.draft")
        target.rename(old)
        draft.rename(target)
        shutil.rmtree(old)


_EVAL = "eval/"


def _scores(
    run_dir: RunDir, policy_id: str, name: str | None, found: Sequence[Checkpoint]
) -> Mapping[int, float]:
    """Return what the run's folder says of checkpoints by `Keep.best`, by step."""
    if name is None:
        return {}
    if not name.startswith(_EVAL):
        rows = [row for row in read_json_lines(run_dir.metrics) if row["policy"] == policy_id]
        return {row["step"]: row[name] for row in rows if name in row}
    runs = [row for row in read_json_lines(run_dir.evals) if row["suite"] == name[len(_EVAL) :]]
    by_version = {
        row["versions"][policy_id]: row["overall"]["avg_at_k"]
        for row in runs
        if row["overall"] and policy_id in row["versions"]
    }
    return {each.step: by_version[each.version] for each in found if each.version in by_version}


# The newest one may not be acknowledged yet; then its predecessor is resumed.
_RESUMABLE_COUNT = 2

_GOING = ".going"


class Checkpoints:
    """Writes the checkpoints of one policy into the folder of a run."""

    def __init__(
        self,
        engine: TrainEngine,
        *,
        run_dir: RunDir,
        policy_id: str,
        start: Checkpoint = FIRST_WEIGHTS,
    ) -> None:
        """Remove the drafts of a predecessor that was killed.

        What the engine was restored from, `start`, is in the folder under its name.
        """
        self._engine = engine
        self._run_dir = run_dir
        self._policy_id = policy_id
        self._saved_step = start.step if start.checkpoint_id else None
        drop_drafts(run_dir.checkpoints(policy_id))
        self._writer = ThreadPoolExecutor(1, "save")
        self._last: Future[str] | None = None

    def save(self, *, step: int, version: int | None, checkpoint_id: str = "") -> str:
        """Write the present state, all of it; see `begin`. Return the checkpoint's id."""
        return self.begin(step=step, version=version, checkpoint_id=checkpoint_id).result()

    def begin(
        self,
        *,
        step: int,
        version: int | None,
        checkpoint_id: str = "",
        then: Callable[[], None] = lambda: None,
    ) -> Future[str]:
        """Write the present state; that of this step, if it is there, is named anew at most.

        The end of it is written while the caller goes on: what its engine leaves until then, and
        the disk. Before that there is no checkpoint.

        Args:
            step: Optimizer steps behind it.
            version: What these weights are published as; None: they are not.
            checkpoint_id: What the run calls it; empty: by the directory's name.
            then: Called once it is written, on the thread that writes.

        Returns:
            The checkpoint's id, once it is whole.

        Raises:
            AstraflowError: CAPACITY_EXCEEDED: there was no room for this one, or the one before.
            Exception: What the engine raised; OSError also where older ones cannot be let go of.
        """
        if self._last is not None:
            self._last.result()
        target = self._run_dir.checkpoint(self._policy_id, step)
        name = checkpoint_id or target.name
        if self._saved_step == step:
            finish = partial(_rename, target, checkpoint_id)
        else:
            state = {"step": step, "version": version, "checkpoint_id": name}
            draft = drafted(target)
            self._engine.save(draft)
            finish = partial(self._finish, draft, target, state)
            self._saved_step = step

        def written() -> str:
            finish()
            then()
            return name

        self._last = self._writer.submit(written)
        return self._last

    def thin_out(self, keep: Keep) -> None:
        """Let go of the checkpoints that need not stay; what is half gone already goes, too.

        The first, the newest and the named ones stay, what `keep` says, and the best of those whose
        scores are known; of equals the latest.
        """
        for path in self._run_dir.checkpoints(self._policy_id).glob(f".*{_GOING}"):
            shutil.rmtree(path)
        found = _found(self._run_dir, self._policy_id)
        scores = _scores(self._run_dir, self._policy_id, keep.best, found)
        known = [each.step for each in reversed(found) if each.step in scores]
        staying = {each.step for each in (*found[:1], *self._newest(found, keep.last))}
        staying |= {max(known, key=lambda step: scores[step])} if known else set()
        for each in found:
            is_regular = keep.every is not None and each.step % keep.every == 0
            if not (each.step in staying or each.is_named or is_regular):
                # A reader sees all of it or nothing.
                going = each.directory.with_name(f".{each.directory.name}{_GOING}")
                shutil.rmtree(each.directory.rename(going))

    def _newest(self, found: Sequence[Checkpoint], count: int) -> Sequence[Checkpoint]:
        """Return the last so many up to what was saved: later ones are of a future that was undone.

        The run does not know these any more once a trainer has gone back to a checkpoint before.
        """
        last = self._saved_step
        return [each for each in found if last is None or each.step <= last][-count:]

    def _finish(self, draft: Path, target: Path, state: Mapping[str, object]) -> None:
        try:
            self._engine.wait_for_save()
            (draft / STATE_FILE).write_text(json.dumps(state) + "\n")
        except AstraflowError:
            raise
        except Exception as error:
            free_nbytes = shutil.disk_usage(draft).free
            if free_nbytes > _ALMOST_NOTHING and not any(words in str(error) for words in _FULL):
                raise
            raise AstraflowError(
                Reason.CAPACITY_EXCEEDED,
                f"checkpoint {target} cannot be written ({error}); its disk has "
                f"{free_nbytes >> 20:,} MiB left: make room and go on with the run (--resume)",
            ) from error
        place(draft, target)
        self._drop_optimizers()

    def _drop_optimizers(self) -> None:
        """Keep the optimizer's state, twice the weights, of the newest and the named ones alone."""
        found = _found(self._run_dir, self._policy_id)
        newest = self._newest(found, _RESUMABLE_COUNT)
        for each in found:
            if each.is_resumable and not each.is_named and each not in newest:
                _amend(each.directory, is_resumable=False)
                for path in (each.directory / OPTIMIZER_FILE, each.directory / OPTIMIZER_DIR):
                    if path.is_dir():
                        shutil.rmtree(path)
                    else:
                        path.unlink(missing_ok=True)


def _state_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / STATE_FILE).read_text())


def _rename(directory: Path, checkpoint_id: str) -> None:
    """Call a checkpoint what the run does; empty: it has no name for it."""
    if checkpoint_id and Checkpoint.read(directory).checkpoint_id != checkpoint_id:
        _amend(directory, checkpoint_id=checkpoint_id)


def _amend(directory: Path, **fields: object) -> None:
    path = directory / STATE_FILE
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(_state_of(directory) | fields) + "\n")
    draft.replace(path)


# What a trainer that is killed loses at most, where the recipe does not say.
_CHECKPOINT_S = 600.0


class Saves:
    """Writes a checkpoint when one is asked for or due.

    Attributes:
        last: The ack of the newest batch; None: there was none in this process.
    """

    def __init__(
        self, client: TrainerClient, checkpoints: Checkpoints, settings: TrainerConfig
    ) -> None:
        self.last: AckBatch | None = None
        self._client = client
        self._checkpoints = checkpoints
        self._settings = settings
        self._saved = perf_counter()
        # Asked for before there was a batch to tell of it.
        self._asked = ""
        self._written: set[str] = set()

    def after_step(self, step: int, version: int | None) -> Future[str] | None:
        """Begin to write a checkpoint if one is due; return its id, once it is whole."""
        asked, self._asked = self._asked, ""
        every = self._settings.checkpoint_every
        if every is None:
            is_due = perf_counter() - self._saved >= _CHECKPOINT_S
        else:
            is_due = step % every == 0
        is_last = step == self._settings.step_count
        return self._write(asked, step, version) if asked or is_due or is_last else None

    def save(self, checkpoint_id: str, *, step: int, version: int | None) -> None:
        """Save what the run asks for; the last ack says so again.

        An order that comes again is carried out once. One before the first batch waits for it.
        """
        if checkpoint_id in self._written:
            return
        if self.last is None:
            self._asked = checkpoint_id
        else:
            written = self._write(checkpoint_id, step, version)
            self._client.ack_later(self.last, checkpoint=written)

    def finish(self, *, step: int, version: int | None) -> None:
        """Save where it ends, whyever it does: the run goes on from there when it is resumed."""
        if self.last is None:
            self._checkpoints.save(step=step, version=version)
        else:
            self._client.ack_later(self.last, checkpoint=self._write("", step, version))
            self._client.flush()

    def _write(self, asked: str, step: int, version: int | None) -> Future[str]:
        # It names a version that the run knows.
        self._client.flush()
        written = self._checkpoints.begin(
            step=step, version=version, checkpoint_id=asked, then=self._thin_out
        )
        self._written.add(asked)
        self._saved = perf_counter()
        return written

    def _thin_out(self) -> None:
        keep = self._settings.save.keep
        if keep is not None or self._settings.checkpoint_every is None:
            self._checkpoints.thin_out(keep or Keep())
