"""What the run knows of arrays that lie elsewhere, and when it lets go of them."""

from dataclasses import replace

import numpy as np
import pytest

from astraflow.core.batches import BatchOutcome
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.events import RunStopped
from astraflow.core.packing import Share, laid_out, recut
from astraflow.core.rollouts import ROUTED_EXPERTS, Column, ColumnAxis, Disposition
from astraflow.core.samples import Row
from astraflow.core.settings import ReplaySettings
from astraflow.core.status import StopMode


@pytest.fixture
def rows(trajectory, rollout_of):
    class Task:
        task_id, group_id, attempt = "t", "g", 0

    def row(number, length):
        spans = (4,) * (1 + number % 3) + (5,)
        found = trajectory(f"t{number}", versions=spans, length=length)
        columns = {
            "own": Column(axis=ColumnAxis.TOKEN, values=np.full((length, 2), number, np.float32)),
            "place": Column(axis=ColumnAxis.ROW, values=np.array([number], np.int64)),
        }
        if number % 2:
            routes = np.full((length, 3, 2), number, np.uint16)
            columns[ROUTED_EXPERTS] = Column(axis=ColumnAxis.TOKEN, values=routes)
        return Row(
            trajectory=replace(found, columns=columns),
            rollout=rollout_of(Task, number, versions={"solver": (4,)}),
            reward=float(number),
            min_version=4,
            max_version=5,
            advantage=number / 7,
            is_masked=number == 2,
        )

    return [row(number, 5 + number) for number in range(6)]


def share(rows, max_tokens, **more):
    return Share("b", rows, max_tokens=max_tokens, group_indexes={"g": 7}, **more)


@pytest.mark.parametrize("max_tokens", [0, 12, 1])
@pytest.mark.parametrize("weights", [None, [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]])
@pytest.mark.parametrize("kept", [(), (1, 4)])
def test_a_batch_made_of_payloads_is_the_one_made_of_arrays(
    rows, referenced, max_tokens, weights, kept
):
    inline = list(share(rows, max_tokens, loss_weights=weights))
    sent = share(
        [
            row if number in kept else replace(row, trajectory=referenced(row.trajectory))
            for number, row in enumerate(rows)
        ],
        max_tokens,
        loss_weights=weights,
    )
    arrays = {row.trajectory.trajectory_id: row.trajectory for row in rows}
    assert [part.row_count for part in sent] == [6]
    fetched = [
        replace(
            part,
            sources=tuple(
                replace(source, trajectory=arrays[source.trajectory.trajectory_id])
                for source in part.sources
            ),
        )
        for part in sent
    ]
    made = recut(fetched, max_tokens)
    assert len(made) == len(inline)
    for found, sources in zip(made, inline, strict=True):
        one, other = laid_out(found, ("solver",)), laid_out(sources, ("solver",))
        assert one.index == other.index
        assert one.row_offsets.tolist() == other.row_offsets.tolist()
        assert one.trajectory_ids == other.trajectory_ids
        assert one.rollout_ids == other.rollout_ids
        assert one.columns.keys() == other.columns.keys()
        for name, column in one.columns.items():
            assert column.axis is other.columns[name].axis
            assert column.values.dtype == other.values(name).dtype
            np.testing.assert_array_equal(column.values, other.values(name))


def test_what_lies_elsewhere_cannot_be_read_by_mistake(trajectory, referenced):
    found = referenced(trajectory("a", versions=(1, 1, 2)))
    assert (found.token_count, found.sampled_count) == (4, 3)
    for name in ("tokens", "sampled_mask", "logprobs", "columns", "versions"):
        with pytest.raises(AttributeError, match=f"{name} of trajectory a lies in the"):
            getattr(found, name)


def test_a_payload_that_cannot_hold_its_trajectory_is_refused(trajectory, referenced):
    found = referenced(trajectory("a", versions=(1, 1, 2)))
    with pytest.raises(AstraflowError) as caught:
        replace(trajectory("a", versions=(1, 1, 2)), payload=replace(found.payload, token_count=2))
    assert caught.value.reason is Reason.ROLLOUT_INVALID


def test_a_payload_of_more_tokens_than_a_batch_can_count_is_refused(trajectory, referenced):
    whole = trajectory("a", versions=(1, 1, 2))
    payload = replace(referenced(whole).payload, token_count=2**62)
    with pytest.raises(AstraflowError, match="more than") as caught:
        replace(whole, payload=payload)
    assert caught.value.reason is Reason.ROLLOUT_INVALID


def named(parts):
    return {s.trajectory.payload.name for part in parts for s in part.sources}


