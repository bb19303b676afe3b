"""HTTP servers that stand where a service would: real sockets, and nothing behind them."""

import json
from collections.abc import Generator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class JsonPage(BaseHTTPRequestHandler):
    """Answers in JSON, and says nothing of it."""

    def answer(self, said: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(said).encode()
        # Who asked may have gone.
        with suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(page: type[JsonPage], **fields: Any) -> Generator[Any]:
    """Serve a page at a free port, with fields of its server, until the block ends."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), page)
    vars(server).update(fields)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
