"""A later release reads a snapshot as far as it can be sure, and refuses the rest by name."""

from dataclasses import dataclass, replace

import pytest

from astraflow.core.errors import AstraflowError
from astraflow.core.ids import IdGenerator, RunId
from astraflow.core.rollouts import VersionSpan
from astraflow.wire.rollout import decode_rollout, encode_rollout
from astraflow.wire.snapshot import RENAMED, dump_state, load_state
from astraflow_proto.journal.v1 import snapshot_pb2 as pb
from made_up import made_up_rollout, made_up_trajectory

OURS = ("astraflow.core.",)


@pytest.fixture
def ids():
    ids = IdGenerator(RunId("r"))
    ids.next("task")
    return ids


def written(thing, change):
    """A snapshot as another release would have written it."""
    snapshot = pb.Snapshot.FromString(dump_state(thing, position=3, modules=OURS))
    for shape in snapshot.shapes:
        change(shape)
    return snapshot.SerializeToString()


def path_of(thing):
    return f"{type(thing).__module__}:{type(thing).__qualname__}"


def test_a_class_that_moved_is_found_by_its_name(ids):
    def move(shape):
        shape.kind = shape.kind.replace(type(ids).__module__, "astraflow.core.elsewhere")

    read, position = load_state(written(ids, move), modules=OURS)
    assert position == 3
    assert read.next("task") == ids.next("task")


def test_what_got_another_name_is_found_by_the_table(ids, monkeypatch):
    old = "astraflow.core.mint:Mint"
    attribute, *_ = vars(ids)
    monkeypatch.setitem(RENAMED, old, path_of(ids))
    monkeypatch.setitem(RENAMED, f"{old}.before", attribute)

    def rename(shape):
        if shape.kind == path_of(ids):
            shape.kind = old
            shape.names[list(shape.names).index(attribute)] = "before"

    read, _ = load_state(written(ids, rename), modules=OURS)
    assert read.next("task") == ids.next("task")


def test_a_class_that_nobody_knows_is_refused_by_its_name(ids):
    def rename(shape):
        shape.kind = shape.kind.replace("IdGenerator", "Mint")

    with pytest.raises(AstraflowError, match=r"there is no astraflow\.core\.\w+:Mint in release"):
        load_state(written(ids, rename), modules=OURS)


def test_an_attribute_that_an_older_release_lacks_is_refused_by_its_name(ids):
    attribute, *_ = vars(ids)

    def lose(shape):
        if shape.kind == path_of(ids):
            shape.names[list(shape.names).index(attribute)] = "before"

    with pytest.raises(AstraflowError, match=f"IdGenerator has gained {attribute} in release"):
        load_state(written(ids, lose), modules=OURS)


def test_a_field_that_is_new_has_its_default():
    span = VersionSpan(version=2, length=5)
    snapshot = pb.Snapshot.FromString(dump_state(span, position=0, modules=OURS))
    [shape] = [each for each in snapshot.shapes if each.kind == path_of(span)]
    place = list(shape.names).index("policy_id")
    del shape.names[place], snapshot.nodes[0].values[place]
    read, _ = load_state(snapshot.SerializeToString(), modules=OURS)
    assert read == span


@pytest.fixture
def came():
    """A rollout that came in a message."""
    spans = (VersionSpan(version=3, length=2),)
    trajectories = tuple(made_up_trajectory(name, "solver", spans) for name in ("t1", "t2"))
    return decode_rollout(encode_rollout(made_up_rollout(*trajectories)))


def read_again(thing):
    return load_state(dump_state(thing, position=0, modules=OURS), modules=OURS)[0]


def test_a_rollout_is_kept_as_the_message_that_it_came_in(came):
    assert came.received is not None
    rollout, again, trajectory = read_again((came, came, came.trajectories[1]))
    assert again is rollout
    assert trajectory is rollout.trajectories[1]
    assert rollout.received == came.received
    assert trajectory.received == came.trajectories[1].received


def test_a_trajectory_that_comes_before_its_rollout_is_shared_with_it_too(came):
    trajectory, rollout = read_again((came.trajectories[1], came))
    assert trajectory is rollout.trajectories[1]
    assert encode_rollout(rollout) == encode_rollout(came)


def test_a_rollout_with_other_values_is_kept_with_these(came):
    changed = replace(came, reward=0.5)
    read = read_again(changed)
    assert read.reward == 0.5
    assert read.received is read.trajectories[0].received is None
    assert encode_rollout(read) == encode_rollout(changed)


@dataclass
class Viewer:
    """Has what is no plain value."""

    view: memoryview


def test_any_other_view_is_refused():
    with pytest.raises(AstraflowError, match="memoryview, which has no plain value"):
        dump_state(Viewer(memoryview(b"x")), position=0, modules=(__name__,))
