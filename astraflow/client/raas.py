"""The run as a RaaS sees it: a session, tasks in, rollouts out, versions."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import structlog
from grpc.aio import AioRpcError, UnaryStreamCall

from astraflow.client.hub import HubChannel, dial_twice
from astraflow.client.session import MemberHooks, MemberSession
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.ids import PolicyId, TaskId
from astraflow.core.members import JoinPool, PoolMembership, Session, SessionResume
from astraflow.core.rollouts import Disposition, ItemAck, PayloadStore, Rollout, TaskResult
from astraflow.core.tasks import RolloutTask, TaskCancellation, TaskCredit
from astraflow.core.versions import PublishAnswer, SourceInfo, VersionInfo, VersionReport
from astraflow.rpc.auth import bearer
from astraflow.rpc.concurrency import Outbox, Retry, beside
from astraflow.rpc.tls import Tls
from astraflow.wire.common import encode_failure
from astraflow.wire.dataflow import (
    decode_item_ack,
    decode_pool_membership,
    decode_task_cancellation,
    encode_join_pool,
    encode_task_credit,
)
from astraflow.wire.rollout import (
    decode_payload_store,
    encode_rollout,
    encode_task_result,
    is_read,
)
from astraflow.wire.tasks import decode_rollout_task
from astraflow.wire.versions import (
    decode_source,
    decode_version_info,
    encode_version_report,
    leave_out_unknown,
)
from astraflow_proto.dataflow.v1 import raas_service_pb2 as pb
from astraflow_proto.dataflow.v1.raas_service_pb2_grpc import RaasServiceStub
from astraflow_proto.rollout.v1 import task_pb2
from astraflow_proto.weights.v1 import version_service_pb2
from astraflow_proto.weights.v1.version_service_pb2_grpc import VersionServiceStub

Item = TypeVar("Item")


async def converse(
    call: Any,
    outbox: Outbox[Item],
    take: Callable[[Any], None],
    *,
    pack: Callable[[Sequence[Item]], Iterable[Any]],
    pause_s: float = 0.0,
) -> None:
    """Write what waits and take what comes, until the peer ends the call."""
    try:
        async with beside(_write(call, outbox, pack, pause_s)):
            async for answer in call:
                take(answer)
    finally:
        call.cancel()


async def _write(
    call: Any,
    outbox: Outbox[Item],
    pack: Callable[[Sequence[Item]], Iterable[Any]],
    pause_s: float,
) -> None:
    try:
        while True:
            for message in pack(await outbox.take()):
                await call.write(message)
            if pause_s:
                await asyncio.sleep(pause_s)
    except (AioRpcError, asyncio.InvalidStateError):
        # The call is over; whoever reads it gets to know why.
        return


class VersionClient:
    """VersionService for one member."""

    def __init__(self, session: MemberSession) -> None:
        self._session = session
        self._stub = VersionServiceStub(session.hub.channel)

    async def versions(self, policy_id: PolicyId) -> tuple[VersionInfo, ...]:
        """Return what can still be pulled, oldest first.

        Raises:
            AstraflowError: POLICY_UNKNOWN.
        """
        request = version_service_pb2.ListVersionsRequest(policy_id=policy_id)
        answer = await self._session.call(self._stub.ListVersions, request)
        for each in answer.versions:
            leave_out_unknown(each)
        return tuple(map(decode_version_info, answer.versions))

    async def watch(
        self, policy_id: PolicyId, *, after: int | None = None
    ) -> AsyncIterator[VersionInfo]:
        """Yield versions as they are published, over cuts, without end.

        A version comes again when it gained patches.

        Args:
            policy_id: Whose.
            after: Only younger ones; None: from the oldest that can be pulled.

        Raises:
            AstraflowError: POLICY_UNKNOWN; NOT_READY when the hub could not be reached.
        """
        last = after

        def open_stream() -> UnaryStreamCall[Any, version_service_pb2.WatchVersionsResponse]:
            request = version_service_pb2.WatchVersionsRequest(
                policy_id=policy_id, after_version=last
            )
            return self._stub.WatchVersions(request, metadata=self._session.metadata)

        async for answer in self._session.follow(open_stream):
            leave_out_unknown(answer.version)
            info = decode_version_info(answer.version)
            # One that gained patches may be older than the last one.
            last = info.version if last is None else max(last, info.version)
            yield info

    async def sources(self, policy_id: PolicyId, version: int) -> tuple[SourceInfo, ...]:
        """Return who has a version now, best first.

        Raises:
            AstraflowError: VERSION_UNKNOWN, VERSION_EVICTED.
        """
        request = version_service_pb2.ListSourcesRequest(policy_id=policy_id, version=version)
        answer = await self._session.call(self._stub.ListSources, request)
        leave_out_unknown(answer)
        return tuple(map(decode_source, answer.sources))

    async def report(self, report: VersionReport) -> None:
        """Say where a version stands here.

        Raises:
            AstraflowError: VERSION_UNKNOWN.
        """
        await self._session.call(self._stub.ReportVersion, encode_version_report(report))

    async def request_publish(self, policy_id: PolicyId) -> PublishAnswer:
        """Ask for a version with more steps; return at once.

        Raises:
            AstraflowError: POLICY_UNKNOWN; NOT_READY without a trainer.
        """
        request = version_service_pb2.RequestPublishRequest(policy_id=policy_id)
        answer = await self._session.call(self._stub.RequestPublish, request)
        newest = answer.newest_version if answer.HasField("newest_version") else None
        return PublishAnswer(newest_version=newest, is_pending=answer.pending)


# A message takes what is ready up to here, and always one item. The run works through a message
# without a pause, so it must not be long.
_MESSAGE_ITEM_COUNT = 64
_MESSAGE_NBYTES = 1 << 20

# Messages cost both ends more than rollouts do: those that end one soon after another share one.
_PAUSE_S = 0.005

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class RolloutStream:
    """StreamRollouts, opened again after every cut; what was not acknowledged is sent again."""

    def __init__(self, session: MemberSession) -> None:
        self._session = session
        self._stub = RaasServiceStub(session.hub.channel)
        self._unacked: dict[str, pb.RolloutItem] = {}
        self._results: set[TaskId] = set()
        self._outbox: Outbox[pb.RolloutItem] = Outbox()
        self._flushed = asyncio.Event()
        self._flushed.set()
        self.dispositions: Counter[Disposition] = Counter()

    @property
    def unacked_results(self) -> frozenset[TaskId]:
        """Tasks whose result the run has not acknowledged: they are still held."""
        return frozenset(self._results)

    def send(self, rollout: Rollout) -> bool:
        """Send a rollout; return False, and send nothing, when it is larger than the run reads."""
        item = pb.RolloutItem(rollout=encode_rollout(rollout))
        if not is_read(item, self._session.info.max_message_nbytes):
            return False
        self._put(rollout.rollout_id, item)
        return True

    def close_task(self, result: TaskResult) -> None:
        """Send the result of a task, after its rollouts."""
        self._results.add(result.task_id)
        self._put(result.task_id, pb.RolloutItem(result=encode_task_result(result)))

    async def flush(self) -> None:
        """Wait until everything that was sent is acknowledged."""
        await self._flushed.wait()

    async def run(self) -> None:
        """Follow the stream until cancelled."""
        await self._session.run_stream(self._follow)

    def _put(self, item_id: str, item: pb.RolloutItem) -> None:
        self._unacked[item_id] = item
        self._flushed.clear()
        self._outbox.put(item)

    async def _follow(self, retry: Retry) -> bool:
        self._outbox.reset(self._unacked.values())

        def take(answer: pb.StreamRolloutsResponse) -> None:
            retry.reset()
            self._acknowledge(map(decode_item_ack, answer.acks))

        call = self._stub.StreamRollouts(None, metadata=self._session.metadata)
        await converse(call, self._outbox, take, pack=_packed, pause_s=_PAUSE_S)
        return False

    def _acknowledge(self, acks: Iterable[ItemAck]) -> None:
        for ack in acks:
            if self._unacked.pop(ack.item_id, None) is None:
                continue
            self._results.discard(TaskId(ack.item_id))
            self.dispositions[ack.disposition] += 1
            if ack.disposition is Disposition.REJECTED:
                why = ack.message
                log.error("the run refused it", item=ack.item_id, reason=ack.reason, why=why)
        if not self._unacked:
            self._flushed.set()


def _packed(items: Sequence[pb.RolloutItem]) -> Iterator[pb.StreamRolloutsRequest]:
    """Put items into as few messages as their limits allow, in order."""
    message, nbytes = pb.StreamRolloutsRequest(), 0
    for item in items:
        nbytes += item.ByteSize()
        is_full = len(message.items) == _MESSAGE_ITEM_COUNT or nbytes > _MESSAGE_NBYTES
        if message.items and is_full:
            yield message
            message, nbytes = pb.StreamRolloutsRequest(), item.ByteSize()
        message.items.append(item)
    yield message


class TaskStream:
    """StreamTasks, opened again after every cut.

    Tasks and nacks that a cut swallowed are found when the session is opened again: what the
    run holds to be here and is not is sent again.
    """

    def __init__(
        self,
        session: MemberSession,
        *,
        credit: TaskCredit,
        take: Callable[[RolloutTask], None],
        cancel: Callable[[TaskCancellation], None],
    ) -> None:
        self._session = session
        self._stub = RaasServiceStub(session.hub.channel)
        self._take, self._cancel = take, cancel
        self._credit = credit
        self._outbox: Outbox[pb.StreamTasksRequest] = Outbox()

    def set_credit(self, credit: TaskCredit) -> None:
        """Bound the work from now on; less than what is out cancels nothing."""
        if credit != self._credit:
            self._credit = credit
            self._outbox.put(pb.StreamTasksRequest(credit=encode_task_credit(credit)))

    def nack(self, task_id: TaskId, failure: Failure) -> None:
        """Give a task back unstarted."""
        nack = pb.TaskNack(task_id=task_id, failure=encode_failure(failure))
        self._outbox.put(pb.StreamTasksRequest(nack=nack))

    async def run(self) -> None:
        """Follow the stream until cancelled."""
        await self._session.run_stream(self._follow, reconciles=True)

    async def _follow(self, retry: Retry) -> bool:
        opening = pb.TaskOpen(credit=encode_task_credit(self._credit))
        # What was given back while the session was opened again: the run holds it to be here.
        held = self._session.info.held_task_ids
        nacks = [each for each in self._outbox.clear() if each.nack.task_id in held]
        self._outbox.reset([pb.StreamTasksRequest(open=opening), *nacks])

        def take(event: pb.StreamTasksResponse) -> None:
            retry.reset()
            self._dispatch(event)

        call = self._stub.StreamTasks(None, metadata=self._session.metadata)
        await converse(call, self._outbox, take, pack=iter)
        return False

    def _take_task(self, message: task_pb2.RolloutTask) -> None:
        """Hand a task over, or give it back when this node cannot read it."""
        try:
            task = decode_rollout_task(message)
        except AstraflowError as error:
            log.error("unreadable task", task_id=message.task_id, why=error.message)  # noqa: TRY400
            self.nack(TaskId(message.task_id), error.to_failure())
        else:
            self._take(task)

    def _dispatch(self, event: pb.StreamTasksResponse) -> None:
        match event.WhichOneof("event"):
            case "task":
                self._take_task(event.task)
            case "cancellation":
                self._cancel(decode_task_cancellation(event.cancellation))
            case "directive":
                self._session.take_directive(event.directive)
            case _:
                log.warning("unknown event on the task stream; is the hub newer than this node?")


class RaasClient:
    """A RaaS's place in a run.

    Attributes:
        payload_store: Where the arrays of large trajectories go, as the run said at the last join;
            None: with the rollouts.
    """

    def __init__(
        self,
        *,
        hub: HubChannel,
        keep_alive_hub: HubChannel,
        token: str,
        join: JoinPool,
        hooks: MemberHooks,
        describe: Callable[[JoinPool], JoinPool] = lambda join: join,
    ) -> None:
        """Hold no session; `join` does. `describe` renews the request before it goes again."""
        self._hub = hub
        self._token = token
        self._request = join
        self._describe = describe
        self._stub = RaasServiceStub(hub.channel)
        self._membership: PoolMembership | None = None
        self.payload_store: PayloadStore | None = None
        self.session = MemberSession(
            hub=hub, keep_alive_hub=keep_alive_hub, join=self._join, hooks=hooks
        )
        self.versions = VersionClient(self.session)
        self.rollouts = RolloutStream(self.session)

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
        await self.session.open()
        return self.membership

    def tasks(
        self,
        *,
        credit: TaskCredit,
        take: Callable[[RolloutTask], None],
        cancel: Callable[[TaskCancellation], None] = lambda _: None,
    ) -> TaskStream:
        """Return the stream of tasks; one per session.

        Args:
            credit: Bounds the work at first.
            take: Called with each task; must not block.
            cancel: Called with what is withdrawn; must not block.
        """
        return TaskStream(self.session, credit=credit, take=take, cancel=cancel)

    async def _join(self, resume: SessionResume | None) -> Session:
        request = replace(self._describe(self._request), resume=resume)
        answer = await self._hub.call(
            self._stub.JoinPool, encode_join_pool(request), metadata=bearer(self._token)
        )
        self._membership = decode_pool_membership(answer)
        has_store = answer.HasField("payload_store")
        self.payload_store = decode_payload_store(answer.payload_store) if has_store else None
        return self._membership.session


@asynccontextmanager
async def dial_pool(
    address: str,
    *,
    token: str,
    join: JoinPool,
    hooks: MemberHooks,
    describe: Callable[[JoinPool], JoinPool] = lambda join: join,
    tls: Tls | None = None,
    patience_s: float = 30.0,
) -> AsyncGenerator[RaasClient]:
    """Return a client whose channels are closed at the end; nothing is joined yet."""
    async with dial_twice(address, tls=tls, patience_s=patience_s) as (hub, keep_alive_hub):
        yield RaasClient(
            hub=hub,
            keep_alive_hub=keep_alive_hub,
            token=token,
            join=join,
            hooks=hooks,
            describe=describe,
        )
