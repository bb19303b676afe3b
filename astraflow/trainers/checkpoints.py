"""Checkpoints: Hugging Face directories, there whole or not at all."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, cast

from torch import nn

from astraflow.config.run_dir import RunDir

# What belongs to a model beside its weights and config.json, where it has it.
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


class Checkpoints:
    """Writes the weights of one policy into the folder of a run."""

    def __init__(
        self, module: nn.Module, *, model_dir: Path, run_dir: RunDir, policy_id: str
    ) -> None:
        """Prepare.

        Args:
            module: The weights to save, in f32.
            model_dir: Where the tokenizer lies that belongs to them.
            run_dir: Where checkpoints go.
            policy_id: Whose.
        """
        self._module = module
        self._model_dir = model_dir
        self._run_dir = run_dir
        self._policy_id = policy_id
        self._saved_step: int | None = None

    def save(self, *, step: int, version: int) -> str:
        """Write the present weights, unless those of this step are there; return the name."""
        target = self._run_dir.checkpoint(self._policy_id, step)
        if self._saved_step != step:
            state = {"step": step, "version": version}
            save_model(self._module, target, companions_of=self._model_dir, state=state)
            self._saved_step = step
        return target.name


def save_model(
    module: nn.Module,
    target: Path,
    *,
    companions_of: Path | None = None,
    state: dict[str, Any] | None = None,
) -> None:
    """Write a Hugging Face directory; a reader sees all of it or nothing.

    Args:
        module: A Hugging Face model.
        target: The directory; one that is there is replaced.
        companions_of: Directory whose tokenizer files are copied.
        state: Written as `trainer_state.json`.
    """
    draft = target.with_name(f".{target.name}.{os.getpid()}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    cast("Any", module).save_pretrained(draft)
    for name in _COMPANIONS if companions_of else ():
        source = cast("Path", companions_of) / name
        if source.exists():
            shutil.copyfile(source, draft / name)
    if state is not None:
        (draft / "trainer_state.json").write_text(json.dumps(state) + "\n")
    place(draft, target)


def place(draft: Path, target: Path) -> None:
    """Move a finished directory to where readers look; an older one there gives way."""
    for path in draft.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        draft.rename(target)
    except OSError:
        old = draft.with_suffix(".old")
        target.rename(old)
        draft.rename(target)
        shutil.rmtree(old)
