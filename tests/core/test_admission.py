from astraflow.core.admission import min_version, open_limit, train_version


def test_batch_in_the_trainers_hands_makes_the_next_version():
    assert train_version(newest=7, newest_step=7, step=7, leased_batch_count=1) == 8


def test_published_before_its_ack_counts_once():
    assert train_version(newest=8, newest_step=8, step=7, leased_batch_count=1) == 8


def test_acked_before_its_publication_counts_once():
    assert train_version(newest=7, newest_step=7, step=8, leased_batch_count=0) == 8


def test_new_work_is_never_born_stale():
    common = {"groups_per_batch": 16, "max_staleness": 2}
    assert min_version(train_version=8, groups_ahead=20, **common) == 7
    assert min_version(train_version=8, groups_ahead=15, **common) == 6
    assert min_version(train_version=1, groups_ahead=0, **common) == 0


def test_open_work_is_bounded_by_staleness_and_by_the_steps_left():
    assert open_limit(groups_per_batch=16, max_staleness=2, steps_left=None) == 48
    assert open_limit(groups_per_batch=16, max_staleness=2, steps_left=1) == 16
    assert open_limit(groups_per_batch=16, max_staleness=0, steps_left=9) == 16
