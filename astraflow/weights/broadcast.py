"""Weights over torch.distributed, for clusters with a fast fabric: one sends, the others receive.

The group is its own: it touches no default group of the process. Every operation ends by a
deadline; after the first failure a group is torn down for good, and its members pull instead.
All members trust each other: the sender's updates are those that it publishes as well.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import structlog
import torch
import torch.distributed as dist

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.updates import WeightUpdate
from astraflow.core.versions import VersionInfo
from astraflow.weights.broadcast_message import pack, unpack
from astraflow.weights.ports import ListVersions
from astraflow.weights.pulled import Pulled

_T = TypeVar("_T")

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

SENDER_RANK = 0
_LIMIT_NBYTES = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where and as whom a process meets the others.

    Attributes:
        host: Of the sender.
        port: Where the sender listens for the meeting.
        rank: 0 sends, the others receive.
        size: Processes in the group.
        deadline_s: Of the meeting.
        update_deadline_s: Of each update; None: the same.
        device: cpu: over gloo; cuda:N: over NCCL.
    """

    host: str
    port: int
    rank: int
    size: int
    deadline_s: float = 30.0
    update_deadline_s: float | None = None
    device: str = "cpu"

    @property
    def update_limit_s(self) -> float:
        """Seconds that an update may take."""
        return self.deadline_s if self.update_deadline_s is None else self.update_deadline_s


class BroadcastGroup:
    """One process's place in a group; used from one thread at a time."""

    def __init__(self, group: Any, where: Rendezvous) -> None:
        """Hold a group; `join` makes one."""
        self._group: Any = group
        self._where = where

    @classmethod
    async def join(cls, where: Rendezvous) -> "BroadcastGroup":
        """Meet the others.

        Raises:
            AstraflowError: SOURCE_TIMEOUT when not all came by the deadline.
        """
        try:
            return cls(await asyncio.to_thread(_meet, where), where)
        except RuntimeError as error:
            raise AstraflowError(
                Reason.SOURCE_TIMEOUT,
                f"rank {where.rank} met no group of {where.size} at {where.host}:{where.port} "
                f"within {where.deadline_s} s: {error}",
            ) from error

    async def send(self, update: WeightUpdate) -> None:
        """Give an update to all others, as rank 0.

        Raises:
            AstraflowError: SOURCE_UNREACHABLE when one is gone or late; the group is closed.
        """
        header, payload = await asyncio.to_thread(pack, update)

        def work(clock: _Deadline) -> None:
            self._send(header, payload, clock)

        await self._guarded(work)

    async def receive(self) -> WeightUpdate:
        """Take the next update.

        Raises:
            AstraflowError: SOURCE_UNREACHABLE when the sender is gone or late, DIGEST_MISMATCH
                or CHUNK_INVALID when it came damaged; the group is closed.
        """
        return await self._guarded(self._receive)

    def close(self) -> None:
        """Leave; the others notice with their next operation."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    async def _guarded(self, work: "Callable[[_Deadline], _T]") -> _T:
        if self._group is None:
            raise _closed()
        try:
            return await asyncio.to_thread(work, _Deadline(self._where.update_limit_s))
        except AstraflowError:
            self.close()
            raise
        except RuntimeError as error:
            self.close()
            raise AstraflowError(
                Reason.SOURCE_UNREACHABLE, f"the broadcast group broke: {error}"
            ) from error

    def _send(self, header: bytes, payload: np.ndarray, clock: "_Deadline") -> None:
        sizes = np.array([len(header), len(payload)], np.int64)
        for array in (sizes.view(np.uint8), np.frombuffer(bytearray(header), np.uint8), payload):
            self._move(torch.as_tensor(array), clock)

    def _receive(self, clock: "_Deadline") -> WeightUpdate:
        sizes = self._taken(16, clock).view(np.int64)
        header_nbytes, payload_nbytes = int(sizes[0]), int(sizes[1])
        if not 0 <= min(sizes) <= max(sizes) <= _LIMIT_NBYTES:
            raise AstraflowError(Reason.CHUNK_INVALID, f"a broadcast announces {sizes} bytes")
        header = self._taken(header_nbytes, clock)
        return unpack(header.tobytes(), self._taken(payload_nbytes, clock))

    def _taken(self, nbytes: int, clock: "_Deadline") -> np.ndarray:
        return self._move(torch.empty(nbytes, dtype=torch.uint8), clock).numpy()

    def _move(self, tensor: torch.Tensor, clock: "_Deadline") -> torch.Tensor:
        """Broadcast bytes u8[n] from the sender; return what is here afterwards, on the CPU."""
        group = self._group
        if group is None:
            raise _closed()
        if not len(tensor):
            return tensor
        there = tensor.to(self._where.device)
        options = cast("Any", dist).BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = SENDER_RANK, 0, clock.left
        group.broadcast([there], options).wait(clock.left)
        return there.cpu()


def _closed() -> AstraflowError:
    return AstraflowError(Reason.SOURCE_UNREACHABLE, "the broadcast group is closed; pull instead")


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> timedelta:
        # 0 would mean no limit.
        return timedelta(seconds=max(0.001, self._end - time.monotonic()))


def _meet(where: Rendezvous) -> Any:
    limit = timedelta(seconds=where.deadline_s)
    torch_dist = cast("Any", dist)
    store = torch_dist.TCPStore(
        where.host, where.port, where.size, where.rank == SENDER_RANK, timeout=limit
    )
    if torch.device(where.device).type == "cpu":
        return torch_dist.ProcessGroupGloo(store, where.rank, where.size, limit)
    torch.cuda.set_device(where.device)
    options = torch_dist.ProcessGroupNCCL.Options()
    options._timeout = limit  # noqa: SLF001  torch has no public name for it
    return torch_dist.ProcessGroupNCCL(store, where.rank, where.size, options)


class Puller(Protocol):
    """What is fallen back to; `astraflow.weights.puller.WeightPuller` is one."""

    async def pull(
        self,
        target: VersionInfo,
        known: Mapping[int, VersionInfo],
        transfer_token: bytes,
        *,
        listed: ListVersions | None = None,
    ) -> Pulled:
        """Get a verified version."""
        ...

    def full_update(self) -> WeightUpdate:
        """Return all that is held, dense."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


