"""Versions by broadcast over gloo, and what happens when a member of the group is gone."""

import asyncio
import socket
from contextlib import closing

import numpy as np
import pytest

from astraflow.config.recipe import Broadcast
from astraflow.core.errors import AstraflowError, Reason
from astraflow.weights.broadcast import (
    Broadcaster,
    BroadcastPuller,
    SenderMeetings,
    bodies,
    items,
)
from astraflow.weights.fetch.lanes import BROADCAST, AnyLane, BroadcastInbox
from astraflow.weights.fetch.puller import WeightPuller
from astraflow.wire.transfers import TransferPlan
from astraflow.wire.weights import SentChunk
from crash_ends.postgres import free_port


def sent_of(training, version):
    """What is sent of the patch to a version from the one before."""
    patch = next(p for p in training.store.patches if p.info.version == version)
    plan = TransferPlan(
        patches=(patch.index,),
        chunk_count=patch.info.chunk_count,
        payload_nbytes=patch.info.payload_nbytes,
    )
    yield plan
    for chunk in training.chunks_of(patch):
        yield SentChunk(patch_index=0, chunk=chunk)


class Members:
    """A trainer that broadcasts, and pullers of its versions."""

    def __init__(self, training, *, node_count=2):
        self.training = training
        self.settings = Broadcast(node_count=node_count, port=free_port(), deadline_s=60)
        self.pullers = []

    def add_puller(self):
        def pulling(*, lane):
            return WeightPuller(self.training.policy_id, lane=lane)

        self.pullers.append(BroadcastPuller(self.settings, AnyLane(), pulling))
        return self.pullers[-1]

    async def pull(self, puller):
        training = self.training
        info = training.infos[max(training.infos)]
        return await puller.pull(info, training.infos, training.token)

    async def close(self):
        while self.pullers:
            await self.pullers.pop().close()


@pytest.fixture
async def members(training):
    members = Members(training)
    yield members
    await members.close()


def sources_of(pulled):
    return [report.address for report in pulled.reports if report.nbytes]


async def opened(puller, is_open=True):
    """Wait until versions come by broadcast, or no longer."""
    inbox = puller._inbox
    while inbox.is_open is not is_open:
        inbox._changed.clear()
        await inbox._changed.wait()


def test_frames_carry_what_a_pull_would_send(training):
    training.publish()
    (body,) = bodies(sent_of(training, 0))
    plan, *chunks = items(body)
    assert plan.patches[0].patch.version == 0
    assert [sent.chunk for sent in chunks] == [decoded.chunk for decoded in [*items(body)][1:]]
    for damaged in (body[:-1], np.append(body, 1).astype(np.uint8), body[2:]):
        with pytest.raises(AstraflowError) as caught:
            [*items(damaged)]
        assert caught.value.reason is Reason.CHUNK_INVALID


async def test_an_inbox_knows_what_came_and_what_did_not(training):
    inbox = BroadcastInbox()
    training.publish()
    training.publish()
    assert not await inbox.has(1)
    inbox.take([], 0)
    waiting = asyncio.create_task(inbox.has(1))
    inbox.take([*items(next(bodies(sent_of(training, 1))))], 1)
    assert await waiting
    assert [patch.info.version for patch in inbox.way(0, 1)] == [1]
    with pytest.raises(AstraflowError) as caught:
        inbox.way(None, 1)
    assert caught.value.reason is Reason.PATCH_UNKNOWN
    inbox.end()
    assert not await inbox.has(2)
    inbox.forget(1)
    assert not await inbox.has(1)
    with pytest.raises(AstraflowError):
        inbox.take([*items(next(bodies(sent_of(training, 1))))][1:], 1)


def test_a_port_in_use_is_said_at_once():
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        settings = Broadcast(node_count=1, port=taken.getsockname()[1])
        with pytest.raises(AstraflowError, match="choose another port") as caught:
            SenderMeetings(settings, "127.0.0.1", lambda: False)
    assert caught.value.reason is Reason.INVALID_FIELD


@pytest.mark.slow
async def test_versions_come_by_broadcast_until_one_leaves_and_again_once_it_is_replaced(
    training, serve, tools, members
):
    await serve()
    puller = members.add_puller()
    training.publish()
    with Broadcaster(training.publisher, members.settings, host="127.0.0.1") as broadcaster:
        live = tools.live((await members.pull(puller)).update)
        leaving = members.add_puller()
        for _ in range(2):
            assert sources_of(await members.pull(leaving)) == training.endpoints
            await opened(puller)
            late = members.add_puller()
            assert sources_of(await members.pull(late)) == training.endpoints
            for is_noise in (False, True):
                training.publish(share=1 if is_noise else 0.02, is_noise=is_noise)
                broadcaster.wake()
                pulled = await members.pull(puller)
                assert sources_of(pulled) == [BROADCAST]
                live = tools.live(pulled.update, live)
                assert training.is_live(live)
            assert sources_of(await members.pull(late)) == training.endpoints
            await leaving.close()
            await opened(puller, is_open=False)
            training.publish()
            broadcaster.wake()
            pulled = await members.pull(puller)
            assert sources_of(pulled) == training.endpoints
            live = tools.live(pulled.update, live)
            assert training.is_live(live)
            leaving = late
        await members.close()


@pytest.mark.slow
async def test_who_was_busy_takes_several_versions_at_once(training, serve, tools, members):
    await serve()
    members.settings = Broadcast(node_count=1, port=members.settings.port, deadline_s=60)
    puller = members.add_puller()
    training.publish()
    with Broadcaster(training.publisher, members.settings, host="127.0.0.1") as broadcaster:
        live = tools.live((await members.pull(puller)).update)
        await opened(puller)
        for _ in range(3):
            training.publish()
            broadcaster.wake()
        pulled = await members.pull(puller)
        assert sources_of(pulled) == [BROADCAST]
        assert training.is_live(tools.live(pulled.update, live))
        await members.close()
