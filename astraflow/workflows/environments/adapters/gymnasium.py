"""Environments with the methods of Gymnasium whose observations and actions are text."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from astraflow.workflows.environments.protocol import Step


class Gymnasium:
    """`reset(seed=)` and `step(action)`, of Gymnasium or of a package like it."""

    def __init__(self, make: str = "gymnasium:make", **settings: Any) -> None:
        """Make an environment.

        Args:
            make: What makes it, module:attribute; a class will do.
            settings: Keywords of that, such as `id`.
        """
        module, _, attribute = make.partition(":")
        self._environment: Any = getattr(import_module(module), attribute)(**settings)

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Begin an episode; a row's `options` are those of `reset`."""
        options = {"options": task["options"]} if "options" in task else {}
        observation, info = self._environment.reset(seed=seed, **options)
        return _text(observation, info)

    def step(self, action: str) -> Step:
        """Do what the policy says."""
        observation, reward, is_over, is_cut, info = self._environment.step(action)
        is_done = bool(is_over or is_cut)
        return Step(_text(observation, info), float(reward), is_done, _numbers(info))

    def close(self) -> None:
        """Close the environment, where it can be."""
        getattr(self._environment, "close", lambda: None)()


class Gem(Gymnasium):
    """An environment of gem."""

    def __init__(self, id: str, **settings: Any) -> None:  # noqa: A002 - gem's own word
        """Make an environment.

        Args:
            id: Its name, such as game:GuessTheNumber-v0-easy.
            settings: Of the environment.
        """
        super().__init__("gem:make", env_id=id, **settings)


def _text(observation: Any, info: Mapping[str, Any]) -> str:
    if not isinstance(observation, str):
        raise TypeError(f"the observation is {type(observation).__name__}, not text; wrap it")
    # Gem's way to ask for the next action.
    return "\n".join(filter(None, (observation, info.get("suffix"))))


def _numbers(info: Mapping[str, Any]) -> dict[str, float]:
    given = {name: value for name, value in info.items() if isinstance(value, bool | int | float)}
    return {name: float(value) for name, value in given.items()}
