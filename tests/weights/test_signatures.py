"""A stored version proves who registered it: what nobody of the run signed is never live."""

from dataclasses import replace

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import SourceInfo, SourceKind, SourceState
from astraflow.launch.weights import verify_stored
from astraflow.weights.disk.copy import DiskCopy
from astraflow.weights.fetch.object_lane import stored_version
from astraflow.weights.fetch.puller import PullFailed, WeightPuller
from astraflow.weights.patches.layouts import Shard
from astraflow.weights.patches.patch import make_patch
from astraflow.weights.publish.object_store import ObjectWriter
from astraflow.weights.publish.publisher import WeightPublisher, combined
from astraflow.wire.signatures import PatchSigner, require_signed
from astraflow.wire.versions import read_manifest, write_manifest

SEED, OTHER = b"s" * 32, b"o" * 32


@pytest.fixture
def training(training):
    training.publisher.sign_with(SEED)
    return training


@pytest.fixture
async def puller(training):
    puller = WeightPuller(training.policy_id)
    yield puller
    await puller.close()


class Bucket:
    """Versions of a training in a folder that somebody else can write to."""

    def __init__(self, training, folder):
        pytest.importorskip("fsspec")
        self.training, self.root = training, folder / training.policy_id
        self.announced = []
        self.writer = ObjectWriter(training.publisher, f"file://{folder}", self.announced.append)

    def publish(self):
        info = self.training.publish()
        self.writer.wake()
        assert self.writer.sync()
        uri = f"{self.writer.url}/{info.version}"
        source = SourceInfo(kind=SourceKind.OBJECT_STORE, state=SourceState.LIVE, uri=uri)
        sources = (source, *self.training.infos[info.version].sources)
        self.training.infos[info.version] = replace(info, sources=sources)
        return self.training.infos[info.version]

    def forge(self, version, change):
        """Put another manifest in the place of a version's, of patches that were changed."""
        path = self.root / str(version) / "manifest"
        manifest = read_manifest(path.read_bytes())
        patches = tuple(
            replace(each, index=replace(each.index, patch=change(each.index.patch)))
            for each in manifest.patches
        )
        reachable = tuple(map(change, manifest.reachable))
        path.write_bytes(write_manifest(replace(manifest, patches=patches, reachable=reachable)))


@pytest.fixture
def bucket(training, tmp_path):
    return Bucket(training, tmp_path / "bucket")


def test_every_patch_of_a_version_is_signed_by_the_key_of_the_run(training):
    training.publish()
    info = training.publish()
    assert info.signing_key == PatchSigner(SEED).public_key
    whole = make_patch(training.publisher.history, None, 1).info
    for patch in (*info.patches, whole):
        require_signed(info, patch)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"base_version": None},
        {"root_digest": b"r" * 32},
        {"chunk_count": 1000},
        {"payload_nbytes": 1},
        {"shard_count": 2},
        {"codec_version": 9},
        {"signature": b""},
        {"signature": b"x" * 64},
    ],
)
def test_a_signature_is_of_all_that_a_patch_says(training, change):
    training.publish()
    info = training.publish()
    (patch,) = info.patches
    with pytest.raises(AstraflowError) as caught:
        require_signed(info, replace(patch, **change))
    assert caught.value.reason is Reason.SIGNATURE_INVALID
    other_layout = replace(info, layout_digest=b"l" * 32)
    with pytest.raises(AstraflowError):
        require_signed(other_layout, patch)


def test_a_publisher_without_a_key_signs_nothing(training):
    publisher = WeightPublisher(training.policy_id, training.layout)
    publisher.sign_with(b"")
    info = publisher.publish(0, training.tensors)
    assert (info.signing_key, info.patches[0].signature) == (b"", b"")
    require_signed(info, info.patches[0])


def test_one_key_is_for_all_versions_of_a_publisher(training):
    training.publish()
    training.publisher.sign_with(OTHER)
    assert training.publish().signing_key == PatchSigner(SEED).public_key


async def test_a_signed_version_is_pulled_from_a_bucket(bucket, puller, tools):
    tensors = None
    for _ in range(3):
        info = bucket.publish()
        pulled = await puller.pull(info, bucket.training.infos, b"")
        tensors = tools.live(pulled.update, tensors)
        assert bucket.training.is_live(tensors)


def unsigned(patch):
    return replace(patch, signature=b"")


def by_another(patch):
    return PatchSigner(OTHER).signed(patch, b"l" * 32)


@pytest.mark.parametrize("change", [unsigned, by_another])
async def test_what_nobody_of_the_run_signed_is_refused_and_its_bucket_named(
    bucket, puller, change
):
    bucket.publish()
    await puller.pull(bucket.training.infos[0], bucket.training.infos, b"")
    info = bucket.publish()
    bucket.forge(1, change)
    with pytest.raises(PullFailed) as caught:
        await puller.pull(info, bucket.training.infos, b"")
    assert caught.value.reason is Reason.SIGNATURE_INVALID
    (report,) = caught.value.reports
    assert (report.address, report.bad_chunk_count) == (f"{bucket.writer.url}/1", 1)
    assert puller.version == 0


async def test_who_finds_a_forged_bucket_takes_the_version_from_elsewhere(
    bucket, serve, puller, tools
):
    source = await serve()
    info = bucket.publish()
    bucket.forge(0, by_another)
    pulled = await puller.pull(info, bucket.training.infos, bucket.training.token)
    assert bucket.training.is_live(tools.live(pulled.update))
    lied = {report.address: report.bad_chunk_count for report in pulled.reports}
    assert lied == {f"{bucket.writer.url}/0": 1, source.address: 0}


