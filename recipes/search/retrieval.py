"""Questions that are answered with a search engine, by tags in what the policy says.

It runs in a process of its own: the standard library, bm25s for a corpus, and of astraflow what
needs nothing else.
"""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from astraflow.workflows.environments.protocol import Step
from astraflow.workflows.rewards.answers import gold_answers, measures

# One that was opened in passing, and not closed, is none: nor is the rest read for each of them.
_TAG = re.compile(r"<(search|access|answer)>((?:(?!<\1>).)*?)</\1>", re.DOTALL)
_TRIES, _PAUSE_S = 5, 1.0
_HOW = "Write <search>words</search>, <access>address</access> or <answer>answer</answer>."


class Bm25:
    """BM25 over a corpus in memory; needs bm25s."""

    def __init__(self, path: str, *, text: str) -> None:
        """Index a file.

        Args:
            path: JSONL, a document a line; `url` names it, or else its line. Relative to where the
                node runs, or to this file.
            text: The field that is searched.
        """
        bm25s: Any = import_module("bm25s")
        place = Path(path) if Path(path).exists() else Path(__file__).parent / path
        with place.open(encoding="utf-8") as file:
            rows: list[Any] = [json.loads(line) for line in file if not line.isspace()]
        lacking = [number for number, row in enumerate(rows, start=1) if text not in row]
        if lacking or not rows:
            what = f"line {lacking[0]} has no '{text}'" if lacking else "there is no document"
            raise ValueError(f"corpus {path}: {what}")
        self._documents: list[dict[str, str]] = [
            {"contents": str(row[text]), "url": str(row.get("url", number))}
            for number, row in enumerate(rows, start=1)
        ]
        self._by_url = {each["url"]: each["contents"] for each in self._documents}
        self._tokens: Any = partial(bm25s.tokenize, show_progress=False)
        self._index: Any = bm25s.BM25()
        self._index.index(
            self._tokens([each["contents"] for each in self._documents]), show_progress=False
        )

    def retrieve(self, query: str, count: int) -> Sequence[Mapping[str, Any]]:
        """Return the documents that share words with a query."""
        tokens = self._tokens([query])
        most = min(count, len(self._documents))
        numbers, scores = self._index.retrieve(tokens, k=most, show_progress=False)
        found: list[tuple[int, float]] = list(zip(numbers[0], scores[0], strict=True))
        return [self._documents[number] for number, score in found if score > 0]

    def access(self, url: str) -> str | None:
        """Return a document."""
        return self._by_url.get(url)


@cache
def index(path: str, text: str) -> Bm25:
    """Return the index of a corpus, one for all environments of a process."""
    return Bm25(path, text=text)


class RetrievalServer:
    """A retrieval server of the user's: `POST /retrieve` and `POST /access`, as ASearcher's."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def retrieve(self, query: str, count: int) -> Sequence[Mapping[str, Any]]:
        """Ask for passages."""
        asked = {"queries": [query], "topk": count, "return_scores": False}
        return self._post("retrieve", asked)[0]

    def access(self, url: str) -> str | None:
        """Ask for a document."""
        page = self._post("access", {"urls": [url]})[0]
        return None if page is None else page["contents"]

    def _post(self, call: str, body: Mapping[str, Any]) -> Any:
        """Return `result`; a server that does not answer is asked again."""
        request = urllib.request.Request(  # noqa: S310 - as the recipe names it
            f"{self._url}/{call}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        for tries_left in reversed(range(_TRIES)):
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
                    return json.loads(answer.read())["result"]
            except (OSError, KeyError, ValueError) as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                if not tries_left:
                    raise ConnectionError(f"{self._url}/{call} does not answer: {error}") from error
                time.sleep(_PAUSE_S)
        return None


class Search:
    """A row's `question`, and its `answer`, a text or a list of right ones.

    The first tag in what the policy says counts: <search>, <access> or <answer>, which ends the
    episode. The reward is the F1 of words, or the exact match; both are in the metrics.
    """

    def __init__(
        self,
        corpus: str = "",
        url: str = "",
        *,
        top_k: int = 5,
        passage_chars: int = 1000,
        page_chars: int = 5000,
        reward: str = "f1",
        text: str = "contents",
        prompt: str = f"{_HOW}\nQuestion: {{question}}",
    ) -> None:
        """Find what finds.

        Args:
            corpus: JSONL of documents, searched here; relative to where the node runs, or to this
                file.
            url: Of a retrieval server, in place of a corpus.
            top_k: Passages for a search.
            passage_chars: Of each passage that are shown.
            page_chars: Of a document that are shown.
            reward: f1 or em.
            text: Field of a document that is searched.
            prompt: The first observation.
        """
        if bool(corpus) == bool(url):
            raise ValueError("give a corpus or the url of a server, one of them")
        if reward not in ("f1", "em"):
            raise ValueError(f"reward: '{reward}' is none of f1, em")
        self._retriever = RetrievalServer(url) if url else index(corpus, text)
        self._top_k, self._passage_chars, self._page_chars = top_k, passage_chars, page_chars
        self._reward, self._prompt = reward, prompt
        self._golds: Sequence[str] = ()
        self._counts = {"searches": 0.0, "accesses": 0.0}

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Ask the question."""
        del seed
        self._golds = gold_answers(task.get("answer"))
        self._counts = dict.fromkeys(self._counts, 0.0)
        return self._prompt.replace("{question}", str(task["question"]))

    def step(self, action: str) -> Step:
        """Search, open a document, or end with an answer."""
        tag = _TAG.search(action)
        if tag is None:
            return Step(_HOW, metrics=self._measures(None))
        kind, words = tag.group(1), tag.group(2).strip()
        if kind == "answer":
            found = self._measures(words)
            return Step("", found[self._reward], is_done=True, metrics=found)
        if kind == "search":
            self._counts["searches"] += 1
            passages = self._retriever.retrieve(words, self._top_k)
            lines = [
                f"{number}. ({each.get('url', '')}) {each['contents'][: self._passage_chars]}"
                for number, each in enumerate(passages, start=1)
            ]
            said = "\n".join(lines) or "Nothing was found."
        else:
            self._counts["accesses"] += 1
            page = self._retriever.access(words)
            said = "There is no such document." if page is None else page[: self._page_chars]
        return Step(f"<information>\n{said}\n</information>", metrics=self._measures(None))

    def close(self) -> None:
        """Nothing to let go of."""

    def _measures(self, answer: str | None) -> dict[str, float]:
        found = measures(answer, self._golds)
        return {**found, **self._counts, "answered": float(answer is not None)}
