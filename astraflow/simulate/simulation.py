"""One simulation: a scenario on a timeline, from an empty run to a report."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from random import Random
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from astraflow.core.autoscale import ScaleSettings
from astraflow.core.ids import RunId, WorkflowId
from astraflow.core.settings import PolicySettings, RolloutSettings, RunSettings
from astraflow.core.status import LedgerAccount
from astraflow.core.tasks import WorkflowSpec
from astraflow.simulate.hub import SimulatedHub, Timeline
from astraflow.simulate.node import CODE, GRAIN, POLICY, draw_lengths
from astraflow.simulate.pools import Pools, ScaleStep, autoscale
from astraflow.simulate.scenario import Scenario
from astraflow.simulate.trainer import SimulatedTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """Numbers of one simulated run.

    Attributes:
        node_count: Nodes, a mean over time.
        wait_fraction: Share of the trainer's time from the first batch on, 0 to 1.
        rollouts_per_s: Trained on.
        tokens_per_s: Sampled for them.
        staleness: Rollouts of the last batches, by versions between sampling and training.
        leave_count: Flapping nodes that left in order.
        broken_laws: How often each did not hold; empty: all held.
        sizes: How many nodes there were, from a time in seconds on.
        steps: Of each batch: when it was done, how long it was waited for, its rollouts.
        failure: Why the run could not go on; empty: it could.
    """

    hours: float
    wall_s: float
    event_count: int
    node_count: float
    node_hours: float
    step_count: int
    wait_fraction: float
    rollouts_per_s: float
    tokens_per_s: float
    staleness: Mapping[int, int]
    crash_count: int
    leave_count: int
    books: LedgerAccount
    law_checks: int
    broken_laws: Mapping[str, int]
    scaling: tuple[ScaleStep, ...] = ()
    sizes: tuple[tuple[float, int], ...] = ()
    steps: tuple[tuple[float, float, int], ...] = ()
    failure: str = ""

    def size_at(self, seconds: float) -> int:
        """Return how many nodes there were at a time."""
        return [count for since_s, count in self.sizes if since_s <= seconds][-1]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values; steps and sizes, which are long, are left out."""
        fields = asdict(self)
        del fields["sizes"], fields["steps"]
        fields["books"]["balanced"] = self.books.is_balanced
        return fields


@dataclass(slots=True, kw_only=True, eq=False)
class Laws:
    """Looks at the run and counts what breaks a law."""

    hub: SimulatedHub
    trainer: SimulatedTrainer
    max_staleness: int
    checked_count: int = 0
    broken: Counter[str] = field(default_factory=Counter[str])

    def check(self) -> None:
        """Look at the books, at how much is open, and at what was leased."""
        self.checked_count += 1
        run = self.hub.run
        status = run.status(self.hub.timeline.now).policies[0]
        books = run.accounts()[0]
        self._must("the books add up", books.is_balanced)
        self._must("open work is bounded", status.open_group_count <= status.max_open_group_count)
        stalest = max(status.staleness_counts, default=0)
        self._must("nothing is trained on that is too old", stalest <= self.max_staleness)
        self._must("versions grow by one", status.version == len(self.trainer.steps))
        in_batches = sum(count for _, _, count in self.trainer.steps)
        self._must("what was trained on is what batches had", status.trained_count == in_batches)

    def check_end(self) -> None:
        """Look at what only the whole run can tell."""
        self.check()
        twice = any(count > 1 for count in self.trainer.seen.values())
        self._must("a rollout is in one batch", not twice)
        books = self.hub.run.accounts()[0]
        group_size = self.hub.settings.rollouts.group_size
        self._must("groups are issued whole", books.issued_count % group_size == 0)
        self._must("no policy was forgotten", books.policy_id == POLICY)

    def _must(self, law: str, holds: bool) -> None:
        if not holds:
            self.broken[law] += 1


_CHECK_S = 60.0


