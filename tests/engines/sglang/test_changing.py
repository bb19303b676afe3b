"""What counts of a change in SGLang is what each of its ranks wrote: real HTTP, no model."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import KvPolicy
from astraflow.engines.sglang.dialect import SglangDialect
from tests.pages import JsonPage, served

ROUTES = ("/begin_weight_update", "/pause_generation", "/v1/loads")
LOADED, ANNOUNCED = "/update_weights_from_tensor", "/update_weight_version"


class Page(JsonPage, BaseHTTPRequestHandler):
    """Takes whatever it is sent, and has its ranks write what they are told to."""

    def do_GET(self) -> None:
        self.answer({"tp_size": 2, "paths": dict.fromkeys(ROUTES)})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.sent.append(self.path)  # type: ignore[attr-defined]
        if self.path in (LOADED, ANNOUNCED):
            for path, said in self.server.written.items():  # type: ignore[attr-defined]
                path.write_text(json.dumps(said))
        self.answer({"success": True})


@pytest.fixture
def page() -> Iterator[Any]:
    with served(Page, sent=[], written={}) as server:
        yield server


@pytest.fixture
async def http(page: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{page.server_port}", trust_env=False
    ) as http:
        yield http


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "7.update"


def answer_of(file: Path, rank: int) -> Path:
    return file.with_name(f"{file.name}.{rank}.answer")


def done(error: str = "") -> dict[str, Any]:
    return {"error": error, "version": 7, "nbytes": 8, "apply_s": 0.1}


async def changed(http: httpx.AsyncClient, file: Path) -> None:
    dialect = SglangDialect(Path())
    await dialect.stage(http, file)
    await dialect.change(http, file, version=7, kv=KvPolicy.KEEP)


@asynccontextmanager
async def staging(file: Path, rank: int) -> AsyncIterator[None]:
    """A rank that stages files, and writes them once their version is announced."""

    async def staged(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.write(json.dumps({"error": "", "is_quick": True}).encode())
        writer.close()

    server = await asyncio.start_unix_server(staged, file.with_name(f"{rank}.socket"))
    async with server:
        yield


async def test_what_an_attempt_that_broke_off_left_does_not_count(
    page: Any, http: httpx.AsyncClient, file: Path
):
    answer_of(file, 1).write_text(json.dumps(done("the server was killed")))
    page.written = {answer_of(file, rank): done() for rank in (2, 3)}
    await changed(http, file)
    assert list(file.parent.iterdir()) == []


async def test_a_version_that_a_rank_was_not_given_is_not_live(
    page: Any, http: httpx.AsyncClient, file: Path
):
    page.written = {answer_of(file, 2): done()}
    with pytest.raises(AstraflowError, match="in 1 of 2 ranks") as caught:
        await changed(http, file)
    assert caught.value.reason is Reason.APPLY_FAILED


async def test_a_version_is_announced_where_all_ranks_have_staged_it_and_loaded_elsewhere(
    page: Any, http: httpx.AsyncClient, file: Path
):
    page.written = {answer_of(file, rank): done() for rank in (2, 3)}
    async with staging(file, 2):
        await changed(http, file)
        assert LOADED in page.sent
        page.sent.clear()
        async with staging(file, 3):
            await changed(http, file)
    assert page.sent == [ANNOUNCED]
