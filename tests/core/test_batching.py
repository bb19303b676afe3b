import pytest

from astraflow.core.batches import BatchOutcome
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.status import RolloutPlace


@pytest.fixture
def world(make_world):
    return make_world(groups_per_batch=2, max_staleness=1)


def refused(call, *arguments, **more):
    with pytest.raises(AstraflowError) as caught:
        call(*arguments, **more)
    return caught.value.reason


def test_batch_says_what_is_in_it(world):
    trainer, node = world.started()
    world.work(node, 2, reward=1.0)
    header, parts = world.pop_batch(trainer)
    assert (header.row_count, header.token_count, header.loss_token_count) == (4, 8, 4)
    assert header.metrics["reward/mean"] == 1.0
    assert header.metrics["group/zero_std_frac"] == 1.0
    assert header.metrics["lag/max"] == 0.0
    assert sum(part.row_count for part in parts) == 4


def test_advantages_are_relative_to_the_group(world):
    trainer, node = world.started()
    for rewards in ((1.0, 0.0), (0.0, 0.0)):
        task = world.pop_task(node)
        for index, reward in enumerate(rewards):
            world.send(node, task, index, reward=reward)
        world.finish(node, task)
    _, (part,) = world.pop_batch(trainer)
    assert part.values("advantages").tolist() == [0, 0.5, 0, -0.5, 0, 0, 0, 0]
    assert part.values("group_reward_mean").tolist() == [0.5, 0.5, 0, 0]
    assert part.values("group_reward_std").tolist() == [0.5, 0.5, 0, 0]


def test_order_in_a_batch_is_that_of_issue(world):
    trainer, node = world.started()
    first, second = world.pop_task(node), world.pop_task(node)
    for task in (second, first):
        for index in reversed(task.sample_indexes):
            world.send(node, task, index)
        world.finish(node, task)
    header, (part,) = world.pop_batch(trainer)
    assert [group.group_id for group in header.groups] == [first.group_id, second.group_id]
    assert part.values("sample_index").tolist() == [0, 1, 0, 1]


def test_strict_stream_gets_the_next_batch_after_the_ack(world):
    trainer, node = world.started()
    world.work(node)
    assert len(world.batches[trainer, 0]) == 1
    world.train(trainer)
    assert len(world.batches[trainer, 0]) == 1


def test_prefetch_holds_two(world):
    trainer, node = world.started(max_outstanding=2)
    world.work(node)
    first, second = world.batches[trainer, 0]
    assert first[0].metrics["lag/max"] == 0
    assert second[0].metrics["lag/max"] == 1


def test_every_row_is_on_one_rank(world):
    trainer, node = world.started(world_size=2, max_outstanding=1)
    world.work(node)
    assert (trainer, 0) not in world.batches
    world.open_stream(trainer, rank=1, world_size=2)
    (one, one_parts), (two, two_parts) = (world.pop_batch(trainer, rank) for rank in (0, 1))
    assert one.batch_id == two.batch_id
    rows = [name for part in one_parts + two_parts for name in part.trajectory_ids]
    assert len(rows) == len(set(rows)) == one.row_count == two.row_count == 4
    assert {part.row_count for part in one_parts + two_parts} == {2}


def test_batch_is_settled_when_every_rank_says_so(world):
    trainer, node = world.started(world_size=2)
    world.open_stream(trainer, rank=1, world_size=2)
    world.work(node)
    header, _ = world.pop_batch(trainer)
    assert world.ack(trainer, header.batch_id, rank=0) is False
    assert world.ack(trainer, header.batch_id, rank=0) is False
    conflict = refused(world.ack, trainer, header.batch_id, BatchOutcome.RETURNED, rank=1)
    assert conflict is Reason.REQUEST_CONFLICT
    assert world.ack(trainer, header.batch_id, rank=1) is True


@pytest.mark.parametrize("is_lost", [False, True])
def test_ranks_settle_a_batch_before_they_listen_again(world, is_lost):
    trainer, node = world.started(world_size=2)
    world.open_stream(trainer, rank=1, world_size=2)
    world.work(node)
    header, _ = world.pop_batch(trainer)
    if is_lost:
        world.leave(trainer)
    assert world.register(resumes=trainer, held=[header.batch_id]) == trainer
    assert world.ack(trainer, header.batch_id, rank=0) is False
    assert world.account().trained_count == 0
    assert world.ack(trainer, header.batch_id, rank=1) is True
    assert world.account().trained_count == 4


def test_what_ranks_said_of_a_batch_does_not_count_once_it_is_shared_out_anew(world):
    trainer, node = world.started(world_size=4)
    for rank in (1, 2, 3):
        world.open_stream(trainer, rank=rank, world_size=4)
    world.work(node)
    header, _ = world.pop_batch(trainer)
    for rank in (2, 3):
        world.ack(trainer, header.batch_id, rank=rank)
    world.register(resumes=trainer, held=[header.batch_id])
    for rank in range(3):
        world.open_stream(trainer, rank=rank, world_size=3)
    shares = [world.pop_batch(trainer, rank)[1] for rank in range(3)]
    assert sum(part.row_count for parts in shares for part in parts) == header.row_count
    settled = [world.ack(trainer, header.batch_id, rank=rank) for rank in range(3)]
    assert settled == [False, False, True]


