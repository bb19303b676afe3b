"""Who attacks the gateway, or is dialled by it, costs others nothing and learns nothing."""

import asyncio
import gzip
import json
import ssl
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from astraflow.config.pool import Http, TlsConfig
from astraflow.core.errors import AstraflowError
from astraflow.gateway.http import BodyRules
from astraflow.gateway.receiving import SenderCopy
from astraflow.gateway.sending import Instance
from astraflow.gateway.serve import serve_gateway
from astraflow.gateway.settings import dial_of
from astraflow.rpc.peers import DialRules, Peer
from astraflow.rpc.tls import Tls

from .conftest import without_a_run

SECRET = "what-only-the-inside-may-read"
LAYOUT = {"tensors_meta": [["w", [[4], "bfloat16"]]], "single_buffer_length": 8}

pytestmark = pytest.mark.asyncio(loop_scope="module")


def settings(**changes):
    rules = BodyRules(reads_pickles=True, max_nbytes=1 << 20, timeout_s=5.0)
    return without_a_run(rules=rules, **changes)


@asynccontextmanager
async def gateway(**changes):
    """Serve a gateway without a hub; yield a client of it."""
    async with (
        serve_gateway(settings(**changes)) as serving,
        httpx.AsyncClient(base_url=f"http://{serving.address}", timeout=60) as client,
    ):
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client():
    async with gateway() as client:
        yield client


class RawPeer:
    """Answers every request with the same bytes, and notes the requests."""

    def __init__(self, answer):
        self.answer = answer
        self.requests = []
        self.sent_nbytes = 0

    async def serve(self, reader, writer):
        self.requests.append(await reader.readuntil(b"\r\n\r\n"))
        try:
            for part in self.answer if isinstance(self.answer, list) else [self.answer]:
                writer.write(part)
                self.sent_nbytes += len(part)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def peer_of(answer, host="127.0.0.1"):
    """Serve raw bytes; yield the peer, with its address."""
    peer = RawPeer(answer)
    async with await asyncio.start_server(peer.serve, host, 0) as server:
        peer.address = f"{host}:{server.sockets[0].getsockname()[1]}"
        yield peer


def http(body, *headers):
    head = ["HTTP/1.1 200 OK", "content-type: application/json", *headers, "", ""]
    return "\r\n".join(head).encode() + body


def whole(fields):
    body = json.dumps(fields).encode()
    return http(body, f"content-length: {len(body)}")


def ready(endpoint):
    return {"train_batch_size": 4, "sender_endpoint": endpoint, "model_id": "solver"}


BOMB = gzip.compress(b"[" * (1 << 20))
ENDLESS = [http(b"", "connection: close"), *[b" " * (1 << 16)] * 2000]
CRUMBS = http(b"1\r\n \r\n" * 20_000, "transfer-encoding: chunked")


@pytest.mark.parametrize(
    ("answer", "status", "why"),
    [
        (http(BOMB, "content-encoding: gzip", f"content-length: {len(BOMB)}"), 503, "compresses"),
        (http(b"", "content-length: 9000000000"), 413, "more than"),
        (ENDLESS, 413, "more than"),
        (CRUMBS, 503, "crumbs"),
        (http(b"[" + b"[]," * 300_000 + b"1]", "connection: close"), 503, "no dict of JSON"),
        (http(b"[" * 100_000, "connection: close"), 503, "no dict of JSON"),
        (http(SECRET.encode(), "connection: close"), 503, "no dict of JSON"),
        (SECRET.encode() + b"\r\n\r\n", 503, "RemoteProtocolError"),
        (b"HTTP/1.1 500 E\r\nconnection: close\r\n\r\n" + SECRET.encode(), 503, "status 500"),
        (whole({"secret": SECRET}), 409, "buffer info is none"),
        (whole({**LAYOUT, "tensors_meta": [[SECRET, [[4], SECRET]]]}), 409, "buffer info is none"),
        (whole({**LAYOUT, "single_buffer_length": float("inf")}), 409, "buffer info is none"),
        (whole({**LAYOUT, "tensors_meta": [["w", [[-4], "bfloat16"]]]}), 409, "info is none"),
        (
            whole({"tensors_meta": [["w", [[2], "bfloat16"]]] * 2, "single_buffer_length": 8}),
            409,
            "names a tensor twice",
        ),
        (
            whole(
                {"tensors_meta": [["w", [[1 << 42], "bfloat16"]]], "single_buffer_length": 1 << 43}
            ),
            413,
            "http.max_weights_nbytes",
        ),
    ],
)
async def test_what_a_sender_answers_is_bounded_and_not_told(client, answer, status, why):
    async with peer_of(answer) as peer:
        told = await client.post("/ready", json=ready(peer.address))
    assert told.status_code == status
    assert why in told.json()["error"]
    assert SECRET not in told.text
    assert b"accept-encoding: identity" in peer.requests[0].lower()
    assert peer.sent_nbytes < 80 << 20


