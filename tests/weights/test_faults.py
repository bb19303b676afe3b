"""Some faults of those that `benchmarks/faults.py` injects: nothing is ever corrupted."""

from random import Random

import pytest

from fault_ends import plan
from fault_ends.damage import CLASSES
from fault_ends.lane import HONEST, FaultyLane
from fault_ends.trial import Receiver
from fault_ends.world import World

pytestmark = pytest.mark.slow

FEW = plan.Quotas(messages=200, states=20, streams=10, relays=10, kills=2, disks=2)
MANY = plan.Quotas(messages=2000, states=100, streams=40, relays=20, kills=5, disks=3)


@pytest.fixture(
    scope="module", params=[FEW, pytest.param(MANY, marks=pytest.mark.long)], ids=["few", "many"]
)
def quotas(request):
    return request.param


@pytest.fixture(scope="module")
def counts(quotas):
    """Inject once, on two cores."""
    return plan.run_all(quotas, seed=7, processes=2)


def test_every_class_has_its_quota(counts, quotas):
    assert all(counts[name].injected >= quotas.messages for name in CLASSES)
    assert counts["lying_relay"].injected >= quotas.relays
    assert counts["spoiled_stream"].injected == quotas.streams
    assert counts["killed_source"].injected == counts["killed_puller"].injected == quotas.kills
    assert counts["killed_join"].injected == quotas.kills
    assert counts["full_store_disk"].injected == quotas.disks
    assert counts["full_node_disk"].injected == quotas.disks


def test_nothing_is_corrupted_in_silence_and_every_failure_is_typed(counts):
    assert {name: each.faults for name, each in counts.items() if not each.is_safe} == {}


@pytest.mark.parametrize("name", plan.WITHOUT_COPY)
def test_all_but_one_in_a_thousand_come_without_a_full_copy(counts, name):
    assert counts[name].is_good, counts[name].faults


@pytest.mark.parametrize("name", ["cold_join", "rotten_base"])
def test_who_has_lost_his_base_gets_a_full_copy(counts, name):
    assert counts[name].recovered_whole == counts[name].injected


async def test_the_harness_sees_wrong_bits():
    world = World(seed=1, scale=1, endpoints=(HONEST,))
    receiver = Receiver(world, FaultyLane(world, World(seed=2, scale=1), Random(1)))
    assert (await receiver.pull(world.publish())).corruption == ""
    receiver._live ^= 1
    assert "what is live is not version 1" in (await receiver.pull(world.publish())).corruption
    receiver.puller._holding.state.flat[0] ^= 1
    assert not receiver.is_held(1)
