"""One answer, in the format that its reader accepts."""

import json
import pickle

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Request
from safetensors import safe_open

from astraflow.gateway.http import BodyRules, serve_app, stream_answer

TOKENS = np.arange(6, dtype=np.int32).reshape(2, 3)
FIELDS = {"ok": True, "items": [{"tokens": TOKENS, "n": 1}, "text", ({"deep": TOKENS.T},)]}


@pytest.fixture
async def answered():
    """Asks for the fields in a format; at the end all of every answer was written."""
    app, ended = FastAPI(), []

    @app.get("/")
    async def fields(request: Request):
        return await stream_answer(request, FIELDS, ended=ended.append)

    async with (
        serve_app(app, host="127.0.0.1", rules=BodyRules()) as address,
        httpx.AsyncClient(base_url=f"http://{address}") as client,
    ):

        async def ask(kind):
            return (await client.get("/", headers={"accept": kind})).content

        yield ask
    assert set(ended) == {True}


async def test_a_pickle_has_tensors(answered):
    read = pickle.loads(await answered("*/*"))
    assert np.array_equal(read["items"][0]["tokens"].numpy(), TOKENS)
    assert read["items"][1] == "text"


async def test_json_has_their_bytes(answered):
    [first, text, [deep]] = json.loads(await answered("application/json"))["items"]
    assert (first["tokens"]["dtype"], first["tokens"]["shape"]) == ("i32", [2, 3])
    assert (text, deep["deep"]["shape"]) == ("text", [3, 2])


async def test_safetensors_have_them_by_their_path_in_lists_too(answered, tmp_path):
    (tmp_path / "answer").write_bytes(await answered("application/vnd.safetensors"))
    with safe_open(tmp_path / "answer", framework="np") as read:
        assert set(read.keys()) == {"items.0.tokens", "items.2.0.deep"}
        assert np.array_equal(read.get_tensor("items.2.0.deep"), TOKENS.T)
        rest = json.loads(read.metadata()["json"])
    assert rest == {"ok": True, "items": [{"n": 1}, "text", [{}]]}
