"""Versions of one policy: fetched from an existing trainer's sender, served to our nodes.

The pool numbers its versions one by one from the second in which it began, and keeps the trainer's
own number of each as its label: a trainer may skip numbers, and come back with older ones. A pool
that begins again is so ahead of all that nodes may hold of the one before.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from astraflow.client.loop_thread import LoopThread
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.layout import Layout
from astraflow.core.versions import Source, SourceKind, SourceState, VersionInfo
from astraflow.gateway.edge.peers import DialRules
from astraflow.gateway.legacy.copy import SenderCopy
from astraflow.gateway.legacy.sender_client import SenderClient
from astraflow.rpc.tls import Tls
from astraflow.storage.weight_files import read_weights
from astraflow.weights.publisher import WeightPublisher
from astraflow.weights.server import WeightServer

# Of these only the patches matter; a node further behind takes a whole version.
_KEPT_COUNT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What came of a load.

    Attributes:
        label: The trainer's number of what the pool has now.
        is_new: Whether it was fetched.
        is_full: Whether all of it was.
        nbytes: That came.
        fetch_s: Seconds from the first question to the last byte.
        publish_s: Seconds to encode it for the nodes.
    """

    label: int
    is_new: bool
    is_full: bool = True
    nbytes: int = 0
    fetch_s: float = 0.0
    publish_s: float = 0.0

    def to_json(self, model_id: str) -> dict[str, Any]:
        """Return it as published."""
        if not self.is_new:
            why = f"version {self.label} is here already"
            return {"ok": True, "pulled": False, "reason": why}
        pulled = {
            "ok": True,
            "version": self.label,
            "mode": "full" if self.is_full else "delta",
            "shm_path": "",
            "use_lora": False,
            "pull_time": self.fetch_s + self.publish_s,
            "tcp_time": self.fetch_s,
            "save_time" if self.is_full else "patch_time": self.publish_s,
            "tcp_size_mb": self.nbytes / 1e6,
        }
        return {"ok": True, "model_id": model_id, "version": self.label, "pull_result": pulled}


