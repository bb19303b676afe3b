"""Versions on their way to an HTTP RaaS: pulled here, sent on the published lane, reported."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, cast

import structlog

from astraflow.client.raas import RaasClient
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId, TaskId
from astraflow.core.tasks import VersionRange
from astraflow.core.versions import VersionInfo, VersionReport, VersionState
from astraflow.gateway.bridge.calls import RaasCalls
from astraflow.gateway.legacy.sending import Offer, Sender, WeightDesk
from astraflow.rpc.concurrency import beside

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_RETRY_S = 1.0


class VersionCourier:
    """Keeps one policy of one RaaS at the newest version.

    While the RaaS loads a version, its sender serves that one and no other: what it labels is what
    it got. It loads nothing whose number is not above that of what it has, and starts at 0 with
    weights of its own: versions are told to it under numbers that only rise, from 1.

    Attributes:
        live: The version that the RaaS samples with; None: none that it is known to have pulled.
        moved: Told whenever `live` is another one.
        versions: What it pulled: the version of every number that its tokens may have.
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
        self.live: int | None = None
        self.moved = asyncio.Condition()
        self.versions: dict[int, int] = {}
        # Numbers: the last that it was told, and the one that `live` has.
        self._told = 0
        self._number: int | None = None
        self._policy_id = policy_id
        self._model_id = model_id
        self._desk = desk
        self._sender = sender
        self._endpoint = endpoint
        self._newest: VersionInfo | None = None
        self._published = asyncio.Event()
        self._is_loading = False
        self._pins: set[TaskId] = set()
        self._free = asyncio.Event()
        self._free.set()

    async def reach(self, wanted: VersionRange, *, pin: TaskId | None = None) -> None:
        """Wait until the RaaS has a version that a task may be sampled with.

        Args:
            wanted: By the task.
            pin: A task for which that version stays, until `unpin`; None: it may move on.

        Raises:
            AstraflowError: VERSION_NOT_SERVED when it is past it.
        """

        def is_reached() -> bool:
            is_still = pin is None or not self._is_loading
            return is_still and self.live is not None and self.live >= (wanted.min or 0)

        async with self.moved:
            await self.moved.wait_for(is_reached)
        if self.live is None or self.live not in wanted:
            raise AstraflowError(
                Reason.VERSION_NOT_SERVED, f"the RaaS is at version {self.live} already"
            )
        if pin is not None:
            self._pins.add(pin)
            self._free.clear()

    def unpin(self, task_id: TaskId) -> None:
        """Let the RaaS move on, where no other task is measured with its version. Idempotent."""
        self._pins.discard(task_id)
        if not self._pins:
            self._free.set()

    async def run(self, client: RaasClient, calls: RaasCalls) -> None:
        """Follow the versions until cancelled."""
        async with beside(self._watch(client)):
            while True:
                await self._published.wait()
                self._published.clear()
                await self._free.wait()
                if self._newest is not None and self._newest.version != self.live:
                    await self._bring(self._newest, client, calls)

    async def _watch(self, client: RaasClient) -> None:
        async for info in client.versions.watch(self._policy_id):
            if self._newest is None or info.version >= self._newest.version:
                self._newest = info
                self._published.set()

    async def _bring(self, info: VersionInfo, client: RaasClient, calls: RaasCalls) -> None:
        self._is_loading, state, failure = True, VersionState.LIVE, None
        version = info.version
        try:
            version = await self._load(info, client, calls)
        except AstraflowError as error:
            log.warning("an HTTP RaaS did not load a version", version=version, why=str(error))
            state, failure = VersionState.FAILED, error.to_failure()
            asyncio.get_running_loop().call_later(_RETRY_S, self._published.set)
        finally:
            await self._loaded()
        report = VersionReport(
            policy_id=self._policy_id, version=version, state=state, failure=failure
        )
        await client.versions.report(report)

    async def _load(self, info: VersionInfo, client: RaasClient, calls: RaasCalls) -> int:
        held = await self._desk.get(
            info,
            lambda: client.versions.versions(self._policy_id),
            client.session.info.transfer_token,
        )
        self._told += 1
        base = self._number if self.live == held.version - 1 else None
        offer = Offer(held=held, number=self._told, base=base)
        self._sender.offer, self._sender.pushed = offer, None
        answer = await calls.notify_version(self._model_id, offer.number, self._endpoint)
        if answer.get("pulled") is False and answer.get("ok"):
            # It has a higher number, of this run or of another: what it samples with is unknown.
            self.live, self._told = None, _local_in(answer) or 2 * offer.number
            why = f"had weights of a number above {offer.number}, which nobody can vouch for"
            raise AstraflowError(Reason.APPLY_FAILED, f"{calls.url} {why}; it is told a higher one")
        if not answer.get("ok") or {self._sender.pushed, _version_in(answer)} != {offer.number}:
            raise AstraflowError(
                Reason.APPLY_FAILED,
                f"{calls.url} was told of version {held.version} as {offer.number}, got "
                f"{self._sender.pushed} and answers {dict(answer)}",
            )
        self.live, self._number = held.version, offer.number
        self.versions[offer.number] = held.version
        return held.version

    async def _loaded(self) -> None:
        self._is_loading = False
        async with self.moved:
            self.moved.notify_all()


def _version_in(answer: Mapping[str, Any]) -> object:
    """Return the number that was pulled."""
    pulled = answer.get("pull_result")
    return cast("Mapping[str, Any]", pulled).get("version") if isinstance(pulled, dict) else None


def _local_in(answer: Mapping[str, Any]) -> int:
    """Return the number that the RaaS says it has; 0: it does not say."""
    found = re.search(r"local=(\d{1,18})\b", str(answer.get("reason")))
    return int(found[1]) if found else 0
