"""An existing Dataflow drives our nodes."""

import asyncio

import numpy as np
import pytest

from .conftest import bits_of, weights_of
from .peers.dataflow import PeerDataflow, RaasClient, evaluate, register, roll_out, until


@pytest.fixture
def dataflow():
    dataflow = PeerDataflow()
    yield dataflow
    dataflow.close()


def rows(count):
    return [{"prompt": f"row {n}", "query_id": f"train-{n:08d}", "answer": n} for n in range(count)]


def notify(raas, sender, version):
    fields = {"model_id": "solver", "version": version, "sender_endpoint": sender.endpoint}
    return raas.post("/notify_version", fields)


def drive(dataflow, sender):
    """60 rollouts of 30 prompts, a version between them, and an evaluation."""
    raas = dataflow.raas()
    register(raas, "default", n_samples=2, temperature=1.0, top_k=100_000_000)
    register(raas, "measure", n_samples=3, greedy=True, max_new_tokens=4)
    before = roll_out(raas, rows(15))
    sender.hold(1, weights_of(1))
    loaded = notify(raas, sender, 1)
    after = roll_out(raas, rows(15))
    measured = evaluate(raas, rows(4), "measure")
    raas.post("/shutdown")
    return before, loaded, after, measured


async def test_a_dataflow_trains_and_measures_on_our_nodes(pooling, dataflow, sender):
    async with pooling(nodes=2, dataflow=dataflow.url) as (serving, nodes):
        before, loaded, after, measured = await asyncio.to_thread(drive, dataflow, sender)
        assert serving.ended.is_set()
        assert all(bits_of(live.engine).tobytes() == weights_of(1).tobytes() for live in nodes)
    assert dataflow.pool == {}
    assert loaded["pull_result"].items() >= {"ok": True, "version": 1, "mode": "full"}.items()
    for items, count, version in ((before, 2, 0), (after, 2, 1), (measured, 3, 1)):
        for row, item in items.items():
            check(item, row, count=count, version=version)
    assert [len(items) for items in (before, after, measured)] == [15, 15, 4]


async def test_a_dataflow_that_is_away_for_a_moment_hears_that_a_pool_leaves(pooling, dataflow):
    async def come_back(port):
        await asyncio.sleep(0.2)
        dataflow.open(port)

    async with pooling(dataflow=dataflow.url):
        await asyncio.to_thread(dataflow.raas)
        dataflow.close()
        returning = asyncio.create_task(come_back(int(dataflow.url.rpartition(":")[2])))
    await returning
    assert dataflow.pool == {}


def check(item, row, *, count, version):
    """What a Dataflow reads of a result."""
    assert "ok" not in item["result"], item
    result = item["result"]
    assert result["prompt_id"] == result["query_id"] == f"train-{row:08d}"
    assert result["n_trajs"] == len(result["rewards"]) == len(result["trajectories"]) == count
    for trajectory in result["trajectories"]:
        [sequence] = trajectory["sequences"]
        assert {tuple(each.shape) for each in sequence.values()} == {
            (1, sequence["input_ids"].shape[1])
        }
        sampled = sequence["loss_mask"].numpy() == 1
        assert set(sequence["versions"].numpy()[sampled]) == {version}
        assert set(sequence["versions"].numpy()[~sampled]) == {-1}
        assert np.all(sequence["logprobs"].numpy()[~sampled] == 0)


def submit(raas, count):
    """Submit prompts whatever the room; return their numbers."""
    asked = ({"data": row, "workflow_id": "default"} for row in rows(count))
    return [raas.post("/submit", each)["task_id"] for each in asked]


def pull_all(raas, count):
    """Pull until so many items have come."""
    items = []
    while len(items) < count:
        items += raas.post("/pull", {"timeout": 5})
    return items


def client_of(serving):
    raas = RaasClient(f"http://{serving.address}")
    until(lambda: raas.get("/status")["status"] == "ready")
    register(raas, "default", n_samples=2)
    return raas


def versions_of(items):
    """Numbers of the versions that sampled anything in items."""
    return {
        int(version)
        for item in items
        for trajectory in item["result"]["trajectories"]
        for sequence in trajectory["sequences"]
        for version in sequence["versions"].unique()
        if version >= 0
    }


@pytest.mark.slow
async def test_what_a_node_held_that_died_is_done_by_another(pooling):
    def drive():
        raas = client_of(serving)
        until(lambda: raas.get("/availability")["max_concurrency"] == 4)
        numbers = submit(raas, 4)
        asyncio.run_coroutine_threadsafe(nodes[0].kill(), loop).result()
        return numbers, pull_all(raas, 4)

    loop = asyncio.get_running_loop()
    changes = {"hub.session_ttl_s": 1}
    async with pooling(nodes=2, capacity=4, token_s=0.05, changes=changes) as (serving, nodes):
        numbers, items = await asyncio.to_thread(drive)
    assert sorted(item["task_id"] for item in items) == numbers
    assert all(item["result"]["n_trajs"] == 2 for item in items)


