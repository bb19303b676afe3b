"""What the gateway is told: the run, its policies, its limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from astraflow.config.recipe import Recipe
from astraflow.core.ids import PolicyId
from astraflow.core.tasks import RegisteredCode
from astraflow.engines.models import first_model
from astraflow.gateway.edge.bodies import BodyRules
from astraflow.gateway.edge.peers import DialRules
from astraflow.rpc.tls import Tls

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPolicy:
    """A policy that a trainer may join for.

    Attributes:
        policy_id: `model_id` of the HTTP endpoints.
        groups_per_batch: Of its batches.
        row_count: Sequences of a batch in which every rollout has one trajectory.
        model_dir: Its first weights; None: a trainer brings them (recovered_version).
    """

    policy_id: PolicyId
    groups_per_batch: int
    row_count: int
    model_dir: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """What the gateway is.

    Attributes:
        hub: host:port.
        token: The run's join token.
        operator_token: For /status, /raas_pool and /shutdown; None: these are not served.
        policies: By id, in the recipe's order.
        group_size: Rollouts of a prompt.
        codes: Workflows and scorers that an HTTP RaaS is taken to have, by name.
        host: On which it listens, and under which peers dial back.
        rules: Of bodies.
        dial: Weight senders and RaaS that may be dialled.
        http_token: That callers show; empty: they show none.
        http_tls: Of the endpoints; None: plain text.
        batch_timeout_s: How long /batch waits; then it says 504.
        transfer_timeout_s: For one transfer of weights.
        silence_s: A trainer that asks nothing for so long has gone: what it holds returns.
        patience_s: How long the hub is tried again while it cannot be reached.
        tls: Of the hub; None: plain text.
    """

    hub: str
    token: str = field(repr=False)
    operator_token: str | None = field(default=None, repr=False)
    policies: Mapping[PolicyId, GatewayPolicy]
    group_size: int = 1
    codes: tuple[RegisteredCode, ...] = ()
    host: str = "127.0.0.1"
    rules: BodyRules = field(default_factory=BodyRules)
    dial: DialRules = field(default_factory=DialRules)
    http_token: str = field(default="", repr=False)
    http_tls: Tls | None = None
    batch_timeout_s: float = 3500.0
    transfer_timeout_s: float = 600.0
    silence_s: float = 3600.0
    patience_s: float = 30.0
    tls: Tls | None = None


def policies_of(
    recipe: Recipe, models: Mapping[str, Path] | None = None
) -> dict[PolicyId, GatewayPolicy]:
    """Return what the gateway needs of the policies of a recipe.

    Args:
        recipe: Of the run.
        models: Model directory by policy; a policy left out: the recipe's.
    """
    return {
        PolicyId(name): GatewayPolicy(
            policy_id=PolicyId(name),
            groups_per_batch=policy.trainer.groups_per_batch,
            row_count=policy.trainer.groups_per_batch * recipe.rollouts.group_size,
            model_dir=(models or {}).get(name) or first_model(policy.model, report=log.info),
        )
        for name, policy in recipe.policies.items()
    }


def codes_of(recipe: Recipe) -> tuple[RegisteredCode, ...]:
    """Return the workflows and scorers of a recipe, by name: nobody compares their sources."""
    names = [
        name for each in recipe.workflows.values() for name in (each.name, each.scorer) if name
    ]
    return tuple(RegisteredCode(name=name) for name in dict.fromkeys(names))
