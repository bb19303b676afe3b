"""The rate of a group follows what its way carried."""

import pytest

from astraflow.transport.groups import next_bound
from astraflow.transport.sockets import TcpInfo


def sent(packets, repeats):
    return TcpInfo(packet_count=packets, repeat_count=repeats)


def test_a_way_that_drops_for_want_of_room_is_bounded():
    bound = next_bound(sent(1000, 0), sent(2000, 20), 100e6, None)
    assert bound == pytest.approx(125e6)


def test_losses_by_chance_bound_nothing():
    assert next_bound(sent(1000, 0), sent(2000, 1), 100e6, None) is None


def test_a_bound_rises_while_nothing_is_dropped():
    assert next_bound(sent(1000, 20), sent(2000, 21), 100e6, 50e6) == pytest.approx(55e6)
