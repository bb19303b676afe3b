"""A node takes a server over that runs already, if it is one of its model: real HTTP, no model."""

import json
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from astraflow.core.errors import Reason

Peer = Callable[[str, Path, int], str]


class Page(BaseHTTPRequestHandler):
    """Says what the server is told to serve; generates nothing."""

    def do_GET(self) -> None:
        body = json.dumps(self.server.said).encode()  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def peer() -> Iterator[Peer]:
    """Starts servers that say what they serve, as vLLM does."""
    servers: list[ThreadingHTTPServer] = []

    def start(name: str, directory: Path, max_context: int) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
        servers.append(server)
        said = {"id": name, "root": str(directory), "max_model_len": max_context}
        server.said = {"data": [said]}  # type: ignore[attr-defined]
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def refused(why_not: Any) -> Callable[[str], Awaitable[str]]:
    """Attaches to an address, and returns why that is refused."""

    async def refused(url: str) -> str:
        error = await why_not(kind="vllm", url=url)
        assert error.reason is Reason.INVALID_FIELD
        return error.message

    return refused


async def test_a_server_of_another_name_is_not_taken_over(peer: Peer, refused: Any, model: Any):
    assert "it serves llama, not policy" in await refused(peer("llama", model.folder, 512))


async def test_what_is_no_such_server_is_named(peer: Peer, why_not: Any, model: Any):
    error = await why_not(kind="sglang", url=peer("policy", model.folder, 512))
    assert error.reason is Reason.ENGINE_FAILED
    assert "KeyError('model_path')" in error.message


async def test_a_server_with_less_context_is_not_taken_over(peer: Peer, refused: Any, model: Any):
    assert "takes 511 tokens" in await refused(peer("policy", model.folder, 511))


async def test_a_server_of_another_model_is_not_taken_over(
    peer: Peer, refused: Any, tmp_path: Path, model: Any
):
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((model.folder / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config))
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [64]}}).encode()
    (other / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    said = await refused(peer("policy", other, 512))
    assert f"the server serves {other}" in said
    assert "model.embed_tokens.weight has shape None" in said
