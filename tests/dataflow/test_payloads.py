"""What the hub removes of the payload store, and what never."""

import asyncio
from contextlib import suppress
from itertools import chain

import pytest

from astraflow.client.loop_thread import HostLoop
from astraflow.client.payloads import MARKER, PayloadWriter, lost_rollout_ids
from astraflow.client.rank import RankClient
from astraflow.client.trainer import TrainerClient
from astraflow.config.recipe import TrainerConfig
from astraflow.core.batches import BatchOutcome, StreamBatches
from astraflow.core.clock import ManualClock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.members import Contract, RegisterTrainer
from astraflow.core.rollouts import PayloadStore, TaskResult
from astraflow.core.versions import WeightEndpoint
from astraflow.dataflow.payloads import PayloadCleaner
from astraflow.rpc.concurrency import beside
from astraflow.storage.buckets import Bucket
from astraflow.trainers.loop import FailedSteps
from astraflow.wire.tasks import decode_rollout_task
from made_up import made_up_version

pytest.importorskip("fsspec")


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture(params=["file", "memory"])
async def cleaner(request, tmp_path, clock):
    folder = tmp_path if request.param == "file" else f"cleaner{tmp_path}"
    store = PayloadStore(url=f"{request.param}://{folder}/run", above_nbytes=1)
    cleaner = PayloadCleaner(store, clock=clock, unnamed_s=60)
    await cleaner.open()
    return cleaner


@pytest.fixture
def bucket(cleaner):
    bucket = Bucket(cleaner.store.url)
    for name in "abc":
        bucket.write(name, b"1")
    return bucket


async def test_what_nobody_names_for_long_is_removed_and_what_is_named_never(
    cleaner, bucket, clock
):
    await cleaner.sweep(lambda: {"a"})
    clock.advance(59)
    bucket.write("late", b"1")
    await cleaner.sweep(lambda: {"a"})
    assert bucket.names() == sorted(["a", "b", "c", "late", MARKER])
    # A node that was cut off for a minute names it after all.
    clock.advance(1)
    await cleaner.sweep(lambda: {"a", "b"})
    assert bucket.names() == sorted(["a", "b", "late", MARKER])
    clock.advance(600)
    await cleaner.sweep(lambda: {"a", "b"})
    assert bucket.names() == sorted(["a", "b", MARKER])
    assert cleaner.removed_count == 2


async def test_a_hub_that_comes_back_counts_from_then(cleaner, bucket, clock):
    await cleaner.sweep(set)
    clock.advance(600)
    again = PayloadCleaner(cleaner.store, clock=clock, unnamed_s=60)
    await again.sweep(set)
    assert "a" in bucket.names()
    clock.advance(60)
    await again.sweep(set)
    assert bucket.names() == [MARKER]


async def test_what_is_released_is_removed_at_once(cleaner, bucket):
    async with beside(cleaner.run(lambda: {"c"})):
        cleaner.release(["a", "never", "b"])
        names = []
        while names != ["c", MARKER]:
            await asyncio.sleep(0)
            # fsspec's memory cannot be listed in the moment in which a thread removes from it.
            with suppress(AstraflowError):
                names = bucket.names()


async def test_what_a_run_leaves_is_removed_at_its_end(cleaner, bucket):
    await cleaner.clear()
    assert bucket.names() == []
    await cleaner.clear()


class TwoRanks:
    """A trainer of two ranks, its calls off the loop."""

    def __init__(self, address, loop):
        register = RegisterTrainer(
            policy_id="solver",
            name="trainer",
            contract=Contract(),
            groups_per_batch=2,
            weight_endpoints=(WeightEndpoint(rank=0, endpoint="127.0.0.1:1"),),
        )
        self.lead = TrainerClient(hub=address, token="join", register=register, loop=loop)
        self.rank = None
        self._address, self._loop = address, loop

    def enter(self):
        self.lead.__enter__()
        self.lead.publish_version(made_up_version("solver", 0))
        tokens = []
        self.lead.on_session(lambda session: tokens.append(session.token))
        share = StreamBatches(rank=1, world_size=2)
        self.rank = RankClient(
            hub=self._address, loop=self._loop, session_token=tokens[0], share=share
        )
        self.rank.__enter__()
        self.batches = self.lead.batches(world_size=2)

    def take(self):
        """Return both shares of the next batch; an error in the place of one."""
        batch = next(self.batches)
        try:
            return batch, self.rank.take(batch.header.batch_id)
        except AstraflowError as error:
            return batch, error
        finally:
            self.rank.release(batch.header.batch_id)

    def settle(self, batch, *, step):
        self.lead.publish_version(made_up_version("solver", step, step=step))
        self.lead.ack(batch.header.batch_id, BatchOutcome.CONSUMED, step=step)

    def leave(self):
        self.batches.close()
        self.rank.__exit__()
        self.lead.close()


async def test_each_rank_reads_its_rows_and_returns_a_batch_that_it_cannot_read(
    start_hub, recipe_of, tmp_path
):
    store = {"url": f"file://{tmp_path}/store", "above_nbytes": 0}
    recipe = recipe_of(rollouts__payloads=store, policies__solver__trainer__max_staleness=2)
    async with start_hub(recipe) as hub:
        ranks = TwoRanks(hub.address, HostLoop())
        await asyncio.to_thread(ranks.enter)
        raas, writer = hub.raas(live={"solver": 0}), PayloadWriter(hub.hub.payloads.store)
        await raas.join()
        await raas.report_version("solver", 0)
        tasks, rollouts = await raas.open_tasks(), await raas.open_rollouts()
        sent = []
        for _ in range(6):
            task = decode_rollout_task((await tasks.read()).task)
            sent.append([await writer.put(each) for each in raas.samples(task)])
            result = TaskResult(task_id=task.task_id, rollout_count=2)
            await raas.send_all(rollouts, [*sent[-1], result])
        # Of the second batch, in the share of rank 1.
        lost = sent[2][1]
        Bucket(hub.hub.payloads.store.url).remove(name_of(lost))
        first, other = await asyncio.to_thread(ranks.take)
        shares = [part.rollout_ids for share in (first, other) for part in share.parts]
        assert sorted(name for names in shares for name in names) == sorted(
            each.rollout_id for group in sent[:2] for each in group
        )
        for share in (first, other):
            assert all(part.values("tokens").tolist() == [0, 1, 2, 3] * 2 for part in share.parts)
        await asyncio.to_thread(ranks.settle, first, step=1)
        second, error = await asyncio.to_thread(ranks.take)
        assert (error.reason, lost_rollout_ids(error)) == (Reason.PAYLOAD_LOST, (lost.rollout_id,))
        # As the training loop does where all ranks agree that a step failed.
        ack = FailedSteps(TrainerConfig()).let_go(second, error, step=1)
        assert ack.outcome is BatchOutcome.RETURNED
        ranks.lead.ack_later(ack)
        third, rest = await asyncio.to_thread(ranks.take)
        names = [part.rollout_ids for share in (third, rest) for part in share.parts]
        left = [sent[2][0], *sent[3]]
        assert sorted(chain(*names)) == sorted(each.rollout_id for each in left)
        await asyncio.to_thread(ranks.leave)


def name_of(rollout):
    (trajectory,) = rollout.trajectories
    return trajectory.payload.name
