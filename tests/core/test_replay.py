import pytest

from astraflow.core.algorithms.finding import Faults
from astraflow.core.algorithms.points import Dice
from astraflow.core.batches import BatchGroup
from astraflow.core.policy.buffers import ReplayBuffer
from astraflow.core.samples import AcceptedRollout, FreshGroup, sample_of
from astraflow.core.settings import PlugInSpec, ReplaySettings
from made_up import made_up_rollout


@pytest.fixture
def group(trajectory):
    def build(number, version=0):
        row = trajectory("t", versions=(version,))
        rollout = made_up_rollout(row, rollout_id=f"r{number}", group_id=f"g{number}")
        entry = AcceptedRollout(rollout=rollout, prompt_id="p", member_id="m", placements={})
        head = BatchGroup(group_id=f"g{number}", prompt_id="p", data_set="d", sample_count=1)
        samples = (sample_of(entry, "solver"),)
        return FreshGroup(head=head, samples=samples, number=number, arrival=number)

    return build


def replay(*, groups_per_batch=4, **settings):
    settings = {"ratio": 0.5, "max_staleness": 9} | settings
    return ReplayBuffer(
        ReplaySettings(**settings),
        groups_per_batch=groups_per_batch,
        dice=Dice(seed=0, salt="r"),
        faults=Faults(),
    )


def numbers(groups):
    return [group.number for group in groups]


def test_a_share_of_the_batch_is_replayed_once_there_is_something(group):
    kept = replay()
    assert kept.available(1) == 0
    kept.use([group(n) for n in range(1, 5)], [])
    assert (kept.available(1), kept.sample_count) == (2, 4)
    assert numbers(kept.take(1, 4)) == [3, 4]


@pytest.mark.parametrize(
    ("ratio", "groups_per_batch", "counts"),
    [
        (0.3, 16, [4, 5, 5, 5, 5, 4, 5]),
        (0.3, 10, [3, 3, 3]),
        (0.1, 4, [0, 0, 1, 0, 1]),
        (0.9, 2, [1, 1]),
        (0.5, 1, [0, 0]),
    ],
)
def test_what_rounding_takes_later_batches_have_more(group, ratio, groups_per_batch, counts):
    kept = replay(ratio=ratio, groups_per_batch=groups_per_batch)
    kept.use([group(n) for n in range(99)], [])
    assert [len(kept.take(1, groups_per_batch)) for _ in counts] == counts


def test_what_is_in_a_batch_is_in_no_other(group):
    kept = replay()
    kept.use([group(1), group(2), group(3)], [])
    first = kept.take(1, 2)
    assert numbers(first) == [2, 3]
    assert numbers(kept.take(1, 2)) == [1]
    kept.give_back(first)
    assert numbers(kept.take(1, 2)) == [2, 3]


def test_uses_are_bounded(group):
    kept = replay(max_uses=3)
    kept.use([group(1)], [])
    for left in (1, 1, 0):
        again = kept.take(1, 2)
        assert len(again) == left
        kept.use([], again)
    assert kept.metrics()["data/replay/uses"] == 2


def test_staleness_is_bounded(group):
    kept = replay(max_staleness=2)
    kept.use([group(1, version=0), group(2, version=1)], [])
    assert (kept.available(2), kept.available(3)) == (2, 1)
    kept.prune(3)
    assert kept.sample_count == 1
    assert numbers(kept.take(3, 2)) == [2]


def test_room_is_bounded_by_groups_and_bytes(group):
    kept = replay(max_groups=2)
    kept.use([group(1), group(2), group(3)], [])
    assert numbers(kept.take(0, 2)) == [2, 3]
    # A group of two tokens takes 18 bytes.
    kept = replay(max_nbytes=20)
    kept.use([group(1), group(2)], [])
    assert numbers(kept.take(0, 2)) == [2]
    assert kept.metrics()["data/replay/evicted"] == 1


def test_a_late_ack_counts_once(group):
    kept = replay(max_uses=3)
    kept.use([group(1)], [])
    lost = kept.take(0, 1)
    kept.give_back(lost)
    kept.regain(lost)
    assert kept.available(0) == 0
    kept.use([], lost)
    assert kept.available(0) == 1
    kept.forget(lost)
    kept.use([], lost)
    assert kept.available(0) == 0


def test_nothing_is_kept_without_a_ratio(group):
    kept = replay(ratio=0.0)
    kept.use([group(1)], [])
    assert (kept.sample_count, kept.take(0, 4), kept.metrics()) == (0, (), {})


def test_ratio_is_exact_where_it_can_be(group):
    kept = replay(ratio=0.75)
    kept.use([group(n) for n in range(5)], [])
    assert kept.available(0) == 3


def test_prioritised_replay_repeats_itself(group):
    picks = []
    for _ in range(2):
        kept = replay(order=PlugInSpec(name="prioritised"))
        kept.use([group(n) for n in range(9)], [])
        picks.append(numbers(kept.take(0, 2)))
    assert picks[0] == picks[1]
