"""VersionService: which versions exist and who has them."""

# ruff: noqa: N802 - methods are named by the contract

from itertools import count

from astraflow.core.events import PublishRequested, VersionReported
from astraflow.core.ids import PolicyId
from astraflow.core.members import Role
from astraflow.core.versions import PublishAnswer
from astraflow.dataflow.hub import Hub
from astraflow.rpc.access import Access
from astraflow.rpc.streams import Context, seated
from astraflow.wire import versions
from astraflow_proto.weights.v1 import version_service_pb2 as version_pb


class VersionServicer:
    """Convert, one call, convert."""

    def __init__(self, hub: Hub, access: Access) -> None:
        self._hub = hub
        self._access = access
        self._numbers = count()

    async def ListVersions(
        self, request: version_pb.ListVersionsRequest, context: Context
    ) -> version_pb.ListVersionsResponse:
        """Return what can still be pulled, oldest first."""
        caller = self._access.anyone(context)
        known = self._hub.run.versions(PolicyId(request.policy_id), caller)
        told = await self._hub.told(known)
        return version_pb.ListVersionsResponse(versions=map(versions.encode_version_info, told))

    async def WatchVersions(
        self, request: version_pb.WatchVersionsRequest, context: Context
    ) -> None:
        """Send versions as they are published."""
        member_id = self._access.member(context)
        after = request.after_version if request.HasField("after_version") else None
        policy_id = PolicyId(request.policy_id)
        purpose = f"versions/{next(self._numbers)}"
        async with seated(self._hub.hands.seats, member_id, purpose, context):
            async for info in self._hub.watch_versions(policy_id, after, member_id):
                version = versions.encode_version_info(info)
                await context.write(version_pb.WatchVersionsResponse(version=version))

    async def ListSources(
        self, request: version_pb.ListSourcesRequest, context: Context
    ) -> version_pb.ListSourcesResponse:
        """Return who has a version now."""
        caller = self._access.anyone(context)
        sources = self._hub.run.sources(PolicyId(request.policy_id), request.version, caller)
        told = await self._hub.told(sources)
        return version_pb.ListSourcesResponse(sources=map(versions.encode_source, told))

    async def ReportVersion(
        self, request: version_pb.ReportVersionRequest, context: Context
    ) -> version_pb.ReportVersionResponse:
        """Take where a version stands on the caller."""
        member_id = self._access.member(context)
        report = versions.decode_version_report(request)
        await self._hub.take(VersionReported(member_id=member_id, report=report))
        return version_pb.ReportVersionResponse()

    async def RequestPublish(
        self, request: version_pb.RequestPublishRequest, context: Context
    ) -> version_pb.RequestPublishResponse:
        """Ask the trainer of a policy for a version."""
        asked = PublishRequested(
            member_id=self._access.member(context, Role.RAAS),
            policy_id=PolicyId(request.policy_id),
        )
        answer: PublishAnswer = await self._hub.take(asked)
        return version_pb.RequestPublishResponse(
            pending=answer.is_pending, newest_version=answer.newest_version
        )
