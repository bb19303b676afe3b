import pytest

from astraflow.core import events as ev
from astraflow.core.errors import AstraflowError
from astraflow.core.settings import ReplaySettings


@pytest.fixture
def world(make_world):
    return make_world()


def causes(world, policy="solver"):
    return [link.cause for link in world.run.explain(policy, world.clock.now())]


def test_no_trainer(world):
    assert causes(world) == ["no_trainer"]


def test_ranks_that_are_not_there_yet_are_named(world):
    world.started(world_size=3)
    world.open_stream("trainer-r-0", rank=2, world_size=3)
    (link,) = world.run.explain("solver", world.clock.now())
    assert link.cause == "no_trainer"
    assert link.message == "ranks of trainer of solver that have not asked for batches yet: 1"


def test_no_raas(world):
    trainer = world.register()
    world.publish(trainer)
    world.open_stream(trainer)
    assert causes(world) == ["too_few_groups", "no_raas"]


def test_weights_are_not_loaded(world):
    trainer = world.register()
    world.publish(trainer)
    world.open_stream(trainer)
    world.join()
    assert causes(world) == ["too_few_groups", "version_not_live"]


def test_group_waits_for_its_task(world):
    _, node = world.started()
    first = world.tasks[node][0]
    links = world.run.explain("solver", world.clock.now())
    assert [link.cause for link in links[:3]] == [
        "too_few_groups",
        "group_incomplete",
        "task_running",
    ]
    assert [link.subject_id for link in links[:3]] == [first.group_id, first.task_id, node]
    assert links[1].message == f"group {first.group_id} lacks 2 of 2"


def test_groups_that_will_be_replayed_are_not_waited_for(make_world):
    replay = ReplaySettings(ratio=0.5, max_staleness=9)
    world = make_world(groups_per_batch=4, serving={"replay": replay})
    trainer, node = world.started()
    world.work(node, 4)
    world.train(trainer)
    link = world.run.explain("solver", world.clock.now())[0]
    assert link.message == "0 of 2 groups are whole"


def test_member_is_silent(world):
    _, node = world.started()
    world.clock.advance(8)
    link = next(
        k for k in world.run.explain("solver", world.clock.now()) if k.cause == "member_silent"
    )
    assert link.waiter_id == node
    assert (link.resolve_time - world.clock.now()).total_seconds() == 2


def test_no_credit(world):
    world.started(credit=2)
    assert causes(world)[-1] == "no_credit"


def test_trainer_holds_its_batches(world):
    _trainer, node = world.started()
    world.work(node)
    (link,) = world.run.explain("solver", world.clock.now())
    assert (link.cause, link.subject_id) == ("batch_held", "batch-r-0")


def test_paused(world):
    world.started()
    world.apply(ev.RunPaused())
    assert "paused" in causes(world)


def test_other_policy_keeps_new_groups_back(make_world):
    world = make_world(policies=("solver", "verifier"), max_staleness=0)
    (solver, _), node = world.started()
    world.work(node)
    world.train(solver, "solver")
    assert causes(world, "solver")[-1] == "staleness_limit"


def test_unknown_policy_is_refused(world):
    with pytest.raises(AstraflowError, match="POLICY_UNKNOWN"):
        world.run.explain("judge", world.clock.now())
