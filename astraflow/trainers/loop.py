"""The training loop, on one screen: a batch, a step, a version, an ack."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter, time_ns
from typing import Self

import structlog

from astraflow.client.trainer import TrainerBatch, TrainerClient
from astraflow.config.recipe import Trainer
from astraflow.core.batches import AckBatch, BatchOutcome
from astraflow.trainers.checkpoints import Checkpoints
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.losses import divisor_of
from astraflow.trainers.mismatch import MismatchProbe
from astraflow.trainers.pace import Pace
from astraflow.trainers.rows import TrainRows
from astraflow.trainers.saves import Saves
from astraflow.trainers.tallies import TrainerTallies
from astraflow.trainers.traces import trace_step

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoop:
    """What a trainer does with its batches.

    A version is published before the batch behind it is acknowledged, so no acknowledged work
    is ever lost with the process. Both go on while the next batch is trained on, and end before
    the version that comes of it.

    Attributes:
        client: Of the run.
        learner: Steps the model.
        probe: Compares the likelihoods of the engine with the trainer's.
        pace: Publishes versions; the first one is published already.
        checkpoints: Where they are written.
        saves: Writes them in time.
        settings: Of the trainer.
        tallies: What it counts.
    """

    client: TrainerClient
    learner: PolicyLearner
    probe: MismatchProbe
    pace: Pace
    checkpoints: Checkpoints
    saves: Saves
    settings: Trainer
    tallies: TrainerTallies

    def run(self, batches: Iterable[TrainerBatch]) -> None:
        """Train until the batches end.

        Raises:
            AstraflowError: INTERNAL when a gradient is not finite, and what the run answers. The
                batch in hand returns to the run with the session.
        """
        if not self.learner.step_count:
            self.checkpoints.save(step=0, version=self.pace.version)
        for batch in batches:
            step = self._step(batch)
            costs = self._publish(batch, step)
            checkpoint_id = self.saves.after_step(step.number, self.pace.version)
            self._settle(batch, step, costs=costs, checkpoint_id=checkpoint_id)
        last = self.pace.finish()
        self.client.flush()
        self.checkpoints.save(step=self.learner.step_count, version=last.info.version)

    def when_asked(self) -> None:
        """Do what the run asks for while there is nothing to train on."""
        self.pace.when_asked()
        self.saves.when_asked(self.learner.step_count, self.pace.version)

    def _step(self, batch: TrainerBatch) -> "_Step":
        """Look at what was sampled, then train on it."""
        began = _Instant.now()
        if self.pace.is_fresh:
            self.probe.keep(self.pace.last.info.version)
        rows = TrainRows.from_parts(batch.parts)
        seen = self.probe.look(rows)
        learned = self.learner.step(rows, divisor=divisor_of(batch.header, self.settings.loss))
        return _Step(
            number=self.learner.step_count,
            token_count=len(rows.tokens),
            metrics={**learned, **seen},
            began=began,
            ended=_Instant.now(),
        )

    def _publish(self, batch: TrainerBatch, step: "_Step") -> Mapping[str, float]:
        """Publish what is due after a step; return what that cost."""
        self.client.flush()
        is_last = step.number == self.settings.step_count
        published = self.pace.after_step(step.number, is_last=is_last)
        version = None if published is None else published.info.version
        if version is not None:
            self.tallies.published(version, step.ended.elapsed_s)
        times_ns = (step.began.unix_ns, step.ended.unix_ns, time_ns())
        trace_step(batch.header, step=step.number, version=version, times_ns=times_ns)
        return {} if published is None else published.metrics

    def _settle(
        self, batch: TrainerBatch, step: "_Step", *, costs: Mapping[str, float], checkpoint_id: str
    ) -> None:
        """Say what came of a batch: to a scraper, to the run, to the log."""
        metrics = {**step.metrics, **costs, **step.pace(batch.wait_s)}
        train_s = step.began.elapsed_s
        self.tallies.trained(
            metrics, wait_s=batch.wait_s, step_s=step.seconds, token_count=step.token_count
        )
        self.saves.last = AckBatch(
            batch_id=batch.header.batch_id,
            outcome=BatchOutcome.CONSUMED,
            step=step.number,
            metrics=metrics,
            wait=timedelta(seconds=batch.wait_s),
            train=timedelta(seconds=train_s),
            checkpoint_id=checkpoint_id,
        )
        self.client.settle(self.saves.last)
        _log_step(step.number, metrics, wait_s=batch.wait_s, train_s=train_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instant:
    """A point in time, on the clock that measures and on the one that traces name."""

    monotonic_s: float
    unix_ns: int

    @classmethod
    def now(cls) -> Self:
        """Return the present one."""
        return cls(monotonic_s=perf_counter(), unix_ns=time_ns())

    @property
    def elapsed_s(self) -> float:
        """Seconds since then."""
        return perf_counter() - self.monotonic_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """An optimizer step.

    Attributes:
        number: Steps done, this one included.
        token_count: Trained on.
        metrics: Of the learner and the probe.
        began: When the batch was there.
        ended: When the weights were new.
    """

    number: int
    token_count: int
    metrics: Mapping[str, float]
    began: _Instant
    ended: _Instant

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended.monotonic_s - self.began.monotonic_s

    def pace(self, wait_s: float) -> Mapping[str, float]:
        """Return how fast it was, after so long a wait."""
        return {
            "time/step_s": self.seconds,
            "time/wait_s": wait_s,
            "batch/tokens": float(self.token_count),
            "perf/trainer_tokens_per_s": self.token_count / self.seconds,
        }


def _log_step(step: int, metrics: Mapping[str, float], *, wait_s: float, train_s: float) -> None:
    shown = ("train/loss", "train/grad_norm", "train/entropy", "mismatch/logp_abs_max")
    log.info(
        "step done",
        step=step,
        wait_s=round(wait_s, 3),
        train_s=round(train_s, 3),
        **{name.replace("/", "_"): round(metrics[name], 5) for name in shown if name in metrics},
    )
