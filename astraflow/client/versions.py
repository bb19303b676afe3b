"""The versions of the run, as a member watches and reports them."""

from collections.abc import AsyncIterator

from astraflow.client.session import SessionKeeper
from astraflow.core.ids import PolicyId
from astraflow.core.versions import PublishAnswer, Source, VersionInfo, VersionReport
from astraflow.wire.versions import decode_source, decode_version_info, encode_version_report
from astraflow_proto.weights.v1 import version_service_pb2
from astraflow_proto.weights.v1.version_service_pb2_grpc import VersionServiceStub


class VersionClient:
    """VersionService for one member."""

    def __init__(self, keeper: SessionKeeper) -> None:
        self._keeper = keeper
        self._stub = VersionServiceStub(keeper.hub.channel)

    async def versions(self, policy_id: PolicyId) -> tuple[VersionInfo, ...]:
        """Return what can still be pulled, oldest first.

        Raises:
            AstraflowError: POLICY_UNKNOWN.
        """
        request = version_service_pb2.ListVersionsRequest(policy_id=policy_id)
        answer = await self._keeper.call(self._stub.ListVersions, request)
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

        async def answers() -> AsyncIterator[VersionInfo]:
            request = version_service_pb2.WatchVersionsRequest(
                policy_id=policy_id, after_version=last
            )
            call = self._stub.WatchVersions(request, metadata=self._keeper.metadata)
            async for answer in call:
                yield decode_version_info(answer.version)

        async for info in self._keeper.follow(answers):
            # One that gained patches may be older than the last one.
            last = info.version if last is None else max(last, info.version)
            yield info

    async def sources(self, policy_id: PolicyId, version: int) -> tuple[Source, ...]:
        """Return who has a version now, best first.

        Raises:
            AstraflowError: VERSION_UNKNOWN, VERSION_EVICTED.
        """
        request = version_service_pb2.ListSourcesRequest(policy_id=policy_id, version=version)
        answer = await self._keeper.call(self._stub.ListSources, request)
        return tuple(map(decode_source, answer.sources))

    async def report(self, report: VersionReport) -> None:
        """Say where a version stands here.

        Raises:
            AstraflowError: VERSION_UNKNOWN.
        """
        await self._keeper.call(self._stub.ReportVersion, encode_version_report(report))

    async def request_publish(self, policy_id: PolicyId) -> PublishAnswer:
        """Ask for a version with more steps; return at once.

        Raises:
            AstraflowError: POLICY_UNKNOWN; NOT_READY without a trainer.
        """
        request = version_service_pb2.RequestPublishRequest(policy_id=policy_id)
        answer = await self._keeper.call(self._stub.RequestPublish, request)
        newest = answer.newest_version if answer.HasField("newest_version") else None
        return PublishAnswer(newest_version=newest, is_pending=answer.pending)