def test_an_ack_of_a_rank_that_there_is_not_is_refused_by_its_field(world):
    trainer, node = world.started(world_size=2)
    world.open_stream(trainer, rank=1, world_size=2)
    world.work(node)
    header, _ = world.pop_batch(trainer)
    with pytest.raises(AstraflowError, match="no rank 2") as caught:
        world.ack(trainer, header.batch_id, rank=2)
    assert caught.value.reason is Reason.INVALID_FIELD
    assert caught.value.metadata == {"field": "rank"}


def test_ranks_agree_on_their_number(world):
    trainer, _ = world.started(world_size=2)
    reason = refused(world.open_stream, trainer, rank=1, world_size=3)
    assert reason is Reason.REQUEST_CONFLICT
    assert refused(world.open_stream, trainer, rank=2, world_size=2) is Reason.INVALID_FIELD


def test_reopened_stream_gets_the_same_batch_again(world):
    trainer, node = world.started()
    world.work(node)
    header, parts = world.batches[trainer, 0][0]
    world.open_stream(trainer)
    again, again_parts = world.batches[trainer, 0][0]
    assert (again.batch_id, again.delivery_count) == (header.batch_id, 2)
    assert [p.trajectory_ids for p in again_parts] == [p.trajectory_ids for p in parts]


def test_ack_is_idempotent_and_final(world):
    trainer, node = world.started()
    world.work(node)
    header = world.train(trainer)
    assert world.ack(trainer, header.batch_id) is True
    assert world.account().trained_count == 4
    reason = refused(world.ack, trainer, header.batch_id, BatchOutcome.DISCARDED)
    assert reason is Reason.REQUEST_CONFLICT
    assert refused(world.ack, trainer, "batch-r-99") is Reason.BATCH_UNKNOWN


def test_returned_rows_come_again_first(world):
    trainer, node = world.started()
    world.work(node)
    header, parts = world.pop_batch(trainer)
    world.ack(trainer, header.batch_id, BatchOutcome.RETURNED)
    again, again_parts = world.pop_batch(trainer)
    assert again.batch_id != header.batch_id
    assert [p.rollout_ids for p in again_parts] == [p.rollout_ids for p in parts]


def test_discarded_rows_are_dropped(world):
    trainer, node = world.started()
    world.work(node)
    header, _ = world.pop_batch(trainer)
    world.ack(trainer, header.batch_id, BatchOutcome.DISCARDED)
    assert [(d.reason, d.count) for d in world.account().drops] == [(Reason.BATCH_DISCARDED, 4)]
    assert not world.batch_lines


def test_lease_ends_with_the_session_and_the_rows_return(world):
    trainer, node = world.started()
    world.work(node, 2)
    header, parts = world.pop_batch(trainer)
    world.leave(trainer)
    assert (world.account().leased_count, world.account().fresh_count) == (0, 4)
    successor = world.register()
    world.open_stream(successor)
    again, again_parts = world.pop_batch(successor)
    assert [p.rollout_ids for p in again_parts] == [p.rollout_ids for p in parts]
    assert refused(world.ack, successor, header.batch_id) is Reason.LEASE_LOST
    assert world.ack(successor, again.batch_id)


def test_late_ack_counts_while_nobody_else_holds_a_row(world):
    trainer, node = world.started()
    world.work(node, 2)
    header, _ = world.pop_batch(trainer)
    world.leave(trainer)
    back = world.register(resumes=trainer)
    assert back == trainer
    assert world.ack(back, header.batch_id) is True
    assert world.account().trained_count == 4
    assert world.policy().step == 1
    assert world.account().is_balanced


def test_stale_rows_are_dropped_at_lease(world):
    trainer, node = world.started(credit=100)
    late = world.pop_task(node)
    world.send(node, late, 0)
    for _ in range(2):
        world.work(node)
        world.train(trainer)
        world.report(node, world.policy().version)
    world.send(node, late, 1, versions={"solver": (2,)})
    world.finish(node, late)
    world.work(node)
    world.train(trainer)
    assert [(d.reason, d.count) for d in world.account().drops] == [(Reason.STALE, 1)]
    records = {r.rollout.rollout_id: r.placements[0] for r in world.run.rollouts()}
    assert records[f"{late.group_id}/0/0"].place is RolloutPlace.DROPPED
    assert records[f"{late.group_id}/1/0"].place is not RolloutPlace.DROPPED
    assert world.account().is_balanced


def test_line_of_metrics_has_what_the_trainer_said(world):
    trainer, node = world.started()
    world.work(node)
    header, _ = world.pop_batch(trainer)
    world.ack(
        trainer, header.batch_id, step=1, wait_s=1.0, train_s=3.0, metrics={"train/loss": 0.5}
    )
    (line,) = world.batch_lines
    assert (line.policy_id, line.step, line.version) == ("solver", 1, 0)
    assert line.metrics["train/loss"] == 0.5
    assert line.metrics["time/wait_batch_frac"] == 0.25
    assert line.metrics["perf/tokens_per_s"] == 1.0
    assert world.policy().metrics == line.metrics
    assert world.policy().wait_fraction == 0.25
    assert world.policy().staleness_counts == {0: 4}
