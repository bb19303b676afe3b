"""Nodes wait for the versions that they are asked for, groups are dropped: no run stands still."""

from random import Random

import pytest

from astraflow.core.settings import PlugInSpec, RelationKind, VersionRelation
from astraflow.core.status import RunState

PAIR = ("solver", "verifier")
LOCKSTEP = VersionRelation(kind=RelationKind.LOCKSTEP)
SKEW = VersionRelation(kind=RelationKind.BOUNDED_SKEW)


def sample(world, node, random):
    """Do one task that waits for no version; return whether there was one."""
    live, tasks = world.live(node), world.tasks[node]
    ready = [t for t in tasks if all((b.min or 0) <= live[p] for p, b in t.versions.items())]
    if not ready:
        return False
    task = random.choice(ready)
    tasks.remove(task)
    # Some groups teach nobody, some others one of several policies alone.
    is_flat, kept = random.random() < 0.3, list(live)
    if len(kept) > 1 and random.random() < 0.3:
        kept.remove(random.choice(kept))
    for index in task.sample_indexes:
        versions = {policy: (live[policy],) for policy in kept}
        world.send(node, task, index, versions=versions, reward=float(is_flat or index % 2))
    world.finish(node, task)
    return True


def train(world, trainer, policy, every):
    """Train on the next batch, publish what is due; return whether there was one."""
    if not world.batches.get((trainer, 0)):
        return False
    header, _ = world.pop_batch(trainer)
    step = world.policy(policy).step + 1
    world.ack(trainer, header.batch_id, step=step)
    if step % every == 0:
        world.publish(trainer, policy, step=step)
    return True


def update(world, node):
    """Load the newest versions; return whether there are new ones."""
    newest = {policy: world.run.versions(policy)[-1].version for policy in world.policies}
    new = {policy: newest[policy] for policy, live in world.live(node).items()} != world.live(node)
    for policy, version in newest.items():
        world.report(node, version, policy)
    return new


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("every", "max_staleness", "policies", "relation"),
    [
        (1, 1, ("solver",), None),
        (2, 0, ("solver",), None),
        (4, 1, ("solver",), None),
        (1, 0, PAIR, None),
        (1, 1, PAIR, SKEW),
        (1, 0, PAIR, LOCKSTEP),
        (1, 1, PAIR, LOCKSTEP),
        (2, 1, PAIR, LOCKSTEP),
    ],
)
def test_no_run_stands_still(make_world, every, max_staleness, policies, relation, seed):
    random = Random(seed)
    world = make_world(
        policies=policies,
        steps_per_version=every,
        max_staleness=max_staleness,
        relation=relation,
        step_count=12,
        filters=(PlugInSpec(name="zero_advantage"),),
    )
    trainers, node = world.started(credit=64, max_outstanding=2)
    pairs = list(zip(policies, trainers if len(policies) > 1 else [trainers], strict=True))
    while world.state is RunState.RUNNING:
        moved = [sample(world, node, random)]
        if random.random() < 0.5 or not moved[0]:
            moved += [train(world, trainer, policy, every) for policy, trainer in pairs]
            moved.append(update(world, node))
        assert any(moved), [world.run.explain(policy, world.clock.now()) for policy in policies]
    assert [world.policy(policy).step for policy in policies] == [12] * len(policies)
