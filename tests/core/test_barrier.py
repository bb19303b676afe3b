from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.core.errors import Failure, Reason
from astraflow.core.settings import OnTimeout, RelationKind, VersionRelation
from astraflow.core.status import RunState
from astraflow.core.work.pacing import Barrier, PolicyStanding

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(seconds=60)
LOCKSTEP = VersionRelation(kind=RelationKind.LOCKSTEP, timeout=MINUTE)
PAIR = ("solver", "verifier")
LOST = Failure(reason=Reason.TASK_CANCELLED)


def standing(policy, made, **more):
    more = {"next_version": made + 1, "published_version": made, **more}
    return PolicyStanding(policy_id=policy, made_version=made, **more)


def blocked(relation, versions):
    barrier = Barrier(relation)
    all_of_them = [standing(f"p{n}", version) for n, version in enumerate(versions)]
    return [p.policy_id for p in all_of_them if barrier.blocker(p, all_of_them)]


def test_lockstep_lets_one_be_a_version_ahead_while_the_others_make_it():
    assert blocked(LOCKSTEP, [4, 4]) == []
    assert blocked(LOCKSTEP, [5, 4]) == ["p0"]
    assert blocked(LOCKSTEP, [5, 5, 4]) == ["p0", "p1"]


def test_bounded_skew_counts_versions_to_the_furthest_behind():
    relation = VersionRelation(kind=RelationKind.BOUNDED_SKEW, max_skew=3)
    assert blocked(relation, [6, 4]) == []
    assert blocked(relation, [7, 4, 6]) == ["p0"]


def test_independent_policies_never_wait():
    assert blocked(VersionRelation(), [90, 0]) == []


def test_versions_are_shown_when_all_have_them():
    ahead, behind = standing("a", 5), standing("b", 4)
    assert Barrier(LOCKSTEP).shown_version(ahead, [ahead, behind]) == 4
    assert Barrier(VersionRelation()).shown_version(ahead, [ahead, behind]) == 5


def test_lockstep_asks_for_no_version_that_waits_for_what_is_asked_for(make_world):
    relation = VersionRelation(kind=RelationKind.LOCKSTEP)
    world = make_world(policies=PAIR, max_staleness=0, relation=relation)
    (solver, verifier), node = world.started(credit=100)
    world.work(node, 1)
    world.work(node, 1, versions={"verifier": (0,)})
    world.train(verifier, "verifier")
    world.work(node, 1, versions={"verifier": (0,)})
    # The solver lacks a group for its version 1, without which nobody sees that of the verifier.
    [task] = world.tasks[node]
    assert [task.versions[policy].min for policy in PAIR] == [0, 0]
    world.work(node)
    world.train(solver, "solver")
    assert [info.version for info in world.announced[-2:]] == [1, 1]


def test_timeout_counts_from_the_last_sign_of_life():
    barrier = Barrier(LOCKSTEP)
    gone = NOW - timedelta(seconds=20)
    pair = [standing("a", 5), standing("b", 4, has_trainer=False, departure_time=gone)]
    assert barrier.advance(pair, NOW) == ()
    assert barrier.next_deadline == gone + MINUTE
    assert barrier.advance(pair, gone + MINUTE) == ("b",)
    assert barrier.blocker(pair[0], pair) is None
    assert barrier.next_deadline is None


def test_who_never_came_is_waited_for_since_somebody_waits():
    barrier = Barrier(LOCKSTEP)
    pair = [standing("a", 0), standing("b", -1, has_trainer=False)]
    assert barrier.advance(pair, NOW) == ()
    assert barrier.advance(pair, NOW + MINUTE / 2) == ()
    assert barrier.deadline_of("b") == NOW + MINUTE


def test_slow_trainer_is_waited_for():
    barrier = Barrier(LOCKSTEP)
    pair = [standing("a", 5), standing("b", 4)]
    assert barrier.advance(pair, NOW) == ()
    assert barrier.next_deadline is None
    assert barrier.blocker(pair[0], pair) == pair[1]


def test_who_comes_back_is_waited_for_again():
    barrier = Barrier(LOCKSTEP)
    gone = standing("b", 4, has_trainer=False, departure_time=NOW - MINUTE)
    ahead = standing("a", 5)
    assert barrier.advance([ahead, gone], NOW) == ("b",)
    back = standing("b", 4)
    assert barrier.advance([ahead, back], NOW) == ()
    assert barrier.blocker(ahead, [ahead, back]) == back


@given(
    versions=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    live=st.lists(st.booleans(), min_size=4, max_size=4),
    skew=st.integers(1, 3),
)
def test_somebody_may_always_go_on_once_the_timeout_is_over(versions, live, skew):
    relation = VersionRelation(kind=RelationKind.BOUNDED_SKEW, max_skew=skew, timeout=MINUTE)
    barrier = Barrier(relation)
    all_of_them = [
        standing(f"p{n}", version, has_trainer=live[n]) for n, version in enumerate(versions)
    ]
    barrier.advance(all_of_them, NOW)
    barrier.advance(all_of_them, NOW + MINUTE)
    free = [p for p in all_of_them if barrier.blocker(p, all_of_them) is None]
    assert any(p.has_trainer for p in free) or not any(p.has_trainer for p in all_of_them)
    for policy in free:
        others = [p for p in all_of_them if p.policy_id not in barrier.given_up]
        assert all(policy.next_version - other.made_version <= skew for other in others) or (
            policy.policy_id in barrier.given_up or others == [policy]
        )


# --- the barrier in a run


