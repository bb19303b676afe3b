from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from astraflow.core.tasks import TaskPurpose
from astraflow.raas.policies import sample_seed, seeded_sampling
from made_up import made_up_task


def test_a_seed_is_that_of_the_sample_not_of_the_attempt(make_task):
    task = make_task(1)
    again = replace(task, task_id="other", attempt=3, priority=9)
    assert sample_seed(task, 0, run_seed=7) == sample_seed(again, 0, run_seed=7)


def test_a_seed_differs_by_all_that_makes_a_sample(make_task):
    task = make_task(1)
    seeds = {
        sample_seed(task, 0, run_seed=7),
        sample_seed(task, 1, run_seed=7),
        sample_seed(task, 0, run_seed=8),
        sample_seed(make_task(2), 0, run_seed=7),
        sample_seed(replace(task, prompt=replace(task.prompt, epoch=1)), 0, run_seed=7),
        sample_seed(replace(task, purpose=TaskPurpose.EVAL), 0, run_seed=7),
    }
    assert len(seeds) == 6


def test_no_seed_of_the_run_is_a_seed_of_0(make_task):
    task = make_task(1)
    assert sample_seed(task, 0, run_seed=None) == sample_seed(task, 0, run_seed=0)


@given(index=st.integers(0, 1 << 20))
def test_a_seed_fits_a_signed_word(index):
    from_task = made_up_task()
    assert 0 <= sample_seed(from_task, index, run_seed=None) < 1 << 63


def test_sampling_keeps_everything_but_the_seed(make_task):
    task = make_task(1)
    sampling = seeded_sampling(task, 1, "solver")
    assert sampling.seed == sample_seed(task, 1, run_seed=7)
    assert replace(sampling, seed=7) == task.sampling["solver"]
    assert seeded_sampling(task, 1, "other").temperature == 1.0
