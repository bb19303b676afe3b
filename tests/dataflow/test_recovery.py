"""A hub that ends at any point goes on where its journal ends."""

import asyncio
import json
import os
import sqlite3
import threading
from contextlib import suppress
from dataclasses import replace
from pkgutil import resolve_name

import pytest
from grpc import StatusCode, aio
from grpc.aio import AioRpcError

from astraflow import __version__
from astraflow.config.run_dir import RunDir
from astraflow.core.clock import ManualClock
from astraflow.core.errors import TEMPORARY_EXIT, AstraflowError, Reason
from astraflow.core.events import PromptsOffered, Ticked
from astraflow.core.ids import IdGenerator
from astraflow.core.members import SessionResume
from astraflow.core.rollouts import Disposition
from astraflow.core.run import Run
from astraflow.core.status import RunState
from astraflow.core.work.scheduler import training_capacity
from astraflow.dataflow.compaction import compact, write_snapshot_of
from astraflow.dataflow.journals import open_journal
from astraflow.dataflow.servicers import Recovery
from astraflow.launch.ledger import read_ledger
from astraflow.rpc.channel import dial
from astraflow.rpc.errors import raised_from
from astraflow.rpc.server import start_server
from astraflow.wire.rollout import encode_rollout
from astraflow.wire.tasks import decode_rollout_task
from astraflow_proto.control.v1.ledger_service_pb2 import GetLedgerRequest
from astraflow_proto.control.v1.ledger_service_pb2_grpc import LedgerServiceStub
from astraflow_proto.dataflow.v1 import raas_service_pb2
from astraflow_proto.dataflow.v1.raas_service_pb2_grpc import RaasServiceStub


async def test_a_run_goes_on_in_another_hub(start_hub, recipe_of):
    recipe = recipe_of()
    async with start_hub(recipe) as hub:
        trainer, raas, task = await hub.begin()
        before, run_id = await hub.books(), hub.hub.status().run_id
    async with start_hub(recipe) as hub:
        assert hub.hub.status().run_id == run_id
        assert await hub.books() == before
        await must_go_on(hub, trainer, raas, task)


async def must_go_on(hub, trainer, raas, task):
    """See a run through with the members that it had before, and look at what came of it."""
    again = hub.raas(live={"solver": 0})
    resume = SessionResume(resume_token=raas.token, incarnation=1, held_task_ids=())
    membership = await again.join(resume)
    assert membership.session.member_id == raas.member_id
    sample = again.sample(task, task.sample_indexes[0])
    ack = await again.send(await again.open_rollouts(), sample)
    assert ack.disposition is Disposition.DUPLICATE
    trained = hub.trainer()
    trained.token, trained.next_version = trainer.token, 1
    await asyncio.gather(again.work(), trained.train())
    status = await hub.serving
    assert status.state is RunState.DONE
    assert json.loads(hub.run_dir.status.read_text())["books"][0]["trained_count"] == 12
    ledger = await read_ledger(hub.run_dir)
    assert ledger.holds
    assert ledger.counts["batches_trained"] == 3


async def test_a_run_that_ended_goes_on_for_more_steps(start_hub, recipe_of):
    longer = recipe_of(
        policies__solver__trainer={"groups_per_batch": 2, "max_staleness": 1, "step_count": 5}
    )
    async with start_hub(recipe_of()) as hub:
        assert await see_through(hub, step=0) is RunState.DONE
    with pytest.raises(ExceptionGroup) as caught:
        async with start_hub(recipe_of(), reopens=True):
            pass
    error = caught.value.exceptions[0]
    assert isinstance(error, AstraflowError)
    assert error.reason is Reason.RUN_ENDED
    async with start_hub(longer, reopens=True) as hub:
        trainer, raas = hub.trainer(step=3, until=lambda: True), hub.raas()
        await trainer.register(last_step=3)
        await raas.join()
        working = asyncio.create_task(raas.work())
        await trainer.work()
        working.cancel()
        await raas.leave()
        before = await hub.books()
    # What is replayed has both numbers of steps.
    async with start_hub(longer) as hub:
        assert await hub.books() == before
        assert await see_through(hub, step=4) is RunState.DONE
    assert json.loads(hub.run_dir.status.read_text())["books"][0]["trained_count"] == 20
    ledger = await read_ledger(hub.run_dir)
    assert ledger.holds
    assert ledger.counts["batches_trained"] == 5


