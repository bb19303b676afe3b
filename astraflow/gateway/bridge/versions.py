"""Versions on their way to an HTTP RaaS: pulled here, sent on the published lane, reported."""

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import structlog

from astraflow.client.duplex import beside
from astraflow.client.raas import RaasClient
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.versions import VersionInfo, VersionReport, VersionState
from astraflow.gateway.bridge.calls import RaasCalls
from astraflow.gateway.legacy.held import Sender, WeightDesk

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_RETRY_S = 1.0


class VersionCourier:
    """Keeps one policy of one RaaS at the newest version.

    While the RaaS loads a version, its sender serves that one and no other: what it labels is what
    it got.

    Attributes:
        live: The version that the RaaS samples with; None: none of this run.
        moved: Told whenever `live` is another one.
    """

    def __init__(
        self,
        policy_id: PolicyId,
        *,
        model_id: str,
        desk: WeightDesk,
        sender: Sender,
        endpoint: str,
    ) -> None:
        """Prepare.

        Args:
            policy_id: Which.
            model_id: What the RaaS calls it.
            desk: Has the weights.
            sender: Serves them to this RaaS.
            endpoint: Of the sender.
        """
        self.live: int | None = None
        self.moved = asyncio.Condition()
        self._policy_id = policy_id
        self._model_id = model_id
        self._desk = desk
        self._sender = sender
        self._endpoint = endpoint
        self._newest: VersionInfo | None = None
        self._published = asyncio.Event()

    async def run(self, client: RaasClient, calls: RaasCalls) -> None:
        """Follow the versions until cancelled."""
        async with beside(self._watch(client)):
            while True:
                await self._published.wait()
                self._published.clear()
                if self._newest is not None and self._newest.version != self.live:
                    await self._bring(self._newest, client, calls)

    async def _watch(self, client: RaasClient) -> None:
        async for info in client.versions.watch(self._policy_id):
            if self._newest is None or info.version >= self._newest.version:
                self._newest = info
                self._published.set()

    async def _bring(self, info: VersionInfo, client: RaasClient, calls: RaasCalls) -> None:
        state, failure = VersionState.LIVE, None
        version = info.version
        try:
            version = await self._load(info, client, calls)
        except AstraflowError as error:
            log.warning("an HTTP RaaS did not load a version", version=version, why=str(error))
            state, failure = VersionState.FAILED, error.to_failure()
            asyncio.get_running_loop().call_later(_RETRY_S, self._published.set)
        report = VersionReport(
            policy_id=self._policy_id, version=version, state=state, failure=failure
        )
        await client.versions.report(report)

    async def _load(self, info: VersionInfo, client: RaasClient, calls: RaasCalls) -> int:
        held = await self._desk.get(
            info,
            lambda: client.versions.versions(self._policy_id),
            client.keeper.session.transfer_token,
        )
        self._sender.held = held
        answer = await calls.notify_version(self._model_id, held.version, self._endpoint)
        if not answer.get("ok") or _version_in(answer) not in (None, held.version):
            raise AstraflowError(
                Reason.APPLY_FAILED,
                f"{calls.url} was told of version {held.version} and answers {dict(answer)}",
            )
        async with self.moved:
            self.live = held.version
            self.moved.notify_all()
        return held.version


def _version_in(answer: Mapping[str, Any]) -> object:
    """Return the version that was pulled, or else named; None: the answer says neither."""
    pulled = answer.get("pull_result")
    if isinstance(pulled, dict):
        return cast("Mapping[str, Any]", pulled).get("version")
    return answer.get("version")
