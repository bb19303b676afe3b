from datetime import timedelta

import pytest

from astraflow.core.algorithms.points import Dice, GroupOutcome, UsedGroup, WholeGroup
from astraflow.core.batches import BatchGroup
from astraflow.core.rollouts import Outcome
from astraflow.core.samples import AcceptedRollout, FreshGroup, sample_of
from astraflow.core.tasks import Prompt
from made_up import made_up_rollout


@pytest.fixture
def dice():
    return Dice(seed=1, salt="test")


@pytest.fixture
def prompt():
    def build(name="p", **changes):
        return Prompt(**{"prompt_id": name, "data_set": "train", "fields": {}} | changes)

    return build


@pytest.fixture
def outcome(prompt):
    return lambda name, *rewards: GroupOutcome(prompt=prompt(name), rewards=tuple(rewards))


@pytest.fixture
def samples(trajectory):
    """Build samples: one per reward, or per (reward, sampled tokens, outcome)."""

    def build(*said, version=0, group="g"):
        return tuple(
            _sample(trajectory, f"{group}/{index}", group, each, version)
            for index, each in enumerate(said)
        )

    return build


def _sample(trajectory, name, group, said, version):
    reward, count, outcome = said if isinstance(said, tuple) else (said, 1, Outcome.SCORED)
    row = trajectory(name, versions=(version,) * count)
    rollout = made_up_rollout(row, rollout_id=name, group_id=group, outcome=outcome, reward=reward)
    entry = AcceptedRollout(rollout=rollout, prompt_id="p", member_id="m", placements={})
    return sample_of(entry, "solver")


@pytest.fixture
def whole(samples, prompt):
    def build(*said, version=0, **changes):
        changes = {
            "policy_id": "solver",
            "prompt": prompt(),
            "train_version": version,
            "run_time": timedelta(),
        } | changes
        return WholeGroup(samples=samples(*said, version=version), **changes)

    return build


@pytest.fixture
def fresh(samples):
    def build(*rewards, prompt="p", number=1, version=0, advantages=None):
        made = samples(*rewards, group=f"g{number}", version=version)
        for sample, advantage in zip(made, advantages or (), strict=False):
            sample.rows[0].advantage = advantage
        head = BatchGroup(
            group_id=f"g{number}", prompt_id=prompt, data_set="d", sample_count=len(rewards)
        )
        return FreshGroup(head=head, samples=made, number=number, arrival=number)

    return build


@pytest.fixture
def used(fresh):
    def build(number, *advantages, staleness=0):
        rewards = (1.0,) * len(advantages)
        group = fresh(*rewards, number=number, advantages=advantages)
        return UsedGroup(group=group, use_count=1, staleness=staleness)

    return build
