"""The games of textarena for one player."""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from astraflow.workflows.environments.protocol import Step

# As games call who plays.
_NAMES = ("[Player]", "[Player 0]", "[GAME]")


class TextArena:
    """A game that is played alone; the row's `seed` is the game's.

    A game tells all that was said so far in every observation; only what is new is passed on,
    for a chat has the rest already.
    """

    def __init__(self, game: str, **settings: Any) -> None:
        """Make a game.

        Args:
            game: Its name, such as GuessTheNumber-v0.
            settings: Of the game.
        """
        arena: Any = import_module("textarena")
        registry: Any = import_module("textarena.envs.registration").ENV_REGISTRY
        if game not in registry:
            raise ValueError(f"game: '{game}' is none of textarena's {len(registry)} games")
        self._make = partial(arena.make, game, **settings)
        self._game = self._make()
        self._seen = ""

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Begin a game."""
        del task
        # Its wrappers remember the game before.
        self._game = self._make()
        self._game.reset(num_players=1, seed=seed)
        _, self._seen = self._game.get_observation()
        return self._seen.strip()

    def step(self, action: str) -> Step:
        """Play a move."""
        is_done, _ = self._game.step(action)
        if is_done:
            rewards, info = self._game.close()
            is_invalid = bool(info[0].get("invalid_move"))
            metrics = {"invalid": float(is_invalid), "moves": float(info[0]["turn_count"])}
            return Step(reward=float(rewards[0]), is_done=True, metrics=metrics)
        _, said = self._game.get_observation()
        new = said.removeprefix(self._seen)
        self._seen = said
        # What the policy said itself stands first, in brackets that it may have left out.
        for echo in (f"{name} {words}" for name in _NAMES for words in (action, f"[{action}]")):
            new = new.strip().removeprefix(echo)
        return Step(observation=new.strip())

    def close(self) -> None:
        """Nothing to let go of."""
