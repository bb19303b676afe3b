"""The run as a RaaS sees it: a session, tasks in, rollouts out, versions."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from astraflow.client.hooks import Held, MemberHooks
from astraflow.client.hub import Hub, dial_twice
from astraflow.client.rollout_stream import RolloutStream
from astraflow.client.session import SessionKeeper
from astraflow.client.task_stream import TaskSink, TaskStream
from astraflow.client.versions import VersionClient
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.members import (
    Directive,
    JoinPool,
    PoolMembership,
    RaasLoad,
    Session,
    SessionResume,
)
from astraflow.core.tasks import TaskCredit
from astraflow.rpc.auth import bearer
from astraflow.rpc.tls import Tls
from astraflow.wire.raas import decode_pool_membership, encode_join_pool
from astraflow_proto.dataflow.v1.raas_service_pb2_grpc import RaasServiceStub


@dataclass(frozen=True, slots=True, kw_only=True)
class RaasHooks:
    """What the run asks of a RaaS.

    Attributes:
        load: How busy it is.
        held: What it works on.
        opened: The session was opened again: what it does not list is no longer its own.
        directed: The run asks for something else than before.
        describe: Brings the join up to date before it is sent again, such as its versions.
    """

    load: Callable[[], RaasLoad]
    held: Callable[[], Held]
    opened: Callable[[Session], None]
    directed: Callable[[Directive], None]
    describe: Callable[[JoinPool], JoinPool] = lambda join: join


class RaasClient:
    """A RaaS's place in a run.

    Attributes:
        keeper: The session.
        versions: VersionService.
        rollouts: What goes back.
    """

    def __init__(
        self, *, hub: Hub, keep_alive_hub: Hub, token: str, join: JoinPool, hooks: RaasHooks
    ) -> None:
        self._hub = hub
        self._token = token
        self._request = join
        self._hooks = hooks
        self._stub = RaasServiceStub(hub.channel)
        self._membership: PoolMembership | None = None
        self.keeper = SessionKeeper(
            hub=hub,
            keep_alive_hub=keep_alive_hub,
            hooks=MemberHooks(
                join=self._join,
                load=hooks.load,
                held=hooks.held,
                opened=hooks.opened,
                directed=hooks.directed,
            ),
        )
        self.versions = VersionClient(self.keeper)
        self.rollouts = RolloutStream(self.keeper)

    @property
    def membership(self) -> PoolMembership:
        """What the run said at the last join.

        Raises:
            AstraflowError: NOT_READY before the first one.
        """
        if self._membership is None:
            raise AstraflowError(Reason.NOT_READY, "the node has not joined yet")
        return self._membership

    async def join(self) -> PoolMembership:
        """Join the pool.

        Raises:
            AstraflowError: NAME_TAKEN, POLICY_UNKNOWN, MODEL_MISMATCH, CODE_UNKNOWN,
                CODE_MISMATCH, CONTRACT_UNSUPPORTED; TOKEN_INVALID for a wrong join token;
                NOT_READY when the hub could not be reached.
        """
        await self.keeper.open()
        return self.membership

    def tasks(self, *, credit: TaskCredit, sink: TaskSink) -> TaskStream:
        """Return the stream of tasks; one per session."""
        return TaskStream(self.keeper, credit=credit, sink=sink)

    async def _join(self, resume: SessionResume | None) -> Session:
        request = replace(self._hooks.describe(self._request), resume=resume)
        answer = await self._hub.call(
            self._stub.JoinPool, encode_join_pool(request), metadata=bearer(self._token)
        )
        self._membership = decode_pool_membership(answer)
        return self._membership.session


@asynccontextmanager
async def dial_pool(
    address: str,
    *,
    token: str,
    join: JoinPool,
    hooks: RaasHooks,
    tls: Tls | None = None,
    patience_s: float = 30.0,
) -> AsyncGenerator[RaasClient]:
    """Return a client whose channels are closed at the end; nothing is joined yet."""
    async with dial_twice(address, tls=tls, patience_s=patience_s) as (hub, keep_alive_hub):
        yield RaasClient(
            hub=hub, keep_alive_hub=keep_alive_hub, token=token, join=join, hooks=hooks
        )
