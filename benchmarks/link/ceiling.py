"""What the emulated link of this machine carries at most."""

import subprocess
import sys
from typing import Final

from link.link import Link
from link.profiles import Profile

_UNBOUND: Final = Profile(name="ceiling", mbit_per_s=1e6, rtt_ms=2, queue_ms=100)
_NBYTES: Final = 1 << 30
_SINK: Final = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
client, _ = server.accept()
buffer = bytearray(1 << 20)
while client.recv_into(buffer):
    pass
client.sendall(b"!")
"""
_SEND: Final = """
import socket, sys, time
client = socket.create_connection((sys.argv[1], 5000))
piece = bytes(1 << 20)
began = time.perf_counter()
for _ in range(int(sys.argv[2]) >> 20):
    client.sendall(piece)
client.shutdown(socket.SHUT_WR)
client.recv(1)
print(time.perf_counter() - began)
"""


def measured_ceiling() -> float:
    """Return the 10^6 bits per second of one stream over a link without a limit."""
    with Link(_UNBOUND, tuned=True) as link:
        words = [sys.executable, "-c", _SINK, link.near.address]
        with link.near.popen(words, stdout=subprocess.PIPE, text=True) as sink:
            assert sink.stdout
            sink.stdout.readline()
            words = [sys.executable, "-c", _SEND, link.near.address, str(_NBYTES)]
            seconds = float(link.far.run(words))
    return _NBYTES * 8 / seconds / 1e6
