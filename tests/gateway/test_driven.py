"""An existing Dataflow drives a node of ours."""

import asyncio

import httpx
import numpy as np
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.registry import workflow

from .conftest import weights_of
from .peers.dataflow import PeerDataflow, RaasClient, evaluate, register, roll_out, until


@workflow("gateway_flaky")
class Flaky:
    """Fails its first sample once, its second always."""

    def __init__(self, options, scorer):
        pass

    async def run(self, episode):
        if episode.sample_index == 1 or episode.sample_index + episode.task.attempt == 0:
            raise RuntimeError("no luck")
        talk = episode.trajectory()
        talk.observe(episode.prompt.fields["prompt"])
        await talk.sample()
        return 1.0


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


async def test_a_dataflow_trains_and_measures_on_a_node(driven, dataflow, sender):
    async with driven(dataflow=dataflow.url) as (serving, engine):
        before, loaded, after, measured = await asyncio.to_thread(drive, dataflow, sender)
        assert serving.ended.is_set()
        assert engine.tensors["w"].tobytes() == weights_of(1).tobytes()
    assert dataflow.pool == {}
    assert loaded["pull_result"].items() >= {"ok": True, "version": 1, "mode": "full"}.items()
    for items, count, version in ((before, 2, 0), (after, 2, 1), (measured, 3, 1)):
        for row, item in items.items():
            check(item, row, count=count, version=version)
    assert [len(items) for items in (before, after, measured)] == [15, 15, 4]


async def test_a_dataflow_that_is_away_for_a_moment_hears_that_a_node_leaves(driven, dataflow):
    async def come_back(port):
        await asyncio.sleep(0.2)
        dataflow.open(port)

    async with driven(dataflow=dataflow.url):
        await asyncio.to_thread(dataflow.raas)
        dataflow.close()
        returning = asyncio.create_task(come_back(int(dataflow.url.rpartition(":")[2])))
    await returning
    assert dataflow.pool == {}


async def test_a_node_ends_while_a_sender_keeps_it_waiting(driven):
    async def say_nothing(_, writer):
        asked.set()
        await ended.wait()
        writer.close()

    asked, ended = asyncio.Event(), asyncio.Event()
    async with (
        await asyncio.start_server(say_nothing, "127.0.0.1", 0) as silent,
        httpx.AsyncClient() as client,
        asyncio.timeout(200),
    ):
        host, port = silent.sockets[0].getsockname()
        async with driven() as (serving, _):
            url = f"http://{serving.address}/notify_version"
            fields = {"version": 1, "sender_endpoint": f"{host}:{port}"}
            loading = asyncio.create_task(client.post(url, json=fields, timeout=60))
            await asked.wait()
        await asyncio.wait([loading])
        loading.exception()
        ended.set()


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
async def test_a_sample_that_fails_is_tried_again_and_left_out(driven):
    """No failure is a reward of 0."""

    def drive():
        raas = client_of(serving)
        for name, count in (("flaky", 3), ("failing", 2)):
            register(raas, name, workflow_cls="gateway_flaky", n_samples=count)
            raas.post("/submit", {"data": rows(1)[0], "workflow_id": name})
        return sorted(pull_all(raas, 2), key=lambda item: item["task_id"])

    changes = {"workflows.other": {"name": "gateway_flaky"}}
    async with driven(changes=changes) as (serving, _):
        flaky, failing = await asyncio.to_thread(drive)
    assert flaky["result"]["rewards"].tolist() == [1.0, 1.0]
    assert failing["result"]["rewards"].tolist() == [1.0]


@pytest.mark.slow
async def test_a_prompt_of_which_every_sample_fails_is_an_error(driven):
    def drive():
        raas = client_of(serving)
        register(raas, "broken", n_samples=2)
        raas.post("/submit", {"data": {"no": "prompt"}, "workflow_id": "broken"})
        [item] = pull_all(raas, 1)
        return item["result"]

    async with driven() as (serving, _):
        result = await asyncio.to_thread(drive)
    assert result["ok"] is False
    assert "prompt" in result["error"]


@pytest.mark.slow
async def test_a_prompt_that_came_while_a_server_was_lost_is_rolled_out_once_it_is_back(driven):
    def drive():
        raas = client_of(serving)
        # As engines over servers have it while one is started again.
        engine.version = None
        submit(raas, 1)
        until(lambda: serving._policies.gates["solver"].waiting_count)
        engine.version = 0
        [item] = pull_all(raas, 1)
        return item["result"]["n_trajs"]

    async with driven() as (serving, engine):
        assert await asyncio.to_thread(drive) == 2


@pytest.mark.slow
async def test_a_reset_wipes_training_and_nothing_else(driven):
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

    async with driven(capacity=32, token_s=0.05) as (serving, _):
        wiped, (number, item), (measured, found) = await asyncio.to_thread(drive)
    assert wiped.items() >= {"cancelled": 4, "stragglers": 0, "ready_for_eval": True}.items()
    assert (item["task_id"], item["result"]["n_trajs"]) == (number, 2)
    assert (found["task_id"], found["result"]["n_trajs"]) == (measured["task_id"], 2)


@pytest.mark.slow
async def test_a_label_is_the_version_of_the_bytes(driven, sender):
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
    async with driven() as (serving, engine):
        skipped, following, again, behind, ahead, back = await asyncio.to_thread(drive)
        assert engine.tensors["w"].tobytes() == weights_of(2).tobytes()
    assert (skipped["version"], skipped["pull_result"]["mode"]) == (3, "full")
    assert (following["version"], following["pull_result"]["mode"]) == (4, "delta")
    assert again.items() >= {"ok": True, "pulled": False}.items()
    assert behind["version"] == 6
    assert not ahead["ok"]
    assert "holds version 6, not 9" in ahead["reason"]
    assert back["version"] == 2
    assert seen == [{3}, {4}, {4}, {6}, {6}, {2}]


@pytest.mark.slow
async def test_a_delta_changes_the_engine_where_it_differs_alone(driven, sender):
    """Where that fails, all weights are swapped."""

    def drive():
        raas = client_of(serving)
        for version in (1, 2, 3):
            if version == 3:
                engine.refusals.append(AstraflowError(Reason.APPLY_FAILED, "it is another one"))
            sender.hold(version, weights_of(version))
            notify(raas, sender, version)

    async with driven() as (serving, engine):
        await asyncio.to_thread(drive)
        assert engine.tensors["w"].tobytes() == weights_of(3).tobytes()
    assert sender.modes == ["full", "delta", "delta"]
    assert [each.base_version for each in engine.swaps] == [None, None, 1, None]
    [changed] = engine.swaps[2].tensors
    assert changed.indices.tolist() == [2]


@pytest.mark.slow
async def test_what_a_reader_did_not_read_comes_again(driven):
    def drive():
        raas = client_of(serving)
        numbers = submit(raas, 3)
        until(lambda: raas.get("/status")["pending_futures"] == 3)
        return numbers

    async with driven() as (serving, _):
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
