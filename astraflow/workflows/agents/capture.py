"""Capture: what an agent samples from one policy in one episode."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import structlog

from astraflow.core.rollouts import Trajectory
from astraflow.engines.protocol import Watch
from astraflow.workflows.agents.prompts import Chats, Texts
from astraflow.workflows.ports import PolicyPort
from astraflow.workflows.seeds import mixed_seed, trajectory_seed
from astraflow.workflows.turns import Owner, Turn, TurnTree, trajectories_of

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Capture:
    """Samples from a policy and keeps every turn.

    Attributes:
        port: The policy.
        chats: Makes prompts of messages.
        texts: Makes prompts of texts.
    """

    def __init__(self, port: PolicyPort, *, prefix: str) -> None:
        """Start without a turn.

        Args:
            port: How the policy is reached.
            prefix: Of the ids of its trajectories.
        """
        self.port = port
        self.chats = Chats(port.template, port.tokenizer)
        self.texts = Texts(port.tokenizer)
        self._tree = TurnTree()
        self._prefix = f"{prefix}/{port.policy_id}"

    @property
    def turns(self) -> Sequence[Turn]:
        """In the order in which they ended."""
        return self._tree.turns

    async def sample(
        self,
        prompt: Sequence[int],
        *,
        overrides: dict[str, Any],
        seed: int | None = None,
        watch: Watch | None = None,
    ) -> Turn:
        """Sample one completion.

        Args:
            prompt: Token ids.
            overrides: Fields of SamplingParams that differ from the task's.
            seed: Of the agent's choice; mixed with the sample's own, so that the rollouts of a
                group differ.
            watch: Told what was sampled while it goes on.

        Raises:
            AstraflowError: CONTEXT_TOO_LONG, and what the engine raises.
        """
        port, opening = self.port, self._tree.open(prompt)
        own_seed = trajectory_seed(port.sampling.seed, opening.branch)
        chosen = own_seed if seed is None else mixed_seed(own_seed, seed)
        wanted = replace(port.sampling, **overrides, seed=chosen)
        before = None if opening.parent is None else opening.parent.sampling
        generation, sampling = await port.generate(prompt, wanted, before=before, watch=watch)
        if not port.is_trained:  # no trainer scores it, so all of it counts
            generation = replace(generation, constrained=None)
        sampling = replace(sampling, grammar=None, top_logprobs=0)
        return self._tree.add(opening, generation, sampling)

    def trajectories(self) -> Iterator[Trajectory]:
        """Yield one per branch in which anything can be trained on."""
        owner = Owner(policy_id=self.port.policy_id, agent="", engine=self.port.engine.name)
        made = list(trajectories_of(self._tree, owner, prefix=self._prefix))
        if self.turns and not made:
            log.warning(
                "nothing of an episode can be trained on: grammars (response_format, tool_choice) "
                "changed every draw; ask for them in fewer turns, or in the prompt",
                policy=self.port.policy_id,
            )
        return iter(made)