async def test_no_answer_leads_elsewhere(client):
    async with peer_of(whole(LAYOUT)) as inside:
        moved = f"HTTP/1.1 307 M\r\nlocation: http://{inside.address}/\r\ncontent-length: 0\r\n\r\n"
        async with peer_of(moved.encode()) as peer:
            told = await client.post("/ready", json=ready(peer.address))
    assert (told.status_code, inside.requests) == (503, [])
    assert inside.address not in told.text


async def test_a_raas_is_bounded_and_not_told_either(client):
    async with peer_of(whole({"status": SECRET, "message": SECRET})) as peer:
        asking = Peer(f"http://{peer.address}", DialRules())
        async with asking:
            assert (await asking.ask_json("GET", "/status"))["status"] == SECRET
            with pytest.raises(AstraflowError, match="more than 10 bytes"):
                await asking.ask("GET", "/status", max_nbytes=10)
    async with peer_of(http(b"no", "content-encoding: br", "content-length: 2")) as peer:
        register = {"uid": "r", "raas_url": f"http://{peer.address}"}
        told = await client.post("/register_raas", json=register)
    assert told.status_code == 503
    assert "compresses" in told.json()["error"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/ready", ready("127.0.0.1:99999")),
        ("/ready", ready("127.0.0.1:0")),
        ("/ready", ready("a/b:80")),
        ("/ready", ready("user@host:80")),
        ("/ready", ready("127.0.0.1:80 ")),
        ("/ready", ready("h\r\nx: y:80")),
        ("/ready", ready("\ud800:80")),
        ("/register_raas", {"uid": "r", "raas_url": "http://h:99999"}),
        ("/register_raas", {"uid": "r", "raas_url": "http://[::1"}),
        ("/register_raas", {"uid": "r", "raas_url": "http://"}),
        ("/register_raas", {"uid": "r", "raas_url": "http://u:p@h:80"}),
        ("/register_raas", {"uid": "r", "raas_url": "http://h:80/?x=1"}),
        ("/register_raas", {"uid": "r", "raas_url": "file:///etc/passwd"}),
        ("/register_raas", {"uid": "\ud800", "raas_url": "http://h:80"}),
        ("/notify_version", {"version": 10**30}),
        ("/notify_version", {"version": True}),
    ],
)
async def test_a_place_that_is_none_is_a_wrong_field(client, path, fields):
    kind = {"content-type": "application/json"}
    told = await client.post(path, content=json.dumps(fields), headers=kind)
    assert (told.status_code, list(told.json())) == (422, ["error"])


@pytest.mark.parametrize("version", ["abc", "nan", "-1", "1e999", "9" * 400, "1.5", "%00", ""])
async def test_a_parameter_that_is_none_is_named(client, version):
    told = await client.get(f"/batch?version={version}")
    assert told.status_code == 422
    assert told.json()["error"].startswith("query.version: ")


async def test_only_hosts_of_the_list_are_dialled():
    async with (
        gateway(dial=DialRules(hosts=("192.0.2.0/24", "trainer.example"))) as client,
        peer_of(whole(LAYOUT), host="127.0.0.2") as inside,
    ):
        told = await client.post("/ready", json=ready(inside.address))
        assert (told.status_code, told.json()["reason"]) == (422, "INVALID_FIELD")
        assert "http.dial" in told.json()["error"]
        register = {"uid": "r", "raas_url": f"http://{inside.address}"}
        told = await client.post("/register_raas", json=register)
        assert told.status_code == 422
        assert inside.requests == []
    async with gateway(dial=DialRules(hosts=())) as client, peer_of(whole({})) as own:
        told = await client.post("/ready", json=ready(own.address))
        assert (told.status_code, len(own.requests)) == (409, 1)


@pytest.mark.parametrize(
    ("hosts", "host", "is_allowed"),
    [
        (("10.0.0.0/8",), "10.1.2.3", True),
        (("10.0.0.0/8",), "::ffff:10.1.2.3", True),
        (("10.0.0.0/8",), "169.254.169.254", False),
        (("127.0.0.0/8",), "0.0.0.0", False),
        (("127.0.0.0/8",), "2130706433", True),
        (("10.0.0.0/8",), "localhost", False),
        (("localhost",), "localhost", True),
        (("::1",), "::1", True),
        (("::1",), "127.0.0.1", False),
    ],
)
async def test_a_name_is_what_it_stands_for(hosts, host, is_allowed):
    asking = DialRules(hosts=hosts).addresses(host, 80)
    if is_allowed:
        assert await asking
    else:
        with pytest.raises(AstraflowError, match="may not be dialled"):
            await asking


