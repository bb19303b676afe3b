import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from link import Link, LinkUnavailableError, Profile
from link.hosts import remove_stale

pytestmark = pytest.mark.root

DATAGRAMS = 2000
AT_ONCE = 250
LOST = 0.2

ECHO = """
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind((sys.argv[1], 5000))
print("ready", flush=True)
while True:
    data, sender = server.recvfrom(65536)
    server.sendto(data, sender)
"""
ASK = """
import socket, sys, time
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.connect((sys.argv[1], 5000))
times = []
for _ in range(5):
    began = time.perf_counter()
    client.send(b"?")
    client.recv(16)
    times.append(time.perf_counter() - began)
print(min(times))
"""
SHOUT = """
import socket, sys
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[2])):
    client.sendto(b"x" * 72, (sys.argv[1], 9))
"""
SINK = """
import socket, sys
server = socket.create_server((sys.argv[1], 5001))
print("ready", flush=True)
client, _ = server.accept()
buffer, count = bytearray(1 << 20), 0
while nbytes := client.recv_into(buffer):
    count += nbytes
client.sendall(count.to_bytes(8, "little"))
"""
SEND = """
import socket, sys, time
client = socket.create_connection((sys.argv[1], 5001))
began = time.perf_counter()
client.sendall(bytes(int(sys.argv[2])))
client.shutdown(socket.SHUT_WR)
print(int.from_bytes(client.recv(8), "little"), time.perf_counter() - began)
"""


@contextmanager
def running(link, program):
    words = [sys.executable, "-c", program, link.near.address]
    with link.near.popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def from_far(link, program, *arguments):
    return link.far.run([sys.executable, "-c", program, link.near.address, *arguments])


def test_round_trip_takes_what_the_profile_says(link):
    with running(link, ECHO):
        # Packets come at most 30 us early, and later by what the machine makes of it.
        assert float(from_far(link, ASK)) >= 0.0799


def test_stream_arrives_whole_and_no_faster_than_the_rate(link):
    nbytes = 4_000_000
    with running(link, SINK):
        count, seconds = from_far(link, SEND, str(nbytes)).split()
    assert int(count) == nbytes
    assert float(seconds) >= nbytes * 8 / 100e6
    assert nbytes <= link.count().to_near.nbytes


def counted(link):
    """Send all datagrams, so few at once that they fit into a queue; return what was counted."""
    before = link.count()
    for sent in range(AT_ONCE, DATAGRAMS + 1, AT_ONCE):
        from_far(link, SHOUT, str(AT_ONCE))
        while (flow := link.count().since(before).to_near).packets + flow.dropped < sent:
            time.sleep(0.01)
    return flow


def test_packets_are_counted_and_lost_at_random(link):
    assert counted(link).dropped == 0
    link.change(loss=LOST)
    flow = counted(link)
    # Six standard deviations of a binomial: 6 * sqrt(2000 * 0.2 * 0.8) = 107.
    assert abs(flow.dropped - DATAGRAMS * LOST) < 110
    assert flow.nbytes >= flow.packets * 28


def test_queue_without_room_drops(link):
    link.change(mbit_per_s=0.1)
    before = link.count()
    from_far(link, SHOUT, str(DATAGRAMS))
    flow = link.count().since(before).to_near
    # 100 ms at 0.1 Mbit/s hold 12 such packets of 100 bytes; the rest has no place to wait.
    assert flow.dropped > DATAGRAMS / 2


def test_each_row_has_its_settings():
    profile = Profile(name="test", mbit_per_s=1000, rtt_ms=300)
    try:
        with Link(profile) as stock, Link(profile, tuned=True) as tuned:
            assert stock.settings() != tuned.settings()
            assert tuned.settings()["net.ipv4.tcp_slow_start_after_idle"] == "0"
            most = int(tuned.settings()["net.ipv4.tcp_rmem"].split()[-1])
            assert most >= 2 * profile.in_flight_nbytes
    except LinkUnavailableError as error:
        pytest.skip(str(error))


def test_link_takes_its_processes_along(link):
    with running(link, ECHO) as process:
        link.close()
        assert process.wait() == -signal.SIGTERM


def test_what_a_killed_harness_left_goes_with_the_next_link(link):
    program = (
        "import json, os, time\n"
        "from link import Link, Profile\n"
        "link = Link(Profile(name='killed', mbit_per_s=100, rtt_ms=10)).__enter__()\n"
        "child = link.far.popen(['sleep', '600'])\n"
        "print(json.dumps([link.far.namespace, child.pid]), flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as harness:
        namespace, child = json.loads(harness.stdout.readline())
        harness.kill()
    assert namespace in remove_stale()
    assert not _runs(child)
    assert namespace not in _namespaces()


def _namespaces():
    told = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return told.stdout.split()


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
