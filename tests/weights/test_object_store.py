"""Versions by way of a shared directory: from one process to another that cannot reach it."""

import asyncio
import os
import shutil
import threading
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, Layout
from astraflow.core.versions import CodecProfile, SourceInfo, SourceKind, SourceState
from astraflow.weights.disk.copy import DiskCopy
from astraflow.weights.fetch.object_lane import ObjectLane
from astraflow.weights.fetch.puller import PullFailed, WeightPuller
from astraflow.weights.patches.layouts import Shard
from astraflow.weights.patches.patch import PatchName, make_patch
from astraflow.weights.publish.background import candidate_patches
from astraflow.weights.publish.object_store import ObjectWriter
from astraflow.weights.publish.publisher import WeightPublisher, combined
from astraflow.wire.transfers import TransferSpec
from astraflow.wire.versions import read_manifest

fsspec = pytest.importorskip("fsspec")
MemoryFileSystem = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem


class Stored:
    """A training whose versions go to a directory; nothing of it can be dialled."""

    def __init__(self, training, folder):
        self.training, self.folder = training, folder
        self.url = f"file://{folder}"
        self.told = {}
        self.writer = ObjectWriter(training.publisher, self.url, self.announce)

    @property
    def root(self):
        return self.folder / self.training.policy_id

    def announce(self, info):
        self.told[info.version] = info
        known = self.training.infos[info.version]
        patches = tuple(dict.fromkeys((*known.patches, *info.patches)))
        sources = tuple(dict.fromkeys((*known.sources, *info.sources)))
        self.training.infos[info.version] = replace(known, patches=patches, sources=sources)

    def publish(self, **moved):
        version = self.training.publish(**moved).version
        self.writer.wake()
        return version

    def gain(self):
        for make in candidate_patches(
            self.training.publisher, self.training.publisher.version, (2, 4)
        ):
            patch = make()
            if patch is not None:
                self.training.add(patch)

    async def pull(self, puller, version=None):
        infos = self.training.infos
        return await puller.pull(infos[max(infos) if version is None else version], infos, b"")


@pytest.fixture
def stored(training, tmp_path):
    return Stored(training, tmp_path / "bucket")


@pytest.fixture
async def puller(training):
    puller = WeightPuller(training.policy_id)
    yield puller
    await puller.close()


async def test_who_reaches_the_store_alone_follows_every_version(stored, puller, tools):
    tensors = None
    for version in range(5):
        stored.publish()
        assert stored.writer.sync()
        pulled = await stored.pull(puller)
        assert pulled.update.base_version == (version - 1 if version else None)
        tensors = tools.live(pulled.update, tensors)
        assert stored.training.is_live(tensors)
        assert [each.address for each in pulled.reports] == [f"{stored.url}/solver/{version}"]


async def test_one_patch_over_several_versions_is_read_where_it_is_smaller(stored, puller, tools):
    stored.publish()
    stored.writer.sync()
    tensors = tools.live((await stored.pull(puller)).update)
    for _ in range(4):
        stored.publish()
        stored.writer.sync()
    stored.gain()
    assert stored.writer.sync()
    pulled = await stored.pull(puller)
    infos = [each for each in stored.training.infos[4].patches if each.base_version == 0]
    assert pulled.nbytes == min(each.payload_nbytes for each in infos)
    assert stored.training.is_live(tools.live(pulled.update, tensors))


async def test_what_was_read_before_a_failure_is_not_read_again(stored, puller, tools):
    stored.publish()
    stored.writer.sync()
    (path,) = stored.root.glob("0/*.patch")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(PullFailed) as caught:
        await stored.pull(puller)
    assert caught.value.reason is Reason.SOURCE_UNREACHABLE
    path.write_bytes(content)
    pulled = await stored.pull(puller)
    assert stored.training.is_live(tools.live(pulled.update))


async def test_wrong_bytes_are_refused_and_what_is_held_stays(stored, puller):
    stored.publish()
    stored.writer.sync()
    await stored.pull(puller)
    stored.publish()
    stored.writer.sync()
    (path,) = stored.root.glob("1/*.patch")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(PullFailed) as caught:
        await stored.pull(puller)
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    assert caught.value.reports[0].bad_chunk_count == 1
    assert puller.version == 0


