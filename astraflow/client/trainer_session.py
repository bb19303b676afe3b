"""A trainer's place in a run, on an event loop: its session, its calls; and its load."""

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from threading import Lock

from astraflow.client.hub import HubChannel, dial_twice
from astraflow.client.payloads import lost_rollout_ids
from astraflow.client.session import MemberHooks, MemberSession
from astraflow.core.batches import AckBatch, BatchOutcome
from astraflow.core.clock import Clock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import BatchId
from astraflow.core.members import (
    Capability,
    RegisterTrainer,
    Session,
    SessionResume,
    TrainerLoad,
    TrainerRegistration,
)
from astraflow.core.versions import VersionInfo
from astraflow.rpc.auth import bearer
from astraflow.rpc.tls import Tls
from astraflow.wire.dataflow import (
    decode_trainer_registration,
    encode_ack_batch,
    encode_register_trainer,
)
from astraflow.wire.versions import encode_version_info
from astraflow_proto.dataflow.v1 import trainer_service_pb2 as pb
from astraflow_proto.dataflow.v1.trainer_service_pb2_grpc import TrainerServiceStub


class TrainerLoadMeter:
    """Adds up between two reports; used by the trainer's thread and by the event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = Lock()
        self._tokens: dict[BatchId, int] = {}
        self._step = 0
        self._trained_count = 0
        self._waited_s = 0.0
        self._waiting_since: float | None = None
        self._reported_at = clock.monotonic()

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Count the time in the body as waiting for a batch."""
        with self._lock:
            self._waiting_since = self._clock.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._count_wait(self._clock.monotonic())
                self._waiting_since = None

    def start_batch(self, batch_id: BatchId, token_count: int) -> None:
        """Note a batch that is trained on from now."""
        with self._lock:
            self._tokens[batch_id] = token_count

    def end_batch(self, batch_id: BatchId, *, step: int, is_trained: bool) -> None:
        """Note what became of a batch."""
        with self._lock:
            token_count = self._tokens.pop(batch_id, 0)
            if is_trained:
                self._step = step
                self._trained_count += token_count

    def report(self) -> TrainerLoad:
        """Return the load since the last report, and begin a new one."""
        with self._lock:
            now = self._clock.monotonic()
            self._count_wait(now)
            span_s = max(now - self._reported_at, 1e-9)
            load = TrainerLoad(
                step=self._step,
                held_batch_count=len(self._tokens),
                tokens_per_s=self._trained_count / span_s,
                wait_fraction=min(1.0, self._waited_s / span_s),
            )
            self._reported_at, self._trained_count, self._waited_s = now, 0, 0.0
            return load

    def _count_wait(self, now: float) -> None:
        if self._waiting_since is not None:
            self._waited_s += now - self._waiting_since
            self._waiting_since = now


class AsyncTrainerClient:
    """Registers, acknowledges, publishes; `TrainerClient` is the same for callers that block."""

    def __init__(
        self,
        *,
        hub: HubChannel,
        keep_alive_hub: HubChannel,
        token: str,
        register: RegisterTrainer,
        hooks: MemberHooks,
    ) -> None:
        self._hub = hub
        self._token = token
        contract = register.contract
        able = contract.capabilities | {Capability.PAYLOADS}
        self._request = replace(register, contract=replace(contract, capabilities=able))
        self._stub = TrainerServiceStub(hub.channel)
        self._registration: TrainerRegistration | None = None
        self.session = MemberSession(
            hub=hub, keep_alive_hub=keep_alive_hub, join=self._register, hooks=hooks
        )

    @property
    def registration(self) -> TrainerRegistration:
        """What the run said at the last registration.

        Raises:
            AstraflowError: NOT_READY before the first one.
        """
        if self._registration is None:
            raise AstraflowError(Reason.NOT_READY, "the trainer is not registered yet")
        return self._registration

    async def acknowledge(self, ack: AckBatch) -> bool:
        """Settle a batch; return False while other ranks have yet to.

        Raises:
            AstraflowError: BATCH_UNKNOWN, LEASE_LOST, REQUEST_CONFLICT.
        """
        answer = await self.session.call(self._stub.AckBatch, encode_ack_batch(ack))
        if ack.outcome is BatchOutcome.CONSUMED:
            self._request = replace(self._request, last_step=ack.step, checkpoint_id="")
        return answer.settled

    async def return_unreadable(self, batch_id: BatchId, error: AstraflowError) -> None:
        """Return a batch of which payloads are lost; the run drops these rollouts.

        Raises:
            AstraflowError: BATCH_UNKNOWN, LEASE_LOST.
        """
        ack = AckBatch(
            batch_id=batch_id,
            outcome=BatchOutcome.RETURNED,
            lost_rollout_ids=lost_rollout_ids(error),
        )
        await self.acknowledge(ack)

    async def publish(self, info: VersionInfo, *, checkpoint_id: str = "") -> int:
        """Announce weights that can now be pulled; return the number of the next version.

        Raises:
            AstraflowError: VERSION_NOT_NEXT, REQUEST_CONFLICT.
        """
        request = pb.PublishVersionRequest(
            version=encode_version_info(info), checkpoint_id=checkpoint_id
        )
        answer = await self.session.call(self._stub.PublishVersion, request)
        # One that gained patches may be older than the last one.
        newest = max(info.version, -1 if self._request.version is None else self._request.version)
        self._request = replace(self._request, version=newest)
        return answer.next_version

    async def _register(self, resume: SessionResume | None) -> Session:
        answer = await self._hub.call(
            self._stub.RegisterTrainer,
            encode_register_trainer(replace(self._request, resume=resume)),
            metadata=bearer(self._token),
        )
        self._registration = decode_trainer_registration(answer)
        return self._registration.session


@asynccontextmanager
async def dial_trainer(
    address: str,
    *,
    token: str,
    register: RegisterTrainer,
    hooks: MemberHooks,
    tls: Tls | None = None,
    patience_s: float = 30.0,
) -> AsyncGenerator[AsyncTrainerClient]:
    """Return a member whose channels are closed at the end; nothing is registered yet."""
    async with dial_twice(address, tls=tls, patience_s=patience_s) as (hub, keep_alive_hub):
        yield AsyncTrainerClient(
            hub=hub, keep_alive_hub=keep_alive_hub, token=token, register=register, hooks=hooks
        )
