"""Bodies, keys, orders and processes: what clients meet before anything is computed."""

import asyncio
import contextlib
import json
import os
import random
import signal
import time

import httpx
import pytest
import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.http import json_answer
from astraflow.tinker.app import serving
from astraflow.tinker.checkpoints import TinkerCheckpoints
from astraflow.tinker.learner import LoadedBase
from astraflow.tinker.promises import InOrder, Promises
from astraflow.tinker.requests import CreateModel, OptimStep, SaveWeightsForSampler
from astraflow.tinker.samplers import Samplers
from astraflow.tinker.service import Service

from .conftest import NAME, Peer, RefusedError, arguments_of, made_data, sampled, to_data

ROUTES = (
    "client/config",
    "create_session",
    "session_heartbeat",
    "create_model",
    "get_info",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "load_weights",
    "create_sampling_session",
    "asample",
    "retrieve_future",
    "unload_model",
    "telemetry",
    "sessions/s/finish",
)
PROMPT = [1, 2, 3]


async def test_the_client_finds_what_it_asks_for_first(peer):
    assert await peer.post("client/config", sdk_version="0.38.0") == {}
    assert (await peer.http.get("healthz")).json() == {"status": "ok"}
    told = (await peer.http.get("get_server_capabilities")).json()
    assert told["supported_models"][0]["model_name"] == NAME
    answer = await peer.http.get("nowhere")
    assert (answer.status_code, answer.json()["error"]) == (
        404,
        "GET /api/v1/nowhere is not served here",
    )
    answer = await peer.http.get("optim_step")
    assert answer.status_code == 405