async def see_through(hub, *, step):
    """Train and work until the run is over; return how it ended."""
    trainer, raas = hub.trainer(step=step), hub.raas()
    await trainer.register(last_step=step)
    await raas.join()
    await asyncio.gather(trainer.work(), raas.work())
    return (await hub.serving).state


async def test_callers_are_answered_while_the_lines_of_a_long_run_are_read(start_hub, recipe_of):
    """Those of 100 MB took ten seconds of the event loop."""
    async with start_hub(recipe_of()) as hub:
        await hub.begin()
        metrics = hub.run_dir.metrics
    os.mkfifo(metrics)
    loop, is_answered = asyncio.get_running_loop(), threading.Event()

    def feed():
        # Opens once they are read.
        with metrics.open("w"):
            loop.call_soon_threadsafe(is_answered.set)
            return is_answered.wait(10)

    fed = asyncio.create_task(asyncio.to_thread(feed))
    async with start_hub(recipe_of()):
        assert await fed


async def test_callers_are_answered_while_a_long_journal_is_opened(tmp_path, recipe_of):
    """They are so long as the loop has turns; a hub that is stopped meanwhile lets go of it."""
    turns = []

    async def turn():
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    await asyncio.sleep(0)
    before = len(turns)
    opening = asyncio.create_task(open_journal(recipe_of(), RunDir(tmp_path)))
    journal = await opening
    assert len(turns) - before > 2
    await journal.close()
    opening = asyncio.create_task(open_journal(recipe_of(), RunDir(tmp_path)))
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    await (await open_journal(recipe_of(), RunDir(tmp_path))).close()
    turning.cancel()


async def test_who_is_silent_is_found_by_a_hub_whose_clock_was_set_back(start_hub, recipe_of):
    later, clock = ManualClock(), ManualClock()
    later.advance(86_400)
    async with start_hub(recipe_of(), clock=later) as hub:
        await hub.trainer().register()
    async with start_hub(recipe_of(), clock=clock) as hub:
        clock.advance(61)
        hub.hub.apply(Ticked())
        # The session of the first one is over.
        await hub.trainer().register()
        assert hub.hub.now() > later.now()


async def test_a_node_must_resume_before_it_speaks(start_hub, recipe_of, reason_of):
    recipe = recipe_of()
    async with start_hub(recipe) as hub:
        _, raas, task = await hub.begin(answered=False)
    async with start_hub(recipe) as hub:
        again = hub.raas()
        again.token = raas.token
        assert await reason_of(again.report_version("solver", 0)) is Reason.SESSION_ENDED
        await again.join(SessionResume(resume_token=raas.token, incarnation=1))
        tasks = await again.open_tasks()
        sent = decode_rollout_task((await tasks.read()).task)
        assert sent == task


async def test_a_snapshot_takes_the_place_of_records(start_hub, recipe_of):
    recipe = recipe_of()
    async with start_hub(recipe) as hub:
        await hub.begin()
        before = await hub.books()
        end = hub.hub.commits.ticket
    await write_snapshot_of(hub.run_dir, end)
    with sqlite3.connect(hub.run_dir.journal) as database:
        database.execute("DELETE FROM records WHERE position < ?", (end,))
        database.execute("UPDATE bounds SET first = ?", (end,))
    database.close()
    async with start_hub(recipe) as hub:
        assert await hub.books() == before
    assert (await read_ledger(hub.run_dir)).holds


@pytest.mark.slow
async def test_the_hub_compacts_as_records_come(start_hub, recipe_of):
    recipe = recipe_of(
        hub__journal={"compact_nbytes": 1 << 16},
        policies__solver__trainer__step_count=1_000_000,
        rows=4000,
    )
    async with start_hub(recipe) as hub:
        trainer, raas = hub.trainer(until=hub.run_dir.snapshot.exists), hub.raas()
        await trainer.register()
        await raas.join()
        working = asyncio.create_task(raas.work())
        await trainer.work()
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working
        # Nothing that these two said later counts.
        await raas.leave()
        await hub.hub.commits.passed()
        before = hub.hub.run.accounts()
    async with start_hub(recipe) as hub:
        assert hub.hub.run.accounts() == before


