"""A trainer that comes back at an older step: its prompts and what selectors learned go back."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astraflow.core.algorithms.curation import Curator
from astraflow.core.algorithms.finding import Faults
from astraflow.core.algorithms.points import GroupOutcome
from astraflow.core.settings import PlugInSpec
from astraflow.core.tasks import Prompt

PROMPTS = 12


class Trained:
    """A run over one pass of prompts, and what its weights were trained on."""

    def __init__(self, world):
        self.world = world
        self.trainer, self.node = world.started()
        self.batches = []  # prompt ids per batch that counts
        self.saved = {"": 0}  # checkpoint -> batches in it
        self.issued = []
        self.undone = 0

    def work(self):
        """Answer all tasks, also those that were cancelled: the node may not know yet."""
        cancelled = {each.task_id for each in self.world.cancelled}
        for task in self.world.tasks.get(self.node, ()):
            if task.task_id not in cancelled:
                self.issued.append(task.prompt.prompt_id)
        self.world.work(self.node)

    def step(self, *, is_saved):
        self.work()
        if not self.world.batches.get((self.trainer, 0)):
            return
        header, _ = self.world.pop_batch(self.trainer)
        self.batches.append([group.prompt_id for group in header.groups])
        step = len(self.batches)
        self.world.publish(self.trainer, step=step)
        name = f"step_{step}" if is_saved else ""
        self.world.ack(self.trainer, header.batch_id, step=step, checkpoint_id=name)
        self.world.report(self.node, self.world.policy().version)
        if is_saved:
            self.saved[name] = step

    def come_back(self, name):
        step = self.saved[name]
        self.undone += sum(map(len, self.batches[step:]))
        del self.batches[step:]
        self.saved = {each: at for each, at in self.saved.items() if at <= step}
        self.world.leave(self.trainer)
        self.trainer = self.world.register(checkpoint_id=name, last_step=step)
        self.world.publish(self.trainer, step=step)
        self.world.open_stream(self.trainer)
        self.world.report(self.node, self.world.policy().version)

    @property
    def is_through(self):
        return (self.trainer, 0) in self.world.ends


@given(
    max_staleness=st.integers(0, 2),
    script=st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 3)), max_size=4),
)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_weights_are_trained_on_every_prompt_once(make_world, max_staleness, script):
    run = Trained(make_world(max_staleness=max_staleness, prompt_count=PROMPTS))
    for steps, is_saved, back in script:
        for _ in range(steps):
            run.step(is_saved=is_saved)
        if not run.is_through:
            run.come_back(list(run.saved)[back % len(run.saved)])
        account = run.world.account()
        assert account.is_balanced
        assert account.trained_count == 2 * sum(map(len, run.batches))
        assert account.rolled_back_count == 2 * run.undone
    for _ in range(PROMPTS):
        run.step(is_saved=False)
    assert run.is_through
    trained = Counter(name for batch in run.batches for name in batch)
    assert trained == Counter(f"p{number}" for number in range(PROMPTS))


def test_lost_prompts_come_first_and_in_order(make_world):
    run = Trained(make_world(max_staleness=0, prompt_count=PROMPTS))
    for _ in range(3):
        run.step(is_saved=len(run.batches) == 0)
    assert run.issued == [f"p{number}" for number in range(6)]
    run.come_back("step_1")
    run.issued.clear()
    for _ in range(3):
        run.step(is_saved=False)
    # The last two were out all the time, unused.
    assert run.issued == [f"p{number}" for number in range(2, 8)]
    assert run.batches == [[f"p{n}", f"p{n + 1}"] for n in range(0, 8, 2)]


def test_nothing_new_is_issued_while_lost_prompts_are_read(make_world):
    run = Trained(make_world(max_staleness=0, prompt_count=PROMPTS))
    for _ in range(3):
        run.step(is_saved=len(run.batches) == 0)
    run.world.reads_late = True
    run.come_back("step_1")
    run.issued.clear()
    for _ in range(3):
        run.step(is_saved=False)
    assert run.issued == []
    for prompts in run.world.late:
        run.world.apply(prompts)
    for _ in range(3):
        run.step(is_saved=False)
    assert run.issued == [f"p{number}" for number in range(2, 8)]


def test_a_prompt_that_two_policies_lost_is_drawn_once(make_world):
    world = make_world(policies=("solver", "verifier"), max_staleness=0, prompt_count=PROMPTS)
    trainers, node = world.started()
    for _ in range(2):
        world.work(node)
        for trainer, policy in zip(trainers, world.policies, strict=True):
            world.train(trainer, policy)
            world.report(node, world.policy(policy).version, policy)
    for trainer, policy in zip(trainers, world.policies, strict=True):
        world.leave(trainer)
        successor = world.register(policy)
        world.publish(successor, policy, step=0)
        world.open_stream(successor)
        world.report(node, world.policy(policy).version, policy)
    issued = Counter()
    while world.tasks.get(node):
        issued[world.tasks[node][0].prompt.prompt_id] += 1
        world.work(node, 1)
    assert issued
    assert set(issued.values()) == {1}


@pytest.fixture
def taught():
    def make(numbers):
        curator = Curator(
            [PlugInSpec(name="greso"), PlugInSpec(name="curriculum")], seed=0, faults=Faults()
        )
        for number in numbers:
            prompt = Prompt(
                prompt_id=f"p{number % 5}", data_set="train", fields={}, blobs={"a": b"b"}
            )
            outcome = GroupOutcome(prompt=prompt, rewards=(number % 3 / 2, 0.0))
            curator.note(number, outcome)
            if number % 4 == 0:
                curator.begin_version(number // 4)
        return curator

    return make


def test_selectors_know_what_counts_alone(taught):
    curator, other = taught(range(20)), taught(n for n in range(20) if n not in (9, 13, 17))
    curator.forget({9, 13, 17})
    assert curator.metrics() == other.metrics()
    prompts = [Prompt(prompt_id=f"p{n}", data_set="train", fields={}) for n in range(5)] * 4
    assert [curator.admits(prompt) for prompt in prompts] == [other.admits(p) for p in prompts]


def test_what_is_long_ago_is_not_forgotten(taught):
    curator, other = taught(range(4500)), taught(range(4500))
    curator.forget({1})
    assert curator.metrics() == other.metrics()
