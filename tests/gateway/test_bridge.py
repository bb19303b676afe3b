"""An existing RaaS joins the pool, through the gateway."""

import asyncio
import socket
from dataclasses import replace

import httpx
import pytest

from .conftest import weights_of
from .peers.raas import PeerRaas
from .peers.trainer import PeerTrainer
from .test_trainer import train


@pytest.fixture
def raas():
    raas = PeerRaas()
    yield raas
    raas.close()


async def register(gateway, raas, uid="old"):
    async with httpx.AsyncClient(timeout=100) as client:
        fields = {"uid": uid, "raas_url": raas.url, "gpu_count": 2}
        answer = await client.post(f"http://{gateway.address}/register_raas", json=fields)
        assert answer.json()["ok"], answer.json()


@pytest.mark.parametrize("step_count", [2, pytest.param(50, marks=pytest.mark.long)])
async def test_a_raas_serves_a_run(serving, raas, sender, step_count):
    """With 50 steps it serves 200 rollouts; every version arrives bit by bit."""
    async with serving(step_count=step_count, node=False) as (run, gateway):
        registering = asyncio.create_task(register(gateway, raas))
        await asyncio.to_thread(train, PeerTrainer(gateway.address, sender), step_count)
        await registering
        await run.finish()
        [account] = run.accounts()
    assert account.trained_count == 4 * step_count
    assert {"full", "delta"} >= set(raas.pulls)
    for number, held in raas.history.items():
        assert held == weights_of(number - 1).tobytes()


async def account_of(serving, raas, sender, *, step_count):
    """Return the account of a run that this one works for."""
    async with serving(step_count=step_count, node=False) as (run, gateway):
        registering = asyncio.create_task(register(gateway, raas))
        await asyncio.to_thread(train, PeerTrainer(gateway.address, sender), step_count)
        await registering
        await run.finish()
        [account] = run.accounts()
    return account


async def test_results_of_no_task_cost_no_others(serving, raas, sender):
    raas.strays = [None, {}, *({"task_id": each} for each in (None, "one", [1], 1e400, 10**6))]
    assert (await account_of(serving, raas, sender, step_count=1)).trained_count == 4


@pytest.mark.slow
async def test_every_version_can_be_pulled_as_a_delta(serving, raas, sender):
    async with serving(step_count=6, node=False) as (_, gateway):
        await start(gateway, raas, sender)
        trainer = PeerTrainer(gateway.address, sender)
        for version in range(6):
            await asyncio.to_thread(trainer.batch, version)
            sender.hold(version + 1, weights_of(version + 1))
            await asyncio.to_thread(trainer.notify_version, version + 1)
            await until_loaded(raas, version + 2)
    assert raas.pulls == ["full", *["delta"] * 6]
    assert raas.history == {v + 1: weights_of(v).tobytes() for v in range(7)}


async def test_what_a_raas_of_another_run_holds_is_never_live(serving, sender):
    """It says of every version up to its own that it need not be pulled."""
    raas = PeerRaas(version=50)
    try:
        async with serving(step_count=2, node=False) as (run, gateway):
            registering = asyncio.create_task(register(gateway, raas))
            await asyncio.to_thread(train, PeerTrainer(gateway.address, sender), 2)
            await registering
            await run.finish()
            [account] = run.accounts()
    finally:
        raas.close()
    assert account.trained_count == 8
    assert raas.history
    assert min(raas.history) > 50
    assert weights_of(0).tobytes() in raas.history.values()


async def start(gateway, raas, sender):
    """Let both join; without a RaaS /ready has to answer too."""
    await asyncio.to_thread(PeerTrainer(gateway.address, sender).ready, 4)
    await register(gateway, raas)


async def until(claim):
    async with asyncio.timeout(100):
        while not claim():  # noqa: ASYNC110 - a RaaS lives in other threads
            await asyncio.sleep(0.01)


async def until_loaded(raas, version):
    await until(lambda: raas.version >= version)


@pytest.mark.slow
async def test_what_an_engine_lost_is_no_reward_of_nought(serving, raas, sender):
    raas.fails = 3
    account = await account_of(serving, raas, sender, step_count=3)
    assert account.trained_count == 12
    assert account.is_balanced


