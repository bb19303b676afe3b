"""The process of a trainer: one policy, from its first weights to its last checkpoint."""

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING

import structlog
from structlog.contextvars import bind_contextvars

from astraflow import __version__
from astraflow.client.loop_thread import LoopThread
from astraflow.client.trainer import TrainerClient
from astraflow.config.recipe import Recipe, Trainer
from astraflow.config.run_dir import RunDir
from astraflow.core.dtype import Dtype
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.members import Contract, ModelIdentity, RegisterTrainer, Resources
from astraflow.core.versions import Lane, WeightEndpoint
from astraflow.rpc.tls import Tls
from astraflow.telemetry.garbage import keep_for_good
from astraflow.telemetry.logging import configure_logging
from astraflow.telemetry.prometheus import OFF, MetricsServer
from astraflow.trainers.departure import Departure
from astraflow.trainers.resume import OPTIMIZER_FILE, StartPoint, start_points
from astraflow.trainers.tallies import TrainerTallies
from astraflow.transport.hosts import chosen_lanes
from astraflow.weights.gains import Gains
from astraflow.weights.object_writer import ObjectWriter
from astraflow.weights.publisher import WeightPublisher
from astraflow.weights.server import WeightServer

if TYPE_CHECKING:
    from astraflow.trainers.origin import Followers

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# The session of a trainer that was killed ends after its ttl, a minute at the most.
_TAKEN_S = 90.0
_TAKEN_RETRY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlace:
    """Where a trainer stands.

    Attributes:
        hub: host:port.
        token: The run's join token.
        run_dir: Where checkpoints go.
        model_dir: The policy's first weights, architecture and tokenizer.
        start: What it begins with; None: the first weights.
        is_resuming: Whether it waits for the session of a predecessor to end.
        listen: host:port on which it serves its weights.
        advertise: How others dial that; None: as listened on.
        tls: None: plain text.
        metrics: host:port of its metrics, or off.
    """

    hub: str
    token: str
    run_dir: RunDir
    model_dir: Path
    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    tls: Tls | None = None
    start: StartPoint | None = None
    is_resuming: bool = False
    metrics: str = OFF

    @property
    def start_point(self) -> StartPoint:
        """What it begins with."""
        return self.start or StartPoint(directory=self.model_dir)


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
            if resume:
                _resume(PolicyId(policy_id), settings, place, loop=loop)
            else:
                run_trainer(PolicyId(policy_id), settings, place, loop=loop)
    except AstraflowError as error:
        log.error("the trainer failed", reason=error.reason, why=error.message)  # noqa: TRY400
        return 1
    except KeyboardInterrupt:
        log.warning("stopped at once; the batch in hand returns to the run")
        return 1
    return 0


def _resume(
    policy_id: PolicyId, settings: Trainer, place: TrainerPlace, *, loop: LoopThread
) -> None:
    """Train on from the newest checkpoint that the run knows."""
    for start in start_points(place.run_dir, policy_id, model_dir=place.model_dir):
        try:
            run_trainer(policy_id, settings, replace(place, start=start), loop=loop)
        except AstraflowError as error:
            if error.reason is not Reason.CHECKPOINT_UNKNOWN:
                raise
            log.warning("the run does not know a checkpoint", checkpoint_id=start.checkpoint_id)
        else:
            return