async def test_repetitions_are_counted_and_take_hardly_any_room(start_hub, recipe_of):
    async with start_hub(recipe_of()) as hub:
        _, raas, task = await hub.begin(answered=False)
        rollouts = await raas.open_rollouts()
        await raas.answer(rollouts, task)
        await hub.hub.commits.passed()
        before = hub.hub.commits.nbytes
        again = raas.samples(task) * 20
        stray = [raas.sample(replace(task, group_id="of-another-run", task_id="x"), 0)]
        acks = await raas.send_all(rollouts, again + stray)
        assert {ack.disposition for ack in acks[:-1]} == {Disposition.DUPLICATE}
        assert acks[-1].disposition is Disposition.REJECTED
        assert hub.hub.commits.nbytes - before < 200 * len(acks)
        assert (await hub.books()).duplicate_count == len(again)
    async with start_hub(recipe_of()) as hub:
        assert (await hub.books()).duplicate_count == len(again)


async def test_another_recipe_is_refused(start_hub, recipe_of):
    async with start_hub(recipe_of()) as hub:
        await hub.begin()
    with pytest.raises(ExceptionGroup) as caught:
        async with start_hub(recipe_of(seed=5)):
            pass
    error = caught.value.exceptions[0]
    assert isinstance(error, AstraflowError)
    assert error.reason is Reason.JOURNAL_FAILED
    assert "was set up otherwise" in error.message


async def test_a_run_without_a_journal_begins_anew(start_hub, recipe_of):
    recipe = recipe_of(hub__journal={"kind": "none"})
    async with start_hub(recipe) as hub:
        await hub.begin()
        assert (await hub.books()).issued_count
    async with start_hub(recipe) as hub:
        assert not (await hub.books()).issued_count
    assert not hub.run_dir.journal.exists()


async def test_a_journal_that_fails_stops_the_hub_and_no_ack_leaves(start_hub, recipe_of):
    recipe = recipe_of()
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - it ends while it serves
        async with start_hub(recipe) as hub:
            _, raas, task = await hub.begin(answered=False)
            with sqlite3.connect(hub.run_dir.journal) as database:
                database.execute("DROP TABLE records")
            database.close()
            stub = RaasServiceStub(hub.channel)
            call = stub.StreamRollouts(metadata=raas.metadata)
            item = encode_rollout(raas.sample(task, task.sample_indexes[0]))
            request = raas_service_pb2.StreamRolloutsRequest()
            request.items.add().rollout.CopyFrom(item)
            await call.write(request)
            await asyncio.wait([hub.serving])
            assert hub.run_dir.status.exists()
    error = caught.value.exceptions[0]
    assert isinstance(error, AstraflowError)
    assert error.reason is Reason.JOURNAL_FAILED
    assert "nothing that was acknowledged is lost" in error.message


async def test_a_run_that_fails_to_decide_ends_its_hub_and_goes_on_in_another(
    start_hub, recipe_of, monkeypatch
):
    recipe = recipe_of()
    deciding = Run.apply

    def fails(run, event, now, **options):
        deciding(run, event, now, **options)
        monkeypatch.undo()
        # Nobody takes what was decided.
        raise MemoryError("of the test")

    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - it ends while it serves
        async with start_hub(recipe) as hub:
            _, raas, task = await hub.begin(answered=False)
            before = await hub.books()
            stream = await raas.open_rollouts()
            monkeypatch.setattr(Run, "apply", fails)
            with pytest.raises(AioRpcError) as refused:
                await raas.answer(stream, task)
            assert raised_from(refused.value).retryable
            await asyncio.wait([hub.serving])
    error = caught.value.exceptions[0]
    assert isinstance(error, AstraflowError)
    assert error.exit_code == TEMPORARY_EXIT
    async with start_hub(recipe) as hub:
        assert await hub.books() == before
        again = hub.raas(live={"solver": 0})
        resume = SessionResume(
            resume_token=raas.token, incarnation=1, held_task_ids=(task.task_id,)
        )
        await again.join(resume)
        await again.answer(await again.open_rollouts(), task)
        assert (await hub.books()).fresh_count == len(task.sample_indexes)


