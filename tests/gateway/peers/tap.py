"""Stands between two peers and writes down what they say, so that it can be said again.

A `Tap` passes HTTP on and keeps the exchanges; a `Wire` passes a TCP connection on and keeps what
its client sent. A `Player` answers with what a tap kept.
"""

import base64
import json
import pickle
import socket
from collections import Counter, defaultdict, deque
from contextlib import suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

HEADERS = ("content-type", "accept")
# Of exchanges of one kind, and of an answer: what is polled would fill the disk.
KEPT_COUNT, KEPT_NBYTES = 4, 20_000


class Tap:
    """Listens for HTTP in the place of another server.

    Attributes:
        address: host:port of its own.
        exchanges: What was asked and answered, in order.
    """

    def __init__(self, target, change=None):
        """Listen.

        Args:
            target: host:port that everything is passed on to.
            change: Takes the path and the fields of a request, and changes addresses in them.
        """
        self.exchanges = []
        self._target, self._change, self._seen = target, change, Counter()
        self._server = serve(self._pass_on)
        self.address = f"127.0.0.1:{self._server.server_port}"

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def _pass_on(self, method, path, headers, body):
        connection = HTTPConnection(self._target, timeout=600)
        try:
            connection.request(method, path, self._changed(path, body), headers)
            answer = connection.getresponse()
            raw, status = answer.read(), answer.status
            kind = answer.headers.get("content-type", "")
        finally:
            connection.close()
        known = (method, urlsplit(path).path, status, len(raw) > 100)
        self._seen[known] += 1
        if self._seen[known] <= KEPT_COUNT and len(raw) <= KEPT_NBYTES:
            self.exchanges.append(
                {
                    "method": method,
                    "path": path,
                    "headers": headers,
                    "body": encoded(body),
                    "status": status,
                    "content_type": kind,
                    "answer": encoded(raw),
                }
            )
        return status, kind, raw

    def _changed(self, path, body):
        if self._change is None or not body:
            return body
        is_json = body[:1] in b"{["
        # The test itself started the peer that pickled it.
        fields = json.loads(body) if is_json else pickle.loads(body)
        if not self._change(urlsplit(path).path, fields):
            return body
        return json.dumps(fields).encode() if is_json else pickle.dumps(fields)


class Wire:
    """Passes connections on to host:port, and keeps what their clients sent."""

    def __init__(self, host, port):
        self.sent = []
        self._target = (host, port)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self._sockets = [listener]
        self._thread = Thread(target=self._accept, args=(listener,), daemon=True)
        self._thread.start()

    def close(self):
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for each in self._sockets:
            each.close()

    def _accept(self, listener):
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                self._sockets.append(client)
                server = socket.create_connection(self._target)
                self._sockets.append(server)
                said = bytearray()
                self.sent.append(said)
                Thread(target=pump, args=(client, server, said), daemon=True).start()
                Thread(target=pump, args=(server, client, bytearray()), daemon=True).start()


def pump(source, sink, said):
    with suppress(OSError):
        while part := source.recv(1 << 16):
            said += part
            sink.sendall(part)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def encoded(raw):
    """Return bytes as text: JSON as it is, all else in base64."""
    try:
        text = raw.decode("ascii")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}
    return {"text": text}


def decoded(kept):
    return kept["text"].encode() if "text" in kept else base64.b64decode(kept["base64"])


def serve(answer):
    """Serve HTTP on a port of loopback: `answer` gets method, path, headers and body."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self._do(b"")

        def do_POST(self):
            self._do(self.rfile.read(int(self.headers.get("content-length") or 0)))

        def _do(self, body):
            known = {name: self.headers[name] for name in HEADERS if name in self.headers}
            status, kind, raw = answer(self.command, self.path, known, body)
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(raw)))
            self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


class Player:
    """Answers as a peer did: the answers to each path in their order, the last one for ever.

    Attributes:
        address: host:port.
        asked: (path, body) of every request.
    """

    def __init__(self, exchanges, before=lambda path, body: None):
        """Listen.

        Args:
            exchanges: That a tap kept.
            before: Called with every request before its answer.
        """
        self.asked = []
        self._before = before
        self._answers = defaultdict(deque)
        for each in exchanges:
            key = (each["method"], urlsplit(each["path"]).path)
            self._answers[key].append(each)
        self._server = serve(self._answer)
        self.address = f"127.0.0.1:{self._server.server_port}"

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, method, path, headers, body):
        self.asked.append((path, body))
        self._before(path, body)
        answers = self._answers[method, urlsplit(path).path]
        each = answers.popleft() if len(answers) > 1 else answers[0]
        return each["status"], each["content_type"], decoded(each["answer"])
