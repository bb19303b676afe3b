"""The run of one engine: its place, its versions, and the loop over batches."""

from dataclasses import replace
from pathlib import Path

import structlog

from astraflow.client.loop_thread import LoopThread
from astraflow.client.trainer import TrainerClient
from astraflow.config.recipe import Trainer
from astraflow.config.run_dir import RunDir
from astraflow.core.dtype import Dtype
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.layout import Layout
from astraflow.core.members import Capability
from astraflow.rpc.tls import Tls
from astraflow.telemetry.garbage import keep_for_good
from astraflow.telemetry.prometheus import MetricsServer
from astraflow.trainers.checkpoints import Checkpoints
from astraflow.trainers.departure import Departure
from astraflow.trainers.engine import ReplaysExperts, TrainEngine
from astraflow.trainers.failures import FailedSteps
from astraflow.trainers.followers import followed
from astraflow.trainers.interpreter import shared_interpreter
from astraflow.trainers.joining import TrainerPlace, joined
from astraflow.trainers.loop import TrainingLoop
from astraflow.trainers.origin import Followers, WeightOrigin
from astraflow.trainers.own_engine import prepare
from astraflow.trainers.pace import Pace
from astraflow.trainers.published_layout import published_layout
from astraflow.trainers.publishing import Publishing, publishing_of
from astraflow.trainers.resume import StartPoint, start_points
from astraflow.trainers.saves import Saves
from astraflow.trainers.tallies import TrainerTallies

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


def run_engine(
    engine: TrainEngine,
    *,
    hub: str,
    token: str,
    policy: str,
    settings: Trainer | None = None,
    run_dir: Path | None = None,
    resume: bool = False,
    listen: str = "127.0.0.1:0",
    advertise: str | None = None,
    tls: Tls | None = None,
) -> None:
    """Join a run as the trainer of a policy, and train until it ends: any engine is a trainer.

    It serves and publishes the engine's weights, keeps its place in the run, writes checkpoints
    and does what the run asks for. SIGTERM and SIGINT let the step in progress end.

    Args:
        engine: Not prepared yet.
        hub: host:port.
        token: The run's join token.
        policy: Which policy of the run.
        settings: Of its trainer, `load_recipe(path).policies[policy].trainer`; of these an engine
            of your own needs groups_per_batch, and of the others what is not the default.
        run_dir: Where checkpoints go; unset: runs/POLICY.
        resume: Go on from the newest checkpoint in it that the run knows.
        listen: host:port on which it serves its weights.
        advertise: How others dial that; unset: as listened on.
        tls: Unset: plain text.

    Raises:
        AstraflowError: What joining, the engine and the run answer.
    """
    place = TrainerPlace(
        hub=hub,
        token=token,
        run_dir=RunDir(run_dir or Path("runs") / policy),
        listen=listen,
        advertise=advertise,
        tls=tls,
        is_resuming=resume,
    )
    with LoopThread() as loop:
        train(engine, PolicyId(policy), settings or Trainer(), place, loop=loop)


def train(
    engine: TrainEngine,
    policy_id: PolicyId,
    settings: Trainer,
    place: TrainerPlace,
    *,
    loop: LoopThread,
) -> None:
    """Train; who resumes goes on from the newest checkpoint that the run knows.

    Args:
        engine: Not prepared yet.
        policy_id: Which policy.
        settings: Of its trainer.
        place: Where the trainer stands.
        loop: Running; for all that is not training.

    Raises:
        AstraflowError: CHECKPOINT_UNKNOWN when it was told which one, and that is not there or not
            known to the run; CAPABILITY_MISSING for an engine that lacks a method; what joining,
            the engine and the run answer.
    """
    prepare(engine)
    if not place.is_resuming:
        _train_from(engine, policy_id, settings, place, loop)
        return
    for start in _starts(policy_id, place):
        try:
            _train_from(engine, policy_id, settings, replace(place, start=start), loop)
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


def _starts(policy_id: PolicyId, place: TrainerPlace) -> list[StartPoint]:
    found = start_points(place.run_dir, policy_id)
    wanted = place.checkpoint_id
    return [start for start in found if not wanted or start.checkpoint_id == wanted]


def _train_from(
    engine: TrainEngine,
    policy_id: PolicyId,
    settings: Trainer,
    place: TrainerPlace,
    loop: LoopThread,
) -> None:
    """Join the run and train from one point; signals end it when this is the main thread."""
    layout = published_layout(engine.named_parameters(), Dtype(settings.export_dtype))
    publishing = publishing_of(engine, policy_id, layout)
    departure, tallies = Departure(), TrainerTallies(policy_id)
    with (
        shared_interpreter(),
        departure.listening(),
        MetricsServer(place.metrics, tallies.families) as metrics,
        joined(
            policy_id,
            settings,
            place,
            publishing,
            loop,
            capabilities=_capabilities(engine),
            metrics_address=metrics.address,
        ) as client,
        followed(publishing.own, client, settings, place) as followers,
    ):
        if place.start.directory is not None:
            engine.restore(place.start.directory)
        origin = _origin(
            engine,
            layout,
            publishing,
            client=client,
            followers=followers,
            start=place.start,
        )
        checkpoints = Checkpoints(engine, run_dir=place.run_dir, policy_id=policy_id)
        training = _loop(
            engine, origin, checkpoints, settings=settings, client=client, tallies=tallies
        )
        batches = client.batches(
            world_size=publishing.rank_count,
            max_tokens=settings.max_tokens_per_pass,
            prefetch=settings.prefetch,
            when_asked=training.when_asked,
        )
        keep_for_good()
        training.run(departure.watch(batches))
        end = client.end_of_data
        log.info("the trainer leaves", step=engine.step_count, cause=end and end.cause)


def _capabilities(engine: TrainEngine) -> frozenset[Capability]:
    replays = isinstance(engine, ReplaysExperts) and engine.replays_experts
    return frozenset({Capability.ROUTED_EXPERTS} if replays else ())


def _loop(
    engine: TrainEngine,
    origin: WeightOrigin,
    checkpoints: Checkpoints,
    *,
    settings: Trainer,
    client: TrainerClient,
    tallies: TrainerTallies,
) -> TrainingLoop:
    """Publish the first weights; return what trains from there."""
    pace = Pace(
        origin,
        settings.sync,
        is_asked=client.take_publish_order,
        step=engine.step_count,
        last_step=settings.step_count,
    )
    return TrainingLoop(
        client=client,
        engine=engine,
        pace=pace,
        checkpoints=checkpoints,
        saves=Saves(client, checkpoints, settings),
        failures=FailedSteps(settings),
        tallies=tallies,
    )


def _origin(
    engine: TrainEngine,
    layout: Layout,
    publishing: Publishing,
    *,
    client: TrainerClient,
    followers: tuple[Followers, ...],
    start: StartPoint,
) -> WeightOrigin:
    registration = client.registration
    if start.step or registration.rolled_back_batch_count:
        log.info(
            "goes on from a checkpoint",
            step=start.step,
            restored_from=start.version,
            rolled_back_batches=registration.rolled_back_batch_count,
        )
    return WeightOrigin(
        engine,
        layout=layout,
        publisher=publishing,
        herald=client,
        first_version=registration.next_version,
        order=publishing.order,
        followers=followers,
        restored_from=_restored(start, registration.next_version),
    )


def _restored(start: StartPoint, next_version: int) -> int | None:
    """Return what these weights were in this run; None: they come from elsewhere."""
    is_older = start.version is not None and start.version < next_version
    return start.version if is_older else None
