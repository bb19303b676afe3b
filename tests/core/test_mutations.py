"""Code that decides otherwise is refused at the first record where it does.

One run is recorded in a real journal; each test changes one rule of the state machine as a bug, or
another release, would, and replays the journal.
"""

import asyncio
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from math import floor
from random import Random

import pytest

from astraflow.core.algorithms import advantages
from astraflow.core.batches import BatchOutcome
from astraflow.core.effects import Decision, Effects
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.evals import EvalAccumulator
from astraflow.core.events import TaskNacked
from astraflow.core.groups import SampleGroup
from astraflow.core.ids import IdGenerator
from astraflow.core.policy.accounting import Books
from astraflow.core.policy.admission import PolicyProgress
from astraflow.core.policy.buffers import FreshBuffer, ReplayBuffer
from astraflow.core.policy.leases import Lease, LeaseTable
from astraflow.core.policy.sample_flow import SampleFlow
from astraflow.core.rollouts import Outcome
from astraflow.core.run import Run
from astraflow.core.settings import ReplaySettings
from astraflow.core.versions import VersionLedger, VersionState
from astraflow.core.work import scheduler
from astraflow.core.work.batching import Batching
from astraflow.core.work.eval_work import EvalWork
from astraflow.dataflow.recovery import replay
from astraflow.storage.snapshot import SnapshotFile
from astraflow.storage.sqlite import SqliteJournal
from astraflow.wire.journal import RunOpened, read_record, record_bytes, with_decision

ENGINE = Failure(reason=Reason.ENGINE_FAILED, message="broken")
_EVENT_COUNT = 900


@dataclass
class Recorded:
    """A run: its journal, its records, and what begins it again."""

    journal: SqliteJournal
    records: list
    begin: object


@pytest.fixture(scope="module")
def recorded(make_world, suite, tmp_path_factory):
    world = make_world(
        policies=("solver", "verifier"),
        group_size=4,
        groups_per_batch=3,
        max_staleness=2,
        suites=(suite(policies=("solver", "verifier"), repeats=3, every=2),),
        serving={"replay": ReplaySettings(ratio=0.4, max_uses=3, max_staleness=3)},
        max_failed_groups=10_000,
        max_attempts=2,
        keeps_together=False,
    )
    start = world.clock.now()
    opened = RunOpened(run_id="r", settings_digest=b"", data_set_sizes={}, software="this one")
    records = [record_bytes(opened, start)]
    apply = world.run.apply

    def recording(event, now, *, goes_on):
        decision = apply(event, now, goes_on=goes_on)
        record = record_bytes(event, now, goes_on=goes_on)
        # As the replay reads it, not as a test wrote it.
        records.append(with_decision(record, decision.digest))
        return decision

    world.run.apply = recording
    _live(world, Random(3), records)
    journal = SqliteJournal.open(tmp_path_factory.mktemp("mutations") / "journal.sqlite")
    asyncio.run(journal.append(records))
    return Recorded(journal, records, lambda _, time: Run(world.settings, start_time=time))


