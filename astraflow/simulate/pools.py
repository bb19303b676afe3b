"""Pools: nodes that are started, flap, and are scaled by the advice of the run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from random import Random

from astraflow.core.autoscale import Scaler
from astraflow.core.events import MemberDrained
from astraflow.simulate.hub import SimulatedHub
from astraflow.simulate.node import SimulatedNode
from astraflow.simulate.scenario import Autoscale, Pool


@dataclass(slots=True, kw_only=True, eq=False)
class Pools:
    """All nodes of a simulation.

    Attributes:
        sizes: How many nodes there were, from a time in seconds on.
        node_s: Seconds of nodes that have ended.
        crash_count: Times that a node went silently.
        leave_count: Times that a flapping node left in order.
    """

    hub: SimulatedHub
    lengths: Iterator[float]
    random: Random
    sizes: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    node_s: float = 0.0
    crash_count: int = 0
    leave_count: int = 0
    _births: dict[str, float] = field(default_factory=dict[str, float])

    def start(self, name: str, pool: Pool) -> None:
        """Start the nodes of a pool; some of them flap."""
        flapping = round(pool.count * pool.flapping.share)
        for number in range(pool.count):
            if number < flapping:
                self._flap(f"{name}-{number}", pool, life=0)
            else:
                self.add(f"{name}-{number}", pool)

    def add(self, name: str, pool: Pool) -> SimulatedNode:
        node = SimulatedNode(
            name=name, pool=pool, hub=self.hub, lengths=self.lengths, on_end=self._bury
        )
        self._births[name] = self.hub.timeline.seconds
        self._note_size()
        self.hub.timeline.after(pool.join_s, node.join)
        return node

    @property
    def total_node_s(self) -> float:
        """Seconds of all nodes so far."""
        now = self.hub.timeline.seconds
        return self.node_s + sum(now - birth for birth in self._births.values())

    def _bury(self, node: SimulatedNode) -> None:
        self.node_s += self.hub.timeline.seconds - self._births.pop(node.name)
        self._note_size()

    def _note_size(self) -> None:
        self.sizes.append((self.hub.timeline.seconds, len(self._births)))

    def _flap(self, name: str, pool: Pool, *, life: int) -> None:
        node = self.add(f"{name}.{life}", pool)
        up_s = self.random.expovariate(1 / pool.flapping.up_s)
        self.hub.timeline.after(up_s, partial(self._go, name, pool, node, life))

    def _go(self, name: str, pool: Pool, node: SimulatedNode, life: int) -> None:
        if not node.is_gone:
            if self.random.random() < pool.flapping.crash_share:
                self.crash_count += 1
                node.crash()
            else:
                self.leave_count += 1
                node.leave()
        down_s = self.random.expovariate(1 / pool.flapping.down_s)
        self.hub.timeline.after(down_s, partial(self._flap, name, pool, life=life + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleStep:
    """One change that the scaler made."""

    seconds: float
    started: int
    drained: int
    target: int
    message: str


def autoscale(
    settings: Autoscale, hub: SimulatedHub, start: Callable[[str], object], join_s: float
) -> Sequence[ScaleStep]:
    """Act on the advice of the run from now on, as `astraflow autoscale` does.

    Returns:
        The changes that were made; it grows.
    """
    steps: list[ScaleStep] = []
    timeout = timedelta(seconds=2 * join_s + 60)
    scaler = Scaler(prefix="scaled", start_timeout=timeout)

    def scale() -> None:
        advice = hub.run.scale_advice(hub.timeline.now)
        plan = scaler.plan(advice, hub.timeline.now)
        for name in plan.start:
            start(name)
        for member_id in plan.drain:
            hub.apply(MemberDrained(member_id=member_id))
        if plan.start or plan.drain:
            steps.append(
                ScaleStep(
                    seconds=hub.timeline.seconds,
                    started=len(plan.start),
                    drained=len(plan.drain),
                    target=advice.target_member_count,
                    message=advice.message,
                )
            )
        hub.timeline.after(settings.poll_s, scale)

    hub.timeline.after(join_s + settings.poll_s, scale)
    return steps