@pytest.mark.slow
async def test_what_a_raas_held_that_died_is_issued_again(serving, raas, sender):
    """The second one takes over; nothing is lost."""
    async with serving(step_count=2, node=False, recipe={"hub.patience_s": 2}) as (run, gateway):
        raas.keeps = True
        await start(gateway, raas, sender)
        await until(lambda: raas.asked)
        raas.close()
        other = PeerRaas()
        try:
            registering = asyncio.create_task(register(gateway, other, "new"))
            trainer = PeerTrainer(gateway.address, sender)
            for version in range(2):
                await asyncio.to_thread(trainer.batch, version)
                sender.hold(version + 1, weights_of(version + 1))
                await asyncio.to_thread(trainer.notify_version, version + 1)
            await registering
            await run.finish()
        finally:
            other.close()
        [account] = run.accounts()
    assert account.trained_count == 8
    assert account.is_balanced


async def test_what_a_raas_has_done_is_not_asked_for_again_over_a_cut(serving, raas, sender):
    async with serving(step_count=9, node=False) as (run, gateway):
        line = await run.open_line()
        line.hold("StreamRollouts")
        gateway.settings = replace(gateway.settings, hub=line.address)
        await start(gateway, raas, sender)
        work = gateway._raas["old"]._work
        await until(lambda: work._client.rollouts.unacked_results and not work._training.tasks)
        line.cut()
        await line.until(lambda: line.calls["JoinPool"] > 1)
        line.release("StreamRollouts")
        trainer, count = PeerTrainer(gateway.address, sender), len(raas.asked)
        await asyncio.to_thread(trainer.batch, 0)
        sender.hold(1, weights_of(1))
        await asyncio.to_thread(trainer.notify_version, 1)
        await until(lambda: len(raas.asked) > count)
        assert len(raas.asked) == len(set(raas.asked))


async def test_a_raas_that_comes_under_another_name_is_there_once(serving, raas, sender):
    """Results that one takes from it are nowhere else."""
    async with serving(step_count=2, node=False) as (run, gateway):
        registering = asyncio.create_task(register(gateway, raas))
        await asyncio.to_thread(PeerTrainer(gateway.address, sender).ready, 4)
        await registering
        await register(gateway, raas, "new")
        assert [member.name for member in run.status().members if member.role == "raas"] == ["new"]
        await asyncio.to_thread(train, PeerTrainer(gateway.address, sender), 2)


async def test_a_raas_that_loads_its_engines_leaves_at_once(serving, raas):
    raas.state = "starting"
    async with serving(node=False) as (_, gateway), httpx.AsyncClient(timeout=200) as client:
        fields = {"uid": "old", "raas_url": raas.url}
        asked = client.post(f"http://{gateway.address}/register_raas", json=fields)
        registering = asyncio.ensure_future(asked)
        await until(lambda: "old" in gateway._raas)
        await gateway.deregister_raas("old")
        answer = await registering
    assert "left before it had joined" in answer.json()["error"]


async def test_a_raas_that_is_not_there_does_not_join(serving):
    # Bound and not listening: who dials is refused, and nobody else gets the port.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with serving(node=False) as (_, gateway), httpx.AsyncClient(timeout=100) as client:
            fields = {"uid": "old", "raas_url": url}
            answer = await client.post(f"http://{gateway.address}/register_raas", json=fields)
            assert answer.status_code == 503
            assert url in answer.json()["error"]


@pytest.mark.slow
async def test_a_raas_leaves_and_is_asked_to_end(serving, raas, sender):
    async with serving(node=False) as (_, gateway), httpx.AsyncClient(timeout=100) as client:
        await start(gateway, raas, sender)
        url = f"http://{gateway.address}"
        [instance] = (await client.get(f"{url}/raas_pool")).json()["instances"]
        assert (instance["uid"], instance["gpu_count"]) == ("old", 2)
        gone = await client.post(f"{url}/deregister_raas", json={"uid": "old", "shutdown": True})
        assert gone.json() == {"ok": True, "uid": "old", "pool_size": 0}
        assert raas.ended
        assert (await client.get(f"{url}/raas_pool")).json()["size"] == 0
