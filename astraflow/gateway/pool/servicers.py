"""The contract's services for the nodes of such a pool: convert, one call, convert."""

# ruff: noqa: N802 - methods are named by the contract

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime

import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId, TaskId
from astraflow.core.members import Directive, DirectiveKind, Role
from astraflow.core.rollouts import Disposition, ItemAck
from astraflow.core.tasks import RolloutTask, TaskCancellation
from astraflow.core.versions import VersionState
from astraflow.gateway.pool.desk import OrderDesk
from astraflow.gateway.pool.nodes import Node
from astraflow.gateway.pool.sessions import NodeSessions
from astraflow.gateway.pool.versions import PoolVersions
from astraflow.rpc.access import Access
from astraflow.rpc.server import Servicer
from astraflow.rpc.streams import Context, either, seated
from astraflow.wire import common, rollout, tasks
from astraflow.wire import raas as wire
from astraflow.wire import versions as versions_wire
from astraflow.wire.fields import encode_span, encode_time, invalid
from astraflow_proto.dataflow.v1 import raas_service_pb2, session_service_pb2
from astraflow_proto.dataflow.v1.raas_service_pb2_grpc import add_RaasServiceServicer_to_server
from astraflow_proto.dataflow.v1.session_service_pb2_grpc import (
    add_SessionServiceServicer_to_server,
)
from astraflow_proto.weights.v1 import version_service_pb2
from astraflow_proto.weights.v1.version_service_pb2_grpc import add_VersionServiceServicer_to_server

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


def pool_servicers(
    sessions: NodeSessions,
    desk: OrderDesk,
    versions: Mapping[PolicyId, PoolVersions],
    access: Access,
) -> Sequence[Servicer]:
    """Return all that nodes call."""
    return (
        Servicer(
            add=add_SessionServiceServicer_to_server, methods=PoolSessionService(sessions, access)
        ),
        Servicer(
            add=add_RaasServiceServicer_to_server, methods=PoolRaasService(sessions, desk, access)
        ),
        Servicer(
            add=add_VersionServiceServicer_to_server,
            methods=PoolVersionService(sessions, desk, versions, access),
        ),
    )


class PoolSessionService:
    """SessionService."""

    def __init__(self, sessions: NodeSessions, access: Access) -> None:
        self._sessions = sessions
        self._access = access

    async def KeepAlive(
        self, request: session_service_pb2.KeepAliveRequest, context: Context
    ) -> session_service_pb2.KeepAliveResponse:
        """Renew the caller's session."""
        node = self._sessions.node(self._access.member(context, Role.RAAS))
        if request.HasField("raas"):
            node.load = common.decode_raas_load(request.raas)
        return session_service_pb2.KeepAliveResponse(
            ttl=encode_span(self._sessions.ttl),
            directive=common.encode_directive(Directive(kind=DirectiveKind.CONTINUE)),
            server_time=encode_time(datetime.now(UTC)),
        )

    async def ReportFailure(
        self, request: session_service_pb2.ReportFailureRequest, context: Context
    ) -> session_service_pb2.ReportFailureResponse:
        """Log what failed beside any rollout."""
        member_id = self._access.member(context, Role.RAAS)
        failure = common.decode_failure(request.failure)
        log.warning("a node reports", member=member_id, why=failure.message, at=failure.traceback)
        return session_service_pb2.ReportFailureResponse()

    async def EndSession(
        self, request: session_service_pb2.EndSessionRequest, context: Context
    ) -> session_service_pb2.EndSessionResponse:
        """Give what the caller has to others."""
        member_id = self._access.member(context, may_be_ended=True)
        self._sessions.end(member_id, request.message)
        return session_service_pb2.EndSessionResponse()


