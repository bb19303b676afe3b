"""TextWorld: games of a file, or made here from a seed."""

import argparse
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from astraflow.workflows.environments.protocol import Step


class TextWorld:
    """A text adventure; the score's growth, as a share of the most that there is, is the reward."""

    def __init__(
        self,
        challenge: str = "",
        folder: str = "",
        settings: Mapping[str, Any] | None = None,
        commands: bool = True,
    ) -> None:
        """Prepare.

        Args:
            challenge: A family of games that are made here, such as tw-coin_collector, one for a
                seed; empty: a row's field `game` is the path of one.
            folder: Keeps the games that were made, which takes seconds each; relative to where the
                node runs.
            settings: Of the challenge, as `tw-make CHALLENGE --help` lists them.
            commands: Tell in each observation what can be done.
        """
        self._textworld: Any = import_module("textworld")
        if challenge and not folder:
            raise ValueError("folder: name one that keeps the games")
        known: Any = import_module("textworld.challenges").CHALLENGES
        if challenge and challenge not in known:
            raise ValueError(f"challenge: '{challenge}' is none of {', '.join(sorted(known))}")
        self._challenge = challenge
        self._folder = Path(folder).absolute()
        self._settings = dict(settings or {})
        self._commands = commands
        self._game: Any = None
        self._score = 0.0
        self._most = 1.0

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Begin a game."""
        path = str(task["game"]) if not self._challenge else self._made(seed)
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no game {path}")
        self.close()
        infos = self._textworld.EnvInfos(
            admissible_commands=True, won=True, lost=True, max_score=True, objective=True
        )
        self._game = self._textworld.start(path, infos)
        state = self._game.reset()
        self._score, self._most = 0.0, float(state["max_score"] or 1)
        return self._told(state, f"{state['objective']}\n\n{_without_banner(state.feedback)}")

    def step(self, action: str) -> Step:
        """Type a command."""
        state, score, is_done = self._game.step(action.strip())
        gain, self._score = (score - self._score) / self._most, score
        metrics = {"won": float(bool(state["won"]))}
        return Step(self._told(state, state.feedback), gain, bool(is_done), metrics)

    def close(self) -> None:
        """End the game."""
        if self._game is not None:
            self._game.close()
            self._game = None

    def _told(self, state: Any, text: str) -> str:
        said = text.strip()
        if not self._commands:
            return said
        return f"{said}\nYou can: {', '.join(state['admissible_commands'])}"

    def _made(self, seed: int) -> str:
        """Return the path of the game of a seed; another process may make it at the same time."""
        challenges: Any = import_module("textworld.challenges").CHALLENGES
        _, make, add_arguments = challenges[self._challenge]
        words = "-".join(f"{key}_{value}" for key, value in sorted(self._settings.items()))
        path = self._folder / f"{'-'.join(filter(None, (self._challenge, words)))}-{seed}.z8"
        if path.is_file():
            return str(path)
        self._folder.mkdir(parents=True, exist_ok=True)
        parser = argparse.ArgumentParser(exit_on_error=False)
        add_arguments(parser)
        given = [f"--{key}={value}" for key, value in self._settings.items()]
        options = self._textworld.GameOptions()
        options.seeds = seed
        draft = path.with_name(f"{os.getpid()}-{path.name}")
        options.path = str(draft)
        settings = vars(parser.parse_args(given))
        self._textworld.generator.compile_game(make(settings, options), options)
        # The rules beside it carry its name.
        beside = draft.with_suffix(".json")
        if beside.is_file():
            beside.replace(path.with_suffix(".json"))
        draft.replace(path)
        return str(path)


def _without_banner(text: str) -> str:
    """Return what a game says first, without the title in letters of letters."""
    _, is_there, rest = text.partition("-=")
    return f"{is_there}{rest}" if is_there else text
