"""The process of a trainer: one policy, from its first weights to its last checkpoint."""

from dataclasses import replace
from pathlib import Path

import structlog

from astraflow.client.loop_thread import LoopThread
from astraflow.config.recipe import Recipe, Trainer
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.rpc.tls import Tls
from astraflow.telemetry.logging import configure_logging
from astraflow.trainers.joining import TrainerPlace
from astraflow.trainers.resume import start_points

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


def main_run(
    recipe: Recipe,
    *,
    policy_id: str,
    hub: str,
    token: str,
    run_dir: Path,
    model_dir: Path | None = None,
    listen: str = "127.0.0.1:0",
    advertise: str | None = None,
    tls: Tls | None = None,
    resume: bool = False,
    log_file: Path | None = None,
    log_json: bool = False,
) -> int:
    """Train one policy of a run until the data ends or the run asks to leave.

    SIGTERM and SIGINT let the step in progress end; the second one stops at once.

    Args:
        recipe: Of the run.
        policy_id: Which of its policies.
        hub: host:port.
        token: The run's join token.
        run_dir: Where checkpoints go.
        model_dir: None: the recipe's path.
        listen: host:port on which it serves its weights.
        advertise: How others dial that: auto, fqdn, a host or IP; None: as listened on.
        tls: None: plain text.
        resume: Go on from the newest checkpoint in `run_dir` that the run knows.
        log_file: Appended to; None: standard error.
        log_json: Log JSON lines.

    Returns:
        The exit code: 0 when the run is over or the trainer was asked to leave, 1 when it
        failed; the log says why.
    """
    configure_logging(f"trainer-{policy_id}", log_file=log_file, json=log_json)
    try:
        directory = _model_dir(recipe, policy_id, model_dir)
        place = TrainerPlace(
            hub=hub,
            token=token,
            run_dir=RunDir(run_dir),
            model_dir=directory,
            is_resuming=resume,
            listen=listen,
            advertise=advertise,
            tls=tls,
            metrics=recipe.metrics.listen,
        )
        settings = recipe.policies[policy_id].trainer
        with LoopThread() as loop:
            _train(PolicyId(policy_id), settings, place, loop=loop)
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
    """Train; one that resumes goes on from the newest checkpoint that the run knows."""
    from astraflow.trainers.policy_run import run_trainer  # noqa: PLC0415

    if not place.is_resuming:
        run_trainer(policy_id, settings, place, loop=loop)
        return
    for start in start_points(place.run_dir, policy_id, model_dir=place.model_dir):
        try:
            run_trainer(policy_id, settings, replace(place, start=start), loop=loop)
        except AstraflowError as error:
            if error.reason is not Reason.CHECKPOINT_UNKNOWN:
                raise
            log.warning("the run does not know a checkpoint", checkpoint_id=start.checkpoint_id)
        else:
            return


def _model_dir(recipe: Recipe, policy_id: str, model_dir: Path | None) -> Path:
    if policy_id not in recipe.policies:
        raise AstraflowError(
            Reason.POLICY_UNKNOWN,
            f"the recipe has no policy {policy_id}, only {', '.join(recipe.policies)}",
        )
    directory = model_dir or recipe.policies[policy_id].model.path
    if directory is None:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"policy {policy_id} starts from a warm-up model; make it with `astraflow trainer "
            "warm-up` and give --model DIR",
        )
    if not (directory / "config.json").is_file():
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"policy {policy_id}: {directory} has no config.json; give the folder of a Hugging "
            "Face model",
        )
    return directory
