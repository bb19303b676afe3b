"""A Dataflow, written from the protocol's description alone; it stands in for an existing one.

It takes registrations of RaaS and drives each over HTTP: pickled bodies in an envelope.
"""

import json
import pickle
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen


class RaasClient:
    """Calls one RaaS."""

    def __init__(self, url):
        self.url = url

    def get(self, path):
        with urlopen(self.url + path, timeout=30) as answer:
            return json.loads(answer.read())

    def post(self, path, body=None):
        headers = {"content-type": "application/octet-stream"}
        data = b"" if body is None else pickle.dumps(body)
        request = Request(self.url + path, data=data, headers=headers, method="POST")
        try:
            with urlopen(request, timeout=60) as answer:
                envelope = pickle.loads(answer.read())
        except HTTPError as error:
            envelope = pickle.loads(error.read())
        if not envelope["ok"]:
            raise RuntimeError(envelope["error"])
        return envelope["result"]


class PeerDataflow:
    """Registers RaaS; rolls out, loads versions and evaluates on the one that came."""

    def __init__(self):
        self.pool = {}
        self.came = Event()
        self.open(port=0)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def open(self, port):
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True
        Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def raas(self):
        """Return the RaaS that registered first, and is ready."""
        assert self.came.wait(200)
        client = RaasClient(next(iter(self.pool.values())))
        until(lambda: client.get("/status")["status"] == "ready")
        return client

    def answer(self, path, body):
        match path:
            case "/register_raas":
                self.pool[body["uid"]] = body["raas_url"]
                self.came.set()
                return {"ok": True, "uid": body["uid"], "pool_size": len(self.pool)}
            case "/deregister_raas":
                self.pool.pop(body["uid"], None)
                return {"ok": True, "uid": body["uid"], "pool_size": len(self.pool)}
            case "/raas_pool":
                instances = [{"uid": uid, "url": url} for uid, url in self.pool.items()]
                return {"size": len(self.pool), "version": 0, "instances": instances}
        return {"error": "no such path"}

    def _handler(self):
        dataflow = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._do(None)

            def do_POST(self):
                length = int(self.headers["content-length"])
                self._do(json.loads(self.rfile.read(length)))

            def _do(self, body):
                raw = json.dumps(dataflow.answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_):
                pass

        return Handler


def register(raas, workflow_id, *, workflow_cls="gateway_digits", **gconfig):
    raas.post(
        "/register_workflow",
        {
            "workflow_id": workflow_id,
            "workflow_cls": workflow_cls,
            "reward_fn": None,
            "gconfig_overrides": gconfig,
            "workflow_kwargs": {},
        },
    )


def roll_out(raas, rows, workflow_id="default"):
    """Submit rows as there is room; return their items by row, as they finish."""
    return _through(raas, rows, workflow_id, submit="/submit", pull=_pulled)


def evaluate(raas, rows, workflow_id):
    """Measure rows: what trains is wiped before, as existing services do."""
    wiped = raas.post("/reset_training_engine", {"timeout": 5})
    assert wiped["ready_for_eval"]
    raas.post("/eval_start", {})
    items = _through(raas, rows, workflow_id, submit="/eval_submit", pull=_eval_pulled)
    raas.post("/eval_end", {})
    return items


def _through(raas, rows, workflow_id, *, submit, pull):
    left, numbers, done = list(enumerate(rows)), {}, {}
    while len(done) < len(rows):
        room = raas.get("/availability")["available"] if submit == "/submit" else len(left)
        for row, data in left[:room]:
            asked = {"data": data, "workflow_id": workflow_id}
            numbers[raas.post(submit, asked)["task_id"]] = row
        left = left[room:]
        for item in pull(raas):
            done[numbers[item["task_id"]]] = item
    return done


def _pulled(raas):
    return raas.post("/pull", {"max_items": 512, "timeout": 0.1})


def _eval_pulled(raas):
    return raas.post("/eval_pull", {"max_items": 512, "timeout": 0.1})["items"]


def until(claim):
    ends = time.monotonic() + 30
    while not claim():
        assert time.monotonic() < ends
        time.sleep(0.01)