class PoolVersions:
    """Publishes what senders have; one at a time.

    Attributes:
        labels: The trainer's own number of every version.
        moved: Told whenever a version was published.
    """

    def __init__(
        self,
        policy_id: PolicyId,
        *,
        host: str,
        timeout_s: float,
        transfer_token: bytes,
        loop: LoopThread,
        first: int,
        tls: Tls | None = None,
    ) -> None:
        """Prepare; nothing is published.

        Args:
            policy_id: Whose.
            host: On which weights are served, and under which senders dial back.
            timeout_s: For one transfer.
            transfer_token: Lets nodes in.
            loop: The running one.
            first: Number of the first version.
            tls: For nodes; None: plain text.
        """
        self.policy_id = policy_id
        self.labels: dict[int, int] = {}
        self.moved = asyncio.Condition()
        self._host = host
        self._timeout_s = timeout_s
        self._transfer_token = transfer_token
        self._loop = loop
        self._first = first
        self._tls = tls
        self._infos: dict[int, VersionInfo] = {}
        self._copy: SenderCopy | None = None
        self._publisher: WeightPublisher | None = None
        self._layout: Layout | None = None
        self._endpoint = ""
        self._exits = AsyncExitStack()
        self._one_at_a_time = asyncio.Lock()

    async def close(self) -> None:
        """Stop to serve, and let go of the sender."""
        await self._exits.aclose()
        if self._copy is not None:
            await self._copy.close()

    @property
    def newest(self) -> int | None:
        """None: nothing was published."""
        return max(self._infos, default=None)

    @property
    def label(self) -> int | None:
        """The trainer's number of the newest one."""
        return None if self.newest is None else self.labels[self.newest]

    @property
    def infos(self) -> tuple[VersionInfo, ...]:
        """What can be pulled, oldest first."""
        return tuple(self._infos.values())

    async def watch(self, after: int | None) -> AsyncIterator[VersionInfo]:
        """Yield versions after one, and then each as it is published, without end."""
        last = -1 if after is None else after
        while True:
            for info in self.infos:
                if info.version > last:
                    last = info.version
                    yield info
            async with self.moved:
                await self.moved.wait_for(partial(self._is_past, last))

    def _is_past(self, version: int) -> bool:
        return self.newest is not None and self.newest > version

    async def publish_from(self, directory: Path) -> None:
        """Publish the weights of a model directory as what the trainer calls 0."""
        stored = await asyncio.to_thread(read_weights, directory)
        tensors = {name: each.bits for name, each in stored.items()}
        layout = Layout.of([(name, each.dtype, each.bits.shape) for name, each in stored.items()])
        await self._publish(layout, tensors, label=0)

    async def load(self, label: int, endpoint: str, dial: DialRules) -> Loaded:
        """Publish what the sender calls `label`, or the newer one that it has by now.

        Args:
            label: The trainer's number.
            endpoint: host:port of the sender.
            dial: Who may be dialled.

        Returns:
            What was done; nothing, where the pool has what the sender has.

        Raises:
            AstraflowError: VERSION_NOT_SERVED when the sender has an older one;
                LAYOUT_MISMATCH; what a transfer raises.
        """
        async with self._one_at_a_time:
            copy = await self._copy_of(endpoint, dial)
            offered = await copy.offered()
            if label <= offered == self.label:
                return Loaded(label=offered, is_new=False)
            label, began = max(label, offered), perf_counter()
            await copy.fetch(label)
            fetched = perf_counter()
            await self._publish(copy.plan.layout, copy.tensors(), label=label)
            return Loaded(
                label=label,
                is_new=True,
                is_full=copy.is_full,
                nbytes=copy.nbytes,
                fetch_s=fetched - began,
                publish_s=perf_counter() - fetched,
            )

    async def _copy_of(self, endpoint: str, dial: DialRules) -> SenderCopy:
        """Return the copy of a sender; another one begins from nothing."""
        if self._copy is not None and self._copy.endpoint == endpoint:
            return self._copy
        async with AsyncExitStack() as undo:
            sender = await undo.enter_async_context(
                SenderClient(endpoint, host=self._host, timeout_s=self._timeout_s, dial=dial)
            )
            copy = SenderCopy(sender, await sender.plan())
            # From here on it is the copy's.
            undo.pop_all()
        if self._copy is not None:
            await self._copy.close()
        self._copy = copy
        return copy

    async def _publish(self, layout: Layout, tensors: dict[str, Any], *, label: int) -> None:
        publisher = await self._serving(layout)
        version = self._first if self.newest is None else self.newest + 1
        info = await asyncio.to_thread(partial(publisher.publish, version, tensors, step=version))
        source = Source(kind=SourceKind.ORIGIN, state=SourceState.LIVE, endpoint=self._endpoint)
        self.labels[version] = label
        self._infos[version] = replace(info, sources=(source,))
        self._infos.pop(version - _KEPT_COUNT, None)
        async with self.moved:
            self.moved.notify_all()

    async def _serving(self, layout: Layout) -> WeightPublisher:
        """Return the publisher, which serves; the first layout is that of all versions."""
        if self._publisher is None:
            publisher = WeightPublisher(self.policy_id, layout)
            listen = f"{self._host}:0"
            server = WeightServer(publisher, listen=listen, loop=self._loop, tls=self._tls)
            await asyncio.to_thread(server.__enter__)
            self._exits.push_async_callback(asyncio.to_thread, server.__exit__, None, None, None)
            server.set_transfer_token(self._transfer_token)
            self._endpoint, self._publisher, self._layout = server.endpoint, publisher, layout
        _require_same(self._layout, layout)
        return self._publisher


def _require_same(ours: Layout | None, given: Layout) -> None:
    """Compare tensors by name: their order may differ."""
    known, found = (
        {(each.name, each.dtype, each.shape) for each in layout.tensors}
        for layout in (ours or given, given)
    )
    if known != found:
        names = sorted({name for name, *_ in known ^ found})
        raise AstraflowError(
            Reason.LAYOUT_MISMATCH,
            f"the sender's tensors are not those of the pool: {', '.join(names[:5])}; give the "
            "recipe the model that is trained, in the type that is trained",
        )
