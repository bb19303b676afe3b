"""A RaaS, written from the protocol's description alone: it stands in for an existing one.

Its policy draws random tokens. Weights are pulled as described: delta where it can be had, else
full, over TCP pushes and a ZMQ message.
"""

import json
import pickle
import random
import socket
import struct
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from urllib.request import Request, urlopen

import numpy as np
import torch
import zmq


class PeerRaas:
    """Serves rollouts over HTTP."""

    def __init__(self, model_id="solver", concurrency=8, version=0):
        self.model_id = model_id
        self.concurrency = concurrency
        self.receiver = None
        self.version = version
        self.pulls = []
        self.history = {}
        self.workflows = {}
        self.finished = []
        self.measured = []
        self.spells = []
        self.asked = []
        self.ended = False
        self.state = "ready"
        # Faults that a test asks for.
        self.fails = 0
        self.strays = []
        self.keeps = False
        self.keeps_evals = False
        self.may_load = Event()
        self.may_load.set()
        self._dice = random.Random(0)
        self._lock = Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.may_load.set()
        self._server.shutdown()
        self._server.server_close()
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None

    def get(self, path):
        if path == "/status":
            return {
                "status": self.state,
                "models": [self.model_id],
                "max_concurrency": self.concurrency,
            }
        return {"max_concurrency": self.concurrency, "queued": 0, "available": self.concurrency}

    def post(self, path, body):
        match path:
            case "/register_workflow":
                self.workflows[body["workflow_id"]] = body
                return {"workflow_id": body["workflow_id"], "registered": True}
            case "/submit":
                return self._submit(body, self.finished)
            case "/eval_submit":
                return self._submit(body, self.measured)
            case "/pull":
                return [] if self.keeps else self._pull(self.finished)
            case "/eval_pull":
                done = [] if self.keeps_evals else self._pull(self.measured)
                return {"items": done, "inflight": 0, "pending": 0, "total_submitted": 0}
            case "/eval_start" | "/eval_end":
                self.spells.append(path)
                return {"status": "ok"}
            case "/notify_version":
                self.may_load.wait(100)
                return self._load(body["version"], body["sender_endpoint"])
            case "/shutdown":
                self.ended = True
                return "shutting down"
        raise ValueError(f"no path {path}")

    def _submit(self, body, to):
        with self._lock:
            self.asked.append(body["data"]["prompt_id"])
            to.append(self._item(len(self.asked), body))
            return {"task_id": len(self.asked)}

    def _pull(self, finished):
        with self._lock:
            done = [*self.strays, *finished]
            finished.clear()
        return done

    def _item(self, task_id, body):
        if self.fails:
            self.fails -= 1
            return {"task_id": task_id, "result": {"ok": False, "error": "an engine died"}}
        count = self.workflows[body["workflow_id"]]["gconfig_overrides"]["n_samples"]
        result = {
            "prompt_id": body["data"]["prompt_id"],
            "n_trajs": count,
            "rewards": torch.tensor([float(self._dice.random() < 0.5) for _ in range(count)]),
            "trajectories": [{"sequences": [self._sequence()]} for _ in range(count)],
        }
        return {"task_id": task_id, "result": result}

    def _sequence(self):
        prompt, answer = [1, 2, 3], [self._dice.randrange(100) for _ in range(5)]
        length = len(prompt) + len(answer)
        sampled = torch.tensor([[0] * len(prompt) + [1] * len(answer)])
        return {
            "input_ids": torch.tensor([prompt + answer], dtype=torch.int32),
            "loss_mask": sampled,
            "logprobs": -sampled.float(),
            "versions": torch.where(sampled == 1, self.version, -1),
            "attention_mask": torch.ones(1, length, dtype=torch.bool),
        }

    def _load(self, version, sender):
        if version <= self.version:
            reason = f"version={version} <= local={self.version}"
            return {"ok": True, "model_id": self.model_id, "pulled": False, "reason": reason}
        if self.receiver is None:
            # Once: with the first sender that it is told of.
            self.receiver = Receiver(sender)
        can = call(sender, "/get_capabilities")
        is_delta = self.version and can["delta_ready"]
        mode = "delta" if is_delta and can["delta_base_version"] == self.version else "full"
        answer = self.receiver.pull(sender, mode)
        self.version = version
        self.pulls.append(mode)
        self.history[version] = bytes(self.receiver.weights)
        return {
            "ok": True,
            "model_id": self.model_id,
            "version": version,
            "pull_result": answer | {"mode": mode},
        }

    def _handler(self):
        raas = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._write(200, json.dumps(raas.get(self.path)).encode())

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                try:
                    result = raas.post(self.path, pickle.loads(body) if body else None)
                    self._write(200, pickle.dumps({"ok": True, "result": result}))
                except Exception as error:  # noqa: BLE001 - it answers whatever went wrong
                    self._write(500, pickle.dumps({"ok": False, "error": repr(error)}))

            def _write(self, status, raw):
                self.send_response(status)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_):
                pass

        return Handler


def call(endpoint, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = Request(f"http://{endpoint}{path}", data=data)
    request.add_header("content-type", "application/json")
    with urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


class Receiver:
    """A buffer of the whole model, for deltas too, and the weights that it holds."""

    def __init__(self, sender):
        nbytes = call(sender, "/get_buffer_info")["single_buffer_length"]
        self.buffer, self.weights = bytearray(nbytes), bytearray(nbytes)
        self._messages = zmq.Context.instance().socket(zmq.PULL)
        zmq_port = self._messages.bind_to_random_port("tcp://127.0.0.1")
        self._listener = socket.create_server(("127.0.0.1", 0))
        Thread(target=accept, args=(self._listener, self.buffer), daemon=True).start()
        answer = call(
            sender,
            "/register_sglang_instance",
            {
                "sglang_http_host": "127.0.0.1",
                "sglang_http_port": 30000,
                "session_ids": [f"127.0.0.1:{self._listener.getsockname()[1]}"],
                "buffer_ptr": 140000000000,
                "buffer_length": nbytes,
                "zmq_endpoint": "127.0.0.1",
                "zmq_port": zmq_port,
                "handshake_ports": [],
                "sender_group_index": 0,
            },
        )
        assert answer["trainer_session_ids"], "it would ask again for ten minutes"

    def pull(self, sender, mode):
        """Ask for a transfer, take its pushes and its message."""
        answer = call(sender, "/request_transfer", {"instance_id": "127.0.0.1:30000", "mode": mode})
        assert answer["ok"], answer
        assert self._messages.poll(10_000)
        assert self._messages.recv_multipart() == [b"0", b"0"]
        if mode == "delta":
            apply(self.weights, self.buffer[: answer["delta_size"]])
        else:
            self.weights[:] = self.buffer
        return answer

    def close(self):
        self._messages.close(linger=0)
        self._listener.close()


def accept(listener, buffer):
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            offset, length = struct.unpack("<QQ", connection.recv(16, socket.MSG_WAITALL))
            view = memoryview(buffer)[offset : offset + length]
            while view:
                view = view[connection.recv_into(view) :]
            connection.sendall(b"\x01")


def apply(buffer, delta):
    count, size, flags, _ = struct.unpack_from("<QHHi", delta)
    assert (size, flags) == (2, 0)
    indices = np.frombuffer(delta, "<u4", count, 16)
    values = np.frombuffer(delta, "<u2", count, 16 + 4 * count)
    np.frombuffer(buffer, np.uint16)[indices] = values
