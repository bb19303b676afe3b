"""Arrays on their way through a payload store that is a folder, and one in memory."""

import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from astraflow.client.payloads import MARKER, PayloadReader, PayloadWriter, lost_rollout_ids
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.packing import Share, laid_out
from astraflow.core.rollouts import Column, ColumnAxis, Outcome, PayloadStore, VersionSpan
from astraflow.core.samples import Row
from astraflow.storage.buckets import Bucket
from astraflow.wire.rollout import decode_rollout, encode_rollout
from made_up import made_up_rollout, made_up_trajectory

pytest.importorskip("fsspec")


@pytest.fixture(params=["file", "memory"])
def bucket(request, tmp_path):
    folder = tmp_path if request.param == "file" else f"payloads{tmp_path}"
    bucket = Bucket(f"{request.param}://{folder}/run")
    bucket.write(MARKER, b"")
    return bucket


@pytest.fixture
def writer(bucket):
    return PayloadWriter(PayloadStore(url=bucket.url, above_nbytes=100), patience_s=0.1)


def rollout(number, *lengths, outcome=Outcome.SCORED):
    spans = [VersionSpan(version=number, length=3)]
    routes = Column(axis=ColumnAxis.TOKEN, values=np.full((5, 2, 1), number, np.uint16))
    trajectories = [
        made_up_trajectory(f"r{number}/{index}", "solver", spans, prompt_count=length - 3)
        for index, length in enumerate(lengths)
    ]
    if lengths[0] == 5:
        trajectories[0] = replace(trajectories[0], columns={"routed_experts": routes})
    is_scored = outcome is Outcome.SCORED
    return made_up_rollout(
        *trajectories,
        rollout_id=f"r{number}",
        sample_index=number,
        outcome=outcome,
        reward=1.0 if is_scored else None,
        failure=None if is_scored else Failure(reason=Reason.ENGINE_FAILED),
    )


def share(*rollouts):
    rows = [
        Row(trajectory=each, rollout=one, reward=1.0, min_version=0, max_version=9, advantage=0.5)
        for one in rollouts
        for each in one.trajectories
    ]
    return tuple(Share("b", rows, max_tokens=0, group_indexes={"g": 0}))


async def read(bucket, parts):
    reader = PayloadReader(patience_s=0.1)
    return await reader.parts(bucket.url, parts, max_tokens=0)


async def test_large_trajectories_go_to_the_store_and_come_back_as_they_were(bucket, writer):
    before = [rollout(0, 40, 4), rollout(1, 5, 80), rollout(2, 4)]
    sent = [decode_rollout(encode_rollout(await writer.put(each))) for each in before]
    kept = [[each.payload is None for each in one.trajectories] for one in sent]
    assert kept == [[False, True], [True, False], [True]]
    assert len(bucket.names()) == 1 + 2
    (part,) = await read(bucket, share(*sent))
    part, (other,) = laid_out(part, ("solver",)), share(*before)
    other = laid_out(other, ("solver",))
    assert part.columns.keys() == other.columns.keys()
    for name in part.columns:
        np.testing.assert_array_equal(part.values(name), other.values(name))


async def test_what_the_run_does_not_keep_stays_out_of_the_store(bucket, writer):
    for outcome in (Outcome.RETURNED, Outcome.INFRA_ERROR, Outcome.CANCELLED):
        failed = rollout(0, 40, outcome=outcome)
        assert await writer.put(failed) is failed
    assert bucket.names() == [MARKER]


def remove(bucket, name):
    bucket.remove(name)


def cut(bucket, name):
    bucket.write(name, bucket.read(name)[:-1])


def lengthen(bucket, name):
    bucket.write(name, bucket.read(name) + b"1")


def flip(bucket, name):
    content = bytearray(bucket.read(name))
    content[len(content) // 2] ^= 1
    bucket.write(name, bytes(content))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove, "is missing"),
        (cut, "is not what its digest says"),
        (lengthen, "is not what its digest says"),
        (flip, "is not what its digest says"),
    ],
)
async def test_a_payload_that_is_lost_is_named_with_its_rollout(bucket, writer, damage, words):
    sent = [await writer.put(rollout(number, 40, 50)) for number in range(3)]
    for number in (0, 2):
        damage(bucket, sent[number].trajectories[0].payload.name)
    with pytest.raises(AstraflowError, match=f"trajectory r0/0: .*{words}") as caught:
        await read(bucket, share(*sent))
    assert caught.value.reason is Reason.PAYLOAD_LOST
    assert lost_rollout_ids(caught.value) == ("r0", "r2")


async def test_arrays_of_another_trajectory_are_no_payload(bucket, writer):
    sent = await writer.put(rollout(0, 40))
    (trajectory,) = sent.trajectories
    spans = (VersionSpan(version=0, length=2),)
    liar = replace(sent, trajectories=(rebuilt(trajectory, version_spans=spans),))
    with pytest.raises(AstraflowError, match="do not cover the sampled tokens") as caught:
        await read(bucket, share(liar))
    assert lost_rollout_ids(caught.value) == ("r0",)


@pytest.mark.parametrize("nbytes", [1 << 45, 2**63 - 1])
async def test_a_payload_that_is_said_to_be_huge_is_lost_and_no_more(bucket, writer, nbytes):
    sent = await writer.put(rollout(0, 40))
    (trajectory,) = sent.trajectories
    payload = replace(trajectory.payload, nbytes=nbytes)
    liar = replace(sent, trajectories=(rebuilt(trajectory, payload=payload),))
    with pytest.raises(AstraflowError) as caught:
        await read(bucket, share(liar))
    assert lost_rollout_ids(caught.value) == ("r0",)


def rebuilt(trajectory, **changes):
    nothing = np.empty(0)
    arrays = {"tokens": nothing, "sampled_mask": nothing, "logprobs": nothing, "columns": {}}
    return replace(trajectory, **arrays, **changes)


async def test_a_folder_that_is_not_the_hubs_is_no_store_and_loses_nothing(bucket, writer):
    sent = await writer.put(rollout(0, 40))
    bucket.remove("")
    for attempt in (writer.check, partial(read, bucket, share(sent))):
        with pytest.raises(AstraflowError, match="not the payload store that the hub") as caught:
            await attempt()
        assert caught.value.reason is Reason.SOURCE_UNREACHABLE


async def test_a_store_that_cannot_be_written_is_given_up_in_time():
    bucket = Bucket("memory://test_no_payloads")
    bucket.write("file", b"no folder")
    store = PayloadStore(url="memory://test_no_payloads/file", above_nbytes=0)
    with pytest.raises(AstraflowError) as caught:
        await PayloadWriter(store, patience_s=0.1).put(rollout(0, 40))
    assert caught.value.reason is Reason.SOURCE_UNREACHABLE


async def test_a_store_that_fails_now_and_then_is_borne(tmp_path):
    """What counts is the time without a success; each of many objects may need a second try."""

    class Unsteady(PayloadWriter):
        count = 0

        def _write(self, trajectory):
            self.count += 1
            if self.count % 2:
                shutil.rmtree(folder, ignore_errors=True)
                folder.write_text("no folder")
            else:
                folder.unlink()
            return super()._write(trajectory)

    folder = tmp_path / "run"
    store = PayloadStore(url=folder.as_uri(), above_nbytes=0)
    writer = Unsteady(store, patience_s=0.1)
    sent = await writer.put(rollout(0, *range(40, 52)))
    assert all(each.payload is not None for each in sent.trajectories)
