"""The relays of a node behind one endpoint: members of the run are let in, policies told apart."""

from dataclasses import replace

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.versions import Lane, Source, SourceKind, SourceState
from astraflow.transport.grpc_lane import GrpcLane
from astraflow.weights.pulled import PullFailed
from astraflow.weights.puller import WeightPuller
from astraflow.weights.relay_server import RelayServer
from astraflow.wire.patches import TransferSpec


@pytest.fixture
async def relays(training):
    server = RelayServer([training.policy_id, PolicyId("verifier")])
    await server.start()
    server.admit(training.token)
    yield server
    await server.close()


@pytest.fixture
async def first(training, relays):
    puller = WeightPuller(training.policy_id, relay=relays.relays[training.policy_id])
    yield puller
    await puller.close()


def only(info, endpoint):
    source = Source(kind=SourceKind.RELAY, state=SourceState.LIVE, endpoint=endpoint)
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
    relays.admit(b"newer")
    relays.admit(b"newer")
    await puller.pull(only(info, relays.endpoint), training.infos, training.token)


async def test_what_is_not_relayed_is_refused(training, relays):
    lane = GrpcLane()
    spec = TransferSpec(policy_id=PolicyId("nobody"), version=0)
    with pytest.raises(AstraflowError) as caught:
        await anext(lane.pull(relays.endpoint, spec, training.token))
    assert caught.value.reason is Reason.VERSION_UNKNOWN
    with pytest.raises(AstraflowError) as caught:
        await lane.plan_transfer(relays.endpoint, spec, [Lane.TCP], training.token)
    assert caught.value.reason is Reason.LANE_UNAVAILABLE
    await lane.close()