def run_trainer(
    policy_id: PolicyId, settings: Trainer, place: TrainerPlace, *, loop: LoopThread
) -> None:
    """Load the model, join the run and train; signals end it when this is the main thread.

    Args:
        policy_id: Which policy.
        settings: Of its trainer.
        place: Where the trainer stands.
        loop: Running; for all that is not training.

    Raises:
        AstraflowError: INVALID_FIELD for a model that cannot be loaded; what joining and
            training raise.
    """
    from astraflow.trainers.causal_model import load_causal_model, prepare_torch  # noqa: PLC0415
    from astraflow.trainers.checkpoints import Checkpoints  # noqa: PLC0415
    from astraflow.trainers.export import layout_of  # noqa: PLC0415
    from astraflow.trainers.learner import GrpoLearner  # noqa: PLC0415
    from astraflow.trainers.loop import train  # noqa: PLC0415
    from astraflow.trainers.mismatch import MismatchProbe  # noqa: PLC0415
    from astraflow.trainers.origin import WeightOrigin  # noqa: PLC0415
    from astraflow.trainers.pace import Pace  # noqa: PLC0415

    prepare_torch(thread_count=settings.thread_count)
    start = place.start_point
    model = load_causal_model(start.directory, device=settings.device)
    dtype = Dtype(settings.export_dtype)
    learner = GrpoLearner(model, settings)
    if start.step:
        learner.resume(start.step, start.directory / OPTIMIZER_FILE)
    publisher = WeightPublisher(policy_id, layout_of(model.module, dtype))
    departure, tallies = Departure(), TrainerTallies(policy_id)
    with (
        departure.listening(),
        MetricsServer(place.metrics, tallies.families) as metrics,
        _joined(
            policy_id, settings, place, publisher, loop, metrics_address=metrics.address
        ) as client,
        _followed(publisher, client, settings) as followers,
    ):
        origin = WeightOrigin(
            model.module,
            dtype=dtype,
            publisher=publisher,
            herald=client,
            first_version=client.registration.next_version,
            followers=followers,
            restored_from=_restored(start, client.registration.next_version),
        )
        if start.step or client.registration.rolled_back_batch_count:
            log.info(
                "goes on from a checkpoint",
                step=start.step,
                restored_from=start.version,
                rolled_back_batches=client.registration.rolled_back_batch_count,
            )
        pace = Pace(origin, settings.sync, is_asked=client.take_publish_order, step=start.step)
        batches = client.batches(
            max_tokens=settings.max_tokens_per_pass,
            prefetch=settings.prefetch,
            when_asked=pace.when_asked,
        )
        keep_for_good()
        train(
            departure.watch(batches),
            client=client,
            learner=learner,
            probe=MismatchProbe(model, learner, dtype=dtype),
            pace=pace,
            checkpoints=Checkpoints(
                model.module,
                model_dir=place.model_dir,
                run_dir=place.run_dir,
                policy_id=policy_id,
                optimizer=learner.state,
            ),
            settings=settings,
            tallies=tallies,
        )
        end = client.end_of_data
        log.info("the trainer leaves", step=learner.step_count, cause=end and end.cause)


def _restored(start: StartPoint, next_version: int) -> int | None:
    """Return what these weights were in this run; None: they come from elsewhere."""
    is_older = start.version is not None and start.version < next_version
    return start.version if is_older else None


@contextmanager
def _joined(
    policy_id: PolicyId,
    settings: Trainer,
    place: TrainerPlace,
    publisher: WeightPublisher,
    loop: LoopThread,
    *,
    metrics_address: str,
) -> Generator[TrainerClient]:
    """Serve the weights and take the trainer's place in the run."""
    with ExitStack() as stack:
        server = stack.enter_context(
            WeightServer(
                publisher,
                listen=place.listen,
                advertise=place.advertise,
                tls=place.tls,
                loop=loop,
                lanes=_served(settings, place.tls),
            )
        )
        start = place.start_point
        register = RegisterTrainer(
            policy_id=policy_id,
            name=f"trainer-{policy_id}",
            contract=Contract(software=f"astraflow/{__version__}"),
            identity=ModelIdentity(name=place.model_dir.name),
            groups_per_batch=settings.groups_per_batch,
            checkpoint_id=start.checkpoint_id,
            last_step=start.step,
            version=start.version,
            weight_endpoints=(WeightEndpoint(rank=0, endpoint=server.endpoint),),
            resources=Resources(core_count=os.cpu_count() or 0, metrics_address=metrics_address),
        )
        client = _take_place(stack, place, register, loop)
        client.on_transfer_token(server.set_transfer_token)
        session = client.registration.session
        bind_contextvars(run=client.registration.run_id, member=session.member_id)
        yield client


def _take_place(
    stack: ExitStack, place: TrainerPlace, register: RegisterTrainer, loop: LoopThread
) -> TrainerClient:
    """Register; one that resumes waits until the session of its predecessor has ended."""
    deadline = monotonic() + (_TAKEN_S if place.is_resuming else 0.0)
    while True:
        client = TrainerClient(
            hub=place.hub, token=place.token, tls=place.tls, loop=loop, register=register
        )
        try:
            return stack.enter_context(client)
        except AstraflowError as error:
            if error.reason is not Reason.POLICY_TAKEN or monotonic() > deadline:
                raise
        sleep(_TAKEN_RETRY_S)


@contextmanager
def _followed(
    publisher: WeightPublisher, client: TrainerClient, settings: Trainer
) -> Generator["tuple[Followers, ...]"]:
    """Let versions gain patches beside training, and go to an object store too."""
    with ExitStack() as followers:
        if settings.store is None:
            yield (followers.enter_context(Gains(publisher, client.publish_version)),)
            return
        url = f"{settings.store.rstrip('/')}/{client.registration.run_id}"
        writer = followers.enter_context(ObjectWriter(publisher, url, client.publish_version))
        gains = Gains(publisher, client.publish_version, then=writer.look)
        log.info("versions also go to an object store", url=url)
        yield (writer, followers.enter_context(gains))


def _served(settings: Trainer, tls: Tls | None) -> tuple[Lane, ...] | None:
    """Return the lanes beside gRPC; None: the usual ones."""
    lanes = chosen_lanes(settings.lanes, tls)
    return None if lanes is None else tuple(lane for lane in lanes if lane is not Lane.GRPC)


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
