"""What the published code says, said again: recorded by test_upstream.py, read from golden/."""

import json
import pickle
import socket
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import numpy as np
import pytest
import torch

from astraflow.codec.pickles import read_pickle
from astraflow.core.errors import Reason
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import Dtype
from astraflow.gateway import sending
from astraflow.gateway.bridge.calls import RaasCalls, yield_of
from astraflow.gateway.http import BodyRules, LoadVersion, NotifyVersion, TrainerReady, serve_app
from astraflow.gateway.raas.serve import Pull
from astraflow.gateway.raas.workflows import RegisterWorkflow, SubmitPrompt
from astraflow.gateway.receiving import SenderCopy, receiving
from astraflow.gateway.sending import HeldVersion, Pusher, Sender, SenderOffer, sender_app
from astraflow.gateway.weight_buffer import BufferPlan, read_plan
from astraflow.rpc.peers import DialRules
from made_up import made_up_task

from .conftest import weights_of
from .peers.tap import Player, decoded

GOLDEN = Path(__file__).parent / "golden"
GREETING_NBYTES = 64
# Of the published RaaS: its numbers count from 1.
VERSIONS = {number: number - 1 for number in range(1, 60)}
MODELS = {0: ("solver", VERSIONS)}


def golden(role):
    return json.loads((GOLDEN / f"{role}.json").read_text("utf-8"))


def bodies(exchanges, path):
    return [decoded(each["body"]) for each in exchanges if urlsplit(each["path"]).path == path]


def answers(exchanges, path):
    """Return pickled answers to a path: of the published code, or of a run that it served."""
    kept = [each for each in exchanges if urlsplit(each["path"]).path == path]
    return [pickle.loads(decoded(each["answer"])) for each in kept]


def replayed(transfers):
    """Return what a sender does before its answers: it pushes, and sends its message."""
    to, left, open_ones = {}, list(transfers), []

    def before(path, body):
        if path == "/register_sglang_instance":
            to.update(json.loads(body))
        if path == "/request_transfer":
            pushed, message = map(decoded, left.pop(0))
            address = to["session_ids"][0].split(":")
            with socket.create_connection(address) as connection:
                connection.sendall(pushed)
                assert connection.recv(1) == b"\x01"
            messages = socket.create_connection((to["zmq_endpoint"], to["zmq_port"]))
            open_ones.append(messages)
            # A socket of ZMQ passes over what comes before it is ready.
            messages.sendall(message[:GREETING_NBYTES])
            said = b""
            while b"READY" not in said:
                said += messages.recv(1024)
            messages.sendall(message[GREETING_NBYTES:])

    return before, open_ones


async def test_a_published_senders_weights_arrive():
    kept = golden("sender")
    before, open_ones = replayed(kept["transfers"])
    others = [each for each in kept["exchanges"] if each["path"] != "/get_capabilities"]
    sender = Player(others + capabilities(kept["exchanges"]), before)
    try:
        copy = await SenderCopy.of(sender.address, host="127.0.0.1", timeout_s=20, dial=DialRules())
        kinds = []
        for version in (1, 2):
            await copy.fetch(version)
            assert np.array_equal(copy.tensors()["w"], weights_of(version))
            kinds.append(copy.is_full)
        await copy.close()
    finally:
        sender.close()
        for connection in open_ones:
            connection.close()
    assert kinds == [True, False]


def capabilities(exchanges):
    """Return what was said of every version: it is asked for before a transfer and after it."""
    asked = [each for each in exchanges if each["path"] == "/get_capabilities"]
    by_version = {json.loads(decoded(each["answer"]))["version"]: each for each in asked}
    return [each for each in by_version.values() for _ in range(2)]


