"""What the lanes are compared with: sockets and gRPC as they come.

The transfer of the published system is made again from its description: six connections, opened
one after the other, for every transfer, with buffers of 16 MB asked for (which the kernel clamps,
and which switches its own tuning off). Here all six are read at once, and asking costs no round
trip of its own: both are in its favour.
"""

import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import grpc

STREAMS: Final = 6
BUFFER_NBYTES: Final = 16_000_000
MESSAGE_NBYTES: Final = 1 << 20
METHOD: Final = "/baseline.Bytes/Get"

_ASK: Final = b"?"


def made_up_tls() -> ssl.SSLContext:
    """Return a server's context with a certificate that nobody has signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:
        key, certificate = Path(folder) / "key.pem", Path(folder) / "certificate.pem"
        command = (
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
            f" -subj /CN=localhost -keyout {key} -out {certificate}"
        )
        subprocess.run(command.split(), check=True, capture_output=True)
        context.load_cert_chain(certificate, key)
    return context


def serve_sockets(
    address: str, data: bytes, *, buffer_nbytes: int | None, tls: ssl.SSLContext | None = None
) -> int:
    """Answer each byte that comes on a connection with the data; return the port.

    A connection of the published system (that with a buffer size) gets its sixth of them, once.
    """
    server = socket.create_server((address, 0))
    if buffer_nbytes:
        _set_buffers(server, buffer_nbytes)
    answer = memoryview(data)[: len(data) // STREAMS] if buffer_nbytes else memoryview(data)

    def talk(client: socket.socket) -> None:
        if tls is not None:
            client = tls.wrap_socket(client, server_side=True)
        with client:
            while client.recv(1):
                client.sendall(answer)

    def accept() -> None:
        while True:
            client, _ = server.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=talk, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return server.getsockname()[1]


def serve_grpc(address: str, data: bytes) -> tuple[grpc.Server, int]:
    """Serve the data as a stream of messages of 1 MiB, all settings left alone."""

    def get(request: bytes, context: Any) -> Iterator[bytes]:
        del request, context
        for start in range(0, len(data), MESSAGE_NBYTES):
            yield data[start : start + MESSAGE_NBYTES]

    service, method = METHOD.strip("/").split("/")
    stubless: Any = grpc
    handlers = {method: stubless.unary_stream_rpc_method_handler(get)}
    server: Any = stubless.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((stubless.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port(f"{address}:0")
    server.start()
    return server, port


class WarmStream:
    """One connection that is kept, with TLS or without."""

    def __init__(self, address: str, port: int, nbytes: int, *, is_encrypted: bool = False) -> None:
        self._is_encrypted = is_encrypted
        self._place = (address, port)
        self._nbytes = nbytes
        self._stream: socket.socket | None = None
        self._buffer = bytearray(nbytes)

    def pull(self) -> int:
        """Ask and read; return the bytes."""
        if self._stream is None:
            self._stream = socket.create_connection(self._place)
            if self._is_encrypted:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                self._stream = context.wrap_socket(self._stream)
        self._stream.sendall(_ASK)
        return _fill(self._stream, memoryview(self._buffer))

    def close(self) -> None:
        """Let the next one be the first."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None


class PublishedStreams:
    """Six connections that are made anew for every transfer."""

    def __init__(self, address: str, port: int, nbytes: int) -> None:
        self._place = (address, port)
        self._buffer = bytearray(nbytes // STREAMS * STREAMS)

    def pull(self) -> int:
        """Connect, ask and read; return the bytes."""
        each = len(self._buffer) // STREAMS
        view = memoryview(self._buffer)
        with ExitStack() as stack, ThreadPoolExecutor(STREAMS) as readers:
            streams = [stack.enter_context(self._connect()) for _ in range(STREAMS)]
            parts = [view[start : start + each] for start in range(0, len(view), each)]
            return sum(readers.map(_ask_and_fill, streams, parts))

    def close(self) -> None:
        """Return; nothing is kept."""

    def _connect(self) -> socket.socket:
        stream = socket.socket()
        _set_buffers(stream, BUFFER_NBYTES)
        stream.connect(self._place)
        return stream


class PlainGrpc:
    """One channel with all settings left alone."""

    def __init__(self, address: str, port: int) -> None:
        self._target = f"{address}:{port}"
        self._channel: grpc.Channel | None = None

    def pull(self) -> int:
        """Call and read; return the bytes."""
        if self._channel is None:
            options = [("grpc.use_local_subchannel_pool", 1)]
            self._channel = grpc.insecure_channel(self._target, options)
        channel: Any = self._channel
        return sum(map(len, channel.unary_stream(METHOD)(b"")))

    def close(self) -> None:
        """Let the next one be the first."""
        if self._channel is not None:
            self._channel.close()
        self._channel = None


def _set_buffers(stream: socket.socket, nbytes: int) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)


def _ask_and_fill(stream: socket.socket, view: memoryview) -> int:
    stream.sendall(_ASK)
    return _fill(stream, view)


def _fill(stream: socket.socket, view: memoryview) -> int:
    count = 0
    while count < len(view):
        nbytes = stream.recv_into(view[count:])
        if not nbytes:
            raise ConnectionError("the other end closed")
        count += nbytes
    return count
