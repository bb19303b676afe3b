"""Real nodes with small engines, each on a line of its own."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from astraflow.config.recipe import Recipe
from astraflow.core.ids import PolicyId
from astraflow.core.versions import SourceKind
from astraflow.raas.node import NodeDeparture, NodeSettings, RaasNode
from astraflow.raas.policies import ServedModel
from astraflow.raas.updater import Puller, VersionFollower
from astraflow.testing.engine import SmallEngine
from astraflow.testing.line import Line
from astraflow.weights.fetch.puller import WeightPuller
from astraflow.weights.serve.server import RelayServer
from astraflow.workflows.building import recipe_codes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LiveNode:
    """A node that runs.

    Attributes:
        name: Unique in the pool.
        node: For `drain` and `stop`.
        engines: By policy.
        line: Its way to the hub, with the switches.
        left: Done when it has left.
    """

    name: str
    node: RaasNode
    engines: Mapping[str, SmallEngine]
    line: Line
    left: asyncio.Task[NodeDeparture]

    @property
    def engine(self) -> SmallEngine:
        """The engine of the first policy."""
        return next(iter(self.engines.values()))

    async def kill(self) -> None:
        """End it as `kill -9` does: nobody is told."""
        self.line.unplug()
        self.left.cancel()
        await asyncio.wait({self.left})


def make_node(
    recipe: Recipe,
    *,
    hub: str,
    token: str,
    name: str,
    capacity: int,
    eval_extra: int = 0,
    models: Mapping[str, ServedModel],
    relays: RelayServer | None = None,
    kinds: frozenset[SourceKind] | None = None,
    patience_s: float = 5.0,
) -> RaasNode:
    """Return a node that has every workflow of a recipe and, for engines, pulls real weights."""

    def puller(policy_id: PolicyId) -> Puller:
        if recipe.raas.engine.kind == "none":
            return VersionFollower(policy_id)
        return WeightPuller(policy_id, relay=relays and relays.relays[policy_id], kinds=kinds)

    return RaasNode(
        NodeSettings(
            hub=hub,
            token=token,
            name=name,
            capacity=capacity,
            eval_extra=eval_extra,
            codes=recipe_codes(recipe),
            patience_s=patience_s,
            kinds=kinds,
        ),
        models={PolicyId(policy): model for policy, model in models.items()},
        puller=puller,
        relays=relays,
    )
