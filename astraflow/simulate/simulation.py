"""One simulation: a scenario on a timeline, from an empty run to a report."""

import time
from datetime import timedelta
from random import Random

from astraflow.core.autoscale import ScaleSettings
from astraflow.core.ids import RunId, WorkflowId
from astraflow.core.settings import PolicySettings, RolloutSettings, RunSettings
from astraflow.core.tasks import WorkflowSpec
from astraflow.simulate.hub import SimulatedHub
from astraflow.simulate.laws import Laws
from astraflow.simulate.node import CODE
from astraflow.simulate.pools import Autoscaler, Pools
from astraflow.simulate.report import Report
from astraflow.simulate.samples import GRAIN, POLICY, Lengths
from astraflow.simulate.scenario import Scenario
from astraflow.simulate.timeline import Timeline
from astraflow.simulate.trainer import SimulatedTrainer

_CHECK_S = 60.0


class Simulation:
    """Runs a scenario; the same scenario gives the same report, but for the wall time."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._timeline = Timeline()
        self._hub = SimulatedHub(timeline=self._timeline, settings=_settings(scenario))
        self._trainer = SimulatedTrainer(scenario=scenario, hub=self._hub)
        lengths = Lengths(
            mean=scenario.rollouts.mean_tokens,
            spread=scenario.rollouts.spread,
            seed=scenario.seed,
        )
        self._pools = Pools(
            hub=self._hub,
            lengths=lengths,
            random=Random(scenario.seed),  # noqa: S311 - a simulation, not a secret
        )
        self._laws = Laws(
            hub=self._hub,
            trainer=self._trainer,
            max_staleness=scenario.trainer.max_staleness,
        )

    def run(self) -> Report:
        """Simulate to the end of the scenario."""
        started = time.monotonic()
        self._trainer.start()
        for name, pool in self._scenario.pools.items():
            self._pools.start(name, pool)
        scaler = self._autoscaler()
        self._timeline.after(_CHECK_S, self._check)
        self._timeline.run_until(self._scenario.seconds)
        self._laws.check_end()
        return self._report(time.monotonic() - started, scaler)

    def _autoscaler(self) -> Autoscaler | None:
        if self._scenario.autoscale is None:
            return None
        pool = next(iter(self._scenario.pools.values()))
        return Autoscaler(
            self._scenario.autoscale,
            self._hub,
            lambda name: self._pools.add(name, pool),
            pool.join_s,
        )

    def _check(self) -> None:
        self._laws.check()
        self._timeline.after(_CHECK_S, self._check)

    def _report(self, wall_s: float, scaler: Autoscaler | None) -> Report:
        trainer, seconds = self._trainer, self._scenario.seconds
        books = self._hub.run.accounts()[0]
        waited_s = trainer.waited_s + trainer.open_wait_s
        observed_s = waited_s + trainer.trained_s
        status = self._hub.run.status(self._timeline.now).policies[0]
        return Report(
            hours=self._scenario.hours,
            wall_s=wall_s,
            event_count=self._hub.event_count,
            node_count=self._pools.total_node_s / seconds,
            node_hours=self._pools.total_node_s / 3600,
            step_count=len(trainer.steps),
            wait_fraction=waited_s / observed_s if observed_s else 0.0,
            rollouts_per_s=books.trained_count / seconds,
            tokens_per_s=status.tokens_per_s * GRAIN,
            staleness=status.staleness_counts,
            crash_count=self._pools.crash_count,
            leave_count=self._pools.leave_count,
            books=books,
            law_checks=self._laws.checked_count,
            broken_laws=dict(self._laws.broken),
            scaling=tuple(scaler.steps) if scaler else (),
            sizes=tuple(self._pools.sizes),
            steps=tuple(trainer.steps),
        )


def simulate(scenario: Scenario) -> Report:
    """Run a scenario."""
    return Simulation(scenario).run()


def _settings(scenario: Scenario) -> RunSettings:
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
