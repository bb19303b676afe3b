"""A trainer's weight sender, written from the protocol's description alone.

It stands in for an existing trainer: stdlib, numpy and pyzmq, nothing of this project.
"""

import itertools
import json
import socket
import struct
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import zmq


class PeerSender:
    """Holds two versions of one bf16 tensor and pushes them to who registered."""

    def __init__(self, name="w", shape=(100,)):
        self.meta = [[name, [list(shape), "bfloat16"]]]
        self.versions = {}
        self.version = -1
        self.instances = {}
        self.modes = []
        self.streams = 3
        # Faults that a test asks for.
        self.claims = None
        self.torn = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.endpoint = f"127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def hold(self, version, bits):
        """Take new weights: u16[n]."""
        self.versions[version] = np.array(bits, np.uint16)
        self.version = version

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method, path, body):
        match (method, path):
            case ("GET", "/get_version"):
                return 200, {"version": self.version}
            case ("GET", "/get_buffer_info"):
                return 200, {"single_buffer_length": self._length(), "tensors_meta": self.meta}
            case ("GET", "/get_capabilities"):
                return 200, self._capabilities()
            case ("POST", "/register_sglang_instance"):
                key = f"{body['sglang_http_host']}:{body['sglang_http_port']}"
                if body["buffer_length"] != self._length():
                    return 500, {"error": "Transfer buffer length mismatch"}
                self.instances[key] = body
                return 200, {
                    "trainer_global_rank": 0,
                    "trainer_world_size": 1,
                    "trainer_session_ids": [["127.0.0.1_0:0"]],
                    "trainer_buffer_ptr": 0,
                    "trainer_buffer_length": body["buffer_length"],
                    "trainer_hostname": "127.0.0.1",
                    "trainer_rpc_port": 0,
                }
            case ("POST", "/request_transfer"):
                return 200, self._transfer(self.instances[body["instance_id"]], body["mode"])
        return 404, {"error": "no such path"}

    def _length(self):
        return sum(2 * int(np.prod(shape)) for _, (shape, _) in self.meta)

    def _capabilities(self):
        fields = {"strategies": ["full", "delta"], "version": self.version, "delta_ready": False}
        if self.version > 1 and self.version - 1 in self.versions:
            fields |= {
                "delta_ready": True,
                "delta_base_version": self.version - 1,
                "delta_version": self.version,
                "delta_size_bytes": len(self._delta()),
            }
        return fields

    def _delta(self):
        old, new = self.versions[self.version - 1], self.versions[self.version]
        changed = np.flatnonzero(old != new)
        head = struct.pack("<QHHi", len(changed), 2, 0, 0)
        return head + changed.astype("<u4").tobytes() + new[changed].tobytes()

    def _transfer(self, instance, mode):
        if self.version == 0:
            return {"ok": False, "version": 0, "error": "No weights available yet"}
        self.modes.append(mode)
        payload = self._delta() if mode == "delta" else self.versions[self.version].tobytes()
        if self.torn:
            payload = payload[: len(payload) // 2]
        host, *ports = instance["session_ids"][0].split(":")
        edges = np.linspace(0, len(payload), self.streams + 1).astype(int)
        threads = [
            Thread(target=push, args=(host, int(ports[0]), a, payload[a:b]))
            for a, b in itertools.pairwise(edges)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with zmq.Context() as context, context.socket(zmq.PUSH) as messages:
            messages.connect(f"tcp://{instance['zmq_endpoint']}:{instance['zmq_port']}")
            messages.send_multipart([b"0", b"0"])
            messages.close(linger=2000)
        version = self.version if self.claims is None else self.claims
        return {"ok": True, "version": version, "mode": mode}

    def _handler(self):
        sender = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._do("GET", None)

            def do_POST(self):
                length = int(self.headers["content-length"])
                self._do("POST", json.loads(self.rfile.read(length)))

            def _do(self, method, body):
                status, fields = sender.answer(method, self.path, body)
                raw = json.dumps(fields).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_):
                pass

        return Handler


def push(host, port, offset, payload):
    """Push bytes and wait for the one that answers."""
    with socket.create_connection((host, port), timeout=10) as connection:
        connection.sendall(struct.pack("<QQ", offset, len(payload)) + payload)
        assert connection.recv(1) == b"\x01"
