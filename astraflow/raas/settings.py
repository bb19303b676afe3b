"""What a node is, and where it stands."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from astraflow.config.pool import Agents
from astraflow.core.ids import PolicyId
from astraflow.core.members import Resources
from astraflow.core.tasks import RegisteredCode
from astraflow.core.versions import SourceKind
from astraflow.rpc.tls import Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What a node is.

    Attributes:
        hub: host:port.
        token: The run's join token.
        name: Unique in the pool.
        capacity: Rollouts that it runs at once.
        max_eval_count: Of them, what evaluations may take; None: all.
        eval_extra: Rollouts of evaluations that it runs beyond its capacity.
        codes: Workflows and scorers that it has.
        resources: What it runs on.
        region: Where it stands; empty: unknown.
        software: Name and release, for people.
        tls: None: plain text.
        patience_s: How long the hub is tried again while it cannot be reached.
        kinds: Of the sources that weights are pulled from; None: all.
        ask_every: Tasks after which it asks for a newer version, by policy; left out: never.
        agents: How agents reach its policies.
    """

    hub: str
    token: str = field(repr=False)
    name: str
    capacity: int
    max_eval_count: int | None = None
    eval_extra: int = 0
    codes: tuple[RegisteredCode, ...] = ()
    resources: Resources = field(default_factory=Resources)
    region: str = ""
    software: str = "astraflow"
    tls: Tls | None = None
    patience_s: float = 30.0
    kinds: frozenset[SourceKind] | None = None
    ask_every: Mapping[PolicyId, int] = field(default_factory=dict[PolicyId, int])
    agents: Agents = field(default_factory=Agents)
