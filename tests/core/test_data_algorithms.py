"""Data algorithms in a whole run: what is asked, kept, refused, replayed, and in the books."""

import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from astraflow.core.algorithms.points import BatchGuard, PromptSelector, ReplayOrder, RolloutFilter
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import Outcome
from astraflow.core.settings import (
    BufferOrder,
    BufferSettings,
    MixPhaseSettings,
    PlugInSpec,
    ReplaySettings,
)
from astraflow.core.status import RunState, WaitCause

HERE = __name__


def spec(name, **options):
    return PlugInSpec(name=name, options=options)


def drops(world):
    return {(d.reason, d.filter): d.count for d in world.account().drops if d.count}


def answer(world, node, *groups):
    """Do the next tasks, each with these rewards or outcomes; return their prompts."""
    prompts = []
    for rewards in groups:
        task = world.pop_task(node)
        prompts.append(task.prompt.prompt_id)
        for index, said in enumerate(rewards):
            more = {"outcome": said} if isinstance(said, Outcome) else {"reward": said}
            world.send(node, task, index, **more)
        world.finish(node, task)
    return prompts


def uses(parts):
    return [count for part in parts for count in part.values("use_count").tolist()]


# --- selection


class TestSelection:
    def test_solved_prompts_are_passed_over_in_the_next_pass(self, make_world):
        world = make_world(
            selectors=(spec("filter_solved", decay=0.0),), row_count=4, prompt_count=8
        )
        trainer, node = world.started(credit=4)
        asked = answer(world, node, (1, 1), (0, 0), (1, 1), (0, 1))
        world.train(trainer)
        world.train(trainer)
        world.report(node, 2)
        asked += answer(world, node, (0, 0), (0, 0))
        assert asked == ["p0", "p1", "p2", "p3", "p1", "p3"]
        header, _ = world.pop_batch(trainer)
        world.ack(trainer, header.batch_id)
        metrics = world.batch_lines[-1].metrics
        assert metrics["data/select/seen"] == 8
        assert metrics["data/select/skipped"] == 2
        assert metrics["data/select/filter_solved/solved"] == 2
        assert world.policy().metrics == metrics

    def test_a_run_ends_when_the_last_prompts_are_passed_over(self, make_world):
        world = make_world(
            selectors=(spec("filter_solved", decay=0.0),),
            row_count=2,
            prompt_count=4,
            groups_per_batch=4,
        )
        trainer, node = world.started(credit=2)
        answer(world, node, (1, 1), (1, 1))
        assert not world.tasks[node]
        header = world.train(trainer)
        assert len(header.groups) == 2
        world.report(node, 1)
        assert world.state is RunState.DONE

    def test_after_many_refusals_a_prompt_is_asked_for(self, make_world):
        world = make_world(
            selectors=(spec(f"{HERE}:Nothing"),), max_skips=3, max_staleness=0, row_count=30
        )
        _, node = world.started()
        assert [task.prompt.prompt_id for task in world.tasks[node]] == ["p3", "p7"]

    def test_greso_arms_after_one_pass_since_version_1(self, make_world):
        world = make_world(selectors=(spec("greso"),), row_count=3)
        trainer, node = world.started()
        armed = []
        for version in range(1, 5):
            world.work(node, 2, reward=1.0)
            world.train(trainer)
            world.report(node, version)
            armed.append(world.batch_lines[-1].metrics["data/select/greso/adjustment_armed"])
        assert armed[0] == 0
        assert armed[-1] == 1

    def test_every_run_of_a_seed_chooses_alike(self, make_world):
        def chosen():
            world = make_world(selectors=(spec("curriculum", floor=0.2),), row_count=5)
            trainer, node = world.started()
            prompts = []
            for version in range(1, 9):
                prompts += answer(world, node, (1, 1), (0, 1))
                world.train(trainer)
                world.report(node, version)
            return prompts

        assert chosen() == chosen()

    def test_a_selector_that_fails_ends_the_run_with_its_name(self, make_world):
        world = make_world(selectors=(spec(f"{HERE}:Broken"),))
        world.started()
        assert world.state is RunState.FAILED
        failure = world.run.status(world.clock.now()).failure
        assert "selector" in failure.message
        assert "KeyError: 'oh'" in failure.message

    def test_an_unknown_selector_stops_the_start(self, make_world):
        with pytest.raises(AstraflowError) as caught:
            make_world(selectors=(spec("gresso"),))
        assert caught.value.reason is Reason.CODE_UNKNOWN


