"""How a trainer joins: it serves its weights and takes its place in the run."""

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import monotonic, sleep

from structlog.contextvars import bind_contextvars

from astraflow import __version__
from astraflow.client.loop_thread import LoopThread
from astraflow.client.trainer import TrainerClient
from astraflow.config.recipe import TrainerConfig
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.members import Capability, Contract, ModelIdentity, RegisterTrainer, Resources
from astraflow.core.versions import LaneKind
from astraflow.rpc.tls import Tls
from astraflow.telemetry.metrics import OFF
from astraflow.trainers.checkpoints import FIRST_WEIGHTS, Checkpoint
from astraflow.trainers.origin import Publishing
from astraflow.transport.hosts import chosen_lanes
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.server import WeightServer

# The session of a trainer that was killed ends after its ttl, or later on a busy machine.
_TAKEN_SLACK_S = 80.0
_TAKEN_RETRY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlace:
    """Where a trainer stands.

    Attributes:
        hub: host:port.
        token: The run's join token.
        run_dir: Where checkpoints go.
        is_resuming: Whether it waits for the session of a predecessor to end.
        checkpoint_id: What it goes on from then; empty: its newest one that the run knows.
        listen: host:port on which it serves its weights.
        advertise: How others dial that; None: as listened on.
        tls: None: plain text.
        metrics: host:port of its metrics, or off.
        patience_s: How long the hub is tried again while nothing is heard from it.
        session_ttl_s: After which the hub takes a silent member for gone.
    """

    hub: str
    token: str
    run_dir: RunDir
    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    tls: Tls | None = None
    identity: ModelIdentity = field(default_factory=ModelIdentity)
    start: Checkpoint = FIRST_WEIGHTS
    is_resuming: bool = False
    checkpoint_id: str = ""
    metrics: str = OFF
    patience_s: float = 30.0
    session_ttl_s: float = 10.0


@contextmanager
def joined(
    policy_id: PolicyId,
    settings: TrainerConfig,
    place: TrainerPlace,
    publishing: Publishing,
    loop: LoopThread,
    *,
    capabilities: frozenset[Capability],
    metrics_address: str,
) -> Generator[TrainerClient]:
    """Serve the weights and take the trainer's place in the run.

    Raises:
        AstraflowError: What serving and registering raise.
    """
    with ExitStack() as stack:
        server = stack.enter_context(weight_server(publishing.own, settings, place, loop))
        start = place.start
        register = RegisterTrainer(
            policy_id=policy_id,
            name=f"trainer-{policy_id}",
            contract=Contract(capabilities=capabilities, software=f"astraflow/{__version__}"),
            identity=place.identity,
            groups_per_batch=settings.groups_per_batch,
            checkpoint_id=start.checkpoint_id,
            last_step=start.step,
            version=start.version,
            weight_endpoints=publishing.endpoints(server.endpoint),
            resources=Resources(core_count=os.cpu_count() or 0, metrics_address=metrics_address),
        )
        # One that resumes waits until the session of its predecessor has ended.
        taken_s = place.session_ttl_s + _TAKEN_SLACK_S
        deadline = monotonic() + (taken_s if place.is_resuming else 0.0)
        while True:
            client = TrainerClient(
                hub=place.hub,
                token=place.token,
                tls=place.tls,
                patience_s=place.patience_s,
                loop=loop,
                register=register,
            )
            try:
                stack.enter_context(client)
                break
            except AstraflowError as error:
                if error.reason is not Reason.POLICY_TAKEN or monotonic() > deadline:
                    raise
            sleep(_TAKEN_RETRY_S)
        client.on_transfer_token(server.set_transfer_token)
        publishing.entered(client)
        session = client.registration.session
        bind_contextvars(run=client.registration.run_id, member=session.member_id)
        yield client


def weight_server(
    publisher: WeightPublisher, settings: TrainerConfig, place: TrainerPlace, loop: LoopThread
) -> WeightServer:
    lanes = chosen_lanes(settings.lanes)
    return WeightServer(
        publisher,
        listen=place.listen,
        advertise=place.advertise,
        tls=place.tls,
        loop=loop,
        lanes=lanes and [lane for lane in lanes if lane is not LaneKind.GRPC],
        encrypts=settings.encrypt_lanes,
    )
