"""Broadcast groups: two processes over gloo, and what happens when one is gone."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta

import numpy as np
import pytest

from astraflow.core.dtype import Dtype
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.layout import TensorSpec
from astraflow.core.updates import TensorUpdate, WeightUpdate
from astraflow.core.versions import VersionInfo
from astraflow.weights.broadcast import BroadcastGroup, BroadcastPuller, Rendezvous
from astraflow.weights.broadcast_message import pack, unpack
from astraflow.weights.ports import ListVersions
from astraflow.weights.pulled import Pulled

pytestmark = pytest.mark.slow

POLICY = PolicyId("p")
# Sends or receives whatever it is told to, one version per line.
PEER = """
import asyncio, sys
from astraflow.weights.broadcast import BroadcastGroup, Rendezvous
from tests.weights.test_broadcast import update_to
port, rank = int(sys.argv[1]), int(sys.argv[2])
async def main():
    where = Rendezvous(host="127.0.0.1", port=port, rank=rank, size=2, deadline_s=60)
    group = await BroadcastGroup.join(where)
    for line in sys.stdin:
        if rank == 0:
            await group.send(update_to(int(line)))
        else:
            print((await group.receive()).version, flush=True)
asyncio.run(main())
"""


def update_to(version: int) -> WeightUpdate:
    rng = np.random.default_rng(version)
    indices = np.sort(rng.choice(3000, 100, replace=False))
    sparse = TensorUpdate(
        spec=TensorSpec(name="a", dtype=Dtype.BF16, shape=(30, 100), offset=0),
        indices=indices,
        values=rng.integers(0, 2**16, 100).astype(np.uint16),
    )
    dense = TensorUpdate(
        spec=TensorSpec(name="b", dtype=Dtype.F8_E4M3, shape=(7,), offset=6016),
        indices=None,
        values=rng.integers(0, 2**8, 7).astype(np.uint8),
    )
    return WeightUpdate(
        policy_id=POLICY, version=version, base_version=version - 1, tensors=(sparse, dense)
    )


def assert_same(one: WeightUpdate, other: WeightUpdate):
    assert (one.version, one.base_version) == (other.version, other.base_version)
    for left, right in zip(one.tensors, other.tensors, strict=True):
        assert left.spec == right.spec
        assert left.values.dtype == right.values.dtype
        np.testing.assert_array_equal(left.values, right.values)
        np.testing.assert_array_equal(left.indices, right.indices)


def version(number: int) -> VersionInfo:
    return VersionInfo(
        policy_id=POLICY, version=number, layout_digest=b"", content_digest=b"", patches=()
    )


class Source:
    """What is fallen back to: it has every version, and remembers who asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def pull(
        self,
        target: VersionInfo,
        known: Mapping[int, VersionInfo],
        transfer_token: bytes,
        *,
        listed: ListVersions | None = None,
    ) -> Pulled:
        self.asked.append(target.version)
        update = update_to(target.version)
        return Pulled(update=update, nbytes=0, duration=timedelta(), reports=())

    def full_update(self) -> WeightUpdate:
        return update_to(self.asked[-1])

    async def close(self) -> None:
        pass


class Peer:
    """The other process."""

    def __init__(self, rank: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._process = subprocess.Popen(
            [sys.executable, "-c", PEER, str(self.port), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, number: int) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()

    async def says(self) -> str:
        assert self._process.stdout
        return await asyncio.to_thread(self._process.stdout.readline)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
async def peers() -> AsyncIterator[list[Peer]]:
    started: list[Peer] = []
    yield started
    for peer in started:
        peer.end()


async def join(peers: list[Peer], *, rank: int, update_deadline_s: float = 60.0) -> BroadcastGroup:
    peers.append(Peer(1 - rank))
    where = Rendezvous(
        host="127.0.0.1",
        port=peers[-1].port,
        rank=rank,
        size=2,
        deadline_s=60.0,
        update_deadline_s=update_deadline_s,
    )
    return await BroadcastGroup.join(where)


async def send_for_ever(group: BroadcastGroup):
    while True:
        await group.send(update_to(8))


def test_an_update_survives_packing():
    assert_same(unpack(*pack(update_to(3))), update_to(3))


def test_damage_is_noticed():
    header, payload = pack(update_to(3))
    payload[5] ^= 1
    with pytest.raises(AstraflowError) as caught:
        unpack(header, payload)
    assert caught.value.reason is Reason.DIGEST_MISMATCH


async def test_versions_come_by_broadcast_until_the_sender_dies_then_by_pulling(
    peers: list[Peer],
):
    source = Source()
    puller = BroadcastPuller(source, await join(peers, rank=1))
    await puller.pull(version(1), {}, b"")
    for number in (2, 3):
        peers[0].tell(number)
        pulled = await puller.pull(version(number), {}, b"")
        assert_same(pulled.update, update_to(number))
        assert pulled.nbytes == 100 * 10 + 7
    assert source.asked == [1]
    peers[0].signal(signal.SIGKILL)
    await puller.pull(version(4), {}, b"")
    await puller.pull(version(5), {}, b"")
    assert source.asked == [1, 4, 5]
    assert not puller.is_grouped
    await puller.close()


@pytest.mark.slow
async def test_a_sender_that_hangs_is_left_at_the_deadline(peers: list[Peer]):
    source = Source()
    puller = BroadcastPuller(source, await join(peers, rank=1, update_deadline_s=0.3))
    await puller.pull(version(1), {}, b"")
    peers[0].signal(signal.SIGSTOP)
    await puller.pull(version(2), {}, b"")
    assert source.asked == [1, 2]
    await puller.close()


async def test_what_came_by_broadcast_is_not_held_whole(peers: list[Peer]):
    source = Source()
    puller = BroadcastPuller(source, await join(peers, rank=1))
    await puller.pull(version(1), {}, b"")
    assert puller.full_update().version == 1
    peers[0].tell(2)
    await puller.pull(version(2), {}, b"")
    with pytest.raises(AstraflowError) as caught:
        puller.full_update()
    assert caught.value.reason is Reason.NOT_READY
    await puller.pull(version(3), {}, b"")
    assert source.asked == [1, 3]
    await puller.close()


async def test_a_receiver_that_dies_ends_the_group_for_the_sender(peers: list[Peer]):
    group = await join(peers, rank=0)
    peers[0].tell(0)
    await group.send(update_to(7))
    assert await peers[0].says() == "7\n"
    peers[0].end()
    with pytest.raises(AstraflowError) as caught:
        await send_for_ever(group)
    assert caught.value.reason is Reason.SOURCE_UNREACHABLE
    with pytest.raises(AstraflowError):
        await group.send(update_to(9))


async def test_a_meeting_that_not_all_attend_ends_at_the_deadline():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    with pytest.raises(AstraflowError) as caught:
        await BroadcastGroup.join(
            Rendezvous(host="127.0.0.1", port=port, rank=0, size=2, deadline_s=0.3)
        )
    assert caught.value.reason is Reason.SOURCE_TIMEOUT
