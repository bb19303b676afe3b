"""The environment of recipes/search: over a corpus here, and over a server on a real socket."""

import importlib
import json
from pathlib import Path

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.environments.pool import EnvironmentPool, PoolOptions
from tests.pages import JsonPage, served

FOLDER = Path(__file__).parents[2] / "recipes" / "search"
DOCUMENTS = [
    {"url": "wiki/peru", "contents": "Lima is the capital of Peru, by the sea."},
    {"url": "wiki/france", "contents": "Paris is the capital of France, by the Seine."},
    {"contents": "Bread is made of flour and water."},
]
failed_calls = set()
ROW = {"question": "What is the capital of Peru?", "answer": ["Lima", "City of Kings"]}


@pytest.fixture(autouse=True)
def search(monkeypatch):
    """The module of the recipe, which is where its recipes find it."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("retrieval")


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS))
    return str(path)


class Retrieval(JsonPage):
    """Answers as ASearcher's retrieval server; the first call of each kind fails."""

    def do_POST(self):  # noqa: N802
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path not in failed_calls:
            failed_calls.add(self.path)
            self.send_error(503)
            return
        known = {each.get("url"): each for each in DOCUMENTS}
        if self.path == "/retrieve":
            assert asked["return_scores"] is False
            result = [DOCUMENTS[: asked["topk"]] for _ in asked["queries"]]
        else:
            result = [known.get(url) for url in asked["urls"]]
        self.answer({"result": result})


@pytest.fixture
def server():
    failed_calls.clear()
    with served(Retrieval) as listening:
        yield f"http://127.0.0.1:{listening.server_port}/"


def test_a_question_is_answered_with_a_search(corpus, search):
    world = search.Search(corpus, top_k=2, passage_chars=30)
    assert world.reset(ROW, 0).endswith("Question: What is the capital of Peru?")
    found = world.step("I look it up. <search> capital of Peru </search>")
    assert found.observation.splitlines()[:2] == [
        "<information>",
        "1. (wiki/peru) Lima is the capital of Peru, b",
    ]
    assert not found.is_done
    page = world.step("<access>wiki/peru</access>")
    assert "by the sea" in page.observation
    last = world.step("<answer>Lima, Peru</answer>")
    assert (last.is_done, last.reward) == (True, pytest.approx(2 / 3))
    assert last.metrics == {
        "em": 0.0,
        "f1": last.reward,
        "searches": 1.0,
        "accesses": 1.0,
        "answered": 1.0,
    }


def test_the_first_tag_counts(corpus, search):
    world = search.Search(corpus, reward="em")
    world.reset(ROW, 0)
    step = world.step("It goes into <answer>: <answer>lima</answer> <search>Lima</search>")
    assert (step.is_done, step.reward) == (True, 1.0)


def test_what_finds_nothing_or_says_nothing_hears_of_it(corpus, search):
    world = search.Search(corpus)
    world.reset(ROW, 0)
    assert "Nothing was found." in world.step("<search>zzz</search>").observation
    assert "Nothing was found." in world.step("<search></search>").observation
    assert "no such document" in world.step("<access>3.14</access>").observation
    assert "<answer>" in world.step("Lima").observation
    # A document without an address is named by its line.
    assert "Bread" in world.step("<access>3</access>").observation


def test_a_server_of_the_users_is_asked_until_it_answers(server, search, monkeypatch):
    monkeypatch.setattr(search, "_PAUSE_S", 0.01)
    world = search.Search(url=server, top_k=1)
    world.reset(ROW, 0)
    assert "1. (wiki/peru) Lima" in world.step("<search>Peru</search>").observation
    assert "Seine" in world.step("<access>wiki/france</access>").observation
    assert "no such document" in world.step("<access>x</access>").observation
    assert failed_calls == {"/retrieve", "/access"}


def test_a_server_that_is_dead_is_no_wrong_answer(search, monkeypatch):
    monkeypatch.setattr(search, "_PAUSE_S", 0.01)
    world = search.Search(url="http://127.0.0.1:9")
    world.reset(ROW, 0)
    with pytest.raises(ConnectionError, match=r"127.0.0.1:9/retrieve does not answer"):
        world.step("<search>Peru</search>")


async def test_it_runs_in_a_process_of_its_own(corpus):
    options = {
        "environment": "retrieval:Search",
        "environment_options": {"corpus": corpus},
        "workers": 1,
    }
    pool = EnvironmentPool(PoolOptions(**options))
    async with pool.open() as world:
        await world.reset(ROW, 0)
        assert "Lima" in (await world.step("<search>Peru</search>")).observation
    await pool.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give a corpus or the url"),
        ({"corpus": "/nowhere"}, "/nowhere"),
        ({"corpus": "x", "reward": "bleu"}, "'bleu' is none of f1, em"),
    ],
)
async def test_options_that_cannot_be_meant_are_refused(options, said):
    pool = EnvironmentPool(
        PoolOptions(environment="retrieval:Search", environment_options=options, workers=1)
    )
    async with pool.open() as world:
        with pytest.raises(AstraflowError, match=said) as caught:
            await world.reset(ROW, 0)
    await pool.close()
    assert caught.value.reason is Reason.INVALID_FIELD


def test_a_corpus_that_lacks_a_field_names_the_line(search, tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"contents": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match="line 2 has no 'contents'"):
        search.Search(str(path))
