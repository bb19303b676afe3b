"""The pool of a recipe: rollout nodes, and how many of them."""

from math import ceil
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from astraflow.config.engine import Engine
from astraflow.config.services import Tls
from astraflow.config.strict import LaneChoice, Strict


class Relay(Strict):
    """Rollout nodes pass on what they pull, so that a region costs the trainer one transfer.

    Over gRPC and, where `raas.lanes` has tcp and there is no TLS, over TCP.
    """

    mode: Literal["auto", "off"] = "auto"
    """auto: where others can dial the node, which is when `listen` is set or the hub is on
    loopback. Off: never."""
    listen: str | None = None
    """host:port; port 0 takes a free one. Set it with a hub that is not on loopback. TCP is on the
    port above it, when that is free."""
    advertise: str | None = None
    """How others dial it: auto, fqdn, or a host or IP; unset: as listened on."""


class Agents(Strict):
    """How agents of any make reach the policies of a node, over OpenAI's API."""

    listen: str = "127.0.0.1:0"
    """host:port of each node; port 0 takes a free one. It is listened on when a workflow needs
    it. What it serves needs no more than the key of an episode: leave it on loopback unless the
    network is yours."""
    advertise: str | None = None
    """How agents dial it: auto, fqdn, or a host or IP; unset: as listened on."""
    max_requests: int = Field(default=1024, ge=1)
    """Generations at once; more are answered with 429 and Retry-After."""
    max_body_nbytes: int = Field(default=8 * 2**20, ge=1024)
    """Bytes of a request; a larger one is answered with 413."""
    patience_s: float = Field(default=20.0, gt=0)
    """Seconds that a client may take for the head of a request, and again for its body."""
    tls: Tls = Tls()
    """Of what agents dial; with `ca`, they must show a certificate of it."""


class Raas(Strict):
    """The rollout nodes that the launcher starts; more can join at any time."""

    count: int = Field(default=1, ge=0)
    capacity: int = Field(default=128, ge=1)
    """Rollouts that one node runs at once."""
    eval_extra: int | None = Field(default=None, ge=0)
    """Rollouts of evaluations that one node runs beyond `capacity`, so that training keeps all of
    it. An engine that decodes many at once does a few more at little cost, if it has the memory for
    them. Unset: a tenth of `capacity`, rounded up."""
    engine: Engine = Engine()
    relay: Relay = Relay()
    agents: Agents = Agents()
    lanes: LaneChoice = "auto"
    """Over which weights are pulled, the most wanted first, and relayed; gRPC is the way out in any
    case."""
    sources: Literal["auto", "store"] = "auto"
    """Where weights come from. auto: whoever has them, nearest first. store: the object store
    alone, for pools that cannot reach the trainer."""
    cache: Path | None = None
    """Folder in which a node keeps its newest weights, so that one that was killed rejoins by a
    patch; it takes up to two and a half times the exported bytes per policy. Unset: none."""

    @property
    def eval_place_count(self) -> int:
        """Rollouts of evaluations beyond the capacity."""
        return ceil(self.capacity / 10) if self.eval_extra is None else self.eval_extra


class Autoscale(Strict):
    """How large the pool may be, and how `astraflow autoscale` changes it."""

    min: int = Field(default=1, ge=0)
    """Nodes, at least."""
    max: int = Field(default=64, ge=1)
    """Nodes, at most."""
    window_s: float = Field(default=300.0, gt=0)
    """Waits, production and consumption are measured over this time; it is also the least time
    between two changes. Several batches long is good."""
    cooldown_s: float = Field(default=0.0, ge=0)
    """After a change of the pool nothing is measured for so long: what new nodes take to warm
    up."""
    drain_s: float | None = Field(default=None, gt=0)
    """For how long a node that leaves may finish what it holds; unset: as long as it takes."""
    start: str | None = None
    """Shell command that starts one node, such as `sbatch node.sh {name}`; unset: a process on
    the machine of `astraflow autoscale`. {name}, {hub}, {recipe} and {run} are filled in, quoted;
    ASTRAFLOW_JOIN_TOKEN is in its environment."""
    stop: str | None = None
    """Shell command for a node that has left, such as `scancel --name {name}`; unset: a node that
    was drained ends by itself."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.min > self.max:
            raise ValueError("min is larger than max")
        if self.stop is not None and self.start is None:
            raise ValueError("stop without start: give both, or neither for local processes")
        return self
