"""The run of one policy: its model, its place, its versions, and the loop over batches."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import structlog

from astraflow.client.loop_thread import LoopThread
from astraflow.client.trainer import TrainerClient
from astraflow.config.recipe import Trainer
from astraflow.core.dtype import Dtype
from astraflow.core.ids import PolicyId
from astraflow.rpc.address import split_address
from astraflow.telemetry.garbage import keep_for_good
from astraflow.telemetry.prometheus import MetricsServer
from astraflow.trainers.causal_model import CausalModel, load_causal_model, prepare_torch
from astraflow.trainers.checkpoints import Checkpoints
from astraflow.trainers.critic import Critic, load_critic
from astraflow.trainers.departure import Departure
from astraflow.trainers.export import layout_of
from astraflow.trainers.joining import TrainerPlace, joined
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.loop import TrainingLoop
from astraflow.trainers.mismatch import MismatchProbe
from astraflow.trainers.origin import Followers, WeightOrigin
from astraflow.trainers.pace import Pace
from astraflow.trainers.resume import OPTIMIZER_FILE, StartPoint
from astraflow.trainers.saves import Saves
from astraflow.trainers.tallies import TrainerTallies
from astraflow.weights.broadcast import rendezvous
from astraflow.weights.broadcaster import Broadcaster
from astraflow.weights.gains import Gains
from astraflow.weights.object_writer import ObjectWriter
from astraflow.weights.publisher import WeightPublisher
from astraflow.weights.scrub import Scrub

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trainee:
    """What is trained.

    Attributes:
        model: On the trainer's device.
        learner: Steps it.
        dtype: In which its weights are published.
        publisher: Of its versions.
    """

    model: CausalModel
    learner: PolicyLearner
    dtype: Dtype
    publisher: WeightPublisher


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
    trainee = _load(policy_id, settings, place)
    departure, tallies = Departure(), TrainerTallies(policy_id)
    with (
        departure.listening(),
        MetricsServer(place.metrics, tallies.families) as metrics,
        joined(
            policy_id, settings, place, trainee.publisher, loop, metrics_address=metrics.address
        ) as client,
        _followed(trainee.publisher, client, settings, place) as followers,
    ):
        pace = _pace(trainee, settings, place.start_point, client, followers)
        checkpoints = _checkpoints(policy_id, trainee, place)
        training = TrainingLoop(
            client=client,
            learner=trainee.learner,
            probe=MismatchProbe(trainee.model, trainee.learner, dtype=trainee.dtype),
            pace=pace,
            checkpoints=checkpoints,
            saves=Saves(client, checkpoints, settings),
            settings=settings,
            tallies=tallies,
        )
        batches = client.batches(
            max_tokens=settings.max_tokens_per_pass,
            prefetch=settings.prefetch,
            when_asked=training.when_asked,
        )
        keep_for_good()
        training.run(departure.watch(batches))
        end = client.end_of_data
        log.info("the trainer leaves", step=trainee.learner.step_count, cause=end and end.cause)


def _load(policy_id: PolicyId, settings: Trainer, place: TrainerPlace) -> _Trainee:
    start = place.start_point
    prepare_torch(thread_count=settings.thread_count)
    model = load_causal_model(start.directory, device=settings.device)
    dtype = Dtype(settings.export_dtype)
    learner = PolicyLearner(
        model, settings, reference=_reference(settings, place), critic=_critic(settings, place)
    )
    if start.step:
        learner.resume(start.step, start.directory / OPTIMIZER_FILE)
    publisher = WeightPublisher(policy_id, layout_of(model.module, dtype))
    return _Trainee(model=model, learner=learner, dtype=dtype, publisher=publisher)


def _reference(settings: Trainer, place: TrainerPlace) -> CausalModel | None:
    """Load what a KL term compares with; the first weights also after a resume."""
    kl = settings.loss.kl
    if kl is None:
        return None
    model = load_causal_model(kl.reference or place.model_dir, device=settings.device)
    model.module.requires_grad_(False)
    return model


def _critic(settings: Trainer, place: TrainerPlace) -> Critic | None:
    """Make what estimates advantages; its weights are resumed with the optimizer's state."""
    critic, tokens = settings.critic, settings.max_tokens_per_pass
    if critic is None:
        return None
    return load_critic(place.model_dir, critic, device=settings.device, max_tokens=tokens)


def _pace(
    trainee: _Trainee,
    settings: Trainer,
    start: StartPoint,
    client: TrainerClient,
    followers: tuple[Followers, ...],
) -> Pace:
    """Publish the first weights; return what publishes the others."""
    registration = client.registration
    origin = WeightOrigin(
        trainee.model.module,
        dtype=trainee.dtype,
        publisher=trainee.publisher,
        herald=client,
        first_version=registration.next_version,
        followers=followers,
        restored_from=_restored(start, registration.next_version),
    )
    if start.step or registration.rolled_back_batch_count:
        log.info(
            "goes on from a checkpoint",
            step=start.step,
            restored_from=start.version,
            rolled_back_batches=registration.rolled_back_batch_count,
        )
    return Pace(origin, settings.sync, is_asked=client.take_publish_order, step=start.step)


def _checkpoints(policy_id: PolicyId, trainee: _Trainee, place: TrainerPlace) -> Checkpoints:
    return Checkpoints(
        trainee.model.module,
        model_dir=place.model_dir,
        run_dir=place.run_dir,
        policy_id=policy_id,
        optimizer=trainee.learner.state,
    )


def _restored(start: StartPoint, next_version: int) -> int | None:
    """Return what these weights were in this run; None: they come from elsewhere."""
    is_older = start.version is not None and start.version < next_version
    return start.version if is_older else None


@contextmanager
def _followed(
    publisher: WeightPublisher, client: TrainerClient, settings: Trainer, place: TrainerPlace
) -> Generator[tuple[Followers, ...]]:
    """Let versions gain patches beside training, be looked after, and go other ways too."""
    with ExitStack() as followers:
        scrub = followers.enter_context(Scrub(publisher, damaged=client.order_publish))
        client.on_doubt(scrub.doubt)
        others: tuple[Followers, ...] = (scrub,)
        if settings.broadcast is not None:
            where = rendezvous(settings.broadcast, host=split_address(place.listen)[0])
            others = (followers.enter_context(Broadcaster(publisher, where)), *others)
        if settings.store is None:
            yield (*others, followers.enter_context(Gains(publisher, client.publish_version)))
            return
        url = f"{settings.store.rstrip('/')}/{client.registration.run_id}"
        writer = followers.enter_context(ObjectWriter(publisher, url, client.publish_version))
        gains = Gains(publisher, client.publish_version, then=writer.look)
        log.info("versions also go to an object store", url=url)
        yield (*others, writer, followers.enter_context(gains))
