"""SessionService and VersionService: what every member calls, whatever its role."""

# ruff: noqa: N802 - methods are named by the contract

from itertools import count

from astraflow.core.effects import Renewal
from astraflow.core.events import (
    FailureReported,
    MemberKeptAlive,
    MemberLeft,
    PublishRequested,
    VersionReported,
)
from astraflow.core.ids import PolicyId
from astraflow.core.members import MemberRole, RaasLoad, TrainerLoad
from astraflow.core.versions import PublishAnswer
from astraflow.dataflow.hub import Hub
from astraflow.rpc.access import Access
from astraflow.rpc.streams import Context, exclusive_stream
from astraflow.wire import common, versions
from astraflow.wire.fields import encode_span, encode_time
from astraflow_proto.dataflow.v1 import session_service_pb2 as session_pb
from astraflow_proto.weights.v1 import version_service_pb2 as version_pb


class SessionServicer:
    """Convert, one call, convert."""

    def __init__(self, hub: Hub, access: Access) -> None:
        self._hub = hub
        self._access = access

    async def KeepAlive(
        self, request: session_pb.KeepAliveRequest, context: Context
    ) -> session_pb.KeepAliveResponse:
        """Renew the caller's session."""
        member_id = self._access.member(context)
        kept: Renewal = await self._hub.take(
            MemberKeptAlive(member_id=member_id, load=_load(request))
        )
        return session_pb.KeepAliveResponse(
            ttl=encode_span(kept.ttl),
            directive=common.encode_directive(kept.directive),
            server_time=encode_time(kept.server_time),
        )

    async def ReportFailure(
        self, request: session_pb.ReportFailureRequest, context: Context
    ) -> session_pb.ReportFailureResponse:
        """Take what failed beside any rollout."""
        member_id = self._access.member(context)
        failure = common.decode_failure(request.failure)
        await self._hub.take(FailureReported(member_id=member_id, failure=failure))
        return session_pb.ReportFailureResponse()

    async def EndSession(
        self, request: session_pb.EndSessionRequest, context: Context
    ) -> session_pb.EndSessionResponse:
        """Return at once what the caller holds."""
        member_id = self._access.member(context, may_be_ended=True)
        await self._hub.take(MemberLeft(member_id=member_id, message=request.message))
        return session_pb.EndSessionResponse()


def _load(request: session_pb.KeepAliveRequest) -> RaasLoad | TrainerLoad | None:
    match request.WhichOneof("load"):
        case "raas":
            return common.decode_raas_load(request.raas)
        case "trainer":
            return common.decode_trainer_load(request.trainer)
        case _:
            return None


class VersionServicer:
    """Convert, one call, convert."""

    def __init__(self, hub: Hub, access: Access) -> None:
        self._hub = hub
        self._access = access
        self._numbers = count()
        self._encoder = versions.VersionEncoder()

    async def ListVersions(
        self, request: version_pb.ListVersionsRequest, context: Context
    ) -> version_pb.ListVersionsResponse:
        """Return what can still be pulled, oldest first."""
        caller = self._access.anyone(context)
        known = self._hub.run.versions(PolicyId(request.policy_id), caller)
        told = await self._hub.when_safe(known)
        return version_pb.ListVersionsResponse(versions=map(self._encoder.encode, told))

    async def WatchVersions(
        self, request: version_pb.WatchVersionsRequest, context: Context
    ) -> None:
        """Send versions as they are published."""
        member_id = self._access.member(context)
        after = request.after_version if request.HasField("after_version") else None
        policy_id = PolicyId(request.policy_id)
        purpose = f"versions/{next(self._numbers)}"
        async with exclusive_stream(self._hub.executor.streams, member_id, purpose, context):
            async for info in self._hub.watch_versions(policy_id, after, member_id):
                version = self._encoder.encode(info)
                await context.write(version_pb.WatchVersionsResponse(version=version))

    async def ListSources(
        self, request: version_pb.ListSourcesRequest, context: Context
    ) -> version_pb.ListSourcesResponse:
        """Return who has a version now."""
        caller = self._access.anyone(context)
        sources = self._hub.run.sources(PolicyId(request.policy_id), request.version, caller)
        told = await self._hub.when_safe(sources)
        return version_pb.ListSourcesResponse(sources=map(versions.encode_source, told))

    async def ReportVersion(
        self, request: version_pb.ReportVersionRequest, context: Context
    ) -> version_pb.ReportVersionResponse:
        """Take where a version stands on the caller."""
        member_id = self._access.member(context)
        report = versions.decode_version_report(request)
        # A pool reports a version at about the same time.
        await self._hub.take_with_others(VersionReported(member_id=member_id, report=report))
        return version_pb.ReportVersionResponse()

    async def RequestPublish(
        self, request: version_pb.RequestPublishRequest, context: Context
    ) -> version_pb.RequestPublishResponse:
        """Ask the trainer of a policy for a version."""
        asked = PublishRequested(
            member_id=self._access.member(context, MemberRole.RAAS),
            policy_id=PolicyId(request.policy_id),
        )
        answer: PublishAnswer = await self._hub.take(asked)
        return version_pb.RequestPublishResponse(
            pending=answer.is_pending, newest_version=answer.newest_version
        )
