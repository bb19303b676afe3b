"""The far end: pulls when it is told to, and says how long that took.

    python -m wan_ends.puller ADDRESS PLACES

Each line of stdin names a subject, and perhaps "first" (connections are made anew); each answer
is a line of JSON: seconds and bytes.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from astraflow.core.versions import LaneKind
from astraflow.telemetry.logging import configure_logging
from astraflow.transport.grpc_lane import GrpcLane
from astraflow.transport.lanes import Lanes
from astraflow.wire.transfers import TransferSpec
from astraflow.wire.weights import SentChunk
from wan_ends.baselines import PlainGrpc, PublishedStreams, WarmStream
from wan_ends.source import POLICY, TOKEN

Places = Mapping[str, Any]


class Subject(Protocol):
    """One way to get the bytes."""

    def pull(self) -> int:
        """Return how many bytes came."""
        ...

    def close(self) -> None:
        """Let the next one be the first."""
        ...


class OurLane:
    """A lane of ours, from asking for the transfer to the last chunk."""

    def __init__(
        self,
        places: Places,
        runner: asyncio.Runner,
        make: Callable[[], GrpcLane | Lanes],
        *,
        place: str = "weights",
    ) -> None:
        self._endpoint = places[place]
        self._spec = TransferSpec(
            policy_id=POLICY, version=0, layout_digest=bytes.fromhex(places["layout_digest"])
        )
        self._runner = runner
        self._make = make
        self._lane: GrpcLane | Lanes | None = None

    def pull(self) -> int:
        """Pull all chunks; return the bytes."""
        return self._runner.run(self._pull())

    def close(self) -> None:
        """Let the next one be the first."""
        if self._lane is not None:
            self._runner.run(self._lane.close())
        self._lane = None

    async def _pull(self) -> int:
        self._lane = self._lane or self._make()
        nbytes = 0
        async for item in self._lane.pull(self._endpoint, self._spec, TOKEN):
            if isinstance(item, SentChunk):
                nbytes += len(item.chunk.payload)
        return nbytes


LANES: Final = (LaneKind.TCP, LaneKind.GRPC)
SUBJECTS: Final = (
    *("lanes", "encrypted", "grpc lane", "published", "plain grpc"),
    *("warm stream", "warm tls"),
)


def subjects(address: str, places: Places, runner: asyncio.Runner) -> dict[str, Subject]:
    """Return all ways by name."""
    nbytes = places["nbytes"]
    return {
        "lanes": OurLane(places, runner, lambda: Lanes(lanes=LANES)),
        "encrypted": OurLane(
            places, runner, lambda: Lanes(lanes=LANES, encrypts=True), place="encrypted"
        ),
        "grpc lane": OurLane(places, runner, GrpcLane),
        "published": PublishedStreams(address, places["published"], nbytes),
        "plain grpc": PlainGrpc(address, places["grpc"]),
        "warm stream": WarmStream(address, places["warm"], nbytes),
        "warm tls": WarmStream(address, places["warm tls"], nbytes, is_encrypted=True),
    }


def main() -> None:
    configure_logging("puller")  # to stderr: stdout is for answers
    address, places = sys.argv[1], json.loads(sys.argv[2])
    with asyncio.Runner() as runner:
        ways = subjects(address, places, runner)
        for line in sys.stdin:
            name, _, mode = line.strip().partition(":")
            if mode == "first":
                ways[name].close()
            began = time.perf_counter()
            nbytes = ways[name].pull()
            seconds = time.perf_counter() - began
            print(json.dumps({"seconds": seconds, "nbytes": nbytes}), flush=True)


if __name__ == "__main__":
    main()
