"""Models of a hub: a small server that speaks what huggingface_hub asks, over a real socket.

The library reads the hub's address when it is imported, so each look is a process of its own.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.pages import JsonPage, served

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"a pickle",
    "modeling_own.py": b"code",
}


class Hub(JsonPage):
    """Has org/small at one commit, of which main is the branch."""

    def do_GET(self):  # noqa: N802
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(path)
        if path in ("/api/models/org/small", "/api/models/org/small/revision/main"):
            return self._json(self._info())
        if path == f"/api/models/org/small/revision/{COMMIT}":
            return self._json(self._info())
        if path.startswith(f"/api/models/org/small/tree/{COMMIT}"):
            return self._json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": self._etag(data)}
                    for name, data in FILES.items()
                ]
            )
        start = f"/org/small/resolve/{COMMIT}/"
        data = FILES.get(path.removeprefix(start)) if path.startswith(start) else None
        if data is None:
            return self._json({"error": "Repository not found"}, status=404)
        return self._send(data, {"ETag": f'"{self._etag(data)}"', "X-Repo-Commit": COMMIT})

    def do_HEAD(self):  # noqa: N802
        self.do_GET()

    def _info(self):
        names = [{"rfilename": name} for name in FILES]
        return {"id": "org/small", "modelId": "org/small", "sha": COMMIT, "siblings": names}

    def _etag(self, data):
        return hashlib.sha1(data).hexdigest()

    def _json(self, content, *, status=200):
        more = {"X-Error-Code": "RepoNotFound"} if status == 404 else {}
        self._send(json.dumps(content).encode(), more, status=status)

    def _send(self, data, headers, *, status=200):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture
def hub():
    with served(Hub, asked=[]) as server:
        yield server


@pytest.fixture
def look(hub, tmp_path):
    """Runs code that has `commit_of`, `download_model` and `report`; returns what it prints."""

    def run(code, **environment):
        start = (
            "from astraflow.engines.hub import commit_of, download_model\n"
            "from astraflow.core.errors import AstraflowError\n"
            "report = lambda line: print('report', line)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", start + code],
            env={
                **os.environ,
                "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
                "HF_HOME": str(tmp_path / "hf"),
                "HF_HUB_DISABLE_XET": "1",
                "HF_HUB_OFFLINE": "0",
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_a_model_is_downloaded_once_and_then_without_a_network(look, hub):
    assert look("print(commit_of('org/small', None))").strip() == COMMIT
    first = look(f"print(download_model('org/small', '{COMMIT}', report=report))")
    assert first.startswith(f"report downloading org/small ({COMMIT})")
    folder = first.splitlines()[-1]
    assert folder.endswith(f"snapshots/{COMMIT}")
    # Neither pickles nor code.
    assert sorted(path.name for path in Path(folder).iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    hub.asked.clear()
    again = look(
        f"print(commit_of('org/small', '{COMMIT}'))\n"
        f"print(download_model('org/small', '{COMMIT}', report=report))",
        HF_HUB_OFFLINE="1",
    )
    assert again.splitlines() == [COMMIT, folder]
    assert hub.asked == []


@pytest.mark.slow
def test_what_the_hub_does_not_have_is_told(look):
    code = (
        "try: print(commit_of('org/smal', None))\n"
        "except AstraflowError as error: print(error.reason, error.message)\n"
    )
    said = look(code)
    assert said.startswith("SOURCE_UNREACHABLE org/smal (main) cannot be had")
    assert "Check its name" in said
    offline = look(code, HF_HUB_OFFLINE="1")
    assert offline.startswith("SOURCE_UNREACHABLE org/smal (main) cannot be had")
