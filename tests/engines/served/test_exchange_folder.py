"""Folders in shared memory: what a killed process leaves behind, and memory that is too small."""

import subprocess
import sys
import tempfile
from contextlib import contextmanager

import numpy as np
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, TensorSpec, TensorUpdate, WeightUpdate
from astraflow.engines.plugins.exchange import read_update
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


def update_of(nbytes):
    values = np.arange(nbytes // 4, dtype=np.uint32)
    spec = TensorSpec(name="w", dtype=Dtype.F32, shape=values.shape, offset=0)
    part = TensorUpdate(spec=spec, indices=None, values=values)
    return WeightUpdate(policy_id="solver", version=1, base_version=None, tensors=(part,))


@pytest.fixture
def memory(tmp_path):
    """A file system in memory of 1 MiB, as small as containers have it."""
    place = tmp_path / "memory"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", place], check=False
    ).returncode:
        pytest.skip("this machine does not let us mount")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    place = tmp_path / "disk"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@pytest.mark.root
async def test_an_update_that_is_too_large_for_the_memory_goes_by_way_of_the_disk(memory, disk):
    folder = ExchangeFolder("mine", parent=memory)
    async with folder.file(update_of(1 << 18)) as path:
        assert memory in path.parents
    for _ in range(2):
        async with folder.file(update_of(1 << 20)) as path:
            assert disk in path.parents
            read = read_update(path)
            assert read.parts[0].values[-1] == (1 << 18) - 1
            assert len(names(disk)) == 1
        assert not path.exists()
    folder.close()
    assert names(memory) == names(disk) == set()


async def test_an_update_for_which_there_is_no_room_says_what_to_do(disk, full_disk):
    folder = ExchangeFolder("mine", parent=disk)
    full_disk(1 << 16)
    with pytest.raises(AstraflowError, match=r"--shm-size .* TMPDIR") as caught:
        async with folder.file(update_of(1 << 20)):
            pass
    full_disk(None)
    assert caught.value.reason is Reason.CAPACITY_EXCEEDED
    assert {path.suffix for path in folder.path.iterdir()} == {""}
    folder.close()