def _live(world, chance, records):
    """Have members do what members do, in an order of chance."""
    trainers = {policy: world.register(policy) for policy in world.policies}
    for policy, trainer in trainers.items():
        world.publish(trainer, policy)
        world.open_stream(trainer, max_outstanding=2)
    nodes = []

    def join():
        node = world.join(f"node{len(records)}", credit=chance.choice([6, 9, 13]))
        nodes.append(node)
        for policy in world.policies:
            world.report(node, len(world.run.versions(policy)) - 1, policy)

    def work(node):
        tasks = world.tasks.get(node)
        if not tasks:
            return
        task = tasks.pop(chance.randrange(len(tasks)))
        if chance.random() < 0.05:
            world.apply(TaskNacked(member_id=node, task_id=task.task_id, failure=ENGINE))
            return
        broken = [i for i in task.sample_indexes if chance.random() < 0.1]
        for index in task.sample_indexes:
            if index not in broken:
                world.clock.advance(chance.random() * 3)
                rare = chance.random() < 0.2
                outcome = Outcome.TRUNCATED if rare else Outcome.SCORED
                world.send(node, task, index, reward=chance.random(), outcome=outcome)
        world.finish(node, task, failures=[(index, ENGINE) for index in broken])

    def update(node):
        for policy in world.policies:
            newest = len(world.run.versions(policy)) - 1
            state = VersionState.FAILED if chance.random() < 0.1 else VersionState.LIVE
            world.report(node, newest, policy, state)

    def train(policy):
        held = world.batches.get((trainers[policy], 0))
        if not held:
            return
        header, _ = held.pop(0)
        how = chance.random()
        if how < 0.08:
            world.ack(trainers[policy], header.batch_id, BatchOutcome.RETURNED)
        elif how < 0.12:
            world.ack(trainers[policy], header.batch_id, BatchOutcome.DISCARDED)
        else:
            step = world.policy(policy).step + 1
            world.publish(trainers[policy], policy, step=step)
            world.ack(trainers[policy], header.batch_id, step=step)

    def come_again(policy):
        held = world.batches.pop((trainers[policy], 0), [])
        world.leave(trainers[policy])
        trainers[policy] = world.register(policy)
        # A late ack counts while nobody else has its rows.
        for header, _ in held:
            world.ack(trainers[policy], header.batch_id)
        world.open_stream(trainers[policy], max_outstanding=2)

    for _ in range(3):
        join()
    while len(records) < _EVENT_COUNT:
        dice = chance.random()
        # Who is gone may not speak: that changes nothing.
        with suppress(AstraflowError):
            if dice < 0.45:
                work(chance.choice(nodes))
            elif dice < 0.6:
                update(chance.choice(nodes))
            elif dice < 0.9:
                train(chance.choice(world.policies))
            elif dice < 0.93:
                world.tick(chance.random() * 20)
            elif dice < 0.95 and len(nodes) > 2:
                world.leave(nodes.pop(chance.randrange(len(nodes))))
            elif dice < 0.98 and len(nodes) < 5:
                join()
            elif dice >= 0.98:
                come_again(chance.choice(world.policies))


def swapped(monkeypatch, rule, other):
    """Have another rule in the place of one, wherever it is used."""
    function = rule.fget if isinstance(rule, property) else rule
    owner, _, name = function.__qualname__.rpartition(".")
    if owner:
        kind = getattr(sys.modules[function.__module__], owner)
        monkeypatch.setattr(kind, name, property(other) if isinstance(rule, property) else other)
        return
    for module in [m for n, m in sys.modules.items() if n.startswith("astraflow.core")]:
        for known, value in list(vars(module).items()):
            if value is rule:
                monkeypatch.setattr(module, known, other)


def less_free(capacity):
    return lambda member: replace(capacity(member), free=max(0, capacity(member).free - 1))


def without(kind):
    """Effects of a kind are dropped."""
    take = Effects.take

    def fewer(self):
        return tuple(each for each in take(self) if type(each).__name__ != kind)

    return fewer


def shifted(rule, change):
    """A rule that returns a number returns another one."""
    function = rule.fget if isinstance(rule, property) else rule
    return lambda *args, **values: function(*args, **values) + change


def backwards(rule):
    function = rule.fget if isinstance(rule, property) else rule
    return lambda *args, **values: type(function(*args, **values))(
        reversed(function(*args, **values))
    )


def _no_count(self, source, reason, count=1, *, by=""):
    del self, source, reason, count, by


def _all_scored(self, rewards):
    CLOSE(self, [1.0 for _ in rewards])


