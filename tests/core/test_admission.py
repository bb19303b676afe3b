"""Which version a batch trains on, how new what is sampled for it must be, how much may be open."""

from datetime import UTC, datetime

import pytest

from astraflow.core.policy.leases import Lease
from made_up import made_up_version

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def policy(make_world):
    """A policy with batches of 16 groups at version 7, one batch in its trainer's hands."""

    def build(*, newest=7, step=7, leased=1, groups=0, is_asked=False, **settings):
        settings = {"max_staleness": 0} | settings
        found = make_world(groups_per_batch=16, **settings).run._components.policies["solver"]
        for version in range(newest + 1):
            found.versions.publish(made_up_version("solver", version, step=version), NOW)
        for number in range(leased):
            lease = Lease(
                batch_id=f"b{number}",
                policy_id="solver",
                version=7,
                train_version=7,
                groups=(),
                metrics={},
            )
            found.lease_table.add(lease)
        found.progress.step, found.progress.is_requested = step, is_asked
        found.samples.open_count = groups
        return found

    return build


def test_batch_in_the_trainers_hands_makes_the_next_version(policy):
    assert policy().progress.train_version == 8


def test_published_before_its_ack_counts_once(policy):
    assert policy(newest=8).progress.train_version == 8


def test_acked_before_its_publication_counts_once(policy):
    assert policy(step=8, leased=0).progress.train_version == 8


@pytest.fixture
def ahead(policy):
    """Return the version that a group trains on which comes after so many others."""

    def build(groups, **more):
        return policy(groups=groups, **more).samples.min_version(is_open=False)

    return build


def test_new_work_is_never_born_stale(ahead):
    assert ahead(20, max_staleness=2) == 7
    assert ahead(15, max_staleness=2) == 6
    assert ahead(0, newest=1, step=1, leased=0, max_staleness=2) == 0


def test_several_steps_make_one_version(ahead):
    assert ahead(20, steps_per_version=4) == 7
    assert ahead(32, steps_per_version=4) == 7
    assert ahead(48, steps_per_version=4) == 8
    assert ahead(0, step=9, steps_per_version=4) == 7
    assert ahead(0, step=10, steps_per_version=4) == 8


def test_a_version_that_is_asked_for_comes_after_the_step_in_progress(ahead):
    assert ahead(99, steps_per_version=None) == 7
    assert ahead(0, steps_per_version=None, is_asked=True) == 8
    assert ahead(99, steps_per_version=None, is_asked=True) == 8
    assert ahead(0, leased=0, steps_per_version=None, is_asked=True) == 7
    assert ahead(0, steps_per_version=4, is_asked=True) == 8


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"max_staleness": 2}, 48),
        ({"max_staleness": 2, "step_count": 1}, 16),
        ({"max_staleness": 0, "step_count": 9}, 16),
        ({"max_staleness": 1, "step_count": 9, "steps_per_version": 4}, 8 * 16),
        ({"max_staleness": 1, "step_count": 9, "steps_per_version": None}, 32),
    ],
)
def test_open_work_is_bounded_by_staleness_and_by_the_steps_left(policy, settings, limit):
    assert policy(**settings).samples.open_limit == limit


@pytest.mark.parametrize(("step", "batches"), [(7, 8), (8, 7), (10, 5), (11, 8), (12, 7)])
def test_what_needs_a_version_of_batches_to_come_is_not_open(policy, step, batches):
    found = policy(step=step, leased=0, steps_per_version=4, max_staleness=1)
    assert found.samples.open_limit == batches * 16
