"""The process of one rank of a trainer."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import structlog

from astraflow.client.loop_thread import LoopThread
from astraflow.config.recipe import PolicyConfig
from astraflow.core.ids import PolicyId
from astraflow.rpc.address import split_address
from astraflow.trainers.fsdp.engine import ShardedEngine
from astraflow.trainers.fsdp.follow import FollowerRank
from astraflow.trainers.fsdp.lead import LeadEngine
from astraflow.trainers.fsdp.ranks import RanksApartError, joined_ranks, naming_lost_ranks
from astraflow.trainers.joining import TrainerPlace
from astraflow.trainers.main import shared_interpreter, train

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


def train_rank(
    policy_id: PolicyId,
    policy: PolicyConfig,
    place: TrainerPlace,
    *,
    model_dir: Path,
    loop: LoopThread,
) -> None:
    """Be one of the ranks that torchrun started, until rank 0 leaves the run.

    Raises:
        AstraflowError: What joining and training raise; MEMBER_LOST when another rank is gone.
    """
    settings = policy.trainer
    with joined_ranks(device=settings.device, fsdp=settings.fsdp) as ranks:
        log.info("the ranks have met", rank=ranks.rank, count=ranks.count)
        here = _place_here(place)
        try:
            with naming_lost_ranks():
                lora = policy.model.lora
                engine = ShardedEngine(settings, model_dir=model_dir, ranks=ranks, lora=lora)
                if ranks.rank == 0:
                    lead = LeadEngine(engine, ranks)
                    train(lead, policy_id, settings, here, loop=loop, publishing=lead.publishing)
                    lead.leave()
                    return
                # Rank 0 says when the step in progress is the last.
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)
                with shared_interpreter():
                    FollowerRank(
                        engine, ranks, policy_id, settings=settings, place=here, loop=loop
                    ).run()
        except RanksApartError as apart:
            raise apart.error from apart


def _place_here(place: TrainerPlace) -> TrainerPlace:
    """Return where this rank stands: ranks of one machine take ports in a row."""
    host, port = split_address(place.listen)
    number = port + int(os.environ.get("LOCAL_RANK", "0")) if port else 0
    # torchrun starts all ranks again when one of them ended.
    is_again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return replace(place, listen=f"{host}:{number}", is_resuming=place.is_resuming or is_again)
