"""A hub whose journal is in PostgreSQL: another one goes on with its run."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from uuid import uuid4

import psycopg
import pytest
from grpc.aio import AioRpcError

from astraflow.client.control import ControlClient
from astraflow.config.loader import dump_recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import TEMPORARY_EXIT, AstraflowError
from astraflow.core.members import SessionResume
from astraflow.core.rollouts import Disposition
from astraflow.dataflow.compaction import write_snapshot_of
from astraflow.dataflow.main import JOIN_TOKEN, OPERATOR_TOKEN
from astraflow.launch.ledger import read_ledger
from astraflow.rpc.channel import dial
from astraflow_proto.control.v1.ledger_service_pb2 import GetLedgerRequest
from astraflow_proto.control.v1.ledger_service_pb2_grpc import LedgerServiceStub
from crash_ends.postgres import free_port
from crash_ends.takeover import take_over
from link.needs import LinkUnavailableError

pytestmark = pytest.mark.postgres


@pytest.fixture
def journal(postgres):
    return {"kind": "postgres", "url": postgres, "schema_name": uuid4().hex, "lease_s": 1}


@pytest.mark.parametrize("is_compacted", [False, True])
async def test_a_run_goes_on_in_another_folder(
    start_hub, serve_in, recipe_of, journal, tmp_path, is_compacted
):
    recipe = recipe_of(hub__journal=journal)
    async with start_hub(recipe) as hub:
        _, raas, task = await hub.begin()
        before, run_id = await hub.books(), hub.hub.status().run_id
        end = hub.hub.commits.ticket
        if is_compacted:
            await write_snapshot_of(hub.run_dir, end)
    elsewhere = partial(serve_in, tmp_path / "elsewhere")
    async with elsewhere(recipe) as hub:
        assert hub.hub.status().run_id == run_id
        assert await hub.books() == before
        again = hub.raas(live={"solver": 0})
        await again.join(SessionResume(resume_token=raas.token, incarnation=1, held_task_ids=()))
        sample = again.sample(task, task.sample_indexes[0])
        ack = await again.send(await again.open_rollouts(), sample)
        assert ack.disposition is Disposition.DUPLICATE
    ledger = await read_ledger(hub.run_dir)
    assert ledger.source == "journal"
    assert ledger.holds


async def test_connections_that_break_cost_a_run_nothing(start_hub, recipe_of, journal, postgres):
    async with start_hub(recipe_of(hub__journal=journal | {"lease_s": 60})) as hub:
        await hub.begin()
        for number in range(2, 5):
            with psycopg.connect(postgres, autocommit=True) as database:
                others = "FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                database.execute(f"SELECT pg_terminate_backend(pid) {others}")
            await hub.raas(f"raas-{number}").join()
        before, members = await hub.books(), {each.name for each in hub.hub.status().members}
    async with start_hub(recipe_of(hub__journal=journal)) as hub:
        assert await hub.books() == before
        assert {each.name for each in hub.hub.status().members} == members
        assert {f"raas-{number}" for number in range(1, 5)} < members
    assert (await read_ledger(hub.run_dir)).holds


async def test_a_hub_that_replays_answers_that_it_recovers(
    start_hub, serve_in, recipe_of, journal, tmp_path, postgres
):
    recipe = recipe_of(hub__journal=journal, hub__listen=f"127.0.0.1:{free_port()}")
    async with start_hub(recipe) as hub:
        await hub.begin()
        before = await hub.books()
    with psycopg.connect(postgres) as database:
        # Recovery begins with a look at the snapshot.
        schema = journal["schema_name"]
        database.execute(f'LOCK TABLE "{schema}".snapshot IN ACCESS EXCLUSIVE MODE')
        serving = asyncio.create_task(serve_once(partial(serve_in, tmp_path / "other"), recipe))
        async with dial(recipe.hub.listen) as channel:
            while True:
                with pytest.raises(AioRpcError) as caught:
                    await LedgerServiceStub(channel).GetLedger(GetLedgerRequest())
                if caught.value.details() == "the hub is recovering, 0 %":
                    break
                await asyncio.sleep(0.02)
        assert not serving.done()
        database.rollback()
    assert await serving == before


async def serve_once(serve, recipe):
    async with serve(recipe) as hub:
        return await hub.books()


async def test_a_hub_beside_a_live_one_is_refused_and_a_standby_waits(
    start_hub, serve_in, recipe_of, journal, tmp_path
):
    # The one hub may stand still for a second while the other looks.
    journal |= {"lease_s": 4}
    recipe = recipe_of(hub__journal=journal)
    elsewhere = partial(serve_in, tmp_path / "elsewhere")
    async with start_hub(recipe) as hub:
        await hub.begin()
        before = await hub.books()
        with pytest.raises(ExceptionGroup) as caught:
            async with elsewhere(recipe):
                pass
        error = caught.value.exceptions[0]
        assert isinstance(error, AstraflowError)
        assert "--standby" in error.message
        standby = recipe_of(hub__journal=journal | {"standby": True})
        entered, done = asyncio.Event(), asyncio.Event()

        async def wait():
            async with elsewhere(standby) as other:
                assert await other.books() == before
                entered.set()
                await done.wait()

        waiting = asyncio.create_task(wait())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(entered.wait()), timeout=2)
        assert await hub.books() == before
    await entered.wait()
    done.set()
    await waiting


@asynccontextmanager
async def hub_process(folder, recipe, *options):
    """Serve a recipe with the command, in a folder; yield the process."""
    path = folder.with_suffix(".yaml")
    path.write_text(dump_recipe(recipe))
    command = [sys.executable, "-m", "astraflow", "dataflow", "serve", path, "--run-dir", folder]
    tokens = {JOIN_TOKEN: "join", OPERATOR_TOKEN: "operator"}
    process = await asyncio.create_subprocess_exec(
        *command, *options, env=os.environ | tokens, stdout=PIPE, stderr=STDOUT
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def address_of(folder, process):
    """Wait until a hub serves."""
    while not RunDir(folder).endpoint.exists():
        assert process.returncode is None, (await process.communicate())[0].decode()
        await asyncio.sleep(0.02)
    return RunDir(folder).read_endpoint().address


@pytest.mark.slow
async def test_a_hub_that_stood_still_meanwhile_acknowledges_nothing_and_ends(
    recipe_of, journal, tmp_path, raas_at
):
    recipe = recipe_of(hub__journal=journal)
    first, second = tmp_path / "first", tmp_path / "second"
    async with AsyncExitStack() as exits:
        old = await exits.enter_async_context(hub_process(first, recipe))
        old_address = await address_of(first, old)
        new = await exits.enter_async_context(hub_process(second, recipe, "--standby"))
        async with dial(old_address) as channel:
            raas = raas_at(channel, "raas-1")
            await raas.join()
            old.send_signal(signal.SIGSTOP)
            # It lies in the old hub's socket when that one goes on.
            late = asyncio.create_task(raas_at(channel, "raas-2").join())
            new_address = await address_of(second, new)
            old.send_signal(signal.SIGCONT)
            words = (await old.communicate())[0].decode()
            assert old.returncode == 1
            assert "another hub has taken over" in words
            with pytest.raises((AioRpcError, AstraflowError)):
                await late
        async with dial(new_address) as channel:
            again = raas_at(channel, "raas-1")
            await again.join(SessionResume(resume_token=raas.token, incarnation=1))
            assert again.member_id == raas.member_id
        async with ControlClient(new_address, token="operator") as control:
            status = await control.get_run()
        assert [each.name for each in status.members] == ["raas-1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cuts",
    [pytest.param(True, marks=pytest.mark.root, id="cable"), pytest.param(False, id="killed")],
)
def test_members_go_on_with_another_hub_when_the_host_of_theirs_is_lost(tmp_path, cuts):
    try:
        report = take_over(tmp_path / "run", cuts=cuts, lease_s=2.0)
    except (FileNotFoundError, LinkUnavailableError) as error:
        pytest.skip(str(error))
    assert not report.verdict.faults
    assert not report.untrained
    # Cut off, it gave up by itself.
    assert report.first_code == (TEMPORARY_EXIT if cuts else None)
