"""Scenarios: what is simulated. Every key has a default, so that an empty file is one."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from astraflow.config.loader import load_model
from astraflow.config.recipe import Name, Strict
from astraflow.core.errors import AstraflowError, Reason


class Rollouts(Strict):
    """What is asked for, and how long it is."""

    group_size: int = Field(default=8, ge=1)
    """Rollouts per prompt."""
    mean_tokens: float = Field(default=4000.0, gt=0)
    """Sampled per rollout."""
    spread: float = Field(default=0.3, ge=0)
    """Standard deviation of the logarithm of their length; 0: all are equal."""
    timeout_s: float = Field(default=7200.0, gt=0)
    """For one rollout, without its ways to and from the hub; one that takes longer fails then."""


class Demand(Strict):
    """How long an optimizer step takes from a time on."""

    at_s: float = Field(default=0.0, ge=0)
    """Seconds since the start."""
    step_s: float = Field(gt=0)
    """Seconds that the trainer works on one batch."""


class Trainer(Strict):
    """The one trainer."""

    groups_per_batch: int = Field(default=16, ge=1)
    max_staleness: int = Field(default=4, ge=0)
    prefetch: int = Field(default=1, ge=1)
    """Batches held at once."""
    demand: tuple[Demand, ...] = (Demand(step_s=60.0),)
    """Steps of demand, by time."""

    @model_validator(mode="after")
    def _demand_is_in_order(self) -> Self:
        times = [demand.at_s for demand in self.demand]
        if not times or times[0] != 0 or times != sorted(set(times)):
            raise ValueError("demand begins at_s 0 and its times rise")
        return self


class Flapping(Strict):
    """Nodes that come and go."""

    share: float = Field(default=0.0, ge=0, le=1)
    """Of the pool's nodes."""
    up_s: float = Field(default=3600.0, gt=0)
    """Mean time that one stays."""
    down_s: float = Field(default=300.0, gt=0)
    """Mean time that it is gone."""
    crash_share: float = Field(default=0.5, ge=0, le=1)
    """Of the times that it goes it says nothing; else it leaves in order."""


class Pool(Strict):
    """Nodes that are alike."""

    count: int = Field(default=8, ge=0)
    """At the start."""
    slots: int = Field(default=8, ge=1)
    """Rollouts at once per node."""
    queue: int = Field(default=8, ge=0)
    """Rollouts that it asks for beyond its slots, so that no slot waits for the next task."""
    tokens_per_s: float = Field(default=50.0, gt=0)
    """Of one slot."""
    latency_s: float = Field(default=0.0, ge=0)
    """One way to the hub, for each rollout."""
    join_s: float = Field(default=0.0, ge=0)
    """From the start of a node to its join."""
    update_s: float = Field(default=2.0, ge=0)
    """From a version's announcement to the first token of it."""
    flapping: Flapping = Flapping()


class Autoscale(Strict):
    """Scales the first pool; the keys of a recipe."""

    min: int = Field(default=1, ge=0)
    max: int = Field(default=64, ge=1)
    window_s: float = Field(default=300.0, gt=0)
    cooldown_s: float = Field(default=0.0, ge=0)
    poll_s: float = Field(default=30.0, gt=0)
    """Seconds between two looks at the advice."""


class Scenario(Strict):
    """What is simulated."""

    hours: float = Field(default=1.0, gt=0)
    seed: int = 0
    session_ttl_s: float = Field(default=60.0, gt=0)
    """A node that says nothing for so long is gone."""
    rollouts: Rollouts = Rollouts()
    trainer: Trainer = Trainer()
    pools: dict[Name, Pool] = Field(default={"pool": Pool()}, min_length=1)
    autoscale: Autoscale | None = None
    """Unset: the pool is fixed."""

    @property
    def seconds(self) -> float:
        """How long it takes, in simulated time."""
        return self.hours * 3600


def load_scenario(path: Path | str | None, overrides: list[str]) -> Scenario:
    """Read a scenario; no path: that of all defaults.

    Raises:
        AstraflowError: INVALID_FIELD; lists every problem with its place.
    """
    return load_model(Scenario, path, overrides)


def oracle_of(scenario: Scenario) -> Scenario:
    """Return the same scenario with one pool of equal nodes and equal total speed.

    Nobody flaps, and nobody is slow or far: what a perfect placement could make of the same speed.
    A flapping node counts for the share of the time that it is up.

    Raises:
        AstraflowError: INVALID_FIELD when no pool has a node.
    """
    pools = scenario.pools.values()
    slots = sum(pool.count * pool.slots for pool in pools)
    count = sum(pool.count for pool in pools)
    if not count:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            "an oracle has the speed of the nodes at the start, and there are none; "
            "set count in pools, or leave out --oracle",
        )
    speed = 0.0
    for pool in pools:
        flapping = pool.flapping
        down = flapping.share * flapping.down_s / (flapping.up_s + flapping.down_s)
        speed += pool.count * pool.slots * pool.tokens_per_s * (1 - down)
    each = max(1, round(slots / count))
    even = Pool(
        count=count,
        slots=each,
        tokens_per_s=speed / (count * each),
        update_s=min(pool.update_s for pool in pools),
    )
    return scenario.model_copy(update={"pools": {"oracle": even}, "autoscale": None})


def ideal_count(scenario: Scenario, step_s: float) -> float:
    """Return how many nodes of the first pool make what steps of so many seconds consume."""
    pool = next(iter(scenario.pools.values()))
    rollouts = scenario.trainer.groups_per_batch * scenario.rollouts.group_size
    tokens_per_s = rollouts * scenario.rollouts.mean_tokens / step_s
    return tokens_per_s / (pool.slots * pool.tokens_per_s)
