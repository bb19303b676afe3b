"""ALFWorld: household tasks as text; game files are the user's."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from astraflow.workflows.environments.protocol import Step


class AlfWorld:
    """A task in a house; the reward is 1 when it is done."""

    def __init__(self, folder: str = "", commands: bool = True) -> None:
        """Find the games.

        Args:
            folder: Has game.tw-pddl files, at any depth, such as json_2.1.1/train of ALFWorld's
                data; seed n plays number n of them, in the order of their paths. Empty: a row's
                field `game` is the path of one.
            commands: Tell in each observation what can be done.
        """
        self._textworld: Any = import_module("textworld")
        self._engine: Any = import_module("textworld.envs").PddlEnv
        self._alfworld: Any = import_module("alfworld.agents.environment.alfred_tw_env")
        self._games = sorted(Path(folder).rglob("*.tw-pddl")) if folder else []
        if folder and not self._games:
            raise ValueError(f"folder: there is no game.tw-pddl below {folder}")
        self._commands = commands
        self._game: Any = None

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Begin a game."""
        self.close()
        path = Path(task["game"]) if "game" in task else self._games[seed % len(self._games)]
        if not path.is_file():
            raise FileNotFoundError(f"there is no game {path}")
        infos = self._textworld.EnvInfos(admissible_commands=True, won=True)
        # Without it objects are called by their ids.
        self._game = self._alfworld.AlfredDemangler(self._engine(infos), shuffle=False)
        self._game.load(str(path))
        state = self._game.reset()
        _, _, scene = state.feedback.partition("=-\n")
        return self._told(state, scene or state.feedback)

    def step(self, action: str) -> Step:
        """Type a command."""
        state, _, is_done = self._game.step(action.strip())
        won = float(bool(state["won"]))
        return Step(self._told(state, state.feedback), won, bool(is_done), {"won": won})

    def close(self) -> None:
        """End the game."""
        if self._game is not None:
            self._game.close()
            self._game = None

    def _told(self, state: Any, text: str) -> str:
        if not self._commands:
            return text.strip()
        return f"{text.strip()}\nYou can: {', '.join(sorted(state['admissible_commands']))}"