async def test_a_live_source_of_an_earlier_release_leaves_signatures_out(
    training, serve, puller, tools
):
    source = await serve()

    def stripped(plan):
        for each in plan.patches:
            each.patch.signature = b""
        return plan

    source.spoil_plan = stripped
    info = training.publish()
    pulled = await puller.pull(info, training.infos, training.token)
    assert training.is_live(tools.live(pulled.update))
    assert [each.bad_chunk_count for each in pulled.reports] == [0]


async def test_a_live_source_with_another_signature_lies(training, serve, puller):
    source = await serve()

    def forged(plan):
        for each in plan.patches:
            each.patch.signature = b"x" * 64
        return plan

    source.spoil_plan = forged
    info = training.publish()
    with pytest.raises(PullFailed) as caught:
        await puller.pull(info, training.infos, training.token)
    assert caught.value.reason is Reason.SIGNATURE_INVALID
    assert [each.bad_chunk_count for each in caught.value.reports] == [1]


def test_a_rank_announces_no_shard_that_somebody_else_put_into_the_bucket(training, tmp_path):
    pytest.importorskip("fsspec")
    folder, announced = tmp_path / "bucket", []
    writers, infos = [], []
    for rank, seed in enumerate((SEED, OTHER)):
        shard = Shard(rank=rank, count=2)
        publisher = WeightPublisher(training.policy_id, training.layout, shard=shard)
        publisher.sign_with(seed)
        announce = None if rank else announced.append
        writers.append(ObjectWriter(publisher, f"file://{folder}", announce))
        infos.append(publisher.publish(0, training.tensors))
    with pytest.raises(AstraflowError):
        combined(infos)
    for writer in reversed(writers):
        writer.wake()
        writer.sync()
    assert not announced
    assert writers[0].failure_count == 1


class Node:
    """A puller with a copy on disk; another one takes its place."""

    def __init__(self, training, folder):
        self.training, self.folder = training, folder
        self.copy = DiskCopy.open(folder, max_steps=8)
        self.puller = WeightPuller(training.policy_id, copy=self.copy)

    async def pull(self, listed):
        infos = {version: self.training.infos[version] for version in listed}
        pulled = await self.puller.pull(infos[max(infos)], infos, self.training.token)
        await self.puller.flush()
        return pulled.update.base_version

    async def replaced(self):
        await self.puller.close()
        return Node(self.training, self.folder)


async def test_a_copy_that_the_run_no_longer_lists_proves_itself(training, serve, tmp_path):
    await serve()
    node = Node(training, tmp_path / "cache")
    for version in range(2):
        training.publish()
        await node.pull(range(version + 1))
    training.publish()
    node = await node.replaced()
    assert await node.pull([2]) == 1
    await node.puller.close()


async def test_a_copy_that_nobody_signed_is_not_built_on(training, serve, tmp_path):
    await serve()
    node = Node(training, tmp_path / "cache")
    for version in range(2):
        training.publish()
        await node.pull(range(version + 1))
    training.publish()
    training.add(make_patch(training.publisher.history, None, 2))
    others = PatchSigner(OTHER).public_key
    training.infos[2] = replace(training.infos[2], signing_key=others)
    node = await node.replaced()
    with pytest.raises(PullFailed) as caught:
        await node.pull([2])
    # It starts from nothing: the copy is none, and what the source signed is another key's.
    assert caught.value.reason is Reason.SIGNATURE_INVALID
    assert node.puller.version is None
    await node.puller.close()


def test_a_stored_version_is_verified_without_the_hub(bucket):
    bucket.publish()
    bucket.publish()
    key = PatchSigner(SEED).public_key
    for version in (0, 1):
        found = stored_version(f"{bucket.writer.url}/{version}", key)
        assert (found.version, found.policy_id) == (version, bucket.training.policy_id)
    with pytest.raises(AstraflowError) as caught:
        stored_version(f"{bucket.writer.url}/1", PatchSigner(OTHER).public_key)
    assert caught.value.reason is Reason.SIGNATURE_INVALID
    assert bucket.writer.url in caught.value.message


def test_a_stored_version_with_other_bytes_is_refused(bucket):
    bucket.publish()
    key, uri = PatchSigner(SEED).public_key, f"{bucket.writer.url}/0"
    (path,) = bucket.root.glob("0/*.patch")
    content = path.read_bytes()
    for spoiled in (content[:-1], content[:-1] + b"\xff"):
        path.write_bytes(spoiled)
        with pytest.raises(AstraflowError) as caught:
            stored_version(uri, key)
        assert caught.value.reason is Reason.DIGEST_MISMATCH
    path.unlink()
    with pytest.raises(AstraflowError) as caught:
        stored_version(uri, key)
    assert caught.value.reason is Reason.VERSION_EVICTED
    with pytest.raises(AstraflowError):
        stored_version(f"{bucket.writer.url}/9", key)


async def test_the_command_verifies_a_stored_version(bucket, capsys):
    bucket.publish()
    key = PatchSigner(SEED).public_key.hex()
    await verify_stored(f"{bucket.writer.url}/0", key=key, as_json=False)
    assert "all signed by a trainer of the run" in " ".join(capsys.readouterr().out.split())
    for wrong in ("", "xyz", key[2:]):
        with pytest.raises(AstraflowError) as caught:
            await verify_stored(f"{bucket.writer.url}/0", key=wrong, as_json=False)
        assert caught.value.reason is Reason.INVALID_FIELD
