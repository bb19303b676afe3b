"""Checkpoints: what an engine saves, there whole or not at all."""

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from astraflow.config.recipe import Keep
from astraflow.config.run_dir import RunDir
from astraflow.trainers.engine import TrainEngine
from astraflow.trainers.placing import drafted, drop_drafts, place
from astraflow.trainers.resume import OPTIMIZER_FILES, STATE_FILE
from astraflow.trainers.retention import thin_out

# The newest one may not be acknowledged yet; then its predecessor is resumed.
_RESUMABLE_COUNT = 2


class Checkpoints:
    """Writes the checkpoints of one policy into the folder of a run."""

    def __init__(self, engine: TrainEngine, *, run_dir: RunDir, policy_id: str) -> None:
        """Prepare; drafts of a predecessor that was killed go.

        Args:
            engine: Whose state is saved.
            run_dir: Where checkpoints go.
            policy_id: Whose.
        """
        self._engine = engine
        self._run_dir = run_dir
        self._policy_id = policy_id
        self._saved_step: int | None = None
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
            OSError: This one, or the one before, could not be written.
        """
        if self._last is not None:
            self._last.result()
        target = self._run_dir.checkpoint(self._policy_id, step)
        name = checkpoint_id or target.name
        if self._saved_step == step:
            finish = partial(_rename, target, checkpoint_id)
        else:
            state = {"step": step, "version": version, "checkpoint_id": name}
            finish = partial(self._finish, self._begun(target), target, state)
            self._saved_step = step

        def written() -> str:
            finish()
            then()
            return name

        self._last = self._writer.submit(written)
        return self._last

    def thin_out(self, keep: Keep | None = None) -> None:
        """Let go of what need not stay; without settings of all but the newest two."""
        thin_out(self._run_dir, self._policy_id, keep or Keep())

    def _begun(self, target: Path) -> Path:
        draft = drafted(target)
        self._engine.save(draft)
        return draft

    def _finish(self, draft: Path, target: Path, state: Mapping[str, object]) -> None:
        self._engine.wait_for_save()
        (draft / STATE_FILE).write_text(json.dumps(state) + "\n")
        place(draft, target)
        self._drop_optimizers()

    def _drop_optimizers(self) -> None:
        """Keep the optimizer's state, twice the weights, of the newest and the named ones alone."""
        folder = self._run_dir.checkpoints(self._policy_id)
        for path in sorted(folder.glob("step_*"))[:-_RESUMABLE_COUNT]:
            if _name_of(path) == path.name and _state_of(path).get("is_resumable", True):
                _amend(path, is_resumable=False)
                for name in OPTIMIZER_FILES:
                    _remove(path / name)


def _state_of(directory: Path) -> dict[str, object]:
    return json.loads((directory / STATE_FILE).read_text())


def _name_of(directory: Path) -> object:
    return _state_of(directory)["checkpoint_id"]


def _rename(directory: Path, checkpoint_id: str) -> None:
    """Call a checkpoint what the run does; empty: it has no name for it."""
    if checkpoint_id and _name_of(directory) != checkpoint_id:
        _amend(directory, checkpoint_id=checkpoint_id)


def _amend(directory: Path, **fields: object) -> None:
    """Say something else of a checkpoint."""
    path = directory / STATE_FILE
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(_state_of(directory) | fields) + "\n")
    draft.replace(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
