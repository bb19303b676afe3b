"""Memory that is lent, and what a source that died leaves behind."""

import os
import resource
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import LaneKind
from astraflow.transport.groups import Transfers
from astraflow.transport.shm import (
    HOST_NAME,
    SOCKET_NAME,
    ArenaPool,
    ShmHost,
    is_same_host,
    remove_stale,
)
from astraflow.transport.sockets import is_this_machine
from astraflow.wire.transfers import LaneEndpoint


def test_an_arena_is_lent_again_once_its_transfer_is_over():
    pool = ArenaPool()
    first = pool.take(1000)
    second = pool.take(1000)
    assert second.descriptor != first.descriptor
    payload = second.payload(0, 10)
    del first, second

    third = pool.take(900)
    os.pwrite(third.descriptor, b"a" * 10, 0)
    assert os.fstat(third.descriptor).st_size == 1000
    assert bytes(payload) == bytes(10)


def test_what_was_taken_out_of_a_large_arena_is_memory_of_the_system_again():
    arena = ArenaPool().take(65 << 20)
    os.pwrite(arena.descriptor, b"a" * (1 << 20), 64)
    held = os.fstat(arena.descriptor).st_blocks

    assert bytes(arena.payload(64, 1 << 20)) == b"a" * (1 << 20)
    # The pages at both ends may hold another's bytes.
    assert os.fstat(arena.descriptor).st_blocks <= held - (1 << 20) // 512 + 2 * 8


def test_memory_that_the_system_does_not_give_is_a_typed_error():
    pool = ArenaPool()
    with pytest.raises(AstraflowError) as caught:
        pool.take(1 << 62)
    assert caught.value.reason is Reason.LANE_UNAVAILABLE
    assert pool.take(1000).nbytes == 1000


@pytest.fixture
def small_files():
    """Files, of which shared memory is one, may have 1 MiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("others", [[LaneKind.TCP], []])
async def test_where_there_is_no_shared_memory_another_lane_brings_the_version(
    tools, serve, open_lanes, small_files, is_warm, others
):
    source = await serve(lanes=[LaneKind.SHM, *others])
    lanes = open_lanes(LaneKind.SHM, *others)
    if is_warm:
        assert len(await tools.pulled(lanes, source)) == len(source.chunks)
    source.chunks = [tools.chunk_of(index, 300_000) for index in range(8)]

    pulled = await tools.pulled(lanes, source)

    assert [bytes(pulled[n].payload) for n in range(8)] == [each.payload for each in source.chunks]


def test_an_arena_cannot_be_taken_away_under_its_reader():
    arena = ArenaPool().take(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.descriptor, 0)
    with pytest.raises(AstraflowError, match="outside"):
        arena.payload(4000, 97)


def memory_files():
    """Return the inodes of the memory that this process has open as files."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        # The listing's own descriptor is gone already.
        with suppress(FileNotFoundError):
            if "memfd:" in str(path.readlink()):
                found.add(path.stat().st_ino)
    return found


async def test_memory_of_the_last_version_is_used_for_the_next(tools, serve, open_lanes):
    source, lanes = await serve(lanes=[LaneKind.SHM]), open_lanes(LaneKind.SHM)
    for _ in range(3):
        assert len(await tools.pulled(lanes, source)) == len(source.chunks)
    before = memory_files()
    for _ in range(3):
        await tools.pulled(lanes, source)

    assert memory_files() <= before


async def test_the_directory_names_this_host_and_goes_with_the_source(serve):
    source = await serve(lanes=[LaneKind.SHM])
    (place,) = source.hosts.endpoints

    assert is_same_host(place.address)
    await source.hosts.close()
    assert not is_same_host(place.address)


def test_a_place_whose_name_is_a_pipe_or_huge_is_not_waited_for(tmp_path):
    for name in ("pipe", "huge"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / HOST_NAME)
    with (tmp_path / "huge" / HOST_NAME).open("wb") as file:
        file.truncate(1 << 40)
    assert not is_same_host(str(tmp_path / "pipe"))
    assert not is_same_host(str(tmp_path / "huge"))


async def test_places_that_cannot_be_are_lanes_that_cannot_be_reached(tools, serve, open_lanes):
    source, lanes = await serve(lanes=[]), open_lanes(LaneKind.SHM, LaneKind.TCP)
    source.hosts.endpoints = [
        LaneEndpoint(lane=LaneKind.SHM, address="\0"),
        LaneEndpoint(lane=LaneKind.TCP, address="a..b:1"),
    ]

    assert len(await tools.pulled(lanes, source)) == len(source.chunks)
    assert not await is_this_machine("a..b")


async def test_a_source_that_starts_is_not_taken_for_a_dead_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    class Interrupted(ShmHost):
        def listen(self, listener):
            remove_stale(tmp_path)
            super().listen(listener)

    host = Interrupted(Transfers(open=None, secrets=list))
    address = host.start()
    remove_stale(tmp_path)

    assert is_same_host(address)
    await host.close()


async def test_a_directory_whose_path_is_too_long_is_an_error_that_says_so(tmp_path, monkeypatch):
    long = tmp_path / ("a" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    host = ShmHost(Transfers(open=None, secrets=list))

    with pytest.raises(AstraflowError, match="too long"):
        host.start()
    await host.close()


def test_what_a_dead_source_left_is_removed_and_a_live_one_stays(tmp_path):
    for name in ("dead", "live"):
        (tmp_path / f"astraflow-lane-{name}").mkdir()
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as live:
        dead.bind(str(tmp_path / "astraflow-lane-dead" / SOCKET_NAME))
        live.bind(str(tmp_path / "astraflow-lane-live" / SOCKET_NAME))
        live.listen()
        remove_stale(tmp_path)

    assert [each.name for each in tmp_path.iterdir()] == ["astraflow-lane-live"]