MUTATIONS = {
    "dispatch: batches are not sent": (Effects.take, without("SendBatch")),
    "dispatch: rollouts are not recorded": (Effects.take, without("RecordRollout")),
    "dispatch: versions are not announced": (Effects.take, without("AnnounceVersion")),
    "dispatch: effects the other way round": (Effects.take, backwards(Effects.take)),
    "placement: one less is free": (
        scheduler.training_capacity,
        less_free(scheduler.training_capacity),
    ),
    "placement: who is behind keeps up": (scheduler.keeps_up, lambda *_: True),
    "placement: evaluations get one less": (
        scheduler.eval_capacity,
        lambda member, share: replace(
            EVAL_CAPACITY(member, share), free=max(0, floor(EVAL_CAPACITY(member, share).free - 1))
        ),
    ),
    "batching: one group less": (
        Batching._ready_count,
        lambda self, policy: max(0, READY_COUNT(self, policy) - 1),
    ),
    "batching: the buffer gives its last first": (FreshBuffer.take, backwards(FreshBuffer.take)),
    "batching: advantages without a mean": (
        advantages._baseline,
        lambda rewards, baseline: rewards * 0,
    ),
    "staleness: one version less": (
        PolicyProgress.min_version,
        shifted(PolicyProgress.min_version, 1),
    ),
    "staleness: pruned one version late": (
        FreshBuffer.prune,
        lambda self, train_version: PRUNE(self, train_version - 1),
    ),
    "staleness: a batch more may be open": (
        SampleFlow.open_limit,
        lambda self: OPEN_LIMIT(self) + self.fresh_per_batch,
    ),
    "leases: one batch at a time": (
        LeaseTable.has_capacity,
        lambda self: HAS_CAPACITY(self) and not self.leases,
    ),
    "leases: lost ones are forgotten": (
        LeaseTable.lose,
        lambda self, lease: self.leases.pop(lease.batch_id) and None,
    ),
    "leases: rows in other parts": (
        Lease.deliver,
        lambda self, rank, *, world_size, max_tokens: DELIVER(
            self, rank, world_size=world_size, max_tokens=max_tokens + 1
        ),
    ),
    "replay: one group less": (ReplayBuffer.target, shifted(ReplayBuffer.target, -1)),
    "replay: the others come again": (ReplayBuffer._eligible, backwards(ReplayBuffer._eligible)),
    "replay: too old by one": (
        ReplayBuffer.prune,
        lambda self, version: PRUNE_OLD(self, version + 2),
    ),
    "evaluation: all are correct": (EvalAccumulator.close, _all_scored),
    "evaluation: one repeat less": (EvalWork.next_size, shifted(EvalWork.next_size, -1)),
    "versions: shown before their time": (
        VersionLedger.show,
        lambda self, version: SHOW(self, version + 1),
    ),
    "versions: the newest is the one before": (
        VersionLedger.newest_version,
        shifted(VersionLedger.newest_version, -1),
    ),
    "accounting: an attempt counts double": (
        SampleGroup.fail,
        lambda self, index, failure, *, max_attempts, is_counted: FAIL(
            self, index, failure, max_attempts=max_attempts - 1, is_counted=is_counted
        ),
    ),
    "accounting: drops are not counted": (Books.drop, _no_count),
    "accounting: moves count one less": (
        Books.move,
        lambda self, source, target, count=1: MOVE(self, source, target, count - 1),
    ),
    "accounting: open groups off by one": (
        SampleFlow.has_slot,
        lambda self: self.open_count + 1 < self.open_limit,
    ),
    "accounting: samples handed out the other way": (
        SampleGroup.unissued,
        backwards(SampleGroup.unissued),
    ),
    "accounting: ids skip one": (IdGenerator.next, lambda self, kind: NEXT(self, kind) + "0"),
}
EVAL_CAPACITY, PRUNE, DELIVER = scheduler.eval_capacity, FreshBuffer.prune, Lease.deliver
PRUNE_OLD, SHOW, FAIL = ReplayBuffer.prune, VersionLedger.show, SampleGroup.fail
MOVE, NEXT, READY_COUNT = Books.move, IdGenerator.next, Batching._ready_count
CLOSE, HAS_CAPACITY = EvalAccumulator.close, LeaseTable.has_capacity.fget
OPEN_LIMIT = SampleFlow.open_limit.fget


def test_the_same_code_replays_it_whole(recorded, tmp_path):
    replica = asyncio.run(replay(recorded.journal, SnapshotFile(tmp_path / "none"), recorded.begin))
    assert replica.position == len(recorded.records)


@pytest.mark.parametrize("name", MUTATIONS)
def test_code_that_decides_otherwise_is_refused_at_the_first_record(
    recorded, tmp_path, monkeypatch, name
):
    swapped(monkeypatch, *MUTATIONS[name])
    with pytest.raises(AstraflowError) as caught:
        asyncio.run(replay(recorded.journal, SnapshotFile(tmp_path / "none"), recorded.begin))
    error = caught.value
    assert error.reason is Reason.JOURNAL_FAILED
    assert "this one, which wrote it" in error.message
    assert int(error.metadata["position"]) == _first_other(recorded)


def _first_other(recorded):
    """Return the first record that is decided otherwise now, found without a replica."""
    run = recorded.begin(None, read_record(recorded.records[0]).time)
    for position, data in enumerate(recorded.records[1:], 1):
        record = read_record(data)
        try:
            decision: Decision = run.apply(record.entry, record.time, goes_on=record.goes_on)
        except Exception:  # noqa: BLE001 - what a mutation raises is of any kind
            return position
        if decision.digest != record.decision:
            return position
    return len(recorded.records)