async def test_a_run_that_fails_to_decide_what_nobody_asked_for_ends_its_hub_as_well(
    start_hub, recipe_of, monkeypatch
):
    deciding = Run.apply

    def fails(run, event, now, **options):
        if isinstance(event, PromptsOffered):
            raise MemoryError("of the test")  # noqa: TRY004 - the event is as it should be
        return deciding(run, event, now, **options)

    monkeypatch.setattr(Run, "apply", fails)
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - it ends while it serves
        async with start_hub(recipe_of()) as hub:
            with suppress(AioRpcError, AstraflowError):
                await hub.begin()
            await asyncio.wait([hub.serving])
    error = caught.value.exceptions[0]
    assert isinstance(error, AstraflowError)
    assert error.exit_code == TEMPORARY_EXIT


@pytest.mark.parametrize(
    ("where", "mutated"),
    [
        (
            "astraflow.core.work.scheduler.training_capacity",
            lambda old: lambda member: replace(old(member), free=1),
        ),
        (
            "astraflow.core.ids.IdGenerator.next",
            lambda issue: lambda self, kind: issue(self, kind) + "0",
        ),
    ],
    ids=["capacity", "id"],
)
async def test_a_journal_is_not_gone_on_with_by_code_that_decides_otherwise(
    start_hub, recipe_of, monkeypatch, where, mutated
):
    """Each changes who gets what, and would lose what was acknowledged without a word."""
    recipe = recipe_of()
    async with start_hub(recipe) as hub:
        await hub.begin()
    owner, _, name = where.rpartition(".")
    monkeypatch.setattr(f"{owner}.{name}", mutated(getattr(resolve_name(owner), name)))
    with pytest.raises(BaseExceptionGroup) as caught:
        async with start_hub(recipe):
            pass
    [error] = leaves(caught.value)
    assert error.reason is Reason.JOURNAL_FAILED
    assert "something else is decided here" in error.message
    assert f"release {__version__}" in error.message


async def test_another_release_goes_on_from_a_snapshot(start_hub, recipe_of, monkeypatch):
    """One upgrade of a live run: other code trains on what was acknowledged."""
    recipe = recipe_of()
    async with start_hub(recipe) as hub:
        trainer, raas, task = await hub.begin()
        before = await hub.books()
    assert await compact(hub.run_dir)
    free, issue = training_capacity, IdGenerator.next
    monkeypatch.setattr(
        "astraflow.core.work.scheduler.training_capacity",
        lambda member: replace(free(member), free=min(free(member).free, 2)),
    )
    monkeypatch.setattr(IdGenerator, "next", lambda self, kind: issue(self, kind) + "b")
    monkeypatch.setattr("astraflow.dataflow.server.__version__", "another")
    async with start_hub(recipe) as hub:
        assert await hub.books() == before
        await must_go_on(hub, trainer, raas, task)


async def test_a_journal_is_compacted_only_while_no_hub_has_it(start_hub, recipe_of):
    async with start_hub(recipe_of()) as hub:
        await hub.begin()
        with pytest.raises(AstraflowError, match="held by another process"):
            await compact(hub.run_dir)


async def test_a_caller_waits_for_a_hub_that_recovers():
    """It is answered with how far the hub is, and goes on when the hub serves."""
    recovery = Recovery()
    recovery.note(0.4)
    async with await start_server(recovery.servicers) as server, dial(server.address) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await LedgerServiceStub(channel).GetLedger(GetLedgerRequest())
    error = raised_from(caught.value)
    assert caught.value.code() is StatusCode.UNAVAILABLE
    assert (error.reason, error.retryable) == (Reason.NOT_READY, True)
    assert error.message == "the hub is recovering, 40 %"
    assert error.metadata["recovered_percent"] == "40"


def leaves(group):
    """The errors that a group is of."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error


async def test_runs_of_one_recipe_that_begin_at_once_are_told_apart(serve_in, recipe_of, tmp_path):
    recipe, clock = recipe_of(), ManualClock()
    async with (
        serve_in(tmp_path / "first", recipe, clock=clock) as first,
        serve_in(tmp_path / "second", recipe, clock=clock) as second,
    ):
        # Stores that they share have a folder of this name for each.
        assert first.hub.status().run_id != second.hub.status().run_id