def test_data_sets_are_mixed_as_the_schedule_says(make_world):
    world = make_world(
        mix=(
            MixPhaseSettings(weights={"easy": 1.0}),
            MixPhaseSettings(weights={"easy": 1.0, "hard": 1.0}, from_version=2),
        )
    )
    trainer, node = world.started()
    names = []
    for version in range(1, 5):
        tasks = [world.tasks[node][0], world.tasks[node][1]]
        names += [task.prompt.data_set for task in tasks]
        world.work(node, 2)
        world.train(trainer)
        world.report(node, version)
    assert names[:4] == ["easy"] * 4
    assert sorted(names[6:]) == ["easy", "hard"]
    assert world.run.drawn_counts["hard"] > 0


def test_a_run_ends_when_every_data_set_is_through(make_world):
    world = make_world(
        mix=(MixPhaseSettings(weights={"a": 1.0, "b": 3.0}),), prompt_count=2, groups_per_batch=4
    )
    trainer, node = world.started()
    world.work(node)
    header = world.train(trainer)
    assert sorted(group.data_set for group in header.groups) == ["a", "a", "b", "b"]
    world.report(node, 1)
    assert world.state is RunState.DONE


# --- filters


class TestFilters:
    def test_dynamic_sampling_asks_other_prompts_until_the_batch_is_full(self, make_world):
        world = make_world(filters=(spec("zero_advantage"),), max_staleness=0)
        trainer, node = world.started()
        asked = answer(world, node, (1, 1), (0, 0), (1, 0), (1, 1), (0, 1))
        assert asked == ["p0", "p1", "p2", "p3", "p4"]
        header, _ = world.pop_batch(trainer)
        assert [group.prompt_id for group in header.groups] == ["p2", "p4"]
        assert drops(world) == {(Reason.FILTERED, "zero_advantage"): 6}
        assert world.account().is_balanced
        world.ack(trainer, header.batch_id)
        metrics = world.batch_lines[-1].metrics
        assert metrics["data/filter/zero_advantage/groups_dropped"] == 3
        assert metrics["data/filter/zero_advantage/groups_dropped_frac"] == 0.6
        assert metrics["group/zero_std_frac"] == 0

    def test_filters_run_in_order_and_what_is_left_is_compared(self, make_world):
        world = make_world(
            filters=(spec("truncated"), spec("zero_advantage")), group_size=3, min_group_size=2
        )
        trainer, node = world.started()
        for reward in (0.0, 1.0):
            task = world.pop_task(node)
            world.send(node, task, 0, reward=1.0)
            world.send(node, task, 1, reward=reward)
            world.send(node, task, 2, reward=5.0, outcome=Outcome.TRUNCATED)
            world.finish(node, task)
        answer(world, node, (1, 0, 0))
        header, parts = world.pop_batch(trainer)
        assert header.row_count == 5
        assert set(parts[0].values("advantages").tolist()) >= {0.5, -0.5}
        assert drops(world) == {
            (Reason.FILTERED, "truncated"): 2,
            (Reason.FILTERED, "zero_advantage"): 2,
        }

    def test_what_is_masked_counts_for_the_baseline_and_has_no_loss(self, make_world):
        world = make_world(
            filters=(spec("truncated", action="mask"),),
            group_size=3,
            min_group_size=3,
            groups_per_batch=1,
            max_staleness=0,
        )
        trainer, node = world.started()
        task = world.pop_task(node)
        for index in task.sample_indexes:
            world.send(node, task, index, reward=1.0, outcome=Outcome.TRUNCATED)
        world.finish(node, task)
        assert drops(world) == {(Reason.FILTERED, "truncated"): 3}
        task = world.pop_task(node)
        world.send(node, task, 0, reward=1.0)
        world.send(node, task, 1, reward=0.0)
        world.send(node, task, 2, reward=0.0, outcome=Outcome.TRUNCATED)
        world.finish(node, task)
        header, (part,) = world.pop_batch(trainer)
        assert (header.row_count, header.loss_token_count) == (3, 2)
        mask = part.values("loss_mask")
        assert [mask[a:b].any() for a, b in pairwise(part.row_offsets)] == [True, True, False]
        assert part.values("advantages")[mask].tolist() == pytest.approx([2 / 3, -1 / 3])
        assert part.values("advantages")[~mask].tolist() == [0.0] * (header.token_count - 2)
        assert part.values("rewards").tolist() == [1, 0, 0]
        world.ack(trainer, header.batch_id)
        assert world.account().trained_count == 3
        assert world.account().is_balanced

    def test_a_group_of_which_only_masked_samples_are_fresh_is_stale(self, make_world):
        world = make_world(
            filters=(spec("truncated", action="mask"),), groups_per_batch=1, max_staleness=1
        )
        trainer, node = world.started(credit=8)
        old = world.pop_task(node)
        world.send(node, old, 0, reward=1.0)
        world.work(node)
        for version in (1, 2):
            world.train(trainer)
            world.report(node, version)
            world.work(node)
        world.send(node, old, 1, outcome=Outcome.TRUNCATED, versions={"solver": (2,)})
        world.finish(node, old)
        world.train(trainer)
        assert drops(world) == {(Reason.STALE, ""): 2}
        assert world.account().is_balanced

    def test_too_little_left_drops_the_group(self, make_world):
        world = make_world(filters=(spec(f"{HERE}:First"),), min_group_size=2, max_staleness=0)
        _, node = world.started()
        answer(world, node, (1, 0))
        assert drops(world) == {
            (Reason.FILTERED, f"{HERE}:First"): 1,
            (Reason.GROUP_INCOMPLETE, ""): 1,
        }
        assert world.account().is_balanced

    def test_groups_are_routed_to_the_policies_that_want_them(self, make_world):
        rules = {"verifier": [{"min_reward": 1.0}]}
        world = make_world(
            policies=("solver", "verifier"), filters=(spec("route", policies=rules),)
        )
        _, node = world.started()
        answer(world, node, (0, 0), (1, 1))
        assert world.policy("solver").leased_count == 4
        assert world.policy("verifier").fresh_count == 2
        assert world.account("verifier").drops[0].filter == "route"

    def test_a_trainer_that_waits_for_filters_is_told_so(self, make_world):
        world = make_world(filters=(spec("zero_advantage"),))
        _, node = world.started()
        answer(world, node, (1, 1), (0, 0))
        links = world.run.explain("solver", world.clock.now())
        [link] = [link for link in links if link.cause is WaitCause.ALL_DROPPED]
        assert "dropped the last 2 groups, the last one zero_advantage" in link.message
        answer(world, node, (1, 0))
        links = world.run.explain("solver", world.clock.now())
        assert all(link.cause is not WaitCause.ALL_DROPPED for link in links)

    @pytest.mark.parametrize(
        ("name", "options", "by"),
        [
            ("zero_advantage", {}, "zero_advantage"),
            (f"{HERE}:First", {"min_group_size": 2}, f"{HERE}:First"),
        ],
    )
    def test_filters_that_leave_nothing_for_long_end_the_run(self, make_world, name, options, by):
        world = make_world(filters=(spec(name),), max_filtered_groups=5, **options)
        _, node = world.started()
        answer(world, node, (1, 1), (1, 1), (0, 0), (0, 0))
        assert world.policy().filtered_group_count == 4
        assert world.state is RunState.RUNNING
        answer(world, node, (1, 1))
        failure = world.run.status(world.clock.now()).failure
        assert failure.reason is Reason.FILTERED
        assert f"the last 5 groups (rollouts.max_filtered_groups), of the last one {by}" in (
            failure.message
        )
        assert world.account().is_balanced

    def test_groups_that_never_ask_a_policy_are_told(self, make_world):
        world = make_world(policies=("solver", "verifier"))
        _, node = world.started()
        world.work(node, 2, versions={"solver": (0,)})
        links = world.run.explain("verifier", world.clock.now())
        [link] = [link for link in links if link.cause is WaitCause.ALL_DROPPED]
        assert "dropped the last 2 groups, the last one no_trajectory" in link.message

    def test_one_group_that_is_kept_ends_the_row_of_filtered_ones(self, make_world):
        world = make_world(filters=(spec("zero_advantage"),), max_filtered_groups=2)
        trainer, node = world.started()
        answer(world, node, (1, 1), (1, 0), (0, 0), (0, 1))
        world.train(trainer)
        world.report(node, 1)
        answer(world, node, (1, 1), (1, 0), (0, 0))
        assert world.state is RunState.RUNNING

    def test_what_goes_to_another_policy_is_not_filtered(self, make_world):
        rules = {"verifier": [{"min_reward": 1.0}], "solver": [{"max_reward": 0.5}]}
        world = make_world(
            policies=("solver", "verifier"),
            filters=(spec("route", policies=rules),),
            max_filtered_groups=2,
        )
        _, node = world.started()
        answer(world, node, (0, 0), (0, 0), (0, 0))
        assert world.policy("verifier").filtered_group_count == 3
        assert world.state is RunState.RUNNING

    def test_a_filter_that_answers_wrongly_ends_the_run(self, make_world):
        world = make_world(filters=(spec(f"{HERE}:TooFew"),))
        _, node = world.started()
        answer(world, node, (1, 0))
        assert world.state is RunState.FAILED
        assert "0 answers for 2 samples" in world.run.status(world.clock.now()).failure.message
        assert world.account().is_balanced

    def test_what_a_filter_raises_is_told_with_its_line(self, make_world):
        world = make_world(filters=(spec(f"{HERE}:Raises"),))
        _, node = world.started()
        answer(world, node, (1, 0))
        failure = world.run.status(world.clock.now()).failure
        assert "KeyError: 'oh'" in failure.message
        line = Raises.keeps.__code__.co_firstlineno + 1
        assert failure.traceback.endswith(f'{Path(__file__).name}", line {line}, in keeps')


