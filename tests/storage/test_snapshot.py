"""A snapshot is there whole, or it says that it is not."""

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.storage.snapshot import read_snapshot, write_snapshot


def test_the_last_one_counts(tmp_path):
    path = tmp_path / "snapshot"
    assert read_snapshot(path) is None
    write_snapshot(path, b"one")
    write_snapshot(path, b"two")
    assert read_snapshot(path) == b"two"
    assert [each.name for each in tmp_path.iterdir()] == ["snapshot"]


@pytest.mark.parametrize("spoil", [lambda c: c[:-1], lambda c: c[:5], lambda c: b"x" + c[1:]])
def test_a_damaged_one_is_refused(tmp_path, spoil):
    path = tmp_path / "snapshot"
    write_snapshot(path, b"content")
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(AstraflowError, match="move its folder aside") as caught:
        read_snapshot(path)
    assert caught.value.reason is Reason.JOURNAL_FAILED


def test_one_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(AstraflowError, match="make room"):
        write_snapshot(tmp_path / "none" / "snapshot", b"content")
