import pytest

from astraflow.core.batches import BatchGroup
from astraflow.core.policy.buffers import FreshBuffer
from astraflow.core.samples import AcceptedRollout, FreshGroup, Sample
from made_up import made_up_rollout


@pytest.fixture
def rollout(trajectory):
    return made_up_rollout(trajectory("t", length=4))


@pytest.fixture
def group(rollout):
    def build(arrival, *versions):
        entry = AcceptedRollout(rollout=rollout, prompt_id="p", member_id="m", placements={})
        samples = tuple(Sample(entry=entry, rows=(), min_version=v) for v in versions)
        head = BatchGroup(
            group_id=f"g{arrival}", prompt_id="p", data_set="d", sample_count=len(versions)
        )
        return FreshGroup(head=head, samples=samples, number=arrival, arrival=arrival)

    return build


def filled(*groups, max_staleness=2):
    buffer = FreshBuffer(max_staleness=max_staleness)
    for group in groups:
        buffer.put(group)
    return buffer


def test_what_turns_stale_first_comes_first(group):
    buffer = filled(group(1, 5), group(2, 3), group(3, 4), group(4, 3))
    assert [g.arrival for g in buffer.take(3)] == [2, 4, 3]
    assert (len(buffer), buffer.sample_count) == (1, 1)


def test_stale_samples_are_taken_out_and_the_group_goes_on(group):
    buffer = filled(group(1, 3, 5), group(2, 3))
    stale, gone = buffer.prune(6)
    assert [sample.min_version for sample in stale] == [3, 3]
    assert [g.arrival for g in gone] == [2]
    assert [s.min_version for g in buffer.take(9) for s in g.samples] == [5]


def test_nothing_is_stale_at_the_limit(group):
    assert filled(group(1, 4)).prune(6) == ([], [])


def test_these_groups_are_taken_all_or_none(group):
    one, two, three = group(1, 3), group(2, 3), group(3, 3)
    buffer = filled(one, two)
    assert not buffer.take_these((one, three))
    assert len(buffer) == 2
    assert buffer.take_these((one,))
    assert (len(buffer), buffer.sample_count) == (1, 1)
    assert buffer.take(len(buffer)) == (two,)
