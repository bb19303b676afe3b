"""The process of a trainer: one policy, from its first weights to its last checkpoint."""

import os
from pathlib import Path

import structlog

from astraflow.client.loop_thread import LoopThread
from astraflow.config.model_dirs import checked_model_dir
from astraflow.config.recipe import Policy, Recipe
from astraflow.core.errors import AstraflowError
from astraflow.core.ids import PolicyId
from astraflow.telemetry.logging import configure_logging
from astraflow.trainers.engine import TrainEngine
from astraflow.trainers.joining import TrainerPlace
from astraflow.trainers.own_engine import make_engine

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


def main_run(recipe: Recipe, *, policy_id: str, model_dir: Path, place: TrainerPlace) -> int:
    """Train one policy of a run until the data ends or the run asks to leave.

    SIGTERM and SIGINT let the step in progress end; the second one stops at once.

    Args:
        recipe: Of the run.
        policy_id: Which of its policies.
        model_dir: Its first weights, architecture and tokenizer.
        place: Where the trainer stands.

    Returns:
        The exit code: 0 when the run is over or the trainer was asked to leave, 1 when it
        failed, 78 (CONFIGURATION_EXIT) when it would fail again; the log says why.
    """
    configure_logging(f"trainer-{policy_id}{rank_mark()}")
    try:
        checked_model_dir(policy_id, model_dir)
        policy = recipe.policies[policy_id]
        with LoopThread() as loop:
            _train(PolicyId(policy_id), policy, place, model_dir=model_dir, loop=loop)
    except AstraflowError as error:
        log.error("the trainer failed", reason=error.reason, why=error.message)  # noqa: TRY400
        return error.exit_code
    except KeyboardInterrupt:
        log.warning("stopped at once; the batch in hand returns to the run")
        return 1
    return 0


def is_rank() -> bool:
    """Whether torchrun started this process, as one rank of a trainer."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _train(
    policy_id: PolicyId,
    policy: Policy,
    place: TrainerPlace,
    *,
    model_dir: Path,
    loop: LoopThread,
) -> None:
    if is_rank():
        from astraflow.trainers.fsdp.main import train_rank  # noqa: PLC0415 - loads torch

        train_rank(policy_id, policy, place, model_dir=model_dir, loop=loop)
        return
    from astraflow.trainers.engine_run import train  # noqa: PLC0415 - loads what it needs

    train(_engine_of(policy, model_dir), policy_id, policy.trainer, place, loop=loop)


def _engine_of(policy: Policy, model_dir: Path) -> TrainEngine:
    """Return what steps the model, not prepared yet."""
    if policy.trainer.engine is not None:
        return make_engine(policy.trainer.engine, policy.trainer, model_dir=model_dir)
    from astraflow.trainers.torch_engine import TorchEngine  # noqa: PLC0415 - loads torch

    return TorchEngine(policy.trainer, model_dir=model_dir, lora=policy.model.lora)


def rank_mark() -> str:
    """Return what tells the logs and traces of ranks apart."""
    return f"-{os.environ['RANK']}" if is_rank() else ""