@pytest.fixture
def world(make_world):
    replay = ReplaySettings(ratio=0.5, max_uses=3, max_staleness=4, max_groups=4)
    return make_world(groups_per_batch=4, max_staleness=2, serving={"replay": replay})


def test_what_may_be_trained_on_is_never_released_and_the_rest_in_time(world, referenced):
    trainer, node = world.started(credit=64)
    accepted, trained = set(), []
    for step in range(60):
        world.work(node, made=referenced, reward=float(step % 3))
        accepted |= {r.rollout.trajectories[0].payload.name for r in world.recorded}
        header, parts = world.pop_batch(trainer)
        assert world.released.isdisjoint(named(parts))
        outcome = BatchOutcome.DISCARDED if step % 7 == 6 else BatchOutcome.CONSUMED
        if outcome is BatchOutcome.CONSUMED:
            trained.append(named(parts))
            world.publish(trainer, step=len(trained))
        world.ack(trainer, header.batch_id, outcome, step=len(trained))
        world.report(node, world.policy().version)
        assert world.run.payload_names == accepted - world.released
    assert world.released > set.union(*trained[:30])
    assert len(world.run.payload_names) < 120
    world.apply(RunStopped(mode=StopMode.CANCEL))
    world.tick(60)
    world.tick(60)
    assert world.released == accepted
    assert not world.run.payload_names


@pytest.mark.parametrize("max_staleness", [1, 4])
def test_what_a_rollback_brings_back_was_not_released(make_world, referenced, max_staleness):
    world = make_world(groups_per_batch=4, max_staleness=max_staleness)
    trainer, node = world.started(credit=8)
    step = saved = again = 0
    seen = set()
    for number in range(40):
        while not world.batches.get((trainer, 0)):
            world.work(node, 1, made=referenced)
        _, parts = world.pop_batch(trainer)
        again += bool(seen & named(parts))
        seen |= named(parts)
        assert world.released.isdisjoint(named(parts))
        step += 1
        world.publish(trainer, step=step)
        batch_id = parts[0].batch_id
        if number % 4 == 1:
            saved = step
        world.ack(trainer, batch_id, step=step, checkpoint_id=f"at{step}" if saved == step else "")
        if number % 8 == 3:
            world.leave(trainer)
            step = saved
            trainer = world.register(checkpoint_id=f"at{step}", last_step=step)
            world.publish(trainer, step=step)
            world.open_stream(trainer)
        world.report(node, world.policy().version)
    assert world.released
    assert again or max_staleness == 1


def test_a_lost_rollout_is_dropped_and_the_others_of_its_batch_return(world, referenced):
    trainer, node = world.started(credit=64)
    world.work(node, made=referenced)
    header, (part,) = world.pop_batch(trainer)
    lost = part.rollout_ids[0], part.rollout_ids[1], part.rollout_ids[3]
    assert world.ack(
        trainer, header.batch_id, BatchOutcome.RETURNED, lost_rollout_ids=(*lost, "of nobody")
    )
    assert {(drop.reason, drop.count) for drop in world.account().drops} == {
        (Reason.PAYLOAD_LOST, 3)
    }
    assert world.account().is_balanced
    again, (part,) = world.pop_batch(trainer)
    assert again.batch_id != header.batch_id
    assert not {*lost} & {*part.rollout_ids}
    # The group that nothing is left of makes room for another.
    assert len(again.groups) == 4
    assert header.groups[1] in again.groups
    assert header.groups[0] not in again.groups


def test_a_lost_rollout_is_not_replayed(world, referenced):
    trainer, node = world.started(credit=64)
    world.work(node, made=referenced)
    world.train(trainer)
    world.report(node, 1)
    world.work(node, made=referenced)
    header, (part,) = world.pop_batch(trainer)
    again = [i for i, count in enumerate(part.values("use_count")) if count]
    lost = part.rollout_ids[again[0]]
    world.ack(trainer, header.batch_id, BatchOutcome.RETURNED, lost_rollout_ids=(lost,))
    trained = world.account().trained_count
    for _ in range(6):
        _, (part,) = world.batches[trainer, 0][0]
        assert lost not in part.rollout_ids
        world.train(trainer)
        world.report(node, world.policy().version)
        world.work(node, made=referenced)
    assert world.account().is_balanced
    assert world.account().trained_count > trained


def test_a_run_without_a_store_takes_no_payloads(make_world, referenced):
    world = make_world(takes_payloads=False)
    _, node = world.started()
    task = world.pop_task(node)
    ack = world.send(node, task, 0, made=referenced)
    assert (ack.disposition, ack.reason) == (Disposition.REJECTED, Reason.ROLLOUT_INVALID)
    assert world.send(node, task, 0).disposition is Disposition.ACCEPTED