@pytest.mark.parametrize(
    ("host", "is_clear", "is_allowed"),
    [
        ("127.0.0.1", False, True),
        ("localhost", False, True),
        ("10.1.2.3", True, True),
        ("10.1.2.3", False, False),
    ],
)
async def test_weights_leave_the_host_in_the_clear_where_they_may(host, is_clear, is_allowed):
    rules = DialRules(clear_weights=is_clear)
    instance = Instance(
        sglang_http_host=host,
        sglang_http_port=1,
        session_ids=[f"{host}:2"],
        buffer_length=0,
        zmq_endpoint=host,
        zmq_port=3,
    )
    if is_allowed:
        assert (await instance.target(rules)).pushes
        return
    with pytest.raises(AstraflowError, match=r"http\.clear_weights"):
        await instance.target(rules)
    with pytest.raises(AstraflowError, match=r"http\.clear_weights"):
        await SenderCopy.of(f"{host}:2", host="127.0.0.1", timeout_s=1, dial=rules)


async def test_a_sender_names_no_more_weights_than_a_container_has_memory(tmp_path, monkeypatch):
    for folder, limit, used in (
        (tmp_path, "memory.max", "memory.current"),
        (tmp_path / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        folder.mkdir(exist_ok=True)
        for name, said in ((limit, "1000"), (used, "900"), ("memory.stat", "anon 900")):
            (folder / name).write_text(f"{said}\n")
    monkeypatch.setattr("astraflow.engines.devices._GROUPS", tmp_path)
    assert dial_of(Http()).max_weights_nbytes == 1000
    assert dial_of(Http(max_weights_nbytes=7)).max_weights_nbytes == 7


async def test_a_run_with_tls_sends_no_weights_in_the_clear_unless_it_says_so():
    secure = Tls(ca=Path("ca.pem"))
    assert dial_of(Http()).clear_weights
    assert not dial_of(Http(), secure).clear_weights
    assert not dial_of(Http(tls=TlsConfig(ca=Path("ca.pem")))).clear_weights
    assert dial_of(Http(clear_weights=True), secure).clear_weights


@asynccontextmanager
async def half_open(client, count, sent):
    """Open connections that owe something."""
    host, port = client.base_url.host, client.base_url.port
    writers = []
    try:
        for _ in range(count):
            _, writer = await asyncio.open_connection(host, port)
            writers.append(writer)
            writer.write(sent)
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /batch HTTP/1.1\r\nhost: ",
        b"POST /ready HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\n{",
    ],
)
async def test_half_open_connections_cost_others_nothing(client, sent):
    async with (
        half_open(client, 600, sent),
        httpx.AsyncClient(base_url=client.base_url, timeout=60) as other,
    ):
        assert (await other.post("/save_buffer")).status_code == 200


async def test_what_is_no_request_is_told_in_json(client):
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(b"nonsense\r\n\r\n")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b" 400 " in head.splitlines()[0]
    assert list(json.loads(body)) == ["error"]


@pytest.mark.parametrize("path", ["/batch?model_id=other", "/docs", "/openapi.json", "/nowhere"])
async def test_nothing_is_told_before_the_secret(path):
    async with gateway(http_token="open-sesame") as client:
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "open-sesame"}):
            told = await client.get(path, headers=given)
            assert (told.status_code, list(told.json())) == (401, ["error"])
            assert "solver" not in told.text
        told = await client.get(path, headers={"authorization": "Bearer open-sesame"})
        assert told.status_code in (200, 404)


def tls_fields(tls):
    return {"certificate": tls.certificate, "key": tls.key, "ca": tls.ca}


async def test_callers_show_a_certificate_where_one_is_asked_for(pem):
    known = ssl.create_default_context(cafile=pem.ca)
    shown = ssl.create_default_context(cafile=pem.ca)
    shown.load_cert_chain(pem.certificate, pem.key)
    async with serve_gateway(settings(http={"tls": tls_fields(pem)})) as serving:
        url = f"https://{serving.address}/save_buffer"
        async with httpx.AsyncClient(verify=shown) as client:
            assert (await client.post(url)).status_code == 200
        async with httpx.AsyncClient(verify=known) as client:
            with pytest.raises(httpx.TransportError):
                await client.post(url)


async def test_a_key_that_is_none_is_named(tmp_path):
    (tmp_path / "key").write_text("no key")
    tls = Tls(certificate=tmp_path / "key", key=tmp_path / "key")
    with pytest.raises(AstraflowError, match="cannot be used"):
        async with serve_gateway(settings(http={"tls": tls_fields(tls)})):
            pass
