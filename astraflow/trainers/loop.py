"""The training loop: a batch, a step, a version, an ack; and what is counted of it."""

from collections.abc import Iterable, Iterator, Mapping
from time import perf_counter, time_ns

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


def log_step(
    step: int,
    metrics: Mapping[str, float],
    *,
    last_step: int | None,
    wait_s: float,
    train_s: float,
) -> None:
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
        self._limit = settings.max_failed_steps
        self._in_a_row = 0

    def succeeded(self) -> None:
        self._in_a_row = 0

    def let_go(self, batch: TrainerBatch, error: AstraflowError, *, step: int) -> AckBatch:
        """Return how a batch is settled that failed after so many optimizer steps.

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
    """Counts since the process began; written by one thread per number, read by any."""

    def __init__(self, policy_id: PolicyId) -> None:
        self.policy_id = policy_id
        self._wait = Histogram(LONG_SECONDS)
        self._step = Histogram(LONG_SECONDS)
        self._publish = Histogram(LONG_SECONDS)
        self._step_count = self._token_count = 0
        self._version = -1
        self._metrics: Mapping[str, float] = {}

    def published(self, version: int, seconds: float) -> None:
        self._publish.observe(seconds)
        self._version = version

    def trained(
        self, metrics: Mapping[str, float], *, wait_s: float, step_s: float, token_count: int
    ) -> None:
        self._wait.observe(wait_s)
        self._step.observe(step_s)
        self._step_count += 1
        self._token_count += token_count
        self._metrics = metrics

    def families(self) -> Iterator[Family]:
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
        """Publish the first weights, which so many optimizer steps are behind."""
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
        every = self._steps_per_version
        is_due = every is not None and step - self._published_step >= every
        return self.publish() if is_due or step == self.last_step else None

    def publish(self) -> Publication | None:
        """Publish the present weights; None: they are the last version."""
        if self.is_fresh and not self._origin.is_damaged:
            return None
        self.last = self._origin.publish(step=self._step)
        self._published_step = self._step
        return self.last


class TrainingLoop:
    """What a trainer does with its batches.

    A version is published before the batch behind it is acknowledged, so no acknowledged work
    is ever lost with the process. Both go on while the next batch is trained on, and end before
    the version that comes of it; so does the encoding, where the engine can wait for it. A batch
    whose step is saved is acknowledged once the checkpoint is whole.
    """

    def __init__(
        self,
        client: TrainerClient,
        engine: TrainEngine,
        origin: WeightOrigin,
        settings: TrainerConfig,
        *,
        checkpoints: Checkpoints,
        scrub: Scrub,
        tallies: TrainerMetrics,
    ) -> None:
        """Publish the first weights of an engine that is prepared."""
        self._client = client
        self._engine = engine
        self._scrub = scrub
        self._tallies = tallies
        self._failures = FailedSteps(settings)
        self._checkpoints = checkpoints
        self._pace = Pace(
            origin, settings.sync, step=engine.step_count, last_step=settings.step_count
        )
        self._saves = Saves(client, checkpoints, settings)

    def run(self, items: Iterable[TrainerItem]) -> None:
        """Train, publish and save until the items end.

        Raises:
            AstraflowError: What the engine raises and the run answers. The batch in hand returns
                to the run with the session.
        """
        pace, saves = self._pace, self._saves
        if not self._engine.step_count:
            self._checkpoints.save(step=0, version=pace.version)
        for item in items:
            match item:
                case TrainerBatch():
                    self._train(item)
                case PublishOrder():
                    pace.publish()
                case SaveOrder():
                    step = self._engine.step_count
                    saves.save(item.checkpoint_id, step=step, version=pace.version)
                case DamageReport():
                    self._scrub.check_now(item.version)
        last = pace.publish() or pace.last
        self._client.flush()
        saves.finish(step=self._engine.step_count, version=last.version)

    def _train(self, batch: TrainerBatch) -> None:
        began, began_ns = perf_counter(), time_ns()
        try:
            if self._pace.is_fresh and isinstance(self._engine, FollowsVersions):
                self._engine.at_version(self._pace.last.version)
            found = self._engine.train_step(batch)
        except AstraflowError as error:
            done = self._engine.step_count
            self._client.ack_later(self._failures.let_go(batch, error, step=done))
            return
        self._failures.succeeded()
        step_s, stepped_ns = perf_counter() - began, time_ns()
        step, wait_s = self._engine.step_count, batch.wait_s
        # Of all ranks.
        token_count = batch.header.token_count
        metrics = {
            **found,
            "time/publish_wait_s": self._pace.last.held_s,
            "time/step_s": step_s,
            "time/wait_s": wait_s,
            "batch/tokens": float(token_count),
            "perf/trainer_tokens_per_s": token_count / step_s,
        }
        self._client.flush()
        published = self._pace.after_step(step)
        trace_step(
            batch.header,
            step=step,
            version=None if published is None else published.version,
            times_ns=(began_ns, stepped_ns, time_ns()),
        )
        checkpoint = self._saves.after_step(step, self._pace.version)
        train_s = perf_counter() - began
        self._tallies.trained(metrics, wait_s=wait_s, step_s=step_s, token_count=token_count)
        self._saves.last = AckBatch(
            batch_id=batch.header.batch_id,
            outcome=BatchOutcome.CONSUMED,
            step=step,
            metrics=metrics,
            wait_s=wait_s,
            train_s=train_s,
        )
        self._client.ack_later(
            self._saves.last, more=lambda: self._costs(published), checkpoint=checkpoint
        )
        log_step(step, metrics, last_step=self._pace.last_step, wait_s=wait_s, train_s=train_s)

    def _costs(self, published: Publication | None) -> Mapping[str, float]:
        """Count a version that the run knows by now; return what it cost."""
        if published is None:
            return {}
        self._tallies.published(published.version, published.encode_s)
        return published.metrics
