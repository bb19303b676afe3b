"""The relays of a node behind one endpoint: members of the run are let in, policies told apart."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.versions import LaneKind, SourceInfo, SourceKind, SourceState
from astraflow.transport.grpc_lane import GrpcLane
from astraflow.transport.lanes import RECEIVED_NBYTES, Lanes
from astraflow.weights.fetch.puller import PullFailed, WeightPuller
from astraflow.weights.serve.server import RelayServer
from astraflow.wire.transfers import TransferPlan, TransferSpec, Waiting
from astraflow.wire.weights import SentChunk


@pytest.fixture
async def relays(training):
    server = RelayServer([training.policy_id, PolicyId("verifier")])
    await server.start()
    server.set_transfer_token(training.token)
    yield server
    await server.close()


@pytest.fixture
async def first(training, relays):
    puller = WeightPuller(training.policy_id, relay=relays.relays[training.policy_id])
    yield puller
    await puller.close()


def only(info, endpoint):
    source = SourceInfo(kind=SourceKind.RELAY, state=SourceState.LIVE, endpoint=endpoint)
    return replace(info, sources=(source,))


async def test_layout_and_weights_come_from_a_relay_alone(
    training, serve, relays, first, puller, tools
):
    await serve()
    info = training.publish()
    await first.pull(info, training.infos, training.token)
    pulled = await puller.pull(only(info, relays.endpoint), training.infos, training.token)
    assert training.is_live(tools.live(pulled.update))


@pytest.mark.parametrize("token", [b"", b"another"])
async def test_strangers_are_refused(training, relays, puller, token):
    info = only(training.publish(), relays.endpoint)
    with pytest.raises(PullFailed) as caught:
        await puller.pull(info, training.infos, token)
    assert caught.value.reason is Reason.TOKEN_INVALID


async def test_the_secret_before_is_still_good(training, relays, puller, serve, first):
    await serve()
    info = training.publish()
    await first.pull(info, training.infos, training.token)
    relays.set_transfer_token(b"newer")
    relays.set_transfer_token(b"newer")
    await puller.pull(only(info, relays.endpoint), training.infos, training.token)


async def test_what_is_not_relayed_is_refused(training, relays):
    spec = TransferSpec(policy_id=PolicyId("nobody"), version=0)
    for lane in (GrpcLane(), Lanes(lanes=[LaneKind.TCP])):
        with pytest.raises(AstraflowError) as caught:
            await anext(lane.pull(relays.endpoint, spec, training.token))
        assert caught.value.reason is Reason.VERSION_UNKNOWN
        await lane.close()


async def test_a_relay_that_is_told_to_has_no_lane_but_grpc(training, serve, puller, tools):
    await serve()
    server = RelayServer([training.policy_id], lanes=[LaneKind.GRPC])
    await server.start()
    server.set_transfer_token(training.token)
    lane = GrpcLane()
    assert await lane.list_lanes(server.endpoint, training.token) == []
    await lane.close()
    await server.close()


@pytest.fixture
async def lanes():
    lanes = Lanes(lanes=[LaneKind.TCP])
    yield lanes
    await lanes.close()


async def came(lanes, relays, spec, training, *, begun):
    """Ask for a version that the relay does not have yet; return what came, once it has begun."""
    items = []
    async with aclosing(lanes.pull(relays.endpoint, spec, training.token)) as pulling:
        async for item in pulling:
            items.append(item)
            begun.set()
    return items


async def test_a_version_comes_over_tcp_from_a_relay_that_does_not_have_it_yet(
    training, serve, relays, first, lanes
):
    """Twice: over a connection that is made for it, and over one that stands."""
    await serve()
    for version in (0, 1):
        info = training.publish()
        spec = TransferSpec(
            policy_id=training.policy_id,
            version=version,
            base_version=None if version == 0 else version - 1,
            layout_digest=info.layout_digest,
        )
        before, begun = RECEIVED_NBYTES.copy(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            coming = group.create_task(came(lanes, relays, spec, training, begun=begun))
            await begun.wait()
            assert not coming.done()
            await first.pull(info, training.infos, training.token)
        items = coming.result()
        assert isinstance(items[0], Waiting)
        (plan,) = (item for item in items if isinstance(item, TransferPlan))
        chunks = [item.chunk for item in items if isinstance(item, SentChunk)]
        assert {chunk.header.index for chunk in chunks} == {*range(plan.chunk_count)}
        nbytes = sum(len(chunk.payload) for chunk in chunks)
        assert RECEIVED_NBYTES["tcp"] - before["tcp"] == nbytes == plan.payload_nbytes


async def test_a_relay_without_the_version_is_not_asked_again_over_grpc(training, lanes):
    server = RelayServer([training.policy_id], wait_s=0.01)
    await server.start()
    server.set_transfer_token(training.token)
    spec = TransferSpec(policy_id=training.policy_id, version=0)
    for _ in range(2):
        with capture_logs() as logs, pytest.raises(AstraflowError, match="has not begun") as caught:
            await anext(lanes.pull(server.endpoint, spec, training.token))
        assert caught.value.reason is Reason.SOURCE_UNREACHABLE
        assert not logs
    await server.close()


async def test_a_chain_of_relays_passes_versions_on_over_tcp(training, serve, relays, first, tools):
    await serve()
    second = WeightPuller(training.policy_id, lane=Lanes(lanes=[LaneKind.TCP]))
    live = None
    for _ in range(3):
        info = training.publish()
        via = replace(info, sources=(*only(info, relays.endpoint).sources, *info.sources))
        before = RECEIVED_NBYTES["tcp"]
        _, pulled = await asyncio.gather(
            first.pull(info, training.infos, training.token),
            second.pull(via, training.infos, training.token),
        )
        live = tools.live(pulled.update, live)
        assert training.is_live(live)
        assert RECEIVED_NBYTES["tcp"] > before
    await second.close()
