"""A snapshot is there whole, or it says that it is not."""

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.storage.snapshot import read_snapshot, write_snapshot

MINE = bytes(range(16))


def test_the_last_one_counts(tmp_path):
    path = tmp_path / "snapshot"
    assert read_snapshot(path, identity=MINE) is None
    write_snapshot(path, b"one", identity=MINE)
    write_snapshot(path, b"two", identity=MINE)
    assert read_snapshot(path, identity=MINE) == b"two"
    assert [each.name for each in tmp_path.iterdir()] == ["snapshot"]


@pytest.mark.parametrize("spoil", [lambda c: c[:-1], lambda c: c[:5], lambda c: b"x" + c[1:]])
def test_a_damaged_one_is_refused(tmp_path, spoil):
    path = tmp_path / "snapshot"
    write_snapshot(path, b"content", identity=MINE)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(AstraflowError, match="move its folder aside") as caught:
        read_snapshot(path, identity=MINE)
    assert caught.value.reason is Reason.JOURNAL_FAILED


def test_one_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(AstraflowError, match="make room"):
        write_snapshot(tmp_path / "none" / "snapshot", b"content", identity=MINE)


def test_one_of_another_journal_is_refused(tmp_path):
    path = tmp_path / "snapshot"
    write_snapshot(path, b"content", identity=bytes(range(1, 17)))
    with pytest.raises(AstraflowError, match="belongs to another journal"):
        read_snapshot(path, identity=MINE)
