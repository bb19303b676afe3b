"""The bar of a pull counts bytes, and is quiet for machines."""

from types import SimpleNamespace

from astraflow.launch.weights import PullBar


def test_bytes_and_their_total_are_shown_once_the_plan_is_known(capsys):
    bar = PullBar("solver 3", is_quiet=True)
    bar.note()
    coming = SimpleNamespace(nbytes=0, left_nbytes=None)
    bar.begin(coming, None)
    bar.note()
    (task,) = bar.tasks
    assert task.total is None
    coming.nbytes, coming.left_nbytes = 40, 60
    with bar:
        bar.note()
    assert (task.completed, task.total) == (40, 100)
    assert capsys.readouterr() == ("", "")
