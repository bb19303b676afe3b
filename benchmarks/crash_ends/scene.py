"""The folder that the processes of one run share, and what each of them notes in it."""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir
from astraflow.testing import small_recipe

POLICY: Final = "solver"
JOIN: Final = "join"
OPERATOR: Final = "operator"
GROUP_SIZE: Final = 2
# A silent member's work is issued again after so long.
TTL_S: Final = 1.0
CHECKPOINT_EVERY: Final = 3


@dataclass(frozen=True, slots=True)
class Scene:
    """Names of what lies in the folder of one run."""

    root: Path

    @property
    def run_dir(self) -> RunDir:
        """Folder of the hub."""
        return RunDir(self.root / "run")

    @property
    def recipe(self) -> Path:
        """As JSON."""
        return self.root / "recipe.json"

    @property
    def acked(self) -> Path:
        """What the hub acknowledged to nodes, line by line."""
        return self.root / "acked.jsonl"

    @property
    def trained(self) -> Path:
        """What trainers did, line by line."""
        return self.root / "trained.jsonl"

    @property
    def payloads(self) -> Path:
        """Folder of the payload store."""
        return self.root / "payloads"

    @property
    def checkpoints(self) -> Path:
        """Folder of the trainers'."""
        return self.root / "checkpoints"

    @property
    def allowed(self) -> Path:
        """How many steps a trainer may do."""
        return self.root / "allowed"

    @property
    def copied(self) -> Path:
        """How many records of the journal the archive has."""
        return self.root / "copied"

    def log(self, name: str) -> Path:
        """What a process says."""
        return self.root / "logs" / f"{name}.log"

    def read_recipe(self) -> Recipe:
        """Return the recipe of the run."""
        return Recipe.model_validate_json(self.recipe.read_text())


def set_scene(
    root: Path,
    *,
    step_count: int,
    compact_nbytes: int,
    more: Mapping[str, Any] | None = None,
    has_payloads: bool = False,
) -> Scene:
    """Make the folder of a run.

    Args:
        root: Gets everything.
        step_count: Of the trainer.
        compact_nbytes: Of the journal.
        more: Further keys of the recipe.
        has_payloads: Whether all rollouts go by way of a payload store, in the same folder.
    """
    root.mkdir(parents=True)
    scene = Scene(root)
    store = {"url": f"file://{scene.payloads}", "above_nbytes": 0}
    changes: dict[str, Any] = {
        f"policies.{POLICY}.trainer.step_count": step_count,
        "rollouts.group_size": GROUP_SIZE,
        "hub.session_ttl_s": TTL_S,
        "hub.journal.compact_nbytes": compact_nbytes,
        **(more or {}),
        **({"rollouts.payloads": store} if has_payloads else {}),
    }
    prompts = [{"prompt": f"row {number}"} for number in range(40 * step_count)]
    recipe = small_recipe(root, prompts=prompts, changes=changes)
    scene.recipe.write_text(recipe.model_dump_json())
    scene.checkpoints.mkdir()
    allow(scene, 0)
    return scene


def allow(scene: Scene, steps: int) -> None:
    """Let trainers go on up to a step."""
    replace_with(scene.allowed, str(steps))


def replace_with(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as draft:
        draft.write(text)
    Path(draft.name).replace(path)


def note(path: Path, row: Mapping[str, Any]) -> None:
    """Append a line with one write: it is there whole when this returns, whoever dies then."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, json.dumps(row).encode() + b"\n")
    finally:
        os.close(descriptor)


def notes(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
