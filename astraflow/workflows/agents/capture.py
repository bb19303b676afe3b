"""Capture: what an agent samples from one policy in one episode."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from astraflow.core.rollouts import Trajectory
from astraflow.engines.protocol import Watch
from astraflow.telemetry.traces import span
from astraflow.workflows.agents.prompts import Chats, Texts
from astraflow.workflows.agents.turns import Owner, Turn, TurnTree, trajectories_of
from astraflow.workflows.ports import PolicyPort
from astraflow.workflows.seeds import mixed_seed, trajectory_seed


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
        self._owner = Owner(
            prefix=f"{prefix}/{port.policy_id}",
            policy_id=port.policy_id,
            agent="",
            engine=port.engine.name,
        )

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
        sampling = port.fit(
            replace(port.sampling, **overrides, seed=chosen),
            len(prompt),
            before=None if opening.parent is None else opening.parent.sampling,
        )
        with span("gen_ai.generate", prompt_token_count=len(prompt), policy=port.policy_id):
            generation = await port.engine.generate(
                prompt, sampling, version=port.version, watch=watch
            )
        return self._tree.add(opening, generation, sampling)

    def trajectories(self) -> Iterator[Trajectory]:
        """Yield one per branch."""
        return trajectories_of(self._tree, self._owner)