async def test_a_model_tells_what_it_is_and_is_gone_with_its_session(peer):
    model = await peer.create_model(rank=3, train_mlp=False)
    told = await peer.post("get_info", model_id=model.model_id)
    assert (told["is_lora"], told["lora_rank"], told["model_name"]) == (True, 3, NAME)
    answer = await peer.http.post(f"sessions/{model.session_id}/finish", json={})
    assert answer.status_code == 200
    answer = await peer.http.post("get_info", json={"model_id": model.model_id})
    assert answer.status_code == 404
    assert "create one from the last checkpoint" in answer.json()["error"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"base_model": "other/model"}, "this server has"),
        ({"lora_config": {"rank": 9}}, "--max-rank"),
        (
            {"lora_config": {"rank": 1, "train_attn": False, "train_mlp": False}},
            "train_attn or train_mlp",
        ),
    ],
)
async def test_a_model_that_cannot_be_made_is_refused(peer, fields, why):
    ids = {"session_id": "s", "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 1}}
    with pytest.raises(RefusedError, match=why) as refused:
        await peer.done("create_model", **{**ids, **fields})
    assert refused.value.category == "user"


async def test_adapters_begin_as_their_seed_says(peer):
    rows = to_data(made_data(2), "weights")
    norms = []
    for seed in (1, 2, 1):
        model = await peer.create_model(rank=2, seed=seed)
        await model.forward_backward(rows)
        norms.append((await model.optim_step())["metrics"]["grad_norm"])
    assert norms[0] == norms[2] != norms[1]


@pytest.mark.parametrize("path", ROUTES)
async def test_whatever_a_body_is_the_answer_is_typed(peer, path):
    """And none of them breaks the server."""
    chance = random.Random(path)
    odd = [None, True, -1, 2**70, 1.5, "", "a/../b", "\ud800", [], {}, [{}], {"type": None}]
    known = ("session_id", "model_id", "seq_id", "model_seq_id", "base_model", "path", "request_id")
    more = ("adam_params", "sampling_params", "prompt", "sampling_session_id", "lora_config")
    bodies = [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 5000, bytes(range(256)) * 40]
    for _ in range(60):
        fields = {name: chance.choice(odd) for name in (*known, *more) if chance.random() < 0.6}
        bodies.append(json.dumps(fields).encode())
        bodies.append(chance.randbytes(chance.randrange(200)))
    for body in bodies:
        answer = await peer.http.post(path, content=body)
        assert answer.status_code < 500, (path, body, answer.text)
        assert answer.status_code == 200 or answer.json()["error"]


async def test_a_body_is_bounded(peer):
    async def endless():
        for _ in range(70):
            yield bytes(1 << 20)

    try:
        answer = await peer.http.post("forward_backward", content=endless())
    except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        return
    assert answer.status_code == 413


async def test_a_key_opens_where_one_was_set(make_settings):
    async with serving(make_settings(token="tml-right")) as address:
        for key, status in (("tml-right", 200), ("tml-wrong", 401), ("", 401)):
            async with Peer(address, key) as peer:
                assert (await peer.http.get("healthz")).status_code == status
    with pytest.raises(AstraflowError, match="tml-"):
        make_settings(token="secret")


async def test_a_result_that_is_not_there_yet_is_asked_for_again():
    never, done = asyncio.Event(), asyncio.Event()

    async def work():
        await never.wait()
        return json_answer({"a": 1})

    async with asyncio.TaskGroup() as tasks:
        promises = Promises(tasks)
        promise = promises.make("key", b"body", work())
        assert await promises.answer(promise.request_id, hold_s=0.01) is None
        never.set()
        answer = await promises.answer(promise.request_id, hold_s=100)
        assert json.loads(answer.body) == {"a": 1}
        done.set()
        with pytest.raises(AstraflowError) as gone:
            await promises.answer("other", hold_s=0)
        assert gone.value.reason is Reason.TASK_EXPIRED


async def test_who_waits_for_a_result_is_told_at_once_that_the_server_ends():
    async with asyncio.TaskGroup() as tasks:
        promises = Promises(tasks)
        promise = promises.make("key", b"body", asyncio.Event().wait())
        held = asyncio.ensure_future(promises.answer(promise.request_id, hold_s=100))
        await asyncio.sleep(0)
        promises.close()
        with pytest.raises(AstraflowError) as ended:
            await held
    assert (ended.value.reason, ended.value.retryable) == (Reason.NOT_READY, True)


async def test_what_comes_while_the_server_ends_is_not_waited_for():
    async with asyncio.TaskGroup() as tasks:
        promises = Promises(tasks)
        promises.close()
        with pytest.raises(AstraflowError) as ended:
            promises.make("key", b"body", asyncio.Event().wait())
    assert (ended.value.reason, ended.value.retryable) == (Reason.NOT_READY, True)


async def test_what_waits_for_a_number_that_never_comes_fails():
    """All of it: what the missing request was to do is not known. Then numbers go on."""
    turns, ran = InOrder(gap_s=0.02), []

    async def run(number):
        async with turns.turn(number):
            ran.append(number)

    await run(1)
    found = await asyncio.gather(run(3), run(5), return_exceptions=True)
    assert [error.reason for error in found] == [Reason.SOURCE_TIMEOUT] * 2
    assert turns.is_over(5)
    await asyncio.gather(run(7), run(6))
    assert ran == [1, 6, 7]


async def test_a_long_request_is_no_gap():
    turns, ran, go_on = InOrder(gap_s=0.02), [], asyncio.Event()

    async def run(number):
        async with turns.turn(number):
            if number == 1:
                await go_on.wait()
            ran.append(number)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(1))
        waiting = tasks.create_task(run(2))
        assert not (await asyncio.wait({waiting}, timeout=0.1))[0]
        go_on.set()
    assert ran == [1, 2]


async def test_an_error_of_the_server_is_told_as_one():
    async def work():
        raise RuntimeError("broken")

    async with asyncio.TaskGroup() as tasks:
        promises = Promises(tasks)
        with structlog.testing.capture_logs():
            promise = promises.make("key", b"", work())
            answer = await promises.answer(promise.request_id, hold_s=100)
    fields = json.loads(answer.body)
    assert fields["category"] == "server"
    assert "broken" in fields["error"]