def simulate(scenario: Scenario) -> SimulationReport:
    """Run a scenario; the same scenario gives the same report, but for the wall time."""
    started, timeline = time.monotonic(), Timeline()
    hub = SimulatedHub(timeline=timeline, settings=settings_of(scenario))
    trainer = SimulatedTrainer(scenario=scenario, hub=hub)
    rollouts = scenario.rollouts
    lengths = draw_lengths(mean=rollouts.mean_tokens, spread=rollouts.spread, seed=scenario.seed)
    pools = Pools(hub=hub, lengths=lengths, random=Random(scenario.seed))  # noqa: S311 - no secret
    laws = Laws(hub=hub, trainer=trainer, max_staleness=scenario.trainer.max_staleness)
    trainer.start()
    for name, pool in scenario.pools.items():
        pools.start(name, pool)
    scaling: Sequence[ScaleStep] = ()
    if scenario.autoscale is not None:
        first = next(iter(scenario.pools.values()))
        scaling = autoscale(
            scenario.autoscale, hub, lambda name: pools.add(name, first), first.join_s
        )

    def check() -> None:
        laws.check()
        timeline.after(_CHECK_S, check)

    timeline.after(_CHECK_S, check)
    timeline.run_until(scenario.seconds)
    laws.check_end()
    books = hub.run.accounts()[0]
    waited_s = trainer.waited_s + trainer.open_wait_s
    observed_s = waited_s + trainer.trained_s
    run = hub.run.status(timeline.now)
    status = run.policies[0]
    return SimulationReport(
        hours=scenario.hours,
        wall_s=time.monotonic() - started,
        event_count=hub.event_count,
        node_count=pools.total_node_s / scenario.seconds,
        node_hours=pools.total_node_s / 3600,
        step_count=len(trainer.steps),
        wait_fraction=waited_s / observed_s if observed_s else 0.0,
        rollouts_per_s=books.trained_count / scenario.seconds,
        tokens_per_s=status.tokens_per_s * GRAIN,
        staleness=status.staleness_counts,
        crash_count=pools.crash_count,
        leave_count=pools.leave_count,
        books=books,
        law_checks=laws.checked_count,
        broken_laws=dict(laws.broken),
        scaling=tuple(scaling),
        sizes=tuple(pools.sizes),
        steps=tuple(trainer.steps),
        failure="" if run.failure is None else str(run.failure),
    )


def settings_of(scenario: Scenario) -> RunSettings:
    """Return how the run of a scenario is set up."""
    trainer, rollouts, scale = scenario.trainer, scenario.rollouts, scenario.autoscale
    workflow = WorkflowSpec(workflow_id=WorkflowId("simulated"), code=CODE, policy_ids=(POLICY,))
    policy = PolicySettings(
        policy_id=POLICY,
        groups_per_batch=trainer.groups_per_batch,
        max_staleness=trainer.max_staleness,
    )
    return RunSettings(
        run_id=RunId("simulation"),
        seed=scenario.seed,
        policies=(policy,),
        workflows=(workflow,),
        rollouts=RolloutSettings(
            workflow_id=workflow.workflow_id,
            group_size=rollouts.group_size,
            timeout=timedelta(seconds=rollouts.timeout_s),
        ),
        session_ttl=timedelta(seconds=scenario.session_ttl_s),
        scale=ScaleSettings(window=timedelta(hours=1))
        if scale is None
        else ScaleSettings(
            min_count=scale.min,
            max_count=scale.max,
            window=timedelta(seconds=scale.window_s),
            cooldown=timedelta(seconds=scale.cooldown_s),
        ),
    )


def show(report: SimulationReport, oracle: SimulationReport | None) -> None:
    """Print what came of a simulation, beside its oracle if there is one."""
    console = Console()
    table = Table("", "simulated", *(["oracle"] if oracle is not None else []))
    columns = [_rows(each) for each in (report, oracle) if each is not None]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    console.print(table)
    for step in report.scaling:
        console.print(
            f"{step.seconds / 3600:7.2f} h  +{step.started} -{step.drained} "
            f"to {step.target}: {step.message}"
        )
    if report.failure:
        console.print(f"[red]the run failed:[/] {escape(report.failure)}")
    for law, count in report.broken_laws.items():
        console.print(f"[red]broken {count} times:[/] {law}")


def _rows(report: SimulationReport) -> dict[str, str]:
    stale = sum(drop.count for drop in report.books.drops if drop.reason == "STALE")
    return {
        "hours": f"{report.hours:g}",
        "nodes": f"{report.node_count:.1f}",
        "node-hours": f"{report.node_hours:,.1f}",
        "optimizer steps": f"{report.step_count:,}",
        "trainer waited": f"{report.wait_fraction:.1%}",
        "rollouts trained on": f"{report.books.trained_count:,}",
        "of these per second": f"{report.rollouts_per_s:.2f}",
        "dropped as stale": f"{stale:,}",
        "issued again": f"{report.books.reissued_count:,}",
        "staleness": ", ".join(f"{age}: {count:,}" for age, count in report.staleness.items()),
        "crashed, left": f"{report.crash_count:,}, {report.leave_count:,}",
        "laws": "hold" if not report.broken_laws else "BROKEN",
        "events": f"{report.event_count:,} in {report.wall_s:.1f} s",
    }
