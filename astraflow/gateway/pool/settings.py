"""What a pool is told: the recipe of its nodes, its name, its limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import structlog

from astraflow.config.recipe import Recipe
from astraflow.core.ids import PolicyId
from astraflow.engines.models import first_model
from astraflow.gateway.edge.bodies import BodyRules
from astraflow.gateway.edge.peers import DialRules
from astraflow.rpc.tls import Tls

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """What the pool is.

    Attributes:
        recipe: Workflows, sampling, first weights.
        token: With which nodes join.
        listen: host:port for nodes; port 0 takes a free one.
        uid: Its name at the Dataflow.
        models: Directory of the first weights by policy; one left out: the recipe's.
        rules: Of bodies.
        dial: Weight senders that may be dialled.
        http_token: That callers show; empty: they show none.
        tls: For nodes; None: plain text.
    """

    recipe: Recipe
    token: str = field(repr=False)
    listen: str = "127.0.0.1:0"
    uid: str = field(default_factory=lambda: f"raas-{uuid4().hex[:6]}")
    models: Mapping[str, Path] = field(default_factory=dict[str, Path])
    rules: BodyRules = field(default_factory=BodyRules)
    dial: DialRules = field(default_factory=DialRules)
    http_token: str = field(default="", repr=False)
    tls: Tls | None = None

    @property
    def policy_ids(self) -> tuple[PolicyId, ...]:
        """Of the recipe, in its order."""
        return tuple(map(PolicyId, self.recipe.policies))

    def first_model(self, policy_id: PolicyId) -> Path | None:
        """Return the directory of a policy's first weights; None: a trainer brings them."""
        model = self.recipe.policies[policy_id].model
        return self.models.get(policy_id) or first_model(model, report=log.info)
