"""Evaluations that an existing trainer waits for, on our nodes and on an existing RaaS."""

import asyncio

import pytest

from .conftest import weights_of
from .peers.raas import PeerRaas
from .peers.trainer import PeerTrainer
from .test_bridge import register, start, until, until_loaded


@pytest.fixture
def suite(tmp_path):
    """A suite of three prompts, each twice."""
    part = {"data_set": "held_out", "workflow": "main", "repeats": 2}
    return {
        "data.held_out": {"path": str(tmp_path / "train.jsonl"), "limit": 3},
        "evals.check": {"data_sets": [part], "at_start": False, "at_end": False},
    }


def measure(trainer):
    """Train a step, and wait for what its version is worth."""
    trainer.ready(4)
    trainer.batch(0)
    trainer.sender.hold(1, weights_of(1))
    return trainer.notify_version(1, run_eval=True)["eval_results"]


async def test_a_trainer_gets_the_evaluation_that_it_waits_for(serving, sender, suite):
    async with serving(recipe=suite) as (_, gateway):
        found = await asyncio.to_thread(measure, PeerTrainer(gateway.address, sender))
    assert found.keys() == {
        "eval-avg/held_out/avg@2",
        "eval-avg/held_out/mean_reward",
        "eval-pass/held_out/pass@2",
    }
    assert 0 <= found["eval-avg/held_out/avg@2"] <= found["eval-pass/held_out/pass@2"] <= 100


@pytest.mark.slow
async def test_an_existing_raas_measures_versions(serving, sender, suite):
    raas = PeerRaas()
    try:
        async with serving(node=False, recipe=suite) as (_, gateway):
            measuring = asyncio.to_thread(measure, PeerTrainer(gateway.address, sender))
            found, _ = await asyncio.gather(measuring, register(gateway, raas))
    finally:
        raas.close()
    assert "eval-avg/held_out/avg@2" in found
    assert raas.spells[:2] == ["/eval_start", "/eval_end"]


@pytest.fixture
def raas():
    raas = PeerRaas()
    yield raas
    raas.close()


def next_version(trainer, version):
    trainer.batch(version - 1)
    trainer.sender.hold(version, weights_of(version))
    trainer.notify_version(version)


async def test_an_evaluation_that_nobody_wants_keeps_no_raas_at_its_version(
    serving, sender, suite, raas
):
    """Not even where no result comes of it; the run knows then that nothing of it is out."""
    raas.keeps_evals = True
    async with serving(step_count=9, node=False, recipe=suite) as (_, gateway):
        await start(gateway, raas, sender)
        await until_loaded(raas, 1)
        evals = gateway.control.evals
        measured = await evals.create("check", versions={"solver": 0}, request_id="one")
        work = gateway._raas["old"]._work
        await until(lambda: raas.measured)
        await evals.cancel(measured.eval_run_id)
        trainer = PeerTrainer(gateway.address, sender)
        await asyncio.to_thread(next_version, trainer, 1)
        await until_loaded(raas, 2)
        assert not work._evals.tasks


async def test_an_evaluation_that_was_cut_short_is_not_in_the_answer(serving, sender, suite, raas):
    raas.keeps_evals = True
    async with serving(node=False, recipe=suite) as (_, gateway):
        trainer = PeerTrainer(gateway.address, sender)
        measuring = asyncio.ensure_future(asyncio.to_thread(measure, trainer))
        await register(gateway, raas)
        await until(lambda: len(raas.measured) == 3)
        del raas.measured[1:]
        raas.keeps_evals = False
        evals, asked = gateway.control.evals, "gateway-solver-1-check"
        run = await evals.create("check", versions={"solver": 1}, request_id=asked)
        async for seen in evals.watch(run.eval_run_id):
            if seen.scored_count:
                break
        await evals.cancel(run.eval_run_id)
        assert await measuring == {}


async def behind(gateway, raas, sender):
    """Return a trainer whose newest version the RaaS cannot load for now."""
    await start(gateway, raas, sender)
    await until_loaded(raas, 1)
    raas.may_load.clear()
    trainer = PeerTrainer(gateway.address, sender)
    await asyncio.to_thread(next_version, trainer, 1)
    return trainer


@pytest.mark.parametrize("how", ["cancelled", "disowned"])
async def test_an_evaluation_that_is_withdrawn_while_it_waits_holds_no_version(
    serving, sender, suite, raas, how
):
    async with serving(step_count=9, node=False, recipe=suite) as (_, gateway):
        trainer = await behind(gateway, raas, sender)
        evals, work = gateway.control.evals, gateway._raas["old"]._work
        measured = await evals.create("check", versions={"solver": 1}, request_id="one")
        await until(lambda: work._evals.tasks)
        if how == "cancelled":
            await evals.cancel(measured.eval_run_id)
        else:
            work.keep(())
        await until(lambda: not work._evals.tasks)
        raas.may_load.set()
        await until_loaded(raas, 2)
        await asyncio.to_thread(next_version, trainer, 2)
        await until_loaded(raas, 3)


async def test_a_raas_leaves_whatever_its_tasks_wait_for(serving, sender, suite, raas):
    async with serving(step_count=9, node=False, recipe=suite) as (_, gateway):
        await behind(gateway, raas, sender)
        await gateway.control.evals.create("check", versions={"solver": 1}, request_id="one")
        await until(lambda: gateway._raas["old"]._work._evals.tasks)
        async with asyncio.timeout(100):
            await gateway.deregister_raas("old")


@pytest.mark.slow
async def test_without_a_suite_there_is_nothing_to_wait_for(serving, sender):
    async with serving() as (_, gateway):
        assert await asyncio.to_thread(measure, PeerTrainer(gateway.address, sender)) is None
