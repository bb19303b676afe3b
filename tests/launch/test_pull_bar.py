"""The bar of a pull counts bytes, and is quiet for machines."""

from types import SimpleNamespace

from astraflow.launch.weights import PullBar
from astraflow.weights.patches.incoming import IncomingVersion


def test_bytes_and_their_total_are_shown_once_the_plan_is_known(capsys):
    bar = PullBar("solver 3", is_quiet=True)
    bar.note()
    coming = IncomingVersion(None, {}, base_version=None)
    bar.begin(coming, None)
    bar.note()
    (task,) = bar.tasks
    assert task.total is None
    info = SimpleNamespace(payload_nbytes=100, chunk_count=5)
    coming.nbytes, coming.planned = 40, (SimpleNamespace(info=info, chunks={0: b"", 1: b""}),)
    with bar:
        bar.note()
    assert (task.completed, task.total) == (40, 100)
    assert capsys.readouterr() == ("", "")
