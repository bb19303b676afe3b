"""The process of a trainer: one policy, from its first weights to its last checkpoint."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Final, TypeVar

import structlog

from astraflow.client.loop_thread import LoopThread
from astraflow.config.model_dirs import checked_model_dir
from astraflow.config.recipe import Recipe, TrainerConfig
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.members import Capability
from astraflow.core.tensors import Dtype, Layout
from astraflow.rpc.tls import Tls
from astraflow.telemetry.garbage import keep_for_good
from astraflow.telemetry.logging import configure_logging
from astraflow.telemetry.metrics import MetricsServer
from astraflow.trainers.checkpoints import Checkpoints, start_points
from astraflow.trainers.engine import ReplaysExperts, TrainEngine, make_engine, prepare
from astraflow.trainers.joining import TrainerPlace, joined
from astraflow.trainers.loop import TrainerMetrics, TrainingLoop
from astraflow.trainers.origin import (
    Publishing,
    WeightOrigin,
    published_layout,
    version_listeners,
)
from astraflow.weights.publish.background import Scrub
from astraflow.weights.publish.publisher import WeightPublisher

Item = TypeVar("Item")

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class _Leave(BaseException):
    """Ends a wait for the run or for the next batch."""


class GracefulShutdown:
    """Ends the iteration over batches when the process is asked to leave.

    A signal that comes during a step lets it end; one that comes while the run or the next
    batch is waited for ends the wait. The second one is a KeyboardInterrupt wherever it comes.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._waits = False

    @contextmanager
    def listening(self) -> Generator[None]:
        """Take SIGTERM and SIGINT; outside the main thread, which alone can, do nothing.

        A wait that one of them ends ends the block.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGTERM, signal.SIGINT)
        old = [signal.signal(number, self._request) for number in numbers]
        try:
            yield
        except _Leave:
            log.info("asked to leave")
        finally:
            for number, handler in zip(numbers, old, strict=True):
                signal.signal(number, handler)

    @contextmanager
    def entering(self, context: AbstractContextManager[Item]) -> Generator[Item]:
        """Enter a context, which is a wait."""
        with ExitStack() as stack:
            with self._waiting():
                entered = stack.enter_context(context)
            yield entered

    def watch(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield items until there are no more or the process is asked to leave."""
        iterator = iter(items)
        try:
            while not self.is_requested:
                try:
                    with self._waiting():
                        item = next(iterator)
                except StopIteration:
                    return
                yield item
        except _Leave:  # also where it comes between an item and the note that nobody waits
            pass
        log.info("asked to leave")

    def wait(self, waits: Callable[[], None]) -> None:
        """Call what waits; return when it does, or the process is asked to leave."""
        with suppress(_Leave), self._waiting():
            waits()

    @contextmanager
    def _waiting(self) -> Generator[None]:
        self._waits = True
        try:
            if self.is_requested:
                raise _Leave
            yield
        finally:
            self._waits = False

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        """Note it; nothing is logged here, in the middle of what may be writing a line."""
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True
        if self._waits:
            raise _Leave


_SWITCH_INTERVAL_S: Final = 1e-4


