"""What a node offers to a run: its policies, its room, and how much of it is taken."""

from collections.abc import Mapping
from dataclasses import replace

from astraflow.core.ids import PolicyId
from astraflow.core.members import Capability, Contract, JoinPool, RaasLoad, ServedPolicy
from astraflow.core.tasks import TaskCredit
from astraflow.engines.protocol import TellsExperts
from astraflow.raas.policies import ServedModel
from astraflow.raas.settings import NodeSettings
from astraflow.weights.serve.relay_server import RelayServer


class Offer:
    """Says what a node has."""

    def __init__(
        self,
        settings: NodeSettings,
        models: Mapping[PolicyId, ServedModel],
        relays: RelayServer | None,
    ) -> None:
        """Prepare.

        Args:
            settings: What the node is.
            models: Of each policy.
            relays: Serves what is pulled; None: nobody does.
        """
        self._settings = settings
        self._models = models
        self._relays = relays

    def join_request(self, metrics_address: str) -> JoinPool:
        """Return what a node says when it joins; metrics_address empty: it has none."""
        settings = self._settings
        return JoinPool(
            name=settings.name,
            contract=Contract(capabilities=self._capabilities, software=settings.software),
            capacity=settings.capacity,
            policies=self._served,
            codes=settings.codes,
            resources=replace(settings.resources, metrics_address=metrics_address),
            region=settings.region,
            relay_endpoint=self._relays.endpoint if self._relays else "",
        )

    def renewed(self, join: JoinPool) -> JoinPool:
        """Return the same with the versions that are live now."""
        return replace(join, policies=self._served)

    def credit(self, headroom: int) -> TaskCredit:
        """Return how much work it takes, with so many samples on their way to it."""
        return TaskCredit(
            max_outstanding=self._settings.capacity + headroom,
            max_eval_outstanding=self._settings.max_eval_count,
            max_eval_extra=self._settings.eval_extra,
        )

    def load(self, *, running_count: int, queued_count: int) -> RaasLoad:
        """Return how busy it is at this instant.

        Args:
            running_count: Episodes in progress.
            queued_count: Samples that wait for a version or their turn.
        """
        loads = [model.engine.load() for model in self._models.values()]
        return RaasLoad(
            inflight_count=running_count,
            queued_count=queued_count,
            capacity=self._settings.capacity,
            kv_fraction=max((load.kv_fraction for load in loads), default=0.0),
            engine_queued_count=sum(load.queued_count for load in loads),
        )

    @property
    def _capabilities(self) -> frozenset[Capability]:
        relay = {Capability.RELAY} if self._relays else set[Capability]()
        engines = [model.engine for model in self._models.values()]
        tells = any(isinstance(each, TellsExperts) and each.tells_experts for each in engines)
        experts = {Capability.ROUTED_EXPERTS} if tells else set[Capability]()
        return frozenset({Capability.PIN_VERSION, *relay, *experts})

    @property
    def _served(self) -> tuple[ServedPolicy, ...]:
        return tuple(
            ServedPolicy(
                policy_id=policy_id,
                version=model.engine.version,
                identity=model.identity,
                max_context_token_count=model.engine.max_context_token_count,
            )
            for policy_id, model in self._models.items()
        )
