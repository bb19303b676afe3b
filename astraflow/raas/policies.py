"""Policies of a node: each has an engine, a tokenizer and a gate."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from astraflow.core.ids import PolicyId
from astraflow.core.members import ModelIdentity
from astraflow.core.tasks import RolloutTask, VersionRange
from astraflow.engines.protocol import Engine
from astraflow.raas.gate import VersionGate
from astraflow.raas.seeds import seeded_sampling
from astraflow.workflows.agents.template import ChatTemplate
from astraflow.workflows.ports import PolicyPort, Tokenizer

_ANY = VersionRange()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedModel:
    """What a node has for one policy.

    Attributes:
        engine: Samples.
        tokenizer: Of its model.
        template: Of its chats.
        turn_end_ids: End an answer beside the engine's own end tokens.
        identity: What the model is known by.
    """

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate = field(default_factory=ChatTemplate)
    turn_end_ids: tuple[int, ...] = ()
    identity: ModelIdentity = field(default_factory=ModelIdentity)

    def port(
        self, policy_id: PolicyId, task: RolloutTask, sample_index: int, version: int | None = None
    ) -> PolicyPort:
        """Return what one episode samples with.

        Args:
            policy_id: Whom it serves.
            task: What is asked for.
            sample_index: Which of its samples.
            version: Pins every token to it; None: whatever is live.
        """
        sampling = seeded_sampling(task, sample_index, policy_id)
        ends = (*sampling.stop_token_ids, *self.turn_end_ids)
        return PolicyPort(
            policy_id=policy_id,
            engine=self.engine,
            tokenizer=self.tokenizer,
            sampling=replace(sampling, stop_token_ids=ends),
            version=version,
            template=self.template,
        )


class PolicyDesk:
    """Gives episodes their ports, at versions that their task may sample with."""

    def __init__(self, models: Mapping[PolicyId, ServedModel]) -> None:
        self.models = models
        self.gates = {
            policy_id: VersionGate(policy_id, model.engine) for policy_id, model in models.items()
        }

    async def admit(
        self, task: RolloutTask, policy_ids: Sequence[PolicyId]
    ) -> Mapping[PolicyId, int | None]:
        """Wait until every policy of a task can be sampled from.

        Args:
            task: Bounds their versions.
            policy_ids: The policies of its workflow, in their order.

        Returns:
            The pinned version of each policy, to be given to `dismiss`; None: the live one.

        Raises:
            AstraflowError: VERSION_NOT_SERVED.
        """
        pinned: dict[PolicyId, int | None] = {}
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.dismiss, pinned)
            for policy_id in policy_ids:
                versions = task.versions.get(policy_id, _ANY)
                pinned[policy_id] = await self.gates[policy_id].enter(versions)
            undo.pop_all()
        return pinned

    async def dismiss(self, pinned: Mapping[PolicyId, int | None]) -> None:
        """Let the versions of a task go."""
        for policy_id, version in pinned.items():
            await self.gates[policy_id].leave(version)

    def ports(
        self, task: RolloutTask, sample_index: int, pinned: Mapping[PolicyId, int | None]
    ) -> Mapping[PolicyId, PolicyPort]:
        """Return what one episode samples with, in the order of `pinned`."""
        return {
            policy_id: self.models[policy_id].port(policy_id, task, sample_index, version)
            for policy_id, version in pinned.items()
        }
