"""What a node keeps on disk: who takes its place goes on from there, or from nothing."""

from dataclasses import replace

import numpy as np
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import CodecProfile
from astraflow.weights.disk import copy as disk_copy
from astraflow.weights.disk.copy import DiskCopy
from astraflow.weights.disk.files import RECORD, Record, read_patch
from astraflow.weights.fetch.holding import is_registered
from astraflow.weights.fetch.puller import PullFailed, WeightPuller
from astraflow.weights.patches.patch import make_patch
from astraflow.weights.serve.relay import WeightRelay

MAX_STEPS = 4


class Nodes:
    """Pullers of one training, one after the other, in one folder; each as good as killed."""

    def __init__(self, training, source, folder, tools):
        self.training, self.source, self.folder, self.tools = training, source, folder, tools
        self.copy = self.puller = None
        self.tensors = None
        self.options = {"max_steps": MAX_STEPS}

    def start(self, **settings):
        """Begin anew; what the one before had not written is lost."""
        if self.copy is not None:
            self.copy._thread.shutdown(cancel_futures=True)
            self.copy._writer.close()
            self.copy._lock.release()
        self.copy = DiskCopy.open(self.folder, **self.options)
        self.puller = WeightPuller(self.training.policy_id, copy=self.copy, **settings)
        self.tensors = None

    async def pull(self, *, is_settled=True):
        infos = self.training.infos
        pulled = await self.puller.pull(infos[max(infos)], infos, self.training.token)
        update = pulled.update
        if self.tensors is None and update.base_version is not None:
            update = self.puller.full_update()
        self.tensors = self.tools.live(update, self.tensors)
        assert self.training.is_live(self.tensors)
        if is_settled:
            await self.puller.flush()
        return pulled

    @property
    def files(self):
        return {each.name for each in (self.folder / "0").iterdir()}


@pytest.fixture
async def nodes(training, serve, tmp_path, tools):
    nodes = Nodes(training, await serve(), tmp_path / "cache", tools)
    nodes.start()
    yield nodes
    await nodes.puller.close()


async def follow(nodes, count):
    for _ in range(count):
        nodes.training.publish()
        await nodes.pull()


async def test_who_takes_the_place_of_a_killed_node_needs_a_patch(nodes):
    await follow(nodes, 3)
    nodes.start()
    nodes.training.publish()
    pulled = await nodes.pull()
    assert pulled.update.base_version == 2
    assert pulled.nbytes == nodes.training.infos[3].patches[0].payload_nbytes


async def test_the_newest_version_on_disk_costs_nothing(nodes):
    await follow(nodes, 2)
    relay = WeightRelay()
    nodes.start(relay=relay)
    assert (await nodes.pull()).nbytes == 0
    assert relay.frame.digest == nodes.training.store.frame.digest


async def test_bits_whose_state_digest_was_forged_are_not_taken_from_disk(nodes, training):
    await follow(nodes, 1)
    held = nodes.puller._holding.state
    flat = held.flat.copy()
    assert is_registered(held, training.infos[0])
    flat[5] ^= 1
    # Whoever forges it keeps the two sums as they were.
    assert not is_registered(replace(held, flat=flat), training.infos[0])


async def test_a_version_costs_the_disk_its_patch_until_the_state_is_shorter(nodes, training):
    await follow(nodes, 2)
    patches = [each.info for each in training.store.patches]
    kept = {f"{each.root_digest.hex()}.patch" for each in patches}
    assert nodes.files == {"lock", "layout", "record", *kept}
    await follow(nodes, MAX_STEPS)
    assert any(each.startswith("base-") for each in nodes.files)
    nodes.start()
    training.publish()
    assert (await nodes.pull()).update.base_version == MAX_STEPS + 1


async def test_a_copy_of_a_version_is_whole_while_later_ones_are_written_over_it(
    nodes, monkeypatch
):
    monkeypatch.setattr(disk_copy, "_BLOCK_NBYTES", 1024)
    nodes.options = {"max_steps": 99}
    nodes.start()
    await follow(nodes, 2)
    with nodes.copy._snapshots.copying() as held:
        expected = held.flat.copy()
        blocks = nodes.copy._snapshots.blocks()
        parts = []
        for _ in range(5):
            await follow(nodes, 1)
            parts.append(next(blocks))
        assert (np.concatenate([*parts, *blocks]) == expected).all()
    await nodes.puller.flush()
    assert not (nodes.puller._holding.state.flat == expected).all()


async def test_a_cold_join_goes_on_where_it_was_killed(nodes, training, tools):
    training.publish()
    nodes.source.cuts = [3, 0]
    with pytest.raises(PullFailed):
        await nodes.pull()
    await nodes.puller.flush()
    nodes.source.requests.clear()
    nodes.start()
    await nodes.pull()
    (have,) = nodes.source.requests[0].have_chunks
    assert [len(each) for each in have.indexes] == [3]
    nodes.start()
    assert (await nodes.pull()).nbytes == 0


