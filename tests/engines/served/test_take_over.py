"""A node takes a server over that runs already, if it is one of its model: real HTTP, no model."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.tasks import SamplingParams
from astraflow.engines.building import build_adapter_engines, build_engine
from astraflow.engines.served import engine as engines
from astraflow.engines.served import server as servers
from astraflow.engines.served.adapter_engine import adapter_engines
from astraflow.engines.served.engine import ServedEngine
from astraflow.engines.served.host import ServerHost
from astraflow.engines.served.model import ModelDescription
from astraflow.engines.sglang.dialect import SglangDialect
from astraflow.engines.vllm.dialect import VllmDialect
from astraflow.rpc.concurrency import beside
from tests.engines.adapter_updates import POLICIES, adapters, update
from tests.pages import JsonPage, served

POLICY = PolicyId("sort")
SOLVER = PolicyId("solver")

Peer = Callable[[str, Path, int], str]
Sent = list[tuple[str, dict[str, Any]]]


class Page(JsonPage, BaseHTTPRequestHandler):
    """Says what the server is told to serve, and takes whatever it is sent; has no model."""

    def do_GET(self) -> None:
        self.server.sent.append((self.path, {}))  # type: ignore[attr-defined]
        self.answer(self.server.said)  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.sent.append((self.path, json.loads(sent or "{}")))  # type: ignore[attr-defined]
        if self.path == "/v1/unload_lora_adapter":
            self.server.unloads.wait()  # type: ignore[attr-defined]
        choice = {
            "token_ids": [5],
            "logprobs": {"content": [{"logprob": -0.5}]},
            "weight_versions": [{"version": "1", "start": 0, "end": 1}],
            "finish_reason": "length",
        }
        said = {
            "choices": [choice],
            "results": [{"is_staged": True, "error": ""}],
            "reports": [{"apply_s": 0.0}],
        }
        self.answer(self.server.wrong.get(self.path, said))  # type: ignore[attr-defined]


@pytest.fixture
def sent() -> Sent:
    """What servers were sent: paths, and bodies."""
    return []


@pytest.fixture
def wrong() -> dict[str, Any]:
    """What servers answer to a path in place of what they should."""
    return {}


@pytest.fixture
def unloads() -> Event:
    """Set: servers forget an adapter when they are told to; else they hang."""
    event = Event()
    event.set()
    return event


@pytest.fixture
def peer(sent: Sent, wrong: dict[str, Any], unloads: Event) -> Iterator[Peer]:
    """Starts servers that say what they serve, as vLLM does."""
    with ExitStack() as servers:

        def start(name: str, directory: Path, max_context: int) -> str:
            said = {"data": [{"id": name, "root": str(directory), "max_model_len": max_context}]}
            page = served(Page, said=said, sent=sent, wrong=wrong, unloads=unloads)
            return f"http://127.0.0.1:{servers.enter_context(page).server_port}"

        yield start
        unloads.set()


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


async def test_nothing_is_read_from_the_cache_that_nodes_before_left(
    peer: Peer, sent: Sent, model: Any
):
    url = peer("policy", model.folder, 512)
    for node in range(2):
        engine = build_engine(model.folder, EngineSettings(kind="vllm", url=url), POLICY)
        try:
            for _ in range(2):
                await engine.swap(model.update(1, seed=node))
                for _ in range(2):
                    await engine.generate([3], SamplingParams(max_new_tokens=1))
        finally:
            await engine.close()
    salts = [body["cache_salt"] for _, body in sent if "cache_salt" in body]
    assert len(salts) == 8
    assert salts[::2] == salts[1::2]
    assert len(set(salts)) == 4


async def test_special_ids_that_the_model_does_not_know_are_not_sent(
    peer: Peer, sent: Sent, model: Any
):
    special = {"eos_token_id": [2, 14], "pad_token_id": 14}
    (model.folder / "generation_config.json").write_text(json.dumps(special))
    url = peer("policy", model.folder, 512)
    engine = build_engine(model.folder, EngineSettings(kind="vllm", url=url), POLICY)
    try:
        await engine.swap(model.update(1, seed=0))
        await engine.generate([3], SamplingParams(max_new_tokens=1))
    finally:
        await engine.close()
    (knobs,) = [body["sampling_params"] for _, body in sent if "cache_salt" in body]
    assert knobs["stop_token_ids"] == [2]
    assert knobs["logit_bias"].keys() == {"0", "1"}


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/collective_rpc", {}),
        ("/astraflow/change", {"reports": []}),
        ("/inference/v1/generate", {"choices": []}),
    ],
)
async def test_answers_of_another_form_are_failures_of_the_engine(
    path: str, answer: Any, peer: Peer, wrong: dict[str, Any], model: Any
):
    url = peer("policy", model.folder, 512)
    engine = build_engine(model.folder, EngineSettings(kind="vllm", url=url), POLICY)
    try:
        await engine.swap(model.update(1, seed=0))
        wrong[path] = answer
        is_swap = path != "/inference/v1/generate"
        with pytest.raises(AstraflowError) as caught:
            await (
                engine.swap(model.update(2, seed=1))
                if is_swap
                else engine.generate([3], SamplingParams(max_new_tokens=1))
            )
        assert caught.value.reason is (Reason.APPLY_FAILED if is_swap else Reason.ENGINE_FAILED)
        # What a server may have half of is not sampled from.
        assert engine.version == (None if is_swap else 1)
    finally:
        await engine.close()


@pytest.fixture
async def adapter_engine(peer: Peer, model: Any) -> AsyncIterator[Any]:
    settings = EngineSettings(kind="vllm", url=peer("policy", model.folder, 512))
    engine: Any = build_adapter_engines(model.folder, settings, POLICIES)[SOLVER]
    yield engine
    await engine.close()


async def test_adapters_for_which_there_is_no_room_fail_their_version_alone(
    adapter_engine: Any, full_disk: Any
):
    given = adapters(adapter_engine._model.shapes, seed=0)
    full_disk(1024)
    with pytest.raises(AstraflowError, match="--shm-size") as caught:
        await adapter_engine.swap(update(SOLVER, 1, given))
    full_disk(None)
    assert caught.value.reason is Reason.CAPACITY_EXCEEDED
    assert {path.name for path in adapter_engine._host.folder.path.iterdir()} == {"python"}
    await adapter_engine.swap(update(SOLVER, 1, given))
    assert adapter_engine.version == 1


async def test_adapters_that_a_server_was_lost_with_leave_their_place(
    adapter_engine: Any, sent: Sent, unloads: Event
):
    unloads.clear()
    for version in (1, 2):
        given = adapters(adapter_engine._model.shapes, seed=version)
        await adapter_engine.swap(update(SOLVER, version, given))
    while "/v1/unload_lora_adapter" not in {path for path, _ in sent}:  # noqa: ASYNC110
        await asyncio.sleep(0)
    server = adapter_engine._host.server
    http = server.http
    server.condemn("it generates no token", server.life)
    while not http.is_closed:  # noqa: ASYNC110
        await asyncio.sleep(0)
    unloads.set()
    while [each.version for each in adapter_engine._versions.kept] != [2]:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_adapters_that_are_answered_in_another_form_fail_their_version_alone(
    peer: Peer, model: Any
):
    class AnswersOtherwise(VllmDialect):
        async def load_adapter(self, http: Any, name: str, folder: Path) -> None:
            # As SGLang's dialect reads an answer.
            (await http.get("/metrics")).json()["success"]

    settings = EngineSettings(kind="vllm", url=peer("policy", model.folder, 512))
    description = ModelDescription.read(model.folder, None)
    engine: Any = adapter_engines(
        AnswersOtherwise(Path()), model=description, settings=settings, policies=POLICIES
    )[SOLVER]
    try:
        with pytest.raises(AstraflowError, match="success") as caught:
            await engine.swap(update(SOLVER, 1, adapters(engine._model.shapes, seed=0)))
        assert caught.value.reason is Reason.APPLY_FAILED
    finally:
        await engine.close()


async def test_a_version_that_waited_while_the_server_was_lost_does_not_end_the_next_one(
    peer: Peer, model: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engines, "_LINGER_S", 0.0)
    url = peer("policy", model.folder, 512)
    engine: Any = build_engine(model.folder, EngineSettings(kind="vllm", url=url), POLICY)
    try:
        await engine.swap(model.update(1, seed=0))
        await engine.pin(1)
        swap = asyncio.create_task(engine.swap(model.update(2, seed=1)))
        server = engine._server
        while not engine._holds.is_awaited:  # noqa: ASYNC110 - as it has no event for it
            await asyncio.sleep(0)
        server.condemn("it was killed", server.life)
        next_life = server.life
        await server.wait_up()
        await engine.unpin(1)
        with pytest.raises(AstraflowError) as caught:
            await swap
        assert caught.value.reason is Reason.APPLY_FAILED
        assert next_life.is_up
    finally:
        await engine.close()


async def test_a_version_that_was_applied_as_the_server_was_lost_is_not_live(
    peer: Peer, model: Any
):
    class LostAsItAnswers(VllmDialect):
        async def change(self, *args: Any, **kwargs: Any) -> None:
            await super().change(*args, **kwargs)
            engine._server.condemn("it was killed", engine._server.life)

    settings = EngineSettings(kind="vllm", url=peer("policy", model.folder, 512))
    description = ModelDescription.read(model.folder, None)
    dialect = LostAsItAnswers(Path())
    engine = ServedEngine(dialect, model=description, settings=settings, policy_id=POLICY)
    try:
        with pytest.raises(AstraflowError, match="killed") as caught:
            await engine.swap(model.update(1, seed=0))
        assert caught.value.reason is Reason.APPLY_FAILED
        assert engine.version is None
    finally:
        await engine.close()


async def test_a_server_is_not_dead_while_its_version_changes(peer: Peer, model: Any):
    class GeneratesNothing(VllmDialect):
        async def is_alive(self, http: Any) -> bool:
            while engine.version == 1 and not engine._holds.is_changing:  # noqa: ASYNC110
                await asyncio.sleep(0)
            return engine.version is None

        async def change(self, *args: Any, **kwargs: Any) -> None:
            if engine.version == 1:
                await checked.wait()
            await super().change(*args, **kwargs)

    checked = asyncio.Event()
    settings = EngineSettings(kind="vllm", url=peer("policy", model.folder, 512))
    description = ModelDescription.read(model.folder, None)
    dialect = GeneratesNothing(Path())
    engine: Any = ServedEngine(dialect, model=description, settings=settings, policy_id=POLICY)
    try:
        await engine.swap(model.update(1, seed=0))
        check = asyncio.create_task(engine._server.check_alive())
        swap = asyncio.create_task(engine.swap(model.update(2, seed=1)))
        await check
        await engine._server.check_alive()
        checked.set()
        assert (await swap).version == engine.version == 2
    finally:
        await engine.close()


async def test_closing_ends_a_completion_whose_connection_is_still_being_made(
    peer: Peer, model: Any
):
    url = peer("policy", model.folder, 512)
    engine = build_engine(model.folder, EngineSettings(kind="vllm", url=url), POLICY)
    await engine.swap(model.update(1, seed=0))
    knobs = SamplingParams(max_new_tokens=1)
    tasks = [asyncio.create_task(engine.generate([3], knobs)) for _ in range(8)]
    while engine.load().running_count < len(tasks):  # noqa: ASYNC110 - as it has no event for it
        await asyncio.sleep(0)
    await engine.close()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(error, AstraflowError)
        assert error.reason is Reason.ENGINE_FAILED


async def test_a_load_of_another_form_does_not_end_the_asking(
    peer: Peer, sent: Sent, model: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(servers, "_ASK_EVERY_S", 0.0)
    url = peer("policy", model.folder, 512)
    host = ServerHost(
        VllmDialect(Path()),
        model=ModelDescription.read(model.folder, None),
        settings=EngineSettings(kind="vllm", url=url),
        on_lost=lambda: None,
    )
    meter = servers.ServerMeter()
    try:
        await host.server.wait_up()
        with meter.running():
            async with beside(meter.follow(host.server, SglangDialect(Path()))):
                while len([path for path, _ in sent if path == "/v1/loads"]) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0)
    finally:
        await host.close()
