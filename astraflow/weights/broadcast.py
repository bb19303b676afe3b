"""Broadcast: one process sends its versions to all others of a torch.distributed group at once.

A version that came by broadcast is one more source of it, asked before all others: its chunks are
verified as any others are, and what is missing or wrong comes from the next source.

A group is its own: it touches no default group of the process. The sender keeps a store at a known
port, where the others take places; once all are taken the group meets. Every operation ends by a
deadline. After the first failure a group is over, and its members meet for the next one.

The body of a frame is a series of `PullResponse` messages, each after its length (u32,
little-endian): the plan of one patch, then its chunks. The number of a frame is the newest version
that is through, which is the version itself in its last frame; -1 before there is one. A frame
without a body is a heartbeat.
"""

import asyncio
import io
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from typing import Any, Final, Self, cast

import numpy as np
import structlog
import torch
import torch.distributed as dist

from astraflow.codec.chunks import chunk_invalid
from astraflow.config.recipe import Broadcast
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import WeightUpdate
from astraflow.core.versions import SourceInfo, SourceKind, SourceState, VersionInfo
from astraflow.rpc.address import split_address
from astraflow.weights.fetch.lanes import BROADCAST, AnyLane, BroadcastInbox, ListVersions
from astraflow.weights.fetch.puller import PullResult, WeightPuller
from astraflow.weights.patches.patch import PatchName, packed, plan_of, unpacked
from astraflow.weights.publish.background import BackgroundWorker
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.wire.transfers import SentItem
from astraflow.wire.weights import SentChunk

SENDER_RANK: Final = 0
_HEADER: Final = struct.Struct("<qq")
_LIMIT_NBYTES: Final = 1 << 30
_POLL_S: Final = 0.1


class BroadcastGroup:
    """One process's place in a group; used from one thread."""

    def __init__(self, group: Any, settings: Broadcast) -> None:
        self._group = group
        self._settings = settings

    def send(self, body: np.ndarray, number: int) -> None:
        """Give a frame with a body, u8[n], to all others, as the sender.

        Raises:
            AstraflowError: SOURCE_UNREACHABLE when one is gone or late.
        """
        with _torch_errors():
            end = time.monotonic() + self._settings.deadline_s
            header = bytearray(_HEADER.pack(len(body), number))
            self._move(torch.frombuffer(header, dtype=torch.uint8), end)
            self._move(torch.as_tensor(body), end)

    def receive(self) -> tuple[np.ndarray, int]:
        """Return body, u8[n], and number of the next frame."""
        with _torch_errors():
            end = time.monotonic() + self._settings.deadline_s
            header = self._move(torch.empty(_HEADER.size, dtype=torch.uint8), end)
            nbytes, number = _HEADER.unpack(header.numpy().tobytes())
            if not 0 <= nbytes <= _LIMIT_NBYTES:
                raise chunk_invalid(f"a frame has {nbytes} bytes")
            body = self._move(torch.empty(nbytes, dtype=torch.uint8), end)
            return body.numpy(), number

    def _move(self, tensor: torch.Tensor, end: float) -> torch.Tensor:
        """Broadcast bytes u8[n] from the sender; return what is here afterwards, on the CPU."""
        if not len(tensor):
            return tensor
        there = tensor.to(self._settings.device)
        # 0 would mean no limit.
        left = timedelta(seconds=max(0.001, end - time.monotonic()))
        options = cast("Any", dist).BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = SENDER_RANK, 0, left
        self._group.broadcast([there], options).wait(left)
        return there.cpu()


class _Meetings:
    """Meets for group 0, 1, 2 ... over the keys of a store.

    `group` names the one that is met for; `N/seats` counts its receivers; `N/full` is there once
    all have come. Drop the group before when the next one is met: what it holds are connections.
    """

    def __init__(self, settings: Broadcast, store: Any, is_over: Callable[[], bool]) -> None:
        self._settings = settings
        self._store = store
        self._is_over = is_over

    def _wait(self, is_so: Callable[[], bool]) -> bool:
        while not self._is_over():
            if is_so():
                return True
            time.sleep(_POLL_S)
        return False

    def _met(self, number: int, rank: int) -> BroadcastGroup:
        torch_dist, settings = cast("Any", dist), self._settings
        store = torch_dist.PrefixStore(str(number), self._store)
        size, limit = settings.node_count + 1, _limit(settings)
        if torch.device(settings.device).type == "cpu":
            return BroadcastGroup(torch_dist.ProcessGroupGloo(store, rank, size, limit), settings)
        torch.cuda.set_device(settings.device)
        options = torch_dist.ProcessGroupNCCL.Options()
        options._timeout = limit  # noqa: SLF001 - torch has no public name for it
        return BroadcastGroup(torch_dist.ProcessGroupNCCL(store, rank, size, options), settings)


