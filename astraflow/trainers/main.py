"""The process of a trainer: one policy, from its first weights to its last checkpoint."""

from dataclasses import replace

import structlog

from astraflow.client.loop_thread import LoopThread
from astraflow.config.model_dirs import checked_model_dir
from astraflow.config.recipe import Recipe, Trainer
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.telemetry.logging import configure_logging
from astraflow.trainers.joining import TrainerPlace
from astraflow.trainers.resume import start_points

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


def main_run(recipe: Recipe, *, policy_id: str, place: TrainerPlace) -> int:
    """Train one policy of a run until the data ends or the run asks to leave.

    SIGTERM and SIGINT let the step in progress end; the second one stops at once.

    Args:
        recipe: Of the run.
        policy_id: Which of its policies.
        place: Where the trainer stands.

    Returns:
        The exit code: 0 when the run is over or the trainer was asked to leave, 1 when it
        failed; the log says why.
    """
    configure_logging(f"trainer-{policy_id}")
    try:
        checked_model_dir(policy_id, place.model_dir)
        with LoopThread() as loop:
            _train(PolicyId(policy_id), recipe.policies[policy_id].trainer, place, loop=loop)
    except AstraflowError as error:
        log.error("the trainer failed", reason=error.reason, why=error.message)  # noqa: TRY400
        return 1
    except KeyboardInterrupt:
        log.warning("stopped at once; the batch in hand returns to the run")
        return 1
    return 0


def _train(
    policy_id: PolicyId, settings: Trainer, place: TrainerPlace, *, loop: LoopThread
) -> None:
    """Train; one that resumes goes on from the newest checkpoint that the run knows.

    Raises:
        AstraflowError: CHECKPOINT_UNKNOWN when it was told which one, and that is not there or not
            known to the run.
    """
    from astraflow.trainers.policy_run import run_trainer  # noqa: PLC0415

    if not place.is_resuming:
        run_trainer(policy_id, settings, place, loop=loop)
        return
    starts = start_points(place.run_dir, policy_id, model_dir=place.model_dir)
    if place.checkpoint_id:
        starts = [start for start in starts if start.checkpoint_id == place.checkpoint_id]
    for start in starts:
        try:
            run_trainer(policy_id, settings, replace(place, start=start), loop=loop)
        except AstraflowError as error:
            if error.reason is not Reason.CHECKPOINT_UNKNOWN:
                raise
            log.warning("the run does not know a checkpoint", checkpoint_id=start.checkpoint_id)
        else:
            return
    raise AstraflowError(
        Reason.CHECKPOINT_UNKNOWN,
        f"{policy_id} has no checkpoint {place.checkpoint_id} in {place.run_dir.root} that the run "
        "knows; resume without --checkpoint to go on from its last one",
    )
