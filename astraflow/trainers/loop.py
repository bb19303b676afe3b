"""The training loop, on one screen: a batch, a step, a version, an ack."""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from time import perf_counter, time_ns

import structlog

from astraflow.client.trainer import TrainerBatch, TrainerClient
from astraflow.config.recipe import Trainer
from astraflow.core.batches import AckBatch, BatchOutcome
from astraflow.trainers.checkpoints import Checkpoints
from astraflow.trainers.learner import GrpoLearner
from astraflow.trainers.mismatch import MismatchProbe
from astraflow.trainers.pace import Pace
from astraflow.trainers.rows import TrainRows
from astraflow.trainers.tallies import TrainerTallies
from astraflow.trainers.traces import trace_step

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# What a trainer that is killed loses at most, where the recipe does not say.
_CHECKPOINT_S = 600.0


def train(
    batches: Iterable[TrainerBatch],
    *,
    client: TrainerClient,
    learner: GrpoLearner,
    probe: MismatchProbe,
    pace: Pace,
    checkpoints: Checkpoints,
    settings: Trainer,
    tallies: TrainerTallies,
) -> None:
    """Train until the batches end; the first weights are published already.

    A version is published before the batch behind it is acknowledged, so no acknowledged work
    is ever lost with the process. Both go on while the next batch is trained on, and end before
    the version that comes of it.

    Raises:
        AstraflowError: INTERNAL when a gradient is not finite, and what the run answers. The
            batch in hand returns to the run with the session.
    """
    if not learner.step_count:
        checkpoints.save(step=0, version=pace.version)
    saves = _Saves(client, checkpoints, settings)
    for batch in batches:
        started, started_ns = perf_counter(), time_ns()
        if pace.is_fresh:
            probe.keep(pace.last.info.version)
        rows = TrainRows.from_parts(batch.parts)
        seen = probe.look(rows)
        learned = learner.step(rows, loss_token_count=batch.header.loss_token_count)
        step_s, stepped_ns = perf_counter() - started, time_ns()
        step = learner.step_count
        client.flush()
        published = pace.after_step(step, is_last=step == settings.step_count)
        if published is not None:
            tallies.published(published.info.version, perf_counter() - started - step_s)
        trace_step(
            batch.header,
            step=step,
            version=published.info.version if published else None,
            times_ns=(started_ns, stepped_ns, time_ns()),
        )
        checkpoint_id = saves.after_step(step, pace.version)
        costs: Mapping[str, float] = published.metrics if published else {}
        metrics = {**learned, **seen, **costs, **_pace(batch, rows, step_s)}
        train_s = perf_counter() - started
        tallies.trained(metrics, wait_s=batch.wait_s, step_s=step_s, token_count=len(rows.tokens))
        client.settle(
            AckBatch(
                batch_id=batch.header.batch_id,
                outcome=BatchOutcome.CONSUMED,
                step=step,
                metrics=metrics,
                wait=timedelta(seconds=batch.wait_s),
                train=timedelta(seconds=train_s),
                checkpoint_id=checkpoint_id,
            )
        )
        _log_step(step, metrics, wait_s=batch.wait_s, train_s=train_s)
    last = pace.finish()
    client.flush()
    checkpoints.save(step=learner.step_count, version=last.info.version)


class _Saves:
    """Writes a checkpoint when one is asked for or due."""

    def __init__(self, client: TrainerClient, checkpoints: Checkpoints, settings: Trainer) -> None:
        self._client = client
        self._checkpoints = checkpoints
        self._settings = settings
        self._saved = perf_counter()

    def after_step(self, step: int, version: int | None) -> str:
        """Return the id of the checkpoint that was written; empty: none was."""
        asked = next(iter(self._client.take_orders().checkpoint_ids), "")
        if not asked and not _is_due(step, self._settings, since_s=perf_counter() - self._saved):
            return ""
        # It names a version that the run knows.
        self._client.flush()
        written = self._checkpoints.save(step=step, version=version, checkpoint_id=asked)
        if self._settings.checkpoint_every is None:
            self._checkpoints.thin_out()
        self._saved = perf_counter()
        return written


def _is_due(step: int, settings: Trainer, *, since_s: float) -> bool:
    """Whether a checkpoint is written: the last one before its batch is acknowledged, too.

    Args:
        step: Just done.
        settings: Of the trainer.
        since_s: Seconds since the last one.
    """
    if step == settings.step_count:
        return True
    every = settings.checkpoint_every
    return since_s >= _CHECKPOINT_S if every is None else step % every == 0


def _pace(batch: TrainerBatch, rows: TrainRows, step_s: float) -> Mapping[str, float]:
    token_count = len(rows.tokens)
    return {
        "time/step_s": step_s,
        "time/wait_s": batch.wait_s,
        "batch/tokens": float(token_count),
        "perf/trainer_tokens_per_s": token_count / step_s,
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