async def test_a_published_receiver_gets_what_it_asks_for():
    """It registers once, for a buffer of everything, and gets the answers of a published sender."""
    asked, published = golden("receiver")["exchanges"], golden("sender")["exchanges"]
    flat = weights_of(1).view(np.uint8)
    plan = read_plan(json.loads(bodies_of_answers(published, "/get_buffer_info")[0]), 1 << 20)
    assert plan == BufferPlan.of([("w", plan.tensors[0].dtype, (100,))])
    sender = Sender("solver")
    sender.offer = SenderOffer(held=HeldVersion(version=0, plan=plan, flat=flat), number=1)
    buffer, rules = np.zeros(plan.nbytes, np.uint8), BodyRules()
    async with (
        Pusher(timeout_s=20) as pusher,
        serve_app(
            sender_app(sender, pusher, rules, DialRules()), host="127.0.0.1", rules=rules
        ) as endpoint,
        receiving(buffer, "127.0.0.1") as receiver,
        httpx.AsyncClient(base_url=f"http://{endpoint}") as client,
    ):
        [register] = bodies(asked, "/register_sglang_instance")
        fields = json.loads(register) | {
            "session_ids": [f"127.0.0.1:{receiver.port}"],
            "zmq_endpoint": "127.0.0.1",
            "zmq_port": receiver.message_port,
        }
        answer = (await client.post("/register_sglang_instance", json=fields)).json()
        [known, *_] = bodies_of_answers(published, "/register_sglang_instance")
        assert answer.keys() == json.loads(known).keys()
        assert answer["trainer_session_ids"]
        transfer = bodies(asked, "/request_transfer")[0]
        sent = (await client.post("/request_transfer", json=json.loads(transfer))).json()
        assert sent == {"ok": True, "version": 1, "mode": "full"}
        await receiver.ended()
        info = (await client.get("/get_buffer_info")).json()
        assert info == json.loads(bodies_of_answers(published, "/get_buffer_info")[0])
    assert np.array_equal(buffer, flat)
    assert sender.pushed == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"session_ids": ["127.0.0.1:99999"]}, "session_ids"),
        ({"session_ids": ["127.0.0.1"]}, "session_ids"),
        ({"session_ids": [":".join(["127.0.0.1", *["80"] * 65])]}, "session_ids"),
        ({"session_ids": ["198.51.100.1:80"]}, "http.dial"),
        ({"zmq_endpoint": "tcp://198.51.100.1:80"}, "http.dial"),
        ({"zmq_endpoint": "tcp://127.0.0.1:x"}, "zmq_endpoint"),
        ({"zmq_port": 0}, "zmq_endpoint"),
        ({"buffer_length": 201}, "buffer_length"),
    ],
)
async def test_a_receiver_of_other_addresses_is_refused(changes, named):
    [register] = bodies(golden("receiver")["exchanges"], "/register_sglang_instance")
    plan = BufferPlan.of([("w", Dtype.BF16, (100,))])
    flat, rules = weights_of(1).view(np.uint8), BodyRules()
    sender, pusher = Sender("solver"), Pusher(timeout_s=20)
    sender.offer = SenderOffer(held=HeldVersion(version=0, plan=plan, flat=flat), number=1)
    app = sender_app(sender, pusher, rules, DialRules())
    async with (
        pusher,
        serve_app(app, host="127.0.0.1", rules=rules) as endpoint,
        httpx.AsyncClient(base_url=f"http://{endpoint}") as client,
    ):
        here = {"session_ids": ["127.0.0.1:80"], "zmq_endpoint": "127.0.0.1"}
        fields = json.loads(register) | here | changes
        answer = await client.post("/register_sglang_instance", json=fields)
    assert answer.status_code == 422
    assert named in answer.json()["error"]
    assert not pusher.receivers


def bodies_of_answers(exchanges, path):
    return [decoded(each["answer"]) for each in exchanges if each["path"] == path]


async def test_a_published_raas_is_understood():
    raas = Player(golden("raas")["exchanges"])
    try:
        url = f"http://{raas.address}"
        async with RaasCalls(url, load_timeout_s=20, dial=DialRules()) as calls:
            assert (await calls.status())["status"] == "ready"
            assert await calls.available() > 0
            await calls.register_workflow({"workflow_id": "w"})
            assert isinstance(await calls.submit({}, "w", is_eval=False), int)
            loaded = await calls.notify_version("solver", 1, "127.0.0.1:1")
            items = [item for _ in range(4) for item in await calls.pull(is_eval=False)]
    finally:
        raas.close()
    assert loaded["pull_result"]["version"] == 1
    assert items
    for item in items:
        rollouts, result = yield_of(task(), item, MODELS)
        assert not result.failures
        for rollout in rollouts:
            [trajectory] = rollout.trajectories
            assert trajectory.sampled_mask.sum() == 5
            assert {span.version for span in trajectory.version_spans} <= set(range(59))


async def test_what_was_sampled_before_any_pull_is_no_rollout():
    [item, *_] = answers(golden("raas")["exchanges"], "/pull")[0]["result"]
    rollouts, result = yield_of(task(), item, {0: ("solver", {})})
    assert not rollouts
    assert "never pulled" in result.failures[0].failure.message


async def test_a_receiver_that_is_known_may_register_again_where_no_other_may(monkeypatch):
    monkeypatch.setattr(sending, "_MOST_RECEIVERS", 1)
    plan, rules = BufferPlan.of([("w", Dtype.BF16, (100,))]), BodyRules()
    sender = Sender("solver")
    flat = weights_of(1).view(np.uint8)
    sender.offer = SenderOffer(held=HeldVersion(version=0, plan=plan, flat=flat), number=1)
    async with (
        Pusher(timeout_s=5) as pusher,
        serve_app(
            sender_app(sender, pusher, rules, DialRules()), host="127.0.0.1", rules=rules
        ) as address,
        httpx.AsyncClient(base_url=f"http://{address}") as client,
    ):
        found = []
        for port in (1, 1, 2):
            fields = {
                "sglang_http_host": "127.0.0.1",
                "sglang_http_port": port,
                "session_ids": ["127.0.0.1:9"],
                "buffer_length": plan.nbytes,
                "zmq_endpoint": "127.0.0.1",
                "zmq_port": 9,
            }
            answer = await client.post("/register_sglang_instance", json=fields)
            found.append(answer.status_code)
    assert found == [200, 200, 409]


