"""What is wrong on the edge gets an error in JSON, and costs nobody else anything."""

import asyncio
import pickle

import httpx
import pytest
import pytest_asyncio
from safetensors.numpy import load

from astraflow.gateway.http import BodyRules
from astraflow.gateway.serve import serve_gateway

from .conftest import without_a_run

PICKLE = {"content-type": "application/octet-stream"}


def settings():
    rules = BodyRules(reads_pickles=True, max_nbytes=4096, timeout_s=1.0, head_timeout_s=1.0)
    return without_a_run(rules=rules)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client():
    async with (
        serve_gateway(settings()) as serving,
        httpx.AsyncClient(base_url=f"http://{serving.address}") as client,
    ):
        yield client


async def error_of(answer, status):
    assert answer.status_code == status
    assert set(answer.json()) <= {"error", "reason"}
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "headers", "status", "why"),
    [
        (b"{", {"content-type": "application/json"}, 400, "no JSON"),
        (b"[1]", {"content-type": "application/json"}, 400, "must be a dict"),
        (b"[" * 4000, {"content-type": "application/json"}, 400, "no JSON"),
        (b"x" * 5000, {"content-type": "application/json"}, 413, "4096 bytes"),
        (b"{}", {"content-type": "text/plain"}, 415, "not text/plain"),
        (b"cos\nsystem\n(Vtrue\ntR.", PICKLE, 400, "names os.system"),
        (pickle.dumps({"version": "3"}), PICKLE, 422, "version: "),
        (pickle.dumps({"version": 3, "verison": 4}), PICKLE, 422, "verison"),
        (pickle.dumps({"version": -1}), PICKLE, 422, "greater than or equal to 0"),
        (pickle.dumps({"version": 3, "model_id": "b"}), PICKLE, 404, "none of solver"),
        (pickle.dumps({"version": 3}), PICKLE, 409, "POST /ready first"),
    ],
)
async def test_a_wrong_body_says_what_is_wrong(client, body, headers, status, why):
    answer = await client.post("/notify_version", content=body, headers=headers)
    assert why in await error_of(answer, status)


@pytest.mark.parametrize(
    ("fields", "status", "why"),
    [
        ({"train_batch_size": 4}, 422, "sender_endpoint is missing"),
        ({"train_batch_size": 8, "sender_endpoint": "h:1"}, 409, "batches of 4 sequences"),
        ({"train_batch_size": 4, "sender_endpoint": "127.0.0.1:1"}, 503, "127.0.0.1:1"),
    ],
)
async def test_a_trainer_that_does_not_fit_is_told_why(client, fields, status, why):
    assert why in await error_of(await client.post("/ready", json=fields), status)


async def test_a_length_that_lies_is_refused_before_the_body_comes(client):
    answer = await raw(
        client, b"POST /ready HTTP/1.1\r\nhost: h\r\ncontent-length: 9999999\r\n\r\n"
    )
    assert b" 413 " in answer.splitlines()[0]


async def test_a_body_that_does_not_come_is_given_up(client):
    answer = await raw(client, b"POST /ready HTTP/1.1\r\nhost: h\r\ncontent-length: 10\r\n\r\n12")
    assert b" 408 " in answer.splitlines()[0]
    assert b"did not come in 1 s" in answer


async def test_a_head_that_does_not_come_is_given_up(client):
    answer = await raw(client, b"GET /batch HTTP/1.1\r\nhost: ")
    assert b" 408 " in answer.splitlines()[0]
    assert b"no request head came" in answer


async def raw(client, sent):
    """Send bytes; return all that comes until the connection is closed or falls silent."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(sent)
    try:
        answer = await reader.readuntil(b"\r\n\r\n")
        return answer + await reader.readuntil(b"}")
    finally:
        writer.close()
        await writer.wait_closed()


async def test_without_the_flag_pickles_are_not_read():
    async with serve_gateway(without_a_run()) as serving, httpx.AsyncClient() as client:
        url = f"http://{serving.address}/notify_version"
        answer = await client.post(url, content=pickle.dumps({}), headers=PICKLE)
        assert "--legacy-pickle" in await error_of(answer, 415)


async def test_the_format_of_an_answer_is_what_the_caller_accepts(client):
    published = await client.post("/save_buffer")
    assert pickle.loads(published.content) == {"ok": True}
    as_json = await client.post("/save_buffer", headers={"accept": "application/json"})
    assert as_json.json() == {"ok": True}
    tensors = await client.post("/save_buffer", headers={"accept": "application/vnd.safetensors"})
    assert load(tensors.content) == {}
    refused = await client.post("/save_buffer", headers={"accept": "text/html"})
    assert "not text/html" in await error_of(refused, 406)


async def test_a_path_that_is_none_is_a_404_in_json(client):
    assert await error_of(await client.get("/nowhere"), 404) == "Not Found"


async def test_the_page_describes_every_endpoint(client):
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert {"/ready", "/batch", "/notify_version", "/status", "/raas_pool"} <= paths.keys()
    told = [each for methods in paths.values() for each in methods.values()]
    assert all(len(each["description"]) > 15 for each in told)


async def test_what_needs_an_operator_says_so(client):
    assert "operator token" in await error_of(await client.get("/status"), 501)
