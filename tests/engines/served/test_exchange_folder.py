"""Folders in shared memory that a process leaves behind when it is killed."""

import subprocess
import sys
from contextlib import contextmanager

from astraflow.engines.served.exchange import ExchangeFolder

OWNER = """
import sys
from pathlib import Path
from astraflow.engines.served.exchange import ExchangeFolder

folder = ExchangeFolder("other", parent=Path(sys.argv[1]))
(folder.path / "1.update").write_bytes(b"weights")
print(folder.path.name, flush=True)
sys.stdin.read()
"""


@contextmanager
def owner(parent):
    """Another process with a folder; it is killed with SIGKILL at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        try:
            yield process.stdout.readline().decode().strip()
        finally:
            process.kill()


def names(parent):
    return {path.name for path in parent.iterdir()}


def test_a_folder_is_removed_by_the_next_process_once_its_own_is_killed(tmp_path):
    with owner(tmp_path) as theirs:
        ours = ExchangeFolder("mine", parent=tmp_path)
        assert names(tmp_path) == {theirs, ours.path.name}
    assert names(tmp_path) == {theirs, ours.path.name}
    next_one = ExchangeFolder("mine", parent=tmp_path)
    assert names(tmp_path) == {ours.path.name, next_one.path.name}


def test_a_folder_is_gone_when_it_is_closed_and_may_be_closed_again(tmp_path):
    folder = ExchangeFolder("mine", parent=tmp_path)
    (folder.path / "1.update").write_bytes(b"weights")
    folder.close()
    folder.close()
    assert names(tmp_path) == set()


def test_what_others_made_beside_it_stays(tmp_path):
    (tmp_path / "astraflow-sglang-1").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "astraflow-owned-link").symlink_to(elsewhere)
    folder = ExchangeFolder("mine", parent=tmp_path)
    folder.close()
    assert names(tmp_path) == {"astraflow-sglang-1", "astraflow-owned-link", "elsewhere"}
