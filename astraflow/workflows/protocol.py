"""What a user writes: a workflow or a scorer. `ports` has what these are given.

Example: a whole workflow.

    @workflow("polite")
    class Polite:
        class Options(Strict):
            greeting: str = "Please: "

        def __init__(self, options: Options, scorer: Scorer | None) -> None:
            self._greeting, self._scorer = options.greeting, needs_scorer(scorer)

        async def run(self, episode: Episode) -> Score:
            talk = episode.trajectory()
            talk.observe(self._greeting + episode.prompt.fields["prompt"])
            reply = await talk.sample()
            return await self._scorer.score(episode.prompt, reply.text)

What the policy did badly is a low reward; where its own output ends the episode, such as a program
that hangs, it is a `PolicyFault`. What an engine or an environment did badly is an
`AstraflowError`: the sample is run again or given up, never trained on.
"""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from astraflow.core.tasks import Prompt
from astraflow.workflows.episode import Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What an answer, or a whole episode, is worth.

    Attributes:
        reward: What is trained on.
        parts: What the reward is made of, or what kind of answer it was, by name.
        metrics: Numbers for the log; means over rollouts are shown.
        truncated: A token or turn budget ended the episode.
    """

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    truncated: bool = False


class PolicyFault(Exception):  # noqa: N818 - an answer to what the policy did, no error of ours
    """Ends an episode that the policy's own output broke: it counts, as a bad answer does.

    A program of the policy that hangs, crashes, exits or breaks its limits; a tool call that the
    recipe does not let pass. Workflows, scorers, sandboxes and environments raise it. What was
    sampled is kept and trained on with the fault's reward, and never tried again.

    Example:
        >>> raise PolicyFault("the program took longer than 5 s", parts={"timeout": 1.0})
        Traceback (most recent call last):
        ...
        astraflow.workflows.protocol.PolicyFault: the program took longer than 5 s
    """

    def __init__(
        self,
        message: str,
        *,
        reward: float | None = None,
        parts: Mapping[str, float] | None = None,
    ) -> None:
        """Say what the policy did.

        Args:
            message: For people: what hung, crashed or broke which limit.
            reward: None: the recipe's `rollouts.policy_fault_reward`.
            parts: Of the reward, by name.
        """
        super().__init__(message)
        self.message = message
        self.reward = reward
        self.parts = dict(parts or {})


class Scorer(Protocol):
    """Says what an answer to a prompt is worth: a function, or an object made from options.

    A scorer that takes more than a millisecond is `async` and leaves the event loop free.
    An exception is a failure of the scorer, never a reward of 0; but for a `PolicyFault`.

    Two more methods are looked for, which `astraflow check` calls before a run: `gold(prompt) ->
    str | None` returns an answer that is right, None where none is known (without the method it is
    the row's field `answer`); `lacks() -> Iterable[str]` yields what it needs and this machine does
    not have, as "what is missing; what to do". A workflow may have `lacks`, too. A
    third, `close()`, lets go of what it holds when the node leaves.
    """

    def __call__(self, prompt: Prompt, text: str, /) -> "Score | float | Awaitable[Score | float]":
        """Return what `text` is worth as an answer to `prompt`."""
        ...


class Workflow(Protocol):
    """Turns a prompt into a rollout; one object runs many episodes at a time."""

    async def run(self, episode: Episode, /) -> Score | float:
        """Run one episode; the tokens that its trajectories hold are trained on.

        Raises:
            PolicyFault: What the policy's own output did.
            AstraflowError: What is not the policy's fault, such as ENVIRONMENT_FAILED.
        """
        ...
