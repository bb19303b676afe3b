"""The training loop: a batch, a step, a version, an ack; and what is counted of it."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter, time_ns
from typing import Self

import structlog

from astraflow.client.payloads import lost_rollout_ids
from astraflow.client.trainer import (
    UNREADABLE_COUNT,
    DamageReport,
    PublishOrder,
    SaveOrder,
    TrainerBatch,
    TrainerClient,
    TrainerItem,
)
from astraflow.config.recipe import Sync, TrainerConfig
from astraflow.core.batches import AckBatch, BatchHeader, BatchOutcome
from astraflow.core.errors import AstraflowError
from astraflow.core.ids import PolicyId
from astraflow.telemetry.metrics import LONG_SECONDS, Family, Histogram, counter, gauge, histogram
from astraflow.telemetry.traces import is_tracing, record
from astraflow.trainers.checkpoints import Checkpoints, Saves
from astraflow.trainers.engine import FollowsVersions, TrainEngine
from astraflow.trainers.origin import Publication, WeightOrigin
from astraflow.weights.publish.background import Scrub

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_SHOWN = ("train/loss", "train/grad_norm", "train/entropy", "mismatch/logp_abs_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
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
class StepRecord:
    """An optimizer step.

    Attributes:
        number: Steps done, this one included.
        token_count: Trained on.
        metrics: Of the engine.
        began: When the batch was there.
        ended: When the weights were new.
    """

    number: int
    token_count: int
    metrics: Mapping[str, float]
    began: Instant
    ended: Instant

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


def log_step(
    step: int,
    metrics: Mapping[str, float],
    *,
    last_step: int | None,
    wait_s: float,
    train_s: float,
) -> None:
    """Say in the log that a step is done, and of how many."""
    log.info(
        "step done",
        step=step,
        **({} if last_step is None else {"of": last_step}),
        wait_s=round(wait_s, 3),
        train_s=round(train_s, 3),
        **{name.replace("/", "_"): round(metrics[name], 5) for name in _SHOWN if name in metrics},
    )


class FailedSteps:
    """Counts the steps that came to nothing; an engine is then as if they had never begun."""

    def __init__(self, settings: TrainerConfig) -> None:
        """Begin with none.

        Args:
            settings: What the recipe says of them.
        """
        self._limit = settings.max_failed_steps
        self._in_a_row = 0

    def succeeded(self) -> None:
        """Forget those before."""
        self._in_a_row = 0

    def let_go(self, batch: TrainerBatch, error: AstraflowError, *, step: int) -> AckBatch:
        """Return how a batch is settled that failed.

        Args:
            batch: Which.
            error: What the engine said of it.
            step: Optimizer steps done, without it.

        Raises:
            AstraflowError: That error, once too many have failed in a row.
        """
        self._in_a_row += 1
        lost = lost_rollout_ids(error)
        if self._in_a_row > (max(self._limit, UNREADABLE_COUNT) if lost else self._limit):
            raise error
        log.warning(
            "a step failed; the run goes on without its batch",
            batch_id=batch.header.batch_id,
            reason=error.reason,
            why=error.message,
            in_a_row=self._in_a_row,
        )
        return AckBatch(
            batch_id=batch.header.batch_id,
            outcome=BatchOutcome.RETURNED if lost else BatchOutcome.DISCARDED,
            step=step,
            lost_rollout_ids=lost,
        )


def trace_step(
    header: BatchHeader, *, step: int, version: int | None, times_ns: tuple[int, int, int]
) -> None:
    """Record a step in the traces of all groups of its batch.

    Args:
        header: Of the batch.
        step: Optimizer steps done, this one included.
        version: What was published; None: nothing was after this step.
        times_ns: Unix times: the batch was there, the step was done, the version was published.
    """
    if not is_tracing():
        return
    began, stepped, published = times_ns
    for group in header.groups:
        record(
            "rl.train",
            parent=group.traceparent,
            start_ns=began,
            end_ns=stepped,
            group=group.group_id,
            batch=header.batch_id,
            policy=header.policy_id,
            step=step,
        )
        if version is not None:
            record(
                "rl.sync",
                parent=group.traceparent,
                start_ns=stepped,
                end_ns=published,
                policy=header.policy_id,
                version=version,
            )


class TrainerMetrics:
    """Counts since the process began; written by one thread per number, read by any.

    Attributes:
        policy_id: What it trains.
    """

    def __init__(self, policy_id: PolicyId) -> None:
        self.policy_id = policy_id
        self._wait = Histogram(LONG_SECONDS)
        self._step = Histogram(LONG_SECONDS)
        self._publish = Histogram(LONG_SECONDS)
        self._step_count = self._token_count = 0
        self._version = -1
        self._metrics: Mapping[str, float] = {}

    def published(self, version: int, seconds: float) -> None:
        """Count a version."""
        self._publish.observe(seconds)
        self._version = version

    def trained(
        self, metrics: Mapping[str, float], *, wait_s: float, step_s: float, token_count: int
    ) -> None:
        """Count a step."""
        self._wait.observe(wait_s)
        self._step.observe(step_s)
        self._step_count += 1
        self._token_count += token_count
        self._metrics = metrics

    def families(self) -> Iterator[Family]:
        """Yield what a scraper is told."""
        here = (self.policy_id,)
        yield counter("trainer_steps_total", "Optimizer steps.", {here: self._step_count}, "policy")
        yield counter("trainer_tokens_total", "Trained on.", {here: self._token_count}, "policy")
        yield gauge("trainer_version", "Newest published.", {here: self._version}, "policy")
        for name, text, held in (
            ("trainer_wait_seconds", "Waited for a batch.", self._wait),
            ("trainer_step_seconds", "Of an optimizer step.", self._step),
            ("trainer_publish_seconds", "To encode a version.", self._publish),
        ):
            yield histogram(name, text, {here: held}, "policy")
        said = {(self.policy_id, name): value for name, value in self._metrics.items()}
        yield gauge("trainer_metric", "Of the last step, by its name.", said, "policy", "metric")


class Pace:
    """Publishes when it is due or asked for, and the same weights again only if they were lost.

    Attributes:
        last: What was published last.
        last_step: The weights after it are published; None: nobody knows it.
    """

    def __init__(
        self,
        origin: WeightOrigin,
        sync: Sync,
        *,
        step: int = 0,
        last_step: int | None = None,
    ) -> None:
        """Publish the first weights.

        Args:
            origin: Of the versions.
            sync: When they come.
            step: Optimizer steps behind the first weights.
            last_step: The weights after it are published; None: nobody knows it.
        """
        self._origin = origin
        self._steps_per_version = sync.steps_per_version
        self.last_step = last_step
        self._step = self._published_step = step
        self.last = origin.publish(step=step)

    @property
    def is_fresh(self) -> bool:
        """Whether the present weights are those of the last version."""
        return self._step == self._published_step

    @property
    def version(self) -> int | None:
        """What the present weights are published as; None: they are not."""
        return self.last.version if self.is_fresh else None

    def after_step(self, step: int) -> Publication | None:
        """Publish what is due.

        Returns:
            None: these weights are no version, or not yet.
        """
        self._step = step
        return self.publish() if self.need_sync() else None

    def need_sync(self) -> bool:
        """Whether the present weights are due as a version."""
        every = self._steps_per_version
        is_due = every is not None and self._step - self._published_step >= every
        return is_due or self._step == self.last_step

    def publish(self) -> Publication | None:
        """Publish the present weights; None: they are the last version."""
        if self.is_fresh and not self._origin.is_damaged:
            return None
        self.last = self._origin.publish(step=self._step)
        self._published_step = self._step
        return self.last


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoop:
    """What a trainer does with its batches.

    A version is published before the batch behind it is acknowledged, so no acknowledged work
    is ever lost with the process. Both go on while the next batch is trained on, and end before
    the version that comes of it; so does the encoding, where the engine can wait for it. A batch
    whose step is saved is acknowledged once the checkpoint is whole.

    Attributes:
        client: Of the run.
        engine: Steps the model; prepared.
        pace: Publishes versions; the first one is published already.
        checkpoints: Where they are written.
        saves: Writes them in time.
        scrub: Looks at the published weights.
        failures: What becomes of steps that fail.
        tallies: What it counts.
    """

    client: TrainerClient
    engine: TrainEngine
    pace: Pace
    checkpoints: Checkpoints
    saves: Saves
    scrub: Scrub
    failures: FailedSteps
    tallies: TrainerMetrics

    def run(self, items: Iterable[TrainerItem]) -> None:
        """Train, publish and save until the items end.

        Raises:
            AstraflowError: What the engine raises and the run answers. The batch in hand returns
                to the run with the session.
        """
        if not self.engine.step_count:
            self.checkpoints.save(step=0, version=self.pace.version)
        for item in items:
            match item:
                case TrainerBatch():
                    self._train(item)
                case PublishOrder():
                    self.pace.publish()
                case SaveOrder():
                    step = self.engine.step_count
                    self.saves.save(item.checkpoint_id, step=step, version=self.pace.version)
                case DamageReport():
                    self.scrub.check_now(item.version)
        last = self.pace.publish() or self.pace.last
        self.client.flush()
        self.saves.finish(step=self.engine.step_count, version=last.version)

    def _train(self, batch: TrainerBatch) -> None:
        try:
            step = self._step(batch)
        except AstraflowError as error:
            done = self.engine.step_count
            self.client.ack_later(self.failures.let_go(batch, error, step=done))
            return
        self.failures.succeeded()
        published = self._publish(batch, step)
        checkpoint = self.saves.after_step(step.number, self.pace.version)
        self._acknowledge(batch, step, published=published, checkpoint=checkpoint)

    def _step(self, batch: TrainerBatch) -> StepRecord:
        began = Instant.now()
        if self.pace.is_fresh and isinstance(self.engine, FollowsVersions):
            self.engine.at_version(self.pace.last.version)
        metrics = self.engine.train_step(batch)
        return StepRecord(
            number=self.engine.step_count,
            token_count=sum(part.token_count for part in batch.parts),
            metrics={**metrics, "time/publish_wait_s": self.pace.last.held_s},
            began=began,
            ended=Instant.now(),
        )

    def _publish(self, batch: TrainerBatch, step: StepRecord) -> Publication | None:
        """Publish what is due after a step."""
        self.client.flush()
        published = self.pace.after_step(step.number)
        version = None if published is None else published.version
        times_ns = (step.began.unix_ns, step.ended.unix_ns, time_ns())
        trace_step(batch.header, step=step.number, version=version, times_ns=times_ns)
        return published

    def _acknowledge(
        self,
        batch: TrainerBatch,
        step: StepRecord,
        *,
        published: Publication | None,
        checkpoint: Future[str] | None,
    ) -> None:
        """Say what came of a batch: to a scraper, to the run, to the log."""
        metrics = {**step.metrics, **step.pace(batch.wait_s)}
        train_s = step.began.elapsed_s
        self.tallies.trained(
            metrics, wait_s=batch.wait_s, step_s=step.seconds, token_count=step.token_count
        )
        self.saves.last = AckBatch(
            batch_id=batch.header.batch_id,
            outcome=BatchOutcome.CONSUMED,
            step=step.number,
            metrics=metrics,
            wait_s=batch.wait_s,
            train_s=train_s,
        )
        self.client.ack_later(
            self.saves.last, more=lambda: self._costs(published), checkpoint=checkpoint
        )
        log_step(
            step.number,
            metrics,
            last_step=self.pace.last_step,
            wait_s=batch.wait_s,
            train_s=train_s,
        )

    def _costs(self, published: Publication | None) -> Mapping[str, float]:
        """Count a version that the run knows by now; return what it cost."""
        if published is None:
            return {}
        self.tallies.published(published.version, published.encode_s)
        return published.metrics