async def test_a_wrong_request_is_refused_for_what_is_wrong_before_its_model_is_made(settings):
    """Its model is not waited for: that nothing came of it is another error."""
    base = LoadedBase(settings)
    samplers = Samplers(
        settings.model_dir, settings.engine, layer_shapes=base.layer_shapes, max_rank=8
    )
    kept = TinkerCheckpoints(settings.directory, base_model=NAME, now=time.time)
    async with asyncio.TaskGroup() as tasks, contextlib.AsyncExitStack() as exits:
        exits.push_async_callback(samplers.close)
        promises = Promises(tasks)
        service = Service(base, samplers, kept, promises, base_model=NAME, max_rank=8)
        exits.callback(service.close)
        service.create_model(
            CreateModel(session_id="s", model_seq_id=0, base_model="other/model"), b""
        )
        ids = {"model_id": "s:train:0"}
        wrong = AstraflowError(Reason.INVALID_FIELD, "adam_params.beta1: is a text")
        unserved = SaveWeightsForSampler(**ids, seq_id=2, kind="inflight")
        asked = [
            service.refuse("s:train:0", 1, b"", wrong),
            service.save_weights_for_sampler(unserved, b""),
            service.optim_step(OptimStep(**ids, seq_id=3, adam_params={}), b""),
        ]
        answers = [await promises.answer(each.request_id, hold_s=100) for each in asked]
    told = [json.loads(each.body)["error"] for each in answers]
    assert [each.rpartition(" ")[2] for each in told] == [
        "[INVALID_FIELD]",
        "[CAPABILITY_MISSING]",
        "[POLICY_UNKNOWN]",
    ]


@contextlib.asynccontextmanager
async def forked(nursery, settings, pipe):
    """Start a server of its own process; yield its process id and its address."""
    os.mkfifo(pipe)
    server = nursery.start("run_command", "{}", *arguments_of(settings), output=pipe)
    try:
        with pipe.open() as lines:
            yield server, json.loads(next(line for line in lines if line[0] == "{"))["address"]
    finally:
        nursery.kill(server)


@pytest.mark.slow
async def test_what_was_saved_outlives_a_kill_and_a_signal_ends_what_is_under_way(
    settings, nursery, tmp_path
):
    """Weights, optimizer and sampling sessions; what is asked of a model that is gone says so."""
    data = to_data(made_data(3), "weights")
    first, second = (forked(nursery, settings, tmp_path / name) for name in ("first", "second"))
    async with first as (server, address), Peer(address) as peer:
        model = await peer.create_model(rank=4)
        await model.forward_backward(data)
        await model.optim_step(learning_rate=0.05)
        sampler = await model.sampler()
        named = await model.save_for_sampler("named")
        path = await model.save("state")
        before = sampled(await sampler.sample(PROMPT, seed=3))
        # What is under way when the server is killed was not promised.
        await model.send(model.message(data))
        nursery.kill(server)
    async with second as (server, address), Peer(address) as peer:
        old = sampled(await type(sampler)(peer, sampler.sampler_id).sample(PROMPT, seed=3))
        new = sampled(await (await peer.sampler(named)).sample(PROMPT, seed=3))
        assert before[0][0] == old[0][0] == new[0][0]
        again = await peer.restored(path)
        (found, _), (_, metrics) = [await again.forward_backward(data) for _ in range(2)]
        assert len(found) == 3
        assert metrics["loss:sum"]
        answer = await peer.http.post("get_info", json={"model_id": model.model_id})
        assert answer.status_code == 404
        answer = await peer.http.post("retrieve_future", json={"request_id": "of-before"})
        assert answer.status_code == 410
        again.seq_id += 1
        told = await again.send(again.message(data))
        request = {"request_id": told["request_id"]}
        waiting = asyncio.ensure_future(peer.http.post("retrieve_future", json=request))
        os.kill(server, signal.SIGTERM)
        assert await asyncio.to_thread(nursery.wait, server) == 0
        try:
            answer = await waiting
        except httpx.HTTPError:
            return  # The connection went first.
        if answer.status_code != 200:  # It was not done in time.
            assert answer.status_code == 503, answer.text
            assert answer.json()["reason"] == "NOT_READY"
