"""A trainer's place in a run, on an event loop: its session and its calls."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from astraflow.client.hooks import Held, MemberHooks
from astraflow.client.hub import Hub, dial_twice
from astraflow.client.session import SessionKeeper
from astraflow.core.batches import AckBatch, BatchOutcome
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.members import (
    Directive,
    RegisterTrainer,
    Session,
    SessionResume,
    TrainerLoad,
    TrainerRegistration,
)
from astraflow.core.versions import VersionInfo
from astraflow.rpc.auth import bearer
from astraflow.rpc.tls import Tls
from astraflow.wire.trainer import (
    decode_trainer_registration,
    encode_ack_batch,
    encode_register_trainer,
)
from astraflow.wire.versions import encode_version_info
from astraflow_proto.dataflow.v1 import trainer_service_pb2 as pb
from astraflow_proto.dataflow.v1.trainer_service_pb2_grpc import TrainerServiceStub


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerHooks:
    """What the run asks of a trainer; called on the event loop.

    Attributes:
        load: How busy it is.
        held: Batches that it works on.
        opened: The session was opened again: what it does not list is no longer its own.
        directed: The run asks for something else than before.
        entrusted: The transfer token is another one.
    """

    load: Callable[[], TrainerLoad]
    held: Callable[[], Held]
    opened: Callable[[Session], None]
    directed: Callable[[Directive], None]
    entrusted: Callable[[bytes], None]


class TrainerMember:
    """Registers, acknowledges, publishes; `TrainerClient` is the same for callers that block.

    Attributes:
        keeper: The session.
    """

    def __init__(
        self,
        *,
        hub: Hub,
        keep_alive_hub: Hub,
        token: str,
        register: RegisterTrainer,
        hooks: TrainerHooks,
    ) -> None:
        self._hub = hub
        self._token = token
        self._request = register
        self._stub = TrainerServiceStub(hub.channel)
        self._registration: TrainerRegistration | None = None
        self.keeper = SessionKeeper(
            hub=hub,
            keep_alive_hub=keep_alive_hub,
            hooks=MemberHooks(
                join=self._register,
                load=hooks.load,
                held=hooks.held,
                opened=hooks.opened,
                directed=hooks.directed,
                entrusted=hooks.entrusted,
            ),
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
        answer = await self.keeper.call(self._stub.AckBatch, encode_ack_batch(ack))
        if ack.outcome is BatchOutcome.CONSUMED:
            self._request = replace(self._request, last_step=ack.step, checkpoint_id="")
        return answer.settled

    async def publish(self, info: VersionInfo, *, checkpoint_id: str = "") -> int:
        """Announce weights that can now be pulled; return the number of the next version.

        Raises:
            AstraflowError: VERSION_NOT_NEXT, REQUEST_CONFLICT.
        """
        request = pb.PublishVersionRequest(
            version=encode_version_info(info), checkpoint_id=checkpoint_id
        )
        answer = await self.keeper.call(self._stub.PublishVersion, request)
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
    hooks: TrainerHooks,
    tls: Tls | None = None,
    patience_s: float = 30.0,
) -> AsyncGenerator[TrainerMember]:
    """Return a member whose channels are closed at the end; nothing is registered yet."""
    async with dial_twice(address, tls=tls, patience_s=patience_s) as (hub, keep_alive_hub):
        yield TrainerMember(
            hub=hub, keep_alive_hub=keep_alive_hub, token=token, register=register, hooks=hooks
        )