# --- serving


class TestServing:
    def test_replay_fills_a_share_of_the_batch_and_books_stay_exact(self, make_world):
        world = make_world(
            groups_per_batch=4,
            max_staleness=2,
            serving={"replay": ReplaySettings(ratio=0.5, max_staleness=2)},
        )
        trainer, node = world.started(credit=32)
        found = []
        for version in range(1, 5):
            world.work(node, 4 if version == 1 else 2)
            header, parts = world.pop_batch(trainer)
            found.append(uses(parts))
            assert len(header.groups) == 4
            world.publish(trainer, step=version)
            world.ack(trainer, header.batch_id, step=version)
            world.report(node, version)
        assert [use.count(1) for use in found] == [0, 4, 4, 4]
        account = world.account()
        assert account.is_balanced
        assert (account.trained_count, account.replayed_count) == (8 + 3 * 4, 3 * 4)
        assert world.policy().replay_count > 0
        assert world.batch_lines[-1].metrics["data/replay/frac"] == 0.5
        uses_of = {r.rollout.rollout_id: r.placements[0].use_count for r in world.run.rollouts()}
        assert uses_of["group-r-4/0/0"] == 2

    def test_importance_weights_come_with_the_rows(self, make_world):
        order = spec("prioritised", offset=0.1, beta=1.0)
        replay = ReplaySettings(ratio=0.5, order=order, max_staleness=1)
        world = make_world(serving={"replay": replay})
        trainer, node = world.started(credit=32)
        answer(world, node, (1, 0), (1, 1))
        _, (part,) = world.batches[trainer, 0][0]
        assert "loss_weights" not in part.columns
        world.train(trainer)
        world.report(node, 1)
        answer(world, node, (1, 0))
        found = set()
        for _ in range(32):
            header, (part,) = world.pop_batch(trainer)
            weights = [1.0] * part.token_count
            if "loss_weights" in part.columns:
                weights = part.values("loss_weights").tolist()
            fresh, again = np.split(weights, part.row_offsets[[2]])
            assert set(fresh) == {1.0}
            found.add((header.groups[1].prompt_id, *set(again.round(3).tolist())))
            world.ack(trainer, header.batch_id, "returned")
        # The mean |advantage| is 0.5 or 0: what is picked six times as often weighs a sixth.
        assert found == {("p0", 0.167), ("p1", 1.0)}

    def test_returned_batches_give_their_replays_back(self, make_world):
        world = make_world(serving={"replay": ReplaySettings(ratio=0.5, max_staleness=1)})
        trainer, node = world.started(credit=32)
        world.work(node, 2)
        world.train(trainer)
        world.report(node, 1)
        world.work(node)
        header, parts = world.pop_batch(trainer)
        assert sorted(uses(parts)) == [0, 0, 1, 1]
        world.ack(trainer, header.batch_id, "returned")
        again, parts = world.pop_batch(trainer)
        assert sorted(uses(parts)) == [0, 0, 1, 1]
        assert [g.group_id for g in again.groups] == [g.group_id for g in header.groups]
        world.ack(trainer, again.batch_id, "discarded")
        assert world.account().replayed_count == 0
        assert world.policy().replay_count == 2

    def test_guards_drop_what_is_at_fault_and_never_stop_a_run(self, make_world):
        world = make_world(
            max_staleness=0, serving={"guards": (spec(f"{HERE}:Never"),), "max_refusals": 3}
        )
        trainer, node = world.started(credit=32)
        for _ in range(4):
            world.work(node)
        header, _ = world.pop_batch(trainer)
        assert len(header.groups) == 2
        assert drops(world) == {(Reason.FILTERED, f"{HERE}:Never"): 3 * 4}
        world.ack(trainer, header.batch_id)
        metrics = world.batch_lines[-1].metrics
        assert metrics[f"data/guard/{HERE}:Never/refused"] == 3
        assert metrics["data/guard/forced"] == 1
        assert world.account().is_balanced

    @pytest.mark.parametrize(
        ("order", "served"), [(BufferOrder.EDF, ["p0", "p3"]), (BufferOrder.FIFO, ["p3", "p4"])]
    )
    def test_batches_are_drawn_by_deadline_or_by_arrival(self, make_world, order, served):
        world = make_world(max_staleness=3, serving={"buffer": BufferSettings(order=order)})
        trainer, node = world.started(credit=16)
        late = world.pop_task(node)
        world.work(node, 2)
        world.publish(trainer, step=1)
        world.report(node, 1)
        world.work(node, 2, versions={"solver": (1,)})
        for index in late.sample_indexes:
            world.send(node, late, index, versions={"solver": (0,)})
        world.ack(trainer, world.pop_batch(trainer)[0].batch_id)
        assert [g.prompt_id for g in world.pop_batch(trainer)[0].groups] == served

    def test_what_the_buffer_has_no_room_for_is_dropped(self, make_world):
        world = make_world(max_staleness=2, serving={"buffer": BufferSettings(max_groups=2)})
        _, node = world.started(credit=32)
        world.work(node, 6)
        # Two are leased, two are kept, two had no room.
        assert world.policy().leased_count == 4
        assert world.policy().fresh_count == 4
        assert drops(world) == {(Reason.BUFFER_FULL, ""): 4}
        assert world.account().is_balanced

    def test_bytes_are_bounded_but_for_one_batch(self, make_world):
        world = make_world(max_staleness=2, serving={"buffer": BufferSettings(max_nbytes=1)})
        _, node = world.started(credit=32)
        world.work(node, 5)
        assert world.policy().leased_count == 4
        assert world.policy().fresh_count == 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"filters": (spec(f"{HERE}:NoNumbers"),)}, "data/filter"),
        ({"filters": (spec(f"{HERE}:NoAnswer"),)}, "NoneType"),
        ({"serving": {"guards": (spec(f"{HERE}:NoGuard"),)}}, "TypeError"),
        (
            {"serving": {"replay": ReplaySettings(ratio=0.5, order=spec(f"{HERE}:Nonsense"))}},
            "replay order",
        ),
        (
            {"serving": {"replay": ReplaySettings(ratio=0.5, order=spec(f"{HERE}:Floats"))}},
            "replay order",
        ),
        ({"filters": (spec(f"{HERE}:Exits"),)}, "SystemExit"),
    ],
)
def test_whatever_algorithms_do_wrong_the_books_are_exact(make_world, settings, said):
    if "serving" in settings and "replay" in settings["serving"]:
        bound = replace(settings["serving"]["replay"], max_staleness=1)
        settings = {"serving": {"replay": bound}}
    world = make_world(**settings)
    trainer, node = world.started(credit=32)
    world.work(node, 2)
    for version in (1, 2):
        if world.batches.get((trainer, 0)):
            world.train(trainer)
            world.report(node, version)
            world.work(node, 2)
    world.tick()
    assert world.state is RunState.FAILED
    assert said in world.run.status(world.clock.now()).failure.message
    assert world.account().is_balanced


