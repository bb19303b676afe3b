import socket

import pytest

from astraflow.core.errors import AstraflowError
from astraflow.rpc.address import (
    advertised,
    is_loopback,
    join_address,
    split_address,
    unproxied,
)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("127.0.0.1:7070", "127.0.0.1", 7070), ("hub:0", "hub", 0), ("[::1]:65535", "::1", 65535)],
)
def test_an_address_is_host_and_port(address, host, port):
    assert split_address(address) == (host, port)
    assert join_address(host, port) == address


@pytest.mark.parametrize(
    "address", ["", "hub", ":7070", "hub:", "hub:x", "hub:-1", "hub:65536", "::1:7070", "hub:²"]
)
def test_anything_else_is_refused_with_an_example(address):
    with pytest.raises(AstraflowError, match=r"listen: .*such as 127\.0\.0\.1:7070") as caught:
        split_address(address, "listen")

    assert caught.value.metadata == {"field": "listen"}


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("hub.example", False),
    ],
)
def test_loopback_is_known(host, is_one):
    assert is_loopback(host) is is_one


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({}, "127.0.0.1,localhost,node-7"),
        ({"no_proxy": "a,b"}, "a,b,127.0.0.1,localhost,node-7"),
        ({"NO_PROXY": ".lab"}, ".lab,127.0.0.1,localhost,node-7"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_what_is_reached_without_a_proxy_is_said_in_both_spellings(known, expected):
    assert unproxied(known, "node-7", "localhost", "") == dict.fromkeys(
        ("no_proxy", "NO_PROXY"), expected
    )


@pytest.mark.parametrize(
    ("advertise", "expected"),
    [
        (None, "10.0.0.1:7070"),
        ("hub.example", "hub.example:7070"),
        ("hub.example:443", "hub.example:443"),
        ("fe80::1", "[fe80::1]:7070"),
        ("[fe80::1]", "[fe80::1]:7070"),
        ("[fe80::1]:443", "[fe80::1]:443"),
    ],
)
def test_others_dial_what_is_advertised(advertise, expected):
    assert advertised("10.0.0.1", 7070, advertise) == expected


@pytest.mark.parametrize(("host", "advertise"), [("0.0.0.0", None), ("::", None), ("x", "auto")])
def test_auto_is_an_address_of_this_machine(host, advertise):
    found, port = split_address(advertised(host, 7070, advertise))

    with socket.socket() as probe:
        probe.bind((found, 0))
    assert port == 7070


def test_full_name_is_that_of_the_machine(monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda: "node7.cluster.example")

    assert advertised("0.0.0.0", 7070, "fqdn") == "node7.cluster.example:7070"


@pytest.mark.parametrize("name", ["node7", "localhost.localdomain"])
def test_a_machine_without_a_full_name_says_so(monkeypatch, name):
    monkeypatch.setattr(socket, "getfqdn", lambda: name)

    with pytest.raises(AstraflowError, match="no full name"):
        advertised("0.0.0.0", 7070, "fqdn")