@pytest.mark.parametrize("name", ["layout", "record", "newest", "oldest", "base"])
@pytest.mark.parametrize("how", ["cut", "flip", "gone", "empty"])
async def test_no_damage_to_the_files_reaches_the_weights(nodes, training, name, how):
    await follow(nodes, 3 if name != "base" else MAX_STEPS + 3)
    folder = nodes.folder / "0"
    record = Record.from_bytes((folder / RECORD).read_bytes())
    path = {
        "newest": folder / f"{record.patches[-1].root_digest.hex()}.patch",
        "oldest": folder / f"{record.patches[0].root_digest.hex()}.patch",
        "base": folder / f"base-{record.base and record.base.version}",
    }.get(name, folder / name)
    content = bytearray(path.read_bytes())
    nodes.start()
    if how == "gone":
        path.unlink()
    elif how == "flip":
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    else:
        path.write_bytes(content[: len(content) // 2 if how == "cut" else 0])
    training.publish()
    pulled = await nodes.pull()
    version = max(training.infos)
    assert pulled.update.base_version == (version - 2 if name == "newest" else None)
    await follow(nodes, 1)
    nodes.start()
    training.publish()
    assert (await nodes.pull()).update.base_version == version + 1


async def test_a_copy_of_another_run_is_not_taken(nodes, tools, serve, tmp_path):
    await follow(nodes, 2)
    other = tools.training(seed=5)
    source = await serve(other.store)
    for _ in range(2):
        other.publish()
    other.infos = {
        version: replace(info, sources=tools.sources([source.address]))
        for version, info in other.infos.items()
    }
    nodes.training = other
    nodes.start()
    assert (await nodes.pull()).update.base_version is None
    nodes.start()
    assert (await nodes.pull()).nbytes == 0


async def test_a_full_disk_costs_the_copy_and_no_version(nodes, training, full_disk):
    await follow(nodes, 2)
    full_disk(8 << 10)
    training.publish(share=0.4, is_noise=True)
    await nodes.pull()
    full_disk(None)
    assert nodes.copy.failure_count > 0
    nodes.start()
    training.publish()
    assert (await nodes.pull()).update.base_version in (1, 2)


async def test_a_state_that_cannot_be_written_keeps_no_changes_in_memory(nodes, training):
    await follow(nodes, 1)
    # The file of a state cannot be opened, as on a disk without room for one more.
    for version in range(20):
        (nodes.folder / "0" / f"base-{version}.part").mkdir()
    failures = nodes.copy.failure_count
    nodes.copy._waiting_nbytes = 1 << 40
    await follow(nodes, 1)
    nodes.copy._waiting_nbytes = 0
    await follow(nodes, 3)
    assert nodes.copy.failure_count > failures
    assert not nodes.copy._snapshots._changes


async def test_chunks_of_which_nothing_but_their_bits_is_left_are_not_written(nodes, training):
    training.publish()
    compact = make_patch(training.publisher.history, None, 0, profile=CodecProfile.COMPACT)
    training.add(compact)
    nodes.source.cuts = [3, 0]
    nodes.copy._waiting_nbytes = 1 << 40
    with pytest.raises(PullFailed):
        await nodes.pull()
    nodes.copy._waiting_nbytes = 0
    await nodes.pull()
    nodes.source.requests.clear()
    nodes.start()
    await nodes.pull()
    assert not nodes.source.requests


async def test_versions_that_change_nothing_are_a_copy_like_others(nodes, training):
    await follow(nodes, 2)
    for _ in range(2):
        training.publish(share=0.0)
        await nodes.pull()
    first, second = (training.infos[version].patches[0] for version in (2, 3))
    assert first.root_digest == second.root_digest
    nodes.source.requests.clear()
    nodes.start()
    await nodes.pull()
    assert not nodes.source.requests


async def test_two_nodes_of_one_host_have_a_place_each(nodes, tmp_path):
    other = DiskCopy.open(nodes.folder)
    assert other.folder != nodes.copy.folder
    other.close()


def test_a_folder_that_cannot_be_written_is_an_error_that_says_so(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(AstraflowError) as caught:
        DiskCopy.open(tmp_path / "cache")
    assert caught.value.reason is Reason.CAPABILITY_MISSING


def test_a_file_that_is_none_holds_no_patch(tmp_path):
    path = tmp_path / f"{bytes(32).hex()}.patch"
    assert read_patch(path) is None
    for content in (b"", b"afpatch1", b"\xff\xff\xff\xffpatch", b"x" * 100):
        path.write_bytes(content)
        assert read_patch(path) is None


async def test_a_backlog_that_has_no_room_has_the_state_written_instead(nodes, training):
    await follow(nodes, 2)
    nodes.copy._waiting_nbytes = 1 << 40
    training.publish()
    await nodes.pull(is_settled=False)
    nodes.copy._waiting_nbytes = 0
    await nodes.puller.flush()
    assert "base-2" in nodes.files
    nodes.start()
    assert (await nodes.pull()).nbytes == 0
