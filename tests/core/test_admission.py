from astraflow.core.policy.admission import min_version, open_limit, train_version


def test_batch_in_the_trainers_hands_makes_the_next_version():
    assert train_version(newest=7, newest_step=7, step=7, leased_batch_count=1) == 8


def test_published_before_its_ack_counts_once():
    assert train_version(newest=8, newest_step=8, step=7, leased_batch_count=1) == 8


def test_acked_before_its_publication_counts_once():
    assert train_version(newest=7, newest_step=7, step=8, leased_batch_count=0) == 8


def ahead(groups, **more):
    given = {"newest": 7, "newest_step": 7, "step": 7, "leased_batch_count": 1} | more
    return train_version(batches_ahead=groups // 16, **given)


def test_new_work_is_never_born_stale():
    assert min_version(train_version=ahead(20), max_staleness=2) == 7
    assert min_version(train_version=ahead(15), max_staleness=2) == 6
    assert min_version(train_version=1, max_staleness=2) == 0


def test_several_steps_make_one_version():
    assert ahead(20, steps_per_version=4) == 7
    assert ahead(32, steps_per_version=4) == 7
    assert ahead(48, steps_per_version=4) == 8
    assert ahead(0, step=9, steps_per_version=4) == 7
    assert ahead(0, step=10, steps_per_version=4) == 8


def test_a_version_that_is_asked_for_comes_after_the_step_in_progress():
    assert ahead(99, steps_per_version=None) == 7
    assert ahead(0, steps_per_version=None, is_asked=True) == 8
    assert ahead(99, steps_per_version=None, is_asked=True) == 8
    nothing_newer = ahead(0, leased_batch_count=0, steps_per_version=None, is_asked=True)
    assert nothing_newer == 7
    assert ahead(0, steps_per_version=4, is_asked=True) == 8


def test_open_work_is_bounded_by_staleness_and_by_the_steps_left():
    assert open_limit(groups_per_batch=16, max_staleness=2, steps_left=None) == 48
    assert open_limit(groups_per_batch=16, max_staleness=2, steps_left=1) == 16
    assert open_limit(groups_per_batch=16, max_staleness=0, steps_left=9) == 16
    assert open_limit(groups_per_batch=16, max_staleness=1, steps_left=9, steps_per_version=4) == (
        8 * 16
    )
    asked = open_limit(groups_per_batch=16, max_staleness=1, steps_left=9, steps_per_version=None)
    assert asked == 32
