import asyncio
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from socket import AF_INET6, SOCK_STREAM
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from astraflow.core.errors import AstraflowError, Reason
from astraflow.telemetry.metrics import (
    Family,
    Histogram,
    MetricsServer,
    counter,
    gauge,
    histogram,
    loop_read,
)


def families() -> Iterator[Family]:
    seconds = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        seconds.observe(value)
    yield gauge("level", "A level.", {("a", "x"): 2.0, ("b", 'say "y"'): 3.0}, "policy", "region")
    yield counter("things_total", "Things.", 7)
    yield histogram("wait_seconds", "Waits.", {("a",): seconds}, "policy")


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        return answer.read().decode()


def test_what_is_served_is_what_the_parser_reads() -> None:
    with MetricsServer("127.0.0.1:0", families) as server:
        text = scrape(server.address)
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for metric in text_string_to_metric_families(text)
        for sample in metric.samples
    }
    assert samples["astraflow_level", "b", 'say "y"'] == 3
    assert samples["astraflow_things_total",] == 7
    assert samples["astraflow_wait_seconds_bucket", "0.1", "a"] == 2
    assert samples["astraflow_wait_seconds_bucket", "+Inf", "a"] == 4
    assert samples["astraflow_wait_seconds_sum", "a"] == pytest.approx(7.65)


def test_a_family_stays_as_it_was_made() -> None:
    seconds, levels = Histogram((1.0,)), {("a",): 1.0}
    made = gauge("level", "A level.", levels, "policy"), histogram("wait_seconds", "W.", seconds)
    kept = hash(made)
    levels["b",] = 2.0
    seconds.observe(0.5)
    assert hash(made) == kept
    assert made[0].samples == ((("a",), 1.0),)


def test_families_are_made_without_what_formats_them() -> None:
    code = """
import sys
from astraflow.telemetry.metrics import Histogram, counter, gauge, histogram
gauge("level", "", 1.0), counter("things_total", "", 1), histogram("wait_seconds", "", Histogram())
assert "prometheus_client" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_of_both_protocols_is_served_on_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def ipv6_first(host: Any, port: Any, *args: Any, **kwargs: Any) -> list[Any]:
        found: list[Any] = list(resolve(host, port, *args, **kwargs))
        six = [(AF_INET6, SOCK_STREAM, 6, "", ("::1", int(port or 0), 0, 0))]
        return six + found if host == "localhost" else found

    monkeypatch.setattr("socket.getaddrinfo", ipv6_first)
    with MetricsServer("localhost:0", families) as server:
        assert server.address.startswith("127.0.0.1:")
        assert "astraflow_things_total 7" in scrape(server.address)


def test_an_address_of_ipv6_is_served() -> None:
    try:
        socket.create_server(("::1", 0), family=AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with MetricsServer("[::1]:0", families) as server:
        assert server.address.startswith("[::1]:")
        assert "astraflow_things_total 7" in scrape(server.address)


def test_off_serves_nothing() -> None:
    assert MetricsServer("off", families).address == ""


def test_a_port_that_is_taken_says_what_to_do() -> None:
    with (
        MetricsServer("127.0.0.1:0", families) as first,
        pytest.raises(AstraflowError, match=r"metrics\.listen.*port 0") as caught,
    ):
        MetricsServer(first.address, families)
    assert caught.value.reason is Reason.INVALID_FIELD


async def test_state_is_looked_at_on_its_own_loop() -> None:
    loop = asyncio.get_running_loop()

    def look() -> bool:
        return asyncio.get_running_loop() is loop

    read = loop_read(look, lambda here: [gauge("here", "Here.", float(here))])
    with MetricsServer("127.0.0.1:0", read) as server:
        assert "astraflow_here 1.0" in await asyncio.to_thread(scrape, server.address)
        await asyncio.to_thread(server.close)
