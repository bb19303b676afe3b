from dataclasses import replace

import pytest

from astraflow.core import events as ev
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import Disposition
from astraflow.core.tasks import SamplingParams


@pytest.fixture
def scene(make_world):
    world = make_world()
    _, node = world.started()
    return world, node, world.pop_task(node)


def refusal(world, node, rollout):
    return world.run.refusal(ev.RolloutArrived(member_id=node, rollout=rollout))


def test_what_was_asked_for_is_not_refused(scene, rollout_of):
    world, node, task = scene
    assert refusal(world, node, rollout_of(task, 0, versions={"solver": (0,)})) is None


def test_a_settled_sample_is_told_by_its_name(scene, rollout_of):
    world, node, task = scene
    world.send(node, task, 0)
    refused = refusal(world, node, rollout_of(task, 0, versions={"solver": (0,)}))
    assert refused.ack.disposition is Disposition.DUPLICATE
    assert refused.event.policy_ids == ("solver",)
    assert world.apply(refused.event) == refused.ack
    assert world.account().duplicate_count == 1


def test_a_rollout_that_contradicts_its_task_changes_nothing(scene, rollout_of):
    world, node, task = scene
    refused = refusal(world, node, rollout_of(task, 0, versions={"solver": (9,)}))
    assert refused.ack.reason is Reason.VERSION_UNKNOWN
    assert refused.event is None


def test_two_samples_of_a_group_are_no_one_rollout(scene, rollout_of):
    world, node, task = scene
    first = rollout_of(task, 0, versions={"solver": (0,)})
    world.apply(ev.RolloutArrived(member_id=node, rollout=first))
    again = replace(rollout_of(task, 1, versions={"solver": (0,)}), rollout_id=first.rollout_id)
    refused = refusal(world, node, again)
    assert refused.ack.disposition is Disposition.REJECTED
    assert "rollout_id" in refused.ack.message
    assert refusal(world, node, replace(again, rollout_id="another")) is None


def test_a_late_sample_that_comes_again_is_no_other_one(scene, rollout_of):
    world, node, task = scene
    late = ev.RolloutArrived(member_id=node, rollout=rollout_of(task, 0, versions={"solver": (0,)}))
    world.leave(node)
    world.join("late", resumes=node, incarnation=2)
    world.apply(late)
    refused = world.run.refusal(late)
    assert world.apply(late).disposition is Disposition.DUPLICATE
    assert refused is None or refused.ack.disposition is Disposition.DUPLICATE


def test_who_has_no_session_is_told_so(scene, rollout_of):
    world, node, task = scene
    world.leave(node)
    with pytest.raises(AstraflowError, match="SESSION_ENDED"):
        refusal(world, node, rollout_of(task, 0, versions={"solver": (0,)}))


@pytest.mark.parametrize("knobs", [{"top_p": 0.95}, {"top_k": 50}, {"temperature": 0.0}])
def test_what_was_drawn_from_a_reshaped_distribution_is_not_taken(scene, rollout_of, knobs):
    world, node, task = scene
    rollout = rollout_of(task, 0, versions={"solver": (0,)})
    [whole] = rollout.trajectories
    cut = replace(whole, sampling=SamplingParams(**knobs))
    refused = refusal(world, node, replace(rollout, trajectories=(cut,)))
    assert refused.ack.reason is Reason.ROLLOUT_INVALID
    assert next(iter(knobs)) in refused.ack.message
