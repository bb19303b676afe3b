"""A snapshot is there whole, or it says that it is not."""

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.storage.snapshot import SnapshotFile

MINE = bytes(range(16))


def test_the_last_one_counts(tmp_path):
    path = tmp_path / "snapshot"
    assert SnapshotFile(path).read(identity=MINE) is None
    SnapshotFile(path).write(b"one", identity=MINE, position=1)
    SnapshotFile(path).write(b"two", identity=MINE, position=1)
    assert SnapshotFile(path).read(identity=MINE) == b"two"
    assert [each.name for each in tmp_path.iterdir()] == ["snapshot"]


@pytest.mark.parametrize("spoil", [lambda c: c[:-1], lambda c: c[:5], lambda c: b"x" + c[1:]])
def test_a_damaged_one_is_refused(tmp_path, spoil):
    path = tmp_path / "snapshot"
    SnapshotFile(path).write(b"content", identity=MINE, position=1)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(AstraflowError, match="move its folder aside") as caught:
        SnapshotFile(path).read(identity=MINE)
    assert caught.value.reason is Reason.JOURNAL_FAILED


def test_one_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(AstraflowError, match="make room"):
        SnapshotFile(tmp_path / "none" / "snapshot").write(b"content", identity=MINE, position=1)


def test_one_that_a_full_disk_cuts_short_takes_no_room(tmp_path):
    """The journal beside it needs what is left."""
    path = tmp_path / "snapshot"
    draft = path.with_name("snapshot.draft")
    draft.symlink_to("/dev/full")
    with pytest.raises(AstraflowError, match="make room"):
        SnapshotFile(path).write(b"content", identity=MINE, position=1)
    assert not draft.is_symlink()


def test_one_of_another_journal_is_refused(tmp_path):
    path = tmp_path / "snapshot"
    SnapshotFile(path).write(b"content", identity=bytes(range(1, 17)), position=1)
    with pytest.raises(AstraflowError, match="belongs to another journal"):
        SnapshotFile(path).read(identity=MINE)
