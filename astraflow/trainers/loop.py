"""The training loop, on one screen: a batch, a step, a version, an ack."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from time import time_ns

from astraflow.client.trainer import TrainerBatch, TrainerClient
from astraflow.core.batches import AckBatch, BatchOutcome
from astraflow.core.errors import AstraflowError
from astraflow.trainers.checkpoints import Checkpoints
from astraflow.trainers.engine import FollowsVersions, TrainEngine
from astraflow.trainers.failures import FailedSteps
from astraflow.trainers.origin import Publication
from astraflow.trainers.pace import Pace
from astraflow.trainers.saves import Saves
from astraflow.trainers.steps import Instant, Step, log_step
from astraflow.trainers.tallies import TrainerTallies
from astraflow.trainers.traces import trace_step


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
        failures: What becomes of steps that fail.
        tallies: What it counts.
    """

    client: TrainerClient
    engine: TrainEngine
    pace: Pace
    checkpoints: Checkpoints
    saves: Saves
    failures: FailedSteps
    tallies: TrainerTallies

    def run(self, batches: Iterable[TrainerBatch]) -> None:
        """Train until the batches end.

        Raises:
            AstraflowError: What the engine raises and the run answers. The batch in hand returns
                to the run with the session.
        """
        if not self.engine.step_count:
            self.checkpoints.save(step=0, version=self.pace.version)
        for batch in batches:
            try:
                step = self._step(batch)
            except AstraflowError as error:
                done = self.engine.step_count
                self.client.ack_later(self.failures.let_go(batch, error, step=done))
                continue
            self.failures.succeeded()
            published = self._publish(batch, step)
            checkpoint = self.saves.after_step(step.number, self.pace.version)
            self._settle(batch, step, published=published, checkpoint=checkpoint)
        last = self.pace.finish()
        self.client.flush()
        self.checkpoints.save(step=self.engine.step_count, version=last.version)

    def when_asked(self) -> None:
        """Do what the run asks for while there is nothing to train on."""
        self.pace.when_asked()
        self.saves.when_asked(self.engine.step_count, self.pace.version)

    def _step(self, batch: TrainerBatch) -> Step:
        began = Instant.now()
        if self.pace.is_fresh and isinstance(self.engine, FollowsVersions):
            self.engine.at_version(self.pace.last.version)
        metrics = self.engine.train_step(batch)
        return Step(
            number=self.engine.step_count,
            token_count=sum(part.token_count for part in batch.parts),
            metrics={**metrics, "time/publish_wait_s": self.pace.last.held_s},
            began=began,
            ended=Instant.now(),
        )

    def _publish(self, batch: TrainerBatch, step: Step) -> Publication | None:
        """Publish what is due after a step."""
        self.client.flush()
        published = self.pace.after_step(step.number)
        version = None if published is None else published.version
        times_ns = (step.began.unix_ns, step.ended.unix_ns, time_ns())
        trace_step(batch.header, step=step.number, version=version, times_ns=times_ns)
        return published

    def _settle(
        self,
        batch: TrainerBatch,
        step: Step,
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
            wait=timedelta(seconds=batch.wait_s),
            train=timedelta(seconds=train_s),
        )
        self.client.ack_later(
            self.saves.last, more=lambda: self._costs(published), checkpoint=checkpoint
        )
        log_step(step.number, metrics, wait_s=batch.wait_s, train_s=train_s)

    def _costs(self, published: Publication | None) -> Mapping[str, float]:
        """Count a version that the run knows by now; return what it cost."""
        if published is None:
            return {}
        self.tallies.published(published.version, published.encode_s)
        return published.metrics