class BroadcastPuller:
    """A puller that takes versions from a group while it works, and pulls once it does not.

    The first version is pulled: updates of a group change what is there. What the inner puller
    holds stays where it was meanwhile; its first pull afterwards catches up from there.
    """

    def __init__(self, puller: Puller, group: BroadcastGroup) -> None:
        self._puller = puller
        self._group: BroadcastGroup | None = group
        self._version: int | None = None
        self._pulled_version: int | None = None

    @property
    def is_grouped(self) -> bool:
        """Whether the next version is awaited from the group."""
        return self._group is not None

    async def pull(
        self,
        target: VersionInfo,
        known: Mapping[int, VersionInfo],
        transfer_token: bytes,
        *,
        listed: ListVersions | None = None,
    ) -> Pulled:
        """Get a version; see `WeightPuller.pull`.

        Raises:
            PullFailed: When neither the group nor any source gave it.
        """
        if self._group is not None and self._version is not None:
            try:
                return await self._received(self._group, target)
            except AstraflowError as error:
                log.warning("broadcast failed, pulling", version=target.version, why=str(error))
                self._leave()
        pulled = await self._puller.pull(target, known, transfer_token, listed=listed)
        self._version = self._pulled_version = target.version
        return pulled

    def full_update(self) -> WeightUpdate:
        """Return all that is held, dense.

        Raises:
            AstraflowError: NOT_READY when the newest version came from the group, which keeps
                no copy; from then on versions are pulled.
        """
        if self._version != self._pulled_version:
            self._leave()
            raise AstraflowError(
                Reason.NOT_READY,
                f"version {self._version} came by broadcast and is not held whole; pull it",
                retryable=True,
            )
        return self._puller.full_update()

    async def close(self) -> None:
        """Leave the group and let go of connections."""
        self._leave()
        await self._puller.close()

    async def _received(self, group: BroadcastGroup, target: VersionInfo) -> Pulled:
        started = time.monotonic()
        update = await group.receive()
        while update.version < target.version and update.version <= (self._version or 0):
            update = await group.receive()
        if update.version != target.version or update.base_version not in (None, self._version):
            raise AstraflowError(
                Reason.PATCH_UNKNOWN,
                f"the group sent {update.base_version} to {update.version}, wanted was "
                f"{self._version} to {target.version}",
            )
        self._version = target.version
        return Pulled(
            update=update,
            nbytes=update.nbytes,
            duration=timedelta(seconds=time.monotonic() - started),
            reports=(),
        )

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
