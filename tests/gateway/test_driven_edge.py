"""What is wrong gets an error in the envelope of a RaaS, and costs nobody else anything."""

import asyncio
import pickle

import httpx
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from astraflow.gateway.http import BodyRules
from astraflow.gateway.raas.node import RaasSettings
from astraflow.gateway.raas.serve import serve_raas
from astraflow.raas.policies import ServedModel
from astraflow.testing.engine import CharTokenizer, SmallEngine
from astraflow.testing.recipes import small_recipe

from .conftest import weights_of

PICKLE = {"content-type": "application/octet-stream"}
WORKFLOW = {"workflow_id": "known", "workflow_cls": "gateway_digits", "workflow_kwargs": {}}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    save_file({"w": torch.from_numpy(weights_of(0)).view(torch.bfloat16)}, folder / "m.safetensors")
    rules = BodyRules(reads_pickles=True, max_nbytes=4096, timeout_s=1.0, head_timeout_s=1.0)
    recipe = small_recipe(folder, workflow="gateway_digits")
    settings = RaasSettings(recipe=recipe, rules=rules, models={"solver": folder})
    engine = SmallEngine(CharTokenizer())
    engine.open.clear()
    models = {"solver": ServedModel(engine=engine, tokenizer=CharTokenizer())}
    async with (
        serve_raas(settings, models) as serving,
        httpx.AsyncClient(base_url=f"http://{serving.address}") as client,
    ):
        await post(client, "/register_workflow", WORKFLOW)
        yield client


async def post(client, path, fields):
    """Return the status and the envelope."""
    answer = await client.post(path, content=pickle.dumps(fields), headers=PICKLE)
    return answer.status_code, pickle.loads(answer.content)


class Code:
    """What an existing Dataflow may send for a workflow, and nobody here runs."""


@pytest.mark.parametrize(
    ("path", "fields", "status", "why"),
    [
        ("/submit", {"data": {}, "workflow_id": "other"}, 404, "not registered"),
        ("/submit", {"data": "text", "workflow_id": "known"}, 422, "data: "),
        ("/submit", {"data": {"x": b"raw"}, "workflow_id": "known"}, 422, "not JSON serializable"),
        ("/submit", {"data": {}, "workflow": "known"}, 422, "workflow"),
        ("/submit", [1], 400, "must be a dict"),
        ("/eval_submit", {"data": {}}, 404, "workflow default is not registered"),
        ("/pull", {"max_items": 0}, 422, "max_items"),
        ("/pull", {"timeout": "soon"}, 422, "timeout"),
        ("/pull", {"timeout": float("nan")}, 422, "timeout"),
        ("/eval_pull", {"max_items": 10**30}, 422, "max_items"),
        ("/reset_training_engine", {"timeout": -1}, 422, "timeout"),
        ("/notify_version", {"version": 1, "sender_endpoint": "nowhere"}, 422, "sender_endpoint"),
        (
            "/notify_version",
            {"version": 1, "sender_endpoint": "h:1", "model_id": "b"},
            404,
            "none of solver",
        ),
        ("/register_workflow", WORKFLOW | {"workflow_cls": "other"}, 404, "none of the recipe's"),
        ("/register_workflow", WORKFLOW | {"workflow_cls": Code}, 400, "names "),
        (
            "/register_workflow",
            WORKFLOW | {"gconfig_overrides": {"temperature": "hot"}},
            422,
            "gconfig_overrides.temperature",
        ),
        (
            "/register_workflow",
            WORKFLOW | {"gconfig_overrides": {"n_samples": 10**9}},
            422,
            "n_samples",
        ),
        *(
            ("/register_workflow", WORKFLOW | {"gconfig_overrides": {name: value}}, 422, name)
            for name, value in (
                ("temperature", -1.0),
                ("temperature", float("nan")),
                ("top_p", float("nan")),
                ("top_p", 0.0),
                ("frequency_penalty", float("inf")),
                ("max_new_tokens", -1),
                ("min_new_tokens", -1),
            )
        ),
        ("/shutdown", {"now": True}, 422, "now"),
        ("/submit", {"data": {"x": "y" * 5000}, "workflow_id": "known"}, 413, "4096 bytes"),
    ],
)
async def test_a_wrong_body_says_what_is_wrong(client, path, fields, status, why):
    found, envelope = await post(client, path, fields)
    assert (found, envelope["ok"]) == (status, False)
    assert why in envelope["error"]


async def test_code_in_a_body_is_not_run(client):
    answer = await client.post("/submit", content=b"cos\nsystem\n(Vtrue\ntR.", headers=PICKLE)
    assert answer.status_code == 400
    assert "names os.system" in pickle.loads(answer.content)["error"]


async def test_tensors_are_no_data_of_a_prompt(client):
    fields = {"data": {"x": torch.zeros(2)}, "workflow_id": "known"}
    status, envelope = await post(client, "/submit", fields)
    assert status == 422
    assert "nodes get texts" in envelope["error"]


async def test_a_sender_that_is_not_there_is_a_reason_in_the_answer(client):
    status, envelope = await post(
        client, "/notify_version", {"version": 1, "sender_endpoint": "127.0.0.1:1"}
    )
    assert (status, envelope["ok"], envelope["result"]["ok"]) == (200, True, False)
    assert "127.0.0.1:1" in envelope["result"]["reason"]


async def test_a_body_that_does_not_come_is_given_up(client):
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(b"POST /submit HTTP/1.1\r\nhost: h\r\ncontent-length: 10\r\n\r\n12")
    try:
        assert b" 408 " in await reader.readline()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_what_is_submitted_beyond_the_room_waits(client):
    count = (await client.get("/availability")).json()["max_concurrency"]
    for _ in range(count + 1):
        fields = {"data": {"prompt": "x"}, "workflow_id": "known"}
        status, envelope = await post(client, "/submit", fields)
        assert (status, envelope["ok"]) == (200, True)
    known = (await client.get("/status")).json()
    assert (known["status"], known["queued"], known["workflows"]) == ("ready", 1, ["known"])
    room = (await client.get("/availability")).json()
    assert (room["available"], room["queued"], room["inflight"]) == (0, 1, count + 1)
    _, wiped = await post(client, "/reset_training_engine", {"timeout": 5})
    told = {"cancelled": count + 1, "stragglers": 0, "reset_epoch": 1}
    assert wiped["result"].items() >= told.items()
    assert (await client.get("/status")).json()["queued"] == 0


async def test_the_page_describes_every_endpoint(client):
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert {"/status", "/submit", "/pull", "/eval_pull", "/notify_version"} <= paths.keys()
    told = [each for methods in paths.values() for each in methods.values()]
    assert all(len(each["description"]) > 15 for each in told)