def _limit(settings: Broadcast) -> timedelta:
    return timedelta(seconds=settings.deadline_s)


class SenderMeetings(_Meetings):
    """Listens for receivers, where it is told to and nowhere else, and meets them.

    A port that cannot be listened on is INVALID_FIELD.
    """

    def __init__(self, settings: Broadcast, host: str, is_over: Callable[[], bool]) -> None:
        try:
            listener = socket.create_server((host, settings.port))
        except OSError as error:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"broadcast cannot listen on {host}:{settings.port}, choose another port: {error}",
            ) from error
        store = cast("Any", dist).TCPStore(
            host,
            listener.getsockname()[1],
            None,
            True,
            timeout=_limit(settings),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        super().__init__(settings, store, is_over)
        self._number = -1

    def meet(self) -> BroadcastGroup | None:
        """Return the next group once all have come; None: it is over."""
        self._number += 1
        with _torch_errors():
            self._store.set("group", str(self._number))
            seats, count = f"{self._number}/seats", self._settings.node_count
            if not self._wait(lambda: self._store.add(seats, 0) >= count):
                return None
            self._store.set(f"{self._number}/full", "")
            return self._met(self._number, SENDER_RANK)


class ReceiverMeetings(_Meetings):
    """Dials a sender and takes seats there."""

    def __init__(self, settings: Broadcast, host: str, is_over: Callable[[], bool]) -> None:
        with _torch_errors():
            store = cast("Any", dist).TCPStore(
                host, settings.port, None, False, timeout=_limit(settings), wait_for_workers=False
            )
        super().__init__(settings, store, is_over)
        self._seen = -1

    def meet(self) -> BroadcastGroup | None:
        """Return the next group in which there is a seat, once all have come; None: it is over."""
        with _torch_errors():
            while self._wait(lambda: self._open > self._seen):
                self._seen = self._open
                rank = self._store.add(f"{self._seen}/seats", 1)
                if rank > self._settings.node_count:
                    continue
                full = f"{self._seen}/full"
                self._wait(lambda: self._store.check([full]) or self._open > self._seen)  # noqa: B023 - ends here
                if self._store.check([full]):
                    return self._met(self._seen, rank)
        return None

    @property
    def _open(self) -> int:
        return int(self._store.get("group")) if self._store.check(["group"]) else -1


@contextmanager
def _torch_errors() -> Generator[None]:
    """Turn what torch raises into what is raised here."""
    try:
        yield
    except RuntimeError as error:
        why = str(error).partition(". ")[0]
        raise AstraflowError(
            Reason.SOURCE_UNREACHABLE, f"the broadcast group broke: {why}"
        ) from error


FRAME_NBYTES: Final = 16 << 20
"""A body has so many bytes, or a message more."""


def bodies(items: Iterable[SentItem]) -> Iterator[np.ndarray]:
    """Yield the bodies, u8[n], that carry a plan and its chunks."""
    body = bytearray()
    for item in items:
        body += packed(item)
        if len(body) >= FRAME_NBYTES:
            yield np.frombuffer(body, np.uint8)
            body = bytearray()
    if body:
        yield np.frombuffer(body, np.uint8)


def items(body: np.ndarray) -> Iterator[SentItem]:
    """Yield what a body, u8[n], carries."""
    yield from unpacked(io.BytesIO(body.data))


# Of the deadline; but no heartbeat is later than this.
_HEARTBEATS: Final = 4
_HEARTBEAT_S: Final = 1.0

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Broadcaster(BackgroundWorker):
    """Sends every version once to all who have a seat, in a thread of its own.

    It goes on with the next group when one breaks, and never holds training up.

    Example:
        >>> settings = Broadcast(node_count=8, port=29500)
        >>> with Broadcaster(publisher, settings, host="10.0.0.1") as broadcaster:
        ...     client.publish_version(publisher.publish(1, tensors))
        ...     broadcaster.wake()
    """

    def __init__(self, publisher: WeightPublisher, settings: Broadcast, *, host: str) -> None:
        """Listen on nothing; `with` starts the thread. Receivers dial the host."""
        super().__init__(publisher, name="astraflow-broadcast")
        self._settings = settings
        self._host = host
        self._heartbeat_s = min(_HEARTBEAT_S, settings.deadline_s / _HEARTBEATS)
        self._meetings: SenderMeetings | None = None

    def __enter__(self) -> Self:
        self._meetings = SenderMeetings(self._settings, self._host, lambda: self._is_over)
        return super().__enter__()

    def _run(self) -> None:
        while self._meetings is not None and not self._is_over:
            try:
                self._serve(self._meetings.meet())
            except AstraflowError as error:
                log.warning("a broadcast group is over; its members pull", why=error.message)

    def _serve(self, group: BroadcastGroup | None) -> None:
        """Send what is published from now on."""
        if group is None:
            return
        sent = self._newest
        log.info("a broadcast group has met", size=self._settings.node_count + 1, version=sent)
        while not self._is_over:
            while sent < self._newest:
                self._send(group, sent + 1)
                sent += 1
            group.send(np.empty(0, np.uint8), sent)
            self._wake.wait(self._heartbeat_s)
            self._wake.clear()

    @property
    def _newest(self) -> int:
        newest = self._publisher.version
        return -1 if newest is None else newest

    def _send(self, group: BroadcastGroup, version: int) -> None:
        """Send what leads to a version from the one before, or from nothing, unless it is old."""
        store = self._publisher.store
        names = [PatchName(version=version, base_version=base) for base in (version - 1, None)]
        patch = next((store.find(name) for name in names if name in store), None)
        if patch is None:
            return
        with store.reading([patch.info]):
            chunks = (store.chunk(patch.info, index) for index in range(patch.info.chunk_count))
            sent = (SentChunk(patch_index=0, chunk=chunk) for chunk in chunks)
            for body in bodies(chain([plan_of([patch])], sent)):
                group.send(body, version - 1)


_SOURCE: Final = SourceInfo(
    kind=SourceKind.RELAY, state=SourceState.LIVE, endpoint=BROADCAST, region=BROADCAST
)


class BroadcastPuller:
    """A puller that takes what comes by broadcast first; see `WeightPuller`.

    The first version is pulled; who serves it as the origin is who broadcasts. From then on this
    has a seat in one group after the other, in a thread of its own.
    """

    def __init__(
        self, settings: Broadcast, lane: AnyLane, pulling: Callable[..., WeightPuller]
    ) -> None:
        """Take part in no group yet; `pulling` makes a puller, given the lane to others."""
        self._inbox = lane.inbox = BroadcastInbox()
        self._puller = pulling(lane=lane)
        self._settings = settings
        self._over = threading.Event()
        self._host = ""
        self._thread: threading.Thread | None = None

    async def pull(
        self,
        target: VersionInfo,
        known: Mapping[int, VersionInfo],
        transfer_token: bytes,
        *,
        listed: ListVersions | None = None,
    ) -> PullResult:
        """Get a verified version, staged beside what is held; as `WeightPuller.pull`."""
        offered = target
        if await self._inbox.has(target.version):
            offered = replace(target, sources=(_SOURCE, *target.sources))
        pulled = await self._puller.pull(offered, known, transfer_token, listed=listed)
        self._inbox.forget(target.version)
        origins = [each for each in target.sources if each.kind is SourceKind.ORIGIN]
        if origins:
            self._follow(split_address(origins[0].endpoint)[0])
        return pulled

    def full_update(self) -> WeightUpdate:
        return self._puller.full_update()

    async def close(self) -> None:
        """Leave the group, which lasts until the next sign of life, or the deadline."""
        self._over.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        await self._puller.close()

    def _follow(self, host: str) -> None:
        """Receive from a host; a later call tells where the trainer is now."""
        self._host = host
        if self._thread is None:
            loop = asyncio.get_running_loop()
            self._thread = threading.Thread(
                target=self._run, args=(loop,), name="astraflow-broadcast", daemon=True
            )
            self._thread.start()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._over.is_set():
            try:
                meetings = ReceiverMeetings(self._settings, self._host, self._over.is_set)
                while not self._over.is_set():
                    self._receive(meetings, loop)
            except AstraflowError as error:
                if not self._over.is_set():
                    log.warning("no versions come by broadcast now", why=error.message)
            self._over.wait(1.0)

    def _receive(self, meetings: ReceiverMeetings, loop: asyncio.AbstractEventLoop) -> None:
        async def take(came: Sequence[SentItem], newest: int) -> None:
            self._inbox.take(came, newest)

        group = meetings.meet()
        if group is None:
            return
        log.info("versions come by broadcast")
        try:
            while not self._over.is_set():
                body, number = group.receive()
                # No more than one is on its way.
                taken = take([*items(body)], number)
                asyncio.run_coroutine_threadsafe(taken, loop).result()
        finally:
            loop.call_soon_threadsafe(self._inbox.end)
