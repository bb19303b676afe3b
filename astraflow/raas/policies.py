"""Policies of a node: each has an engine, a tokenizer and a gate."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from astraflow.core.ids import PolicyId
from astraflow.core.members import ModelIdentity
from astraflow.core.tasks import RolloutTask, TaskPurpose, VersionRange
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
        identity: What the model is known by.
    """

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate = field(default_factory=ChatTemplate)
    identity: ModelIdentity = field(default_factory=ModelIdentity)


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
            policy_id: PolicyPort(
                policy_id=policy_id,
                engine=self.models[policy_id].engine,
                tokenizer=self.models[policy_id].tokenizer,
                sampling=seeded_sampling(task, sample_index, policy_id),
                version=version,
                template=self.models[policy_id].template,
                is_trained=task.purpose is TaskPurpose.TRAIN,
            )
            for policy_id, version in pinned.items()
        }