@pytest.mark.slow
async def test_streams_that_are_cut_lose_nothing(pooling):
    def drive():
        raas = client_of(serving)
        numbers = submit(raas, 6)
        loop.call_soon_threadsafe(nodes[0].line.cut)
        return numbers, pull_all(raas, 6)

    loop = asyncio.get_running_loop()
    async with pooling(token_s=0.02) as (serving, nodes):
        numbers, items = await asyncio.to_thread(drive)
    assert sorted(item["task_id"] for item in items) == numbers
    assert all(item["result"]["n_trajs"] == 2 for item in items)


@pytest.mark.slow
async def test_a_reset_wipes_training_and_nothing_else(pooling):
    def drive():
        raas = client_of(serving)
        submit(raas, 4)
        measured = raas.post("/eval_submit", {"data": rows(1)[0], "workflow_id": "default"})
        wiped = raas.post("/reset_training_engine", {"timeout": 20})
        assert raas.post("/pull", {}) == []
        [number] = submit(raas, 1)
        [item] = pull_all(raas, 1)
        [found] = raas.post("/eval_pull", {"timeout": 20})["items"]
        return wiped, (number, item), (measured, found)

    async with pooling(capacity=32, token_s=0.05) as (serving, _):
        wiped, (number, item), (measured, found) = await asyncio.to_thread(drive)
    assert wiped.items() >= {"cancelled": 4, "stragglers": 0, "ready_for_eval": True}.items()
    assert (item["task_id"], item["result"]["n_trajs"]) == (number, 2)
    assert (found["task_id"], found["result"]["n_trajs"]) == (measured["task_id"], 2)


@pytest.mark.slow
async def test_a_label_is_the_version_of_the_bytes(pooling, sender):
    def drive():
        raas = client_of(serving)
        told = []
        for held, asked in ((3, 3), (4, 4), (4, 4), (6, 5), (6, 9), (2, 2)):
            sender.hold(held, weights_of(held))
            told.append(notify(raas, sender, asked))
            submit(raas, 1)
            seen.append(versions_of(pull_all(raas, 1)))
        return told

    seen = []
    async with pooling() as (serving, nodes):
        skipped, following, again, behind, ahead, back = await asyncio.to_thread(drive)
        assert bits_of(nodes[0].engine).tobytes() == weights_of(2).tobytes()
    assert (skipped["version"], skipped["pull_result"]["mode"]) == (3, "full")
    assert (following["version"], following["pull_result"]["mode"]) == (4, "delta")
    assert again.items() >= {"ok": True, "pulled": False}.items()
    assert behind["version"] == 6
    assert not ahead["ok"]
    assert "holds version 6, not 9" in ahead["reason"]
    assert back["version"] == 2
    assert seen == [{3}, {4}, {4}, {6}, {6}, {2}]


@pytest.mark.slow
async def test_what_a_reader_did_not_read_comes_again(pooling):
    def drive():
        raas = client_of(serving)
        numbers = submit(raas, 3)
        until(lambda: raas.get("/status")["pending_futures"] == 3)
        return numbers

    async with pooling() as (serving, _):
        numbers = await asyncio.to_thread(drive)
        await ask_and_hang_up(serving.address)
        raas = RaasClient(f"http://{serving.address}")
        items = await asyncio.to_thread(raas.post, "/pull", {"timeout": 5})
        assert sorted(item["task_id"] for item in items) == numbers
        assert await asyncio.to_thread(raas.post, "/pull", {}) == []


async def ask_and_hang_up(address):
    """Ask for what has finished, and be gone before it is answered."""
    host, port = address.split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /pull HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\n\r\n")
    writer.transport.abort()


@pytest.mark.slow
async def test_a_node_that_was_silent_goes_on(pooling):
    """Its session has ended; it comes back with the version that it has."""

    def drive():
        raas = client_of(serving)
        submit(raas, 1)
        items = pull_all(raas, 1)
        nodes[0].line.unplug()
        until(lambda: raas.get("/status")["status"] == "starting")
        submit(raas, 1)
        loop.call_soon_threadsafe(nodes[0].line.plug)
        return items + pull_all(raas, 1)

    loop = asyncio.get_running_loop()
    async with pooling(changes={"hub.session_ttl_s": 1}) as (serving, nodes):
        items = await asyncio.to_thread(drive)
    assert ["ok" in item["result"] for item in items] == [False, False]
    assert versions_of(items) == {0}
