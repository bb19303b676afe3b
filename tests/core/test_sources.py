"""Sources are ranked so that a region costs the origin one copy, and liars are left out."""

from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astraflow.core.errors import Failure, Reason
from astraflow.core.versions import SourceRecord, SourceReport, VersionState


@pytest.fixture
def world(make_world):
    return make_world()


def pool(world, count, *, region="east", version=0):
    """Let relays of a region join that hold a version."""
    nodes = []
    for number in range(count):
        name = f"{region}{number}"
        node = world.join(name, relay_endpoint=f"{name}:1", region=region)
        world.report(node, version)
        nodes.append(node)
    return nodes


def told(world, node, version=1):
    return [each.endpoint for each in world.run.sources("solver", version, node)]


def published(world):
    trainer = world.register()
    world.publish(trainer)
    return trainer


def report_of(address, *, bad=0, nbytes=1 << 20, seconds=1.0, stalled=False):
    duration = timedelta(seconds=seconds)
    failure = Failure(reason=Reason.SOURCE_TIMEOUT, message="no sign") if stalled else None
    return SourceReport(
        address=address, nbytes=nbytes, duration=duration, bad_chunk_count=bad, failure=failure
    )


def test_the_first_of_a_region_goes_to_the_origin_and_the_rest_to_each_other(world):
    trainer = published(world)
    nodes = pool(world, 8)
    world.publish(trainer)
    assert told(world, nodes[0]) == ["solver:1"]
    for number in range(1, 5):
        assert told(world, nodes[number])[0] == "east0:1"
    for number in range(5, 8):
        assert told(world, nodes[number])[:2] == ["east1:1", "east0:1"]
    assert all(told(world, node)[-1] == "solver:1" for node in nodes)


def test_when_the_first_leaves_only_the_second_goes_to_the_origin(world):
    trainer = published(world)
    nodes = pool(world, 4)
    world.publish(trainer)
    world.leave(nodes[0])
    assert told(world, nodes[1]) == ["solver:1"]
    assert told(world, nodes[2])[0] == "east1:1"


def test_who_holds_the_version_comes_first_and_is_spread(world):
    trainer = published(world)
    nodes = pool(world, 4)
    world.publish(trainer)
    world.report(nodes[2], 1)
    world.report(nodes[3], 1)
    assert {told(world, nodes[0])[0], told(world, nodes[1])[0]} == {"east2:1", "east3:1"}


def test_eight_relays_are_listed_of_a_large_pool_and_near_ones_first(world):
    trainer = published(world)
    east, west, south = (pool(world, n, region=r) for n, r in ((12, "east"), (3, "west"), (1, "s")))
    world.publish(trainer)
    for node in (*east, *west):
        world.report(node, 1)
    near = told(world, east[0])
    assert len(near) == 9
    assert all(each.startswith("east") for each in near[:8])
    assert near[8] == "solver:1"
    between = told(world, west[0])
    assert set(between[:2]) == {"west1:1", "west2:1"}
    assert between[2:] == ["solver:1", *(f"east{number}:1" for number in range(6))]
    assert len(told(world, south[0])) == 9


def test_who_failed_to_load_a_version_feeds_nobody_until_the_next_one(world):
    trainer = published(world)
    nodes = pool(world, 3)
    world.publish(trainer)
    world.report(nodes[0], 1, state=VersionState.FAILED)
    assert told(world, nodes[1]) == ["solver:1"]
    assert told(world, nodes[2]) == ["east1:1", "solver:1"]
    world.publish(trainer)
    assert told(world, nodes[2], 2) == ["east0:1", "east1:1", "solver:1"]


def test_regions_do_not_wait_for_each_other(world):
    trainer = published(world)
    east, west = pool(world, 2), pool(world, 2, region="west")
    world.publish(trainer)
    assert told(world, west[0]) == ["solver:1"]
    assert told(world, west[1]) == ["west0:1", "solver:1"]
    assert told(world, east[1]) == ["east0:1", "solver:1"]


def test_one_that_starts_from_elsewhere_does_not_feed_the_others(world):
    trainer = published(world)
    nodes = pool(world, 2)
    world.publish(trainer)
    world.report(nodes[1], 1)
    world.publish(trainer)
    assert told(world, nodes[0], 2) == ["solver:1"]
    assert told(world, nodes[1], 2) == ["solver:1"]


def test_one_accusation_counts_for_the_accuser_and_two_for_all(world):
    trainer = published(world)
    nodes = pool(world, 4)
    world.publish(trainer)
    lie = report_of("east0:1", bad=1)
    world.report(nodes[1], 1, state=VersionState.FAILED, reports=(lie,))
    assert "east0:1" not in told(world, nodes[1])
    assert "east0:1" in told(world, nodes[2])
    world.report(nodes[2], 1, state=VersionState.FAILED, reports=(lie,))
    assert "east0:1" not in told(world, nodes[3])


def test_who_stalls_is_asked_last_by_its_witness_and_by_all_after_two(world):
    trainer = published(world)
    nodes = pool(world, 4)
    world.publish(trainer)
    stall = report_of("east0:1", stalled=True)
    world.report(nodes[1], 0, reports=(stall,))
    assert told(world, nodes[1])[-1] == "east0:1"
    assert told(world, nodes[2])[0] == "east0:1"
    world.report(nodes[2], 0, reports=(stall,))
    assert told(world, nodes[1]) == ["solver:1"]
    assert told(world, nodes[3])[0] == "east1:1"
    world.report(nodes[0], 0)
    assert told(world, nodes[3])[0] == "east0:1"


def test_an_evicted_version_is_no_longer_offered(world):
    trainer = published(world)
    nodes = pool(world, 2)
    world.publish(trainer)
    world.report(nodes[0], 1)
    assert told(world, nodes[1])[0] == "east0:1"
    world.report(nodes[0], 1, state=VersionState.EVICTED)
    assert told(world, nodes[1]) == ["solver:1"]


def test_measured_goodput_is_listed_towards_the_callers_region(world):
    trainer = published(world)
    nodes = pool(world, 1)
    world.publish(trainer)
    world.report(nodes[0], 1, reports=(report_of("solver:1", nbytes=4 << 20, seconds=2),))
    (origin,) = world.run.sources("solver", 1, nodes[0])
    assert origin.goodput_bytes_per_s == 2 << 20


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    regions=st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=24),
    gone=st.sets(st.integers(0, 23), max_size=6),
)
def test_nobody_waits_for_itself_and_a_region_costs_one_copy(make_world, regions, gone):
    world = make_world()
    trainer = published(world)
    nodes = {}
    for number, region in enumerate(regions):
        name = f"n{number}"
        nodes[f"{name}:1"] = world.join(name, relay_endpoint=f"{name}:1", region=region)
        world.report(nodes[f"{name}:1"], 0)
    world.publish(trainer)
    for number in gone & set(range(len(regions))):
        world.leave(nodes.pop(f"n{number}:1"))
    order = list(nodes)
    first = [told(world, node)[0] for node in nodes.values()]
    left = {regions[int(each[1:-2])] for each in nodes}
    assert first.count("solver:1") == len(left)
    for address, node in nodes.items():
        ahead = [each for each in told(world, node) if each != "solver:1"]
        assert all(order.index(each) < order.index(address) for each in ahead)


def test_what_is_remembered_of_sources_is_bounded():
    record = SourceRecord()
    record.note("m", "", [report_of(f"s{number}", bad=1) for number in range(3000)])
    assert not record.is_avoided("s0", "m")
    assert record.is_avoided("s2999", "m")
    assert record.goodput_bytes_per_s("s0", "") == 0
