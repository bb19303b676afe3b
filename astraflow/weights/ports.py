"""Ports: what a pull needs of others: a lane to bring chunks, and listeners to be told of them."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Protocol, runtime_checkable

from astraflow.core.layout import Layout
from astraflow.core.versions import VersionInfo
from astraflow.weights.frame import Frame
from astraflow.weights.incoming import Incoming
from astraflow.wire.transfers import SentItem, TransferSpec


class Lane(Protocol):
    """Over which chunks travel; `GrpcLane` and `Lanes` are such."""

    def pull(
        self, endpoint: str, spec: TransferSpec, transfer_token: bytes
    ) -> AsyncGenerator[SentItem]:
        """Yield the plan, then its chunks; Waiting between them."""
        ...

    async def get_layout(self, endpoint: str, digest: bytes, transfer_token: bytes) -> Layout:
        """Return a layout."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


ListVersions = Callable[[], Awaitable[Iterable[VersionInfo]]]
"""Asks the run for its versions as they are now; raises what it answers."""


@runtime_checkable
class StandsReady(Protocol):
    """A lane over which the next version can be asked for before there is one."""

    async def stand_ready(self, endpoint: str, spec: TransferSpec, transfer_token: bytes) -> None:
        """Ask for the version that comes next, if the source can be asked so."""
        ...

    async def forget_ready(self, spec: TransferSpec) -> None:
        """Let go of what was asked for ahead and is older than what comes next."""
        ...


class Progress(Protocol):
    """Who is told what a pull brings; `Relay` is one."""

    def begin(self, incoming: Incoming, frame: Frame) -> None:
        """Take note of a pull that begins."""
        ...

    def note(self) -> None:
        """Look at what has come."""
        ...
