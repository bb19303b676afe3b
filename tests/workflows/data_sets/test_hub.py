"""Data sets of a hub: a small server that speaks what `datasets` asks, over a real socket."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from urllib.parse import unquote, urlsplit

import pytest

from astraflow.config.recipe import DataSet
from astraflow.core.errors import AstraflowError, Reason
from astraflow.storage.cache import cache_dir
from astraflow.workflows.data_sets import kept_data_set, open_data_set
from tests.pages import JsonPage, served

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = b'{"prompt": "a", "answer": "b"}\n{"prompt": "c", "answer": "d"}\n'
HAS_DATASETS = importlib.util.find_spec("datasets") is not None


class Hub(JsonPage):
    """Has org/rows at one commit, with one file."""

    def do_GET(self):  # noqa: N802
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        api = "/api/datasets/org/rows"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            files = [{"rfilename": "train.jsonl"}]
            return self._json({"id": "org/rows", "sha": COMMIT, "siblings": files, "tags": []})
        if path.startswith(f"{api}/tree/{COMMIT}"):
            return self._json([self._file()])
        if path == f"{api}/paths-info/{COMMIT}":
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            return self._json([self._file()] if "train.jsonl" in body else [])
        if path == f"/datasets/org/rows/resolve/{COMMIT}/train.jsonl":
            return self._send(ROWS, {"ETag": f'"{self._etag()}"', "X-Repo-Commit": COMMIT})
        return self._json({}, status=404, code="EntryNotFound")

    def do_HEAD(self):  # noqa: N802
        self.do_GET()

    def do_POST(self):  # noqa: N802
        self.do_GET()

    def _etag(self):
        return hashlib.sha1(ROWS).hexdigest()

    def _file(self):
        return {"type": "file", "path": "train.jsonl", "size": len(ROWS), "oid": self._etag()}

    def _json(self, content, *, status=200, code=""):
        headers = {"X-Error-Code": code} if code else {}
        headers["Content-Type"] = "application/json"
        self._send(json.dumps(content).encode(), headers, status=status)

    def _send(self, data, headers, *, status=200):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@pytest.fixture
def hub():
    with served(Hub, asked=[]) as server:
        yield server


READ = """
from pathlib import Path
from astraflow.config.recipe import DataSet
from astraflow.storage.cache import cache_dir
from astraflow.workflows.data_sets import kept_data_set, open_data_set
from astraflow.storage.cache import cache_dir
from astraflow.workflows.data_sets import pinned_data_set
settings = pinned_data_set(DataSet(hub="org/rows", shuffle=False, revision=%r))
print(settings.revision)
print([dict(prompt.fields) for prompt in open_data_set("train", settings, Path()).epoch(0)])
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_DATASETS, reason="needs astraflow[datasets]")
def test_rows_are_downloaded_once_and_then_without_a_network(hub, tmp_path):
    def read(revision, **more):
        environment = {
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
            "HF_HOME": str(tmp_path / "hf"),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        done = subprocess.run(
            [sys.executable, "-c", READ % revision],
            env={**os.environ, **environment, **more},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (done.stderr[-3000:], hub.asked)
        lines = done.stdout.splitlines()  # between them: the log
        return [lines[0], lines[-1]]

    rows = [json.loads(line) for line in ROWS.splitlines()]
    assert read(None) == [COMMIT, str(rows)]
    hub.asked.clear()
    assert read(COMMIT, HF_HUB_OFFLINE="1") == [COMMIT, str(rows)]
    assert hub.asked == []


@pytest.mark.skipif(HAS_DATASETS, reason="datasets is here")
def test_a_missing_package_is_named_with_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = DataSet(hub="org/rows", revision=COMMIT)
    with pytest.raises(AstraflowError, match=r"pip install 'datasets") as caught:
        open_data_set("train", settings, tmp_path)
    assert caught.value.reason is Reason.CAPABILITY_MISSING


def test_a_part_of_a_split_that_is_here_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = DataSet(hub="org/rows", split="train[:10]")
    here = cache_dir() / "data" / f"org--rows-default-train[:10]-{COMMIT}"
    here.mkdir(parents=True)
    assert kept_data_set(settings) == here
    assert kept_data_set(settings.model_copy(update={"revision": COMMIT})) == here