@pytest.mark.parametrize("spoil", [lambda c: c[:-1], lambda c: c[:7], lambda c: b"x" + c[1:]])
async def test_a_torn_manifest_is_a_typed_error(stored, puller, spoil):
    stored.publish()
    stored.writer.sync()
    manifest = stored.root / "0" / "manifest"
    manifest.write_bytes(spoil(manifest.read_bytes()))
    with pytest.raises(PullFailed) as caught:
        await stored.pull(puller)
    assert caught.value.reason is Reason.CHUNK_INVALID


async def test_of_a_layout_that_is_too_large_to_be_one_no_more_is_read(stored, puller):
    stored.publish()
    stored.writer.sync()
    (layout,) = stored.root.glob("layout-*")
    os.truncate(layout, 256 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(PullFailed):
            await stored.pull(puller)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 192 << 20


async def test_a_version_without_its_manifest_is_not_there(stored, puller):
    stored.publish()
    stored.writer.sync()
    (stored.root / "0" / "manifest").unlink()
    with pytest.raises(PullFailed) as caught:
        await stored.pull(puller)
    assert caught.value.reason is Reason.VERSION_EVICTED


def test_a_version_is_announced_once_its_manifest_lies_there(stored):
    stored.publish()
    assert stored.told == {}

    def announce(info):
        manifest = read_manifest((stored.root / "0" / "manifest").read_bytes())
        names = {f"{each.index.patch.root_digest.hex()}.patch" for each in manifest.patches}
        assert {path.name for path in (stored.root / "0").iterdir()} == {*names, "manifest"}
        stored.told[info.version] = info

    stored.writer._announce = announce
    assert stored.writer.sync()
    uri = f"{stored.url}/solver/0"
    source = SourceInfo(kind=SourceKind.OBJECT_STORE, state=SourceState.LIVE, uri=uri)
    assert stored.told[0].sources == (source,)


def test_old_versions_go_one_version_after_the_publisher_forgot_them(tools, tmp_path):
    stored = Stored(tools.training(keep_patches=2), tmp_path)
    for _ in range(8):
        stored.publish()
        stored.gain()
        assert stored.writer.sync()
    folders = sorted(int(each.name) for each in stored.root.iterdir() if each.is_dir())
    assert folders == [4, 5, 6, 7]


async def test_a_store_that_cannot_be_written_is_made_good_at_the_next_version(
    stored, puller, tools
):
    stored.publish()
    stored.writer.sync()
    tensors = tools.live((await stored.pull(puller)).update)
    shutil.move(stored.root, stored.folder / "away")
    stored.root.write_text("a file where the folder was")
    stored.publish()
    assert not stored.writer.sync()
    assert stored.writer.failure_count == 1
    assert 1 not in stored.told
    stored.root.unlink()
    shutil.move(stored.folder / "away", stored.root)
    stored.publish()
    assert stored.writer.sync()
    assert {1, 2} <= stored.told.keys()
    pulled = await stored.pull(puller)
    assert pulled.update.base_version == 0
    assert stored.training.is_live(tools.live(pulled.update, tensors))


def test_a_store_that_failed_is_tried_again_though_no_version_follows(stored):
    # Who reaches the store alone waits for this one, and the trainer for what they would sample.
    stored.root.parent.mkdir()
    stored.root.write_text("a file where the folder should be")
    with stored.writer:
        stored.publish()
        while not stored.writer.failure_count:
            time.sleep(0.01)
        stored.root.unlink()
        for _ in range(6000):
            if stored.told:
                break
            time.sleep(0.01)
        assert 0 in stored.told


class Hanging(MemoryFileSystem):
    """A store that accepts calls, and answers none while it is shut."""

    protocol = "smb"
    opened = threading.Event()

    def ls(self, path, detail=True, **options):
        self.opened.wait()
        return super().ls(path, detail, **options)

    def cat_file(self, path, start=None, end=None, **options):
        self.opened.wait()
        return super().cat_file(path, start, end, **options)


@pytest.fixture
def hanging_store():
    fsspec.register_implementation("smb", Hanging, clobber=True)
    yield "smb://store/run/solver"
    Hanging.opened.set()


async def test_a_store_that_hangs_keeps_no_thread_from_other_work(hanging_store):
    lane = ObjectLane(stall_timeout_s=0.01)
    spec = TransferSpec(policy_id="solver", version=1, base_version=None, layout_digest=b"")
    for _ in range(40):
        with pytest.raises(AstraflowError) as caught:
            await anext(lane.pull(f"{hanging_store}/1", spec, b""))
        assert caught.value.reason is Reason.SOURCE_TIMEOUT
    async with asyncio.timeout(60):
        assert await asyncio.to_thread(lambda: "free") == "free"
    assert not Hanging.opened.is_set()


async def test_what_another_process_has_left_is_removed(stored, tools, puller):
    for _ in range(3):
        stored.publish()
        stored.writer.sync()
    again = Stored(tools.training(seed=1), stored.folder)
    again.publish()
    assert again.writer.sync()
    assert [each.name for each in again.root.iterdir() if each.is_dir()] == ["0"]
    pulled = await again.pull(puller)
    assert again.training.is_live(tools.live(pulled.update))


async def test_the_origin_is_left_alone_where_only_the_store_counts(stored, serve, tools):
    source = await serve()
    puller = WeightPuller(stored.training.policy_id, kinds=[SourceKind.OBJECT_STORE])
    stored.publish()
    with pytest.raises(PullFailed) as caught:
        await stored.pull(puller)
    assert caught.value.reason is Reason.SOURCE_UNREACHABLE
    stored.writer.sync()
    pulled = await stored.pull(puller)
    assert stored.training.is_live(tools.live(pulled.update))
    assert source.requests == []
    await puller.close()


async def test_an_origin_out_of_reach_is_asked_after_the_store_the_next_time(stored, puller):
    stored.training.endpoints.append("127.0.0.1:1")
    stored.publish()
    stored.writer.sync()
    first = await stored.pull(puller)
    assert first.reports[0].address == "127.0.0.1:1"
    stored.publish()
    stored.writer.sync()
    second = await stored.pull(puller)
    assert [each.address for each in second.reports] == [f"{stored.url}/solver/1"]


async def test_large_tensors_are_read_in_several_blocks(tools, tmp_path, puller):
    layout = Layout.of([("w", Dtype.BF16, (9 << 20,)), ("v", Dtype.F32, (3,))])
    stored = Stored(tools.training(layout), tmp_path)
    stored.training.tensors["w"] = np.random.default_rng(0).integers(
        0, 1 << 16, 9 << 20, dtype=np.uint16
    )
    stored.training.publisher.publish(0, stored.training.tensors)
    stored.training.infos[0] = stored.training.publisher.info(0)
    infos = [each.info for each in stored.training.store.patches]
    stored.training.infos[0] = replace(stored.training.infos[0], patches=tuple(infos))
    stored.writer.wake()
    assert stored.writer.sync()
    pulled = await stored.pull(puller)
    assert stored.training.is_live(tools.live(pulled.update))


class Ranks:
    """A training of which each rank publishes and writes its own shard; rank 0 tells the run."""

    def __init__(self, training, folder, count):
        self.training = training
        self.publishers = [
            WeightPublisher(
                training.policy_id,
                training.layout,
                keep_patches=3,
                shard=Shard(rank=rank, count=count),
            )
            for rank in range(count)
        ]
        self.writers = [
            ObjectWriter(publisher, f"file://{folder}", None if rank else self.announce)
            for rank, publisher in enumerate(self.publishers)
        ]
        self.infos, self.told = {}, []

    def announce(self, info):
        known = self.infos[info.version]
        assert info.content_digest == known.content_digest
        self.infos[info.version] = replace(known, sources=info.sources)
        self.told.append(info.version)

    def publish(self, **moved):
        version = self.training.publish(**moved).version
        parts = [each.publish(version, self.training.tensors) for each in self.publishers]
        self.infos[version] = combined(parts)
        for writer in self.writers:
            writer.wake()

    async def pull(self, puller):
        return await puller.pull(self.infos[max(self.infos)], self.infos, b"")


@pytest.fixture
def ranks(training, tmp_path):
    return Ranks(training, tmp_path / "bucket", 3)


async def test_shards_of_several_ranks_make_a_version(ranks, tmp_path, tools):
    copied = WeightPuller("solver", copy=DiskCopy.open(tmp_path / "copy"))
    tensors = None
    for version in range(7):
        ranks.publish()
        for writer in ranks.writers[1:]:
            assert writer.sync()
        assert ranks.told == [*range(version)]
        assert ranks.writers[0].sync()
        pulled = await ranks.pull(copied)
        tensors = tools.live(pulled.update, tensors)
        assert ranks.training.is_live(tensors)
    assert ranks.told == [*range(7)]
    left = {int(each.name) for each in (tmp_path / "bucket" / "solver").glob("[0-9]*")}
    assert 6 in left
    assert 0 not in left
    await copied.flush()
    await copied.close()
    again = WeightPuller("solver", copy=DiskCopy.open(tmp_path / "copy"))
    ranks.publish()
    for writer in (*ranks.writers[1:], ranks.writers[0]):
        assert writer.sync()
    pulled = await ranks.pull(again)
    assert pulled.update.base_version == 6
    assert ranks.training.is_live(tools.live(pulled.update, tensors))
    await again.close()


async def test_a_version_that_one_rank_has_coded_compactly_too_is_had_from_all(
    ranks, puller, tools
):
    tensors = None
    for version in range(2):
        ranks.publish(share=0.5)
        if version:
            # As one does where its readers' links are slow.
            store, history = ranks.publishers[0].store, ranks.publishers[0].history
            compact = make_patch(history, 0, 1, profile=CodecProfile.COMPACT, is_kept=True)
            fast = store.find(PatchName(version=1, base_version=0, shard=store.frame.shard))
            assert compact.info.payload_nbytes < fast.info.payload_nbytes
            store.offer([compact])
        for writer in (*ranks.writers[1:], ranks.writers[0]):
            assert writer.sync()
        pulled = await ranks.pull(puller)
        tensors = tools.live(pulled.update, tensors)
    assert pulled.update.base_version == 0
    assert ranks.training.is_live(tensors)


async def test_a_version_is_told_once_the_last_rank_has_written_it(ranks, puller, tools):
    ranks.publish()
    with ranks.writers[0]:
        ranks.writers[0].wake()
        for writer in ranks.writers[1:]:
            assert writer.sync()
    assert ranks.told == [0]
    assert ranks.training.is_live(tools.live((await ranks.pull(puller)).update))


def test_a_rank_that_fails_writes_its_own_and_waits_for_no_other(ranks, tmp_path):
    ranks.publish()
    writer = ranks.writers[0]
    writer._last_s = 10.0
    writer.wake()
    with pytest.raises(ConnectionError), writer:
        raise ConnectionError
    assert not writer._thread.is_alive()
    assert [*tmp_path.glob("bucket/solver/0/manifest-*")] == [
        tmp_path / "bucket/solver/0/manifest-0-of-3"
    ]


@pytest.mark.parametrize("count", [1, 2])
async def test_what_another_number_of_ranks_has_left_is_removed(
    ranks, puller, tmp_path, tools, count
):
    # A run that heard of none of it gives its numbers again.
    before = Ranks(tools.training(seed=1), tmp_path / "bucket", count)
    for _ in range(2):
        before.publish()
        for writer in (*before.writers[1:], before.writers[0]):
            assert writer.sync()
    ranks.publish()
    for writer in (*ranks.writers[1:], ranks.writers[0]):
        assert writer.sync()
    pulled = await ranks.pull(puller)
    assert ranks.training.is_live(tools.live(pulled.update))
    left = [path for path in (tmp_path / "bucket/solver").glob("*/*") if path.is_file()]
    assert len(left) == 6
    assert {path.name.rpartition("-")[2] for path in left} == {"3"}


async def test_who_lacks_a_shard_refuses_the_version(ranks, puller, tmp_path):
    ranks.publish()
    for writer in (*ranks.writers[1:], ranks.writers[0]):
        writer.sync()
    (manifest,) = tmp_path.glob("bucket/solver/0/manifest-1-of-3")
    manifest.unlink()
    with pytest.raises(PullFailed) as caught:
        await ranks.pull(puller)
    assert caught.value.reason is Reason.VERSION_EVICTED