@pytest.fixture
def pair(make_world):
    def build(**more):
        relation = VersionRelation(kind=RelationKind.LOCKSTEP, timeout=MINUTE, **more)
        world = make_world(policies=PAIR, relation=relation, max_staleness=1)
        trainers, node = world.started()
        return world, dict(zip(PAIR, trainers, strict=True)), node

    return build


def feed(world, node, turns=6):
    """Let the node do what is asked of it, and swap to what it may see."""
    for _ in range(turns):
        for policy in PAIR:
            listed = world.run.versions(policy)
            world.report(node, listed[-1].version, policy)
        world.work(node)


def batches(world, trainer):
    return world.batches.get((trainer, 0), [])


def test_trainer_waits_for_the_other_and_versions_are_shown_together(pair):
    world, trainers, node = pair()
    feed(world, node)
    world.train(trainers["solver"])
    feed(world, node)
    assert not batches(world, trainers["solver"])
    link = world.run.explain("solver", world.clock.now())[0]
    assert (link.cause, link.subject_id) == ("version_barrier", "verifier")
    assert [info.version for info in world.run.versions("solver")] == [0]
    world.train(trainers["verifier"], "verifier")
    feed(world, node)
    assert batches(world, trainers["solver"])
    assert [info.version for info in world.run.versions("solver")] == [0, 1]


def keep_all_but(world, *silent):
    for member in world.run.status(world.clock.now()).members:
        if member.member_id not in silent:
            world.keep_alive(member.member_id)


def pass_time(world, seconds, *silent):
    for _ in range(seconds):
        keep_all_but(world, *silent)
        world.tick(1)


def go_on_alone(world, trainers, node, steps):
    done = 0
    for _ in range(steps * 2):
        feed(world, node, 2)
        while batches(world, trainers["solver"]):
            world.train(trainers["solver"])
            done += 1
    return done


def test_the_other_goes_on_when_a_trainer_is_dead_for_long_enough(pair):
    world, trainers, node = pair()
    feed(world, node)
    world.train(trainers["solver"])
    pass_time(world, 59, trainers["verifier"])
    assert go_on_alone(world, trainers, node, 5) == 0
    pass_time(world, 2, trainers["verifier"])
    assert go_on_alone(world, trainers, node, 5) >= 5
    assert world.account("solver").is_balanced
    assert world.account("verifier").is_balanced


def test_who_comes_back_catches_up_first(pair):
    world, trainers, node = pair()
    feed(world, node)
    world.train(trainers["solver"])
    pass_time(world, 61, trainers["verifier"])
    go_on_alone(world, trainers, node, 4)
    back = world.register("verifier", last_step=0)
    world.open_stream(back)
    feed(world, node)
    ahead = world.policy("solver").version
    for _ in range(ahead + 2):
        feed(world, node, 3)
        while batches(world, back):
            world.train(back, "verifier")
        if batches(world, trainers["solver"]):
            world.train(trainers["solver"])
    assert world.policy("verifier").version > ahead
    assert abs(world.policy("verifier").version - world.policy("solver").version) <= 1


def test_the_run_stops_by_the_stated_policy(pair):
    world, trainers, node = pair(on_timeout=OnTimeout.STOP)
    feed(world, node)
    world.train(trainers["solver"])
    pass_time(world, 61, trainers["verifier"])
    assert world.state is RunState.FAILED
    assert "verifier had no trainer for 60 s" in world.run.status(world.clock.now()).failure.message


# --- independent policies


def test_slow_policy_misses_groups_that_a_faster_one_needs(make_world):
    world = make_world(policies=PAIR, max_staleness=1)
    trainers, node = world.started()
    trainers = dict(zip(PAIR, trainers, strict=True))
    assert go_on_alone(world, trainers, node, 8) >= 8
    assert world.policy("verifier").version == 0
    assert world.account("verifier").issued_count < world.account("solver").issued_count


def test_policies_at_one_pace_share_every_group(make_world):
    world = make_world(policies=PAIR, max_staleness=1)
    trainers, node = world.started()
    trainers = dict(zip(PAIR, trainers, strict=True))
    for _ in range(8):
        feed(world, node, 2)
        for policy in PAIR:
            if batches(world, trainers[policy]):
                world.train(trainers[policy], policy)
    assert world.account("verifier").issued_count == world.account("solver").issued_count


@pytest.mark.parametrize("kind", RelationKind)
def test_work_does_not_wait_for_a_version_that_died_with_its_trainer(make_world, kind):
    relation = VersionRelation(kind=kind, timeout=MINUTE)
    world = make_world(policies=PAIR, relation=relation, max_staleness=1)
    trainers, node = world.started()
    trainers = dict(zip(PAIR, trainers, strict=True))
    for _ in range(2):
        world.work(node)
        for policy, trainer in trainers.items():
            world.train(trainer, policy)
    world.report(node, 2, "solver")
    in_vain = [task for task in world.tasks[node] if task.versions["verifier"].min == 1]
    assert in_vain
    world.tasks[node].clear()
    pass_time(world, 300, trainers["verifier"])
    again = world.tasks[node]
    assert {(t.group_id, t.sample_indexes) for t in in_vain} <= {
        (t.group_id, t.sample_indexes) for t in again
    }
    assert all(task.versions["verifier"].min == 0 for task in again)
    assert all(task.versions["solver"].min >= 1 for task in again)
    for task in in_vain:
        world.finish(node, task, failures=[(i, LOST) for i in task.sample_indexes])
    steps = world.policy("solver").step
    for _ in range(6):
        world.report(node, world.run.versions("solver")[-1].version, "solver")
        world.work(node)
        while batches(world, trainers["solver"]):
            world.train(trainers["solver"])
    assert world.policy("solver").step >= steps + 3
    assert all(account.is_balanced for account in world.run.accounts())
