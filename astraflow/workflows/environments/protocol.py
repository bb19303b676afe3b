"""What a text environment is.

Environments run in a process of their own, perhaps in an interpreter of another version that has
none of this package's dependencies: this module needs the standard library alone, and so does
every adapter besides the package that it adapts.

Example: a whole environment.

    class Countdown:
        def __init__(self, start: int = 3) -> None:
            self._start = start

        def reset(self, task: Mapping[str, Any], seed: int) -> str:
            self._left = self._start
            return f"Count down from {self._left}, one number a turn."

        def step(self, action: str) -> Step:
            if action.strip() != str(self._left):
                return Step(f"Not {action}.", is_done=True)
            self._left -= 1
            return Step("Go on.", reward=1 / self._start, is_done=not self._left)

        def close(self) -> None:
            pass
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[str, Any]
"""Of a chat: `role` and `content`."""

Observation = str | Sequence[Message]
"""What the policy is told: text, which a user says, or messages."""


@dataclass(frozen=True)
class Step:
    """What came of an action.

    Attributes:
        observation: What the policy is told; not read after the last step.
        reward: Of this step.
        is_done: The episode is over.
        metrics: Numbers for the log; those of the last step count.
    """

    observation: Observation = ""
    reward: float = 0.0
    is_done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class Environment(Protocol):
    """One world, in which one episode at a time is played.

    Made with the recipe's `environment_options` as keywords. It is used again for other episodes,
    so what is dear (an import, a table, a Java VM) belongs in `__init__`, and all that an episode
    changes in `reset`. The global state of `random` is each environment's own.

    An action that is not legal is the policy's doing: say so in the observation. An exception is a
    fault of the environment: the episode is run again, never trained on.
    """

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """Begin an episode, and return what the policy sees first.

        Args:
            task: The row of the data set.
            seed: The same for all rollouts of a prompt: the row's own `seed`, or made of its id.
        """
        ...

    def step(self, action: str) -> Step:
        """Do what the policy says."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...
