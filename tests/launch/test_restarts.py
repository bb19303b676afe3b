"""What a launcher starts again, and how often."""

from astraflow.config.recipe import Restarts
from astraflow.launch.launcher import RestartLimit


def test_restarts_within_a_window_are_bounded():
    limit = RestartLimit(Restarts(raas=3, window_s=600))
    assert [limit.allow("raas", now) for now in (0, 1, 2, 3, 599)] == [True] * 3 + [False] * 2
    assert [limit.allow("raas", now) for now in (600, 600.5, 601)] == [True, False, True]
    assert limit.reached("raas") == ("it is not started again: 3 restarts in 600 s (restarts.raas)")


def test_roles_and_trainers_count_by_themselves():
    limit = RestartLimit(Restarts(raas=1, trainer=1, hub=0))
    assert limit.allow("trainer", 0, name="solver")
    assert limit.allow("trainer", 0, name="verifier")
    assert limit.allow("raas", 0)
    assert not limit.allow("trainer", 1, name="solver")
    assert not limit.allow("hub", 0)
