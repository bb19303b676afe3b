"""TextWorldExpress: fast text games, of which some are made for teaching; needs Java."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from astraflow.workflows.environments.protocol import Step


class TextWorldExpress:
    """A game in a Java VM of its own; the score's growth is the reward."""

    def __init__(
        self,
        game: str,
        params: str = "",
        fold: str = "train",
        step_limit: int = 50,
        commands: bool = True,
    ) -> None:
        """Start Java.

        Args:
            game: Such as coin or cookingworld.
            params: Of the game, as in numLocations=1,includeDoors=0.
            fold: Whose seeds are played, unless a row has a `fold`: train, dev or test.
            step_limit: Steps at most.
            commands: Tell in each observation what can be done.
        """
        module: Any = import_module("textworld_express")
        self._game: Any = module.TextWorldExpressEnv(envStepLimit=step_limit)
        names = list(self._game.getGameNames())
        if game not in names:
            raise ValueError(f"game: '{game}' is none of {', '.join(names)}")
        self._game.load(gameName=game, gameParams=params)
        self._fold = fold
        self._commands = commands
        self._seeds: dict[str, list[int]] = {}

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Begin the game of the fold's seed number `seed`."""
        fold = str(task.get("fold", self._fold))
        seeds = self._seeds.get(fold)
        if seeds is None:
            seeds = self._seeds[fold] = getattr(self._game, f"getValidSeeds{fold.title()}")()
        number = seeds[seed % len(seeds)]
        said, infos = self._game.reset(seed=number, gameFold=fold)
        return self._told(infos, f"{infos['taskDescription']}\n\n{said}")

    def step(self, action: str) -> Step:
        """Type a command."""
        said, reward, is_done, infos = self._game.step(action.strip())
        metrics = {"won": float(infos["tasksuccess"])}
        return Step(self._told(infos, said), float(reward), is_done, metrics)

    def close(self) -> None:
        """End Java."""
        self._game.close()

    def _told(self, infos: Mapping[str, Any], text: str) -> str:
        if not self._commands:
            return text.strip()
        return f"{text.strip()}\nYou can: {', '.join(sorted(infos['validActions']))}"