@pytest.mark.parametrize("name", ["loss_mask", "logprobs", "attention_mask", "versions"])
async def test_one_value_does_not_stand_for_all_tokens(name):
    [item, *_] = answers(golden("raas")["exchanges"], "/pull")[0]["result"]
    [sequence] = item["result"]["trajectories"][0]["sequences"]
    sequence[name] = sequence[name][:, -1:]
    rollouts, result = yield_of(task(), item, MODELS)
    assert not rollouts
    assert f"{name} has 1 values for" in result.failures[0].failure.message


@pytest.mark.parametrize(
    "changes", [{"rewards": [10**400, 0]}, {"ok": np.zeros(2)}, {"agent_metrics": {"a": 10**400}}]
)
def test_numbers_that_are_too_large_cost_their_task_and_not_the_raas(changes):
    [item, *_] = answers(golden("raas")["exchanges"], "/pull")[0]["result"]
    item["result"] |= changes
    rollouts, result = yield_of(task(), item, MODELS)
    assert not rollouts
    assert {each.failure.reason for each in result.failures} == {Reason.ROLLOUT_INVALID}


async def test_what_several_policies_sampled_is_trained_on_by_each_alone():
    [item, *_] = answers(golden("raas")["exchanges"], "/pull")[0]["result"]
    for trajectory in item["result"]["trajectories"]:
        [sequence] = trajectory["sequences"]
        sampled = np.flatnonzero(sequence["loss_mask"])
        model_ids = np.full_like(sequence["loss_mask"], -1)
        model_ids[0, sampled] = [2, 2, 1, 1, 2]
        sequence["model_ids"] = model_ids
    # The workflow's first policy is another one than the first in the numbers.
    models = {2: ("solver", VERSIONS), 1: ("judge", VERSIONS)}
    both = replace(task(), sampling={"solver": SamplingParams(), "judge": SamplingParams()})
    rollouts, result = yield_of(both, item, models)
    assert not result.failures
    for rollout in rollouts:
        found = {each.policy_id: each for each in rollout.trajectories}
        assert found.keys() == {"solver", "judge"}
        assert len({each.trajectory_id for each in rollout.trajectories}) == 2
        for policy_id, places in (("solver", [0, 1, 4]), ("judge", [2, 3])):
            assert (
                np.flatnonzero(found[policy_id].sampled_mask).tolist() == sampled[places].tolist()
            )
    _, result = yield_of(both, item, {2: ("solver", VERSIONS)})
    assert "no policy of the workflow" in result.failures[0].failure.message


def task():
    return made_up_task(sample_indexes=(0, 1), sampling={"solver": SamplingParams()})


def test_every_request_of_a_published_trainer_is_read():
    asked = golden("trainer")["exchanges"]
    [ready] = bodies(asked, "/ready")
    assert TrainerReady.model_validate(read_pickle(ready)).model_id == "solver"
    told = [
        NotifyVersion.model_validate(read_pickle(each)) for each in bodies(asked, "/notify_version")
    ]
    assert [each.version for each in told] == list(range(1, len(told) + 1))
    batches = [each["path"] for each in asked if each["path"].startswith("/batch")]
    assert parse_qs(urlsplit(batches[0]).query) == {"model_id": ["solver"], "version": ["0"]}


def test_our_batches_have_the_columns_of_published_ones():
    ours = answers(golden("trainer")["exchanges"], "/batch")[0]["batch"]
    published = answers(golden("dataflow")["answers"], "/batch")[0]["batch"]
    # Only read where there is no mean and deviation of the group.
    published.pop("normalized_rewards")
    assert ours.keys() == published.keys()
    for name, column in published.items():
        assert type(ours[name]) is type(column)
        if torch.is_tensor(column):
            assert (name, ours[name].dtype, ours[name].ndim) == (name, column.dtype, column.ndim)


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/register_workflow", RegisterWorkflow),
        ("/submit", SubmitPrompt),
        ("/pull", Pull),
        ("/notify_version", LoadVersion),
    ],
)
def test_every_request_of_a_published_dataflow_is_read(path, model):
    found = bodies(golden("dataflow")["exchanges"], path)
    assert found
    for body in found:
        model.model_validate(read_pickle(body))


def test_our_results_have_the_fields_of_published_ones():
    [ours, *_] = answers(golden("dataflow")["exchanges"], "/pull")[0]["result"]
    [published, *_] = answers(golden("raas")["exchanges"], "/pull")[0]["result"]
    assert ours.keys() == published.keys() == {"task_id", "result"}
    assert published["result"].keys() <= ours["result"].keys()
    [mine, theirs] = (
        each["result"]["trajectories"][0]["sequences"][0] for each in (ours, published)
    )
    for name in theirs.keys() - {"rewards"}:
        assert (name, mine[name].dtype, mine[name].ndim) == (name, theirs[name].dtype, 2)