@dataclass
class NoNumbers(RolloutFilter):
    def keeps(self, group):
        return (True for _ in group.samples)

    def metrics(self):
        return {"a": "b"}


@dataclass
class NoAnswer(RolloutFilter):
    def keeps(self, group):
        return None


@dataclass
class NoGuard(BatchGuard):
    def unfit(self, groups):
        return 3


@dataclass
class Nonsense(ReplayOrder):
    def pick(self, groups, count, dice):
        return ["x"]


@dataclass
class Floats(ReplayOrder):
    def pick(self, groups, count, dice):
        return [0.0]


@dataclass
class Exits(RolloutFilter):
    def keeps(self, group):
        sys.exit("no model here")


@dataclass
class Nothing(PromptSelector):
    def admits(self, prompt, dice):
        return False


@dataclass
class Broken(PromptSelector):
    def admits(self, prompt, dice):
        raise KeyError("oh")


@dataclass
class First(RolloutFilter):
    def keeps(self, group):
        return [index == 0 for index in range(len(group.samples))]


@dataclass
class Raises(RolloutFilter):
    def keeps(self, group):
        raise KeyError("oh")


@dataclass
class TooFew(RolloutFilter):
    def keeps(self, group):
        return []


@dataclass
class Never(BatchGuard):
    def unfit(self, groups):
        return range(len(groups))
