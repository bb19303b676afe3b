from astraflow.raas.runner import EpisodeTimes, headroom


def test_a_far_node_asks_for_what_ends_during_a_round_trip_in_whole_tasks():
    assert headroom(capacity=16, round_trip_s=0.3, episode_s=0.8, task_size=8) == 8
    assert headroom(capacity=16, round_trip_s=0.3, episode_s=0.8, task_size=4) == 8
    assert headroom(capacity=16, round_trip_s=0.6, episode_s=0.8, task_size=8) == 16


def test_a_near_node_asks_for_no_more_than_it_runs():
    assert headroom(capacity=16, round_trip_s=0.001, episode_s=0.8, task_size=8) == 0
    assert headroom(capacity=16, round_trip_s=0.3, episode_s=0.0, task_size=8) == 0


def test_no_node_asks_for_more_than_twice_its_capacity():
    assert headroom(capacity=4, round_trip_s=3, episode_s=0.1, task_size=8) == 4


def test_times_follow_the_last_episodes_and_tasks():
    times = EpisodeTimes()
    times.note_episode(2.0)
    assert (times.mean_s, times.task_size) == (2.0, 1)
    times.note_episode(4.0)
    assert times.mean_s == 2.125
    times.note_task(8)
    times.note_task(2)
    assert times.task_size == 8