@contextmanager
def shared_interpreter() -> Generator[None]:
    """Have threads beside training let go of the interpreter soon when a step needs it.

    A step needs it for some microseconds between two operations of torch, which compute without it.
    Who encodes and serves versions meanwhile may keep it for 5 ms by Python's own setting: as long
    as many operations of a small model take.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def run_engine(
    engine: TrainEngine,
    *,
    hub: str,
    token: str,
    policy: str,
    settings: TrainerConfig | None = None,
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
        train(engine, PolicyId(policy), settings or TrainerConfig(), place, loop=loop)


def train(
    engine: TrainEngine,
    policy_id: PolicyId,
    settings: TrainerConfig,
    place: TrainerPlace,
    *,
    loop: LoopThread,
    publishing: Callable[[PolicyId, Layout], Publishing] | None = None,
) -> None:
    """Train; who resumes goes on from the newest checkpoint that the run knows.

    The engine is not prepared yet; the loop runs, for all that is not training. What publishes the
    weights is made of their layout; without it this process does alone.

    Raises:
        AstraflowError: CHECKPOINT_UNKNOWN when it was told which one, and that is not there or not
            known to the run; CAPABILITY_MISSING for an engine that lacks a method; what joining,
            the engine and the run answer.
    """
    prepare(engine)
    if not place.is_resuming:
        _train_from(engine, policy_id, settings, place, loop, make_publishing=publishing)
        return
    wanted = place.checkpoint_id
    for start in start_points(place.run_dir, policy_id):
        if wanted not in ("", start.checkpoint_id):
            continue
        here = replace(place, start=start)
        try:
            _train_from(engine, policy_id, settings, here, loop, make_publishing=publishing)
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


def _train_from(
    engine: TrainEngine,
    policy_id: PolicyId,
    settings: TrainerConfig,
    place: TrainerPlace,
    loop: LoopThread,
    *,
    make_publishing: Callable[[PolicyId, Layout], Publishing] | None,
) -> None:
    """Join the run and train from one point; signals end it when this is the main thread."""
    layout = published_layout(engine.named_parameters(), Dtype(settings.export_dtype))
    if make_publishing is None:
        publishing = Publishing(WeightPublisher(policy_id, layout))
    else:
        publishing = make_publishing(policy_id, layout)
    publishing.own.copies_on_device = settings.copy_on_device
    departure, tallies = GracefulShutdown(), TrainerMetrics(policy_id)
    replays = isinstance(engine, ReplaysExperts) and engine.replays_experts
    with (
        shared_interpreter(),
        departure.listening(),
        MetricsServer(place.metrics, tallies.families) as metrics,
        departure.entering(
            joined(
                policy_id,
                settings,
                place,
                publishing,
                loop,
                capabilities=frozenset({Capability.ROUTED_EXPERTS} if replays else ()),
                metrics_address=metrics.address,
            )
        ) as client,
        Scrub(publishing.own, damaged=client.order_publish) as scrub,
        version_listeners(
            publishing.own, client, settings, scrub=scrub, listen=place.listen
        ) as followers,
    ):
        start, registration = place.start, client.registration
        if start.checkpoint_id:
            engine.restore(start.directory)
        if start.step or registration.rolled_back_batch_count:
            log.info(
                "goes on from a checkpoint",
                step=start.step,
                restored_from=start.version,
                rolled_back_batches=registration.rolled_back_batch_count,
            )
        first = registration.next_version
        is_older = start.version is not None and start.version < first
        origin = WeightOrigin(
            engine,
            layout=layout,
            publishing=publishing,
            herald=client,
            first_version=first,
            followers=followers,
            # Of weights that were a version of this run.
            restored_from=start.version if is_older else None,
        )
        training = TrainingLoop(
            client,
            engine,
            origin,
            settings,
            checkpoints=Checkpoints(
                engine, run_dir=place.run_dir, policy_id=policy_id, start=start
            ),
            scrub=scrub,
            tallies=tallies,
        )
        items = client.items(
            world_size=publishing.rank_count,
            max_tokens=settings.max_tokens_per_pass,
            prefetch=settings.prefetch,
        )
        keep_for_good()
        training.run(departure.watch(items))
        end = client.end_of_data
        if end is not None:
            log.info("the data has ended; the last version is served on", step=engine.step_count)
            departure.wait(client.stay)
        log.info("the trainer leaves", step=engine.step_count, cause=end and end.cause)


def main_run(recipe: Recipe, *, policy_id: str, model_dir: Path, place: TrainerPlace) -> int:
    """Train one policy of a run until the data ends or the run asks to leave.

    SIGTERM and SIGINT let the step in progress end; the second one stops at once.

    Returns:
        The exit code: 0 when the run is over or the trainer was asked to leave, 1 when it
        failed, 78 (CONFIGURATION_EXIT) when it would fail again; the log says why.
    """
    configure_logging(f"trainer-{policy_id}{rank_mark()}")
    try:
        checked_model_dir(policy_id, model_dir)
        policy = recipe.policies[policy_id]
        with LoopThread() as loop:
            if is_rank():
                from astraflow.trainers.fsdp.main import train_rank  # noqa: PLC0415 - loads torch

                train_rank(PolicyId(policy_id), policy, place, model_dir=model_dir, loop=loop)
            else:
                settings = policy.trainer
                if settings.engine is not None:
                    engine = make_engine(settings.engine, settings, model_dir=model_dir)
                else:
                    from astraflow.trainers.torch_engine import TorchEngine  # noqa: PLC0415 - torch

                    engine = TorchEngine(settings, model_dir=model_dir, lora=policy.model.lora)
                train(engine, PolicyId(policy_id), settings, place, loop=loop)
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


def rank_mark() -> str:
    """Return what tells the logs and traces of ranks apart."""
    return f"-{os.environ['RANK']}" if is_rank() else ""