class PoolRaasService:
    """RaasService."""

    def __init__(self, sessions: NodeSessions, desk: OrderDesk, access: Access) -> None:
        self._sessions = sessions
        self._desk = desk
        self._access = access

    async def JoinPool(
        self, request: raas_service_pb2.JoinPoolRequest, context: Context
    ) -> raas_service_pb2.JoinPoolResponse:
        """Admit a node."""
        self._access.joiner(context)
        return wire.encode_pool_membership(self._sessions.join(wire.decode_join_pool(request)))

    async def StreamTasks(
        self,
        request_iterator: AsyncIterator[raas_service_pb2.StreamTasksRequest],
        context: Context,
    ) -> None:
        """Send tasks within the credit; take credit and nacks."""
        node = self._sessions.node(self._access.member(context, Role.RAAS))

        async def send(item: RolloutTask | TaskCancellation | Directive) -> None:
            await context.write(_task_event(item))

        async with seated(self._sessions.seats, node.member_id, "tasks", context):
            await either(self._steer(node, request_iterator), node.outbox.deliver(send))

    async def _steer(
        self, node: Node, requests: AsyncIterator[raas_service_pb2.StreamTasksRequest]
    ) -> None:
        async for request in requests:
            match request.WhichOneof("request"):
                case "open":
                    node.credit = wire.decode_task_credit(request.open.credit)
                case "credit":
                    node.credit = wire.decode_task_credit(request.credit)
                case "nack":
                    failure = common.decode_failure(request.nack.failure)
                    self._desk.close(node, TaskId(request.nack.task_id), (failure,))
                case _:
                    raise invalid("request", "on StreamTasks it is open, credit or nack")
            self._desk.place()

    async def StreamRollouts(
        self,
        request_iterator: AsyncIterator[raas_service_pb2.StreamRolloutsRequest],
        context: Context,
    ) -> None:
        """Take rollouts and task results; acknowledge each."""
        node = self._sessions.node(self._access.member(context, Role.RAAS))
        async with seated(self._sessions.seats, node.member_id, "rollouts", context):
            async for request in request_iterator:
                acks = [wire.encode_item_ack(self._take(node, item)) for item in request.items]
                await context.write(raas_service_pb2.StreamRolloutsResponse(acks=acks))

    def _take(self, node: Node, item: raas_service_pb2.RolloutItem) -> ItemAck:
        """Take an item; one that is not sound costs only itself."""
        is_rollout = item.WhichOneof("item") == "rollout"
        try:
            if is_rollout:
                return self._desk.rollout(node, rollout.decode_rollout(item.rollout))
            return self._desk.result(node, rollout.decode_task_result(item.result))
        except AstraflowError as error:
            return ItemAck(
                item_id=item.rollout.rollout_id if is_rollout else item.result.task_id,
                disposition=Disposition.REJECTED,
                reason=error.reason,
                message=error.message,
            )


class PoolVersionService:
    """VersionService."""

    def __init__(
        self,
        sessions: NodeSessions,
        desk: OrderDesk,
        versions: Mapping[PolicyId, PoolVersions],
        access: Access,
    ) -> None:
        self._sessions = sessions
        self._desk = desk
        self._versions = versions
        self._access = access

    async def ListVersions(
        self, request: version_service_pb2.ListVersionsRequest, context: Context
    ) -> version_service_pb2.ListVersionsResponse:
        """Return what can be pulled."""
        self._access.member(context)
        infos = self._of(request.policy_id).infos
        return version_service_pb2.ListVersionsResponse(
            versions=map(versions_wire.encode_version_info, infos)
        )

    async def WatchVersions(
        self, request: version_service_pb2.WatchVersionsRequest, context: Context
    ) -> None:
        """Send versions as they are published."""
        member_id = self._access.member(context)
        after = request.after_version if request.HasField("after_version") else None
        versions = self._of(request.policy_id)
        seat = f"versions/{versions.policy_id}"
        async with seated(self._sessions.seats, member_id, seat, context):
            async for info in versions.watch(after):
                version = versions_wire.encode_version_info(info)
                await context.write(version_service_pb2.WatchVersionsResponse(version=version))

    async def ListSources(
        self, request: version_service_pb2.ListSourcesRequest, context: Context
    ) -> version_service_pb2.ListSourcesResponse:
        """Return who has a version: the pool itself."""
        self._access.member(context)
        for info in self._of(request.policy_id).infos:
            if info.version == request.version:
                sources = map(versions_wire.encode_source, info.sources)
                return version_service_pb2.ListSourcesResponse(sources=sources)
        raise AstraflowError(
            Reason.VERSION_UNKNOWN, f"{request.policy_id} has no version {request.version} here"
        )

    async def ReportVersion(
        self, request: version_service_pb2.ReportVersionRequest, context: Context
    ) -> version_service_pb2.ReportVersionResponse:
        """Take where a version stands on the caller."""
        node = self._sessions.node(self._access.member(context))
        report = versions_wire.decode_version_report(request)
        self._of(report.policy_id)
        if report.state is VersionState.LIVE:
            node.live[report.policy_id] = report.version
            self._desk.tell()
            self._desk.place()
        return version_service_pb2.ReportVersionResponse()

    async def RequestPublish(
        self, request: version_service_pb2.RequestPublishRequest, context: Context
    ) -> version_service_pb2.RequestPublishResponse:
        """Promise nothing: the Dataflow says when there is a version."""
        self._access.member(context)
        newest = self._of(request.policy_id).newest
        return version_service_pb2.RequestPublishResponse(pending=False, newest_version=newest)

    def _of(self, policy_id: str) -> PoolVersions:
        try:
            return self._versions[PolicyId(policy_id)]
        except KeyError:
            known = ", ".join(self._versions)
            raise AstraflowError(
                Reason.POLICY_UNKNOWN, f"policy {policy_id} is none of {known}"
            ) from None


def _task_event(
    item: RolloutTask | TaskCancellation | Directive,
) -> raas_service_pb2.StreamTasksResponse:
    if isinstance(item, RolloutTask):
        return raas_service_pb2.StreamTasksResponse(task=tasks.encode_rollout_task(item))
    if isinstance(item, Directive):
        return raas_service_pb2.StreamTasksResponse(directive=common.encode_directive(item))
    return raas_service_pb2.StreamTasksResponse(cancellation=wire.encode_task_cancellation(item))
