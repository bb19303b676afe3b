"""A link that is measured: a real origin, every lane, and what goes wrong at either end."""

import asyncio
import json
import subprocess
import sys

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import LaneKind
from astraflow.launch.bench.link import measure_link, pull_here, read_source, serve_link


@pytest.fixture(scope="module")
def source():
    with serve_link(
        5_000_000, listen="127.0.0.1:0", advertise=None, lanes=[LaneKind.TCP, LaneKind.SHM]
    ) as source:
        yield source


def measured(source, *lanes):
    return asyncio.run(measure_link(*source, lanes, rounds=2))


def test_each_lane_carries_the_version(source):
    rates = measured(source, LaneKind.SHM, LaneKind.TCP, LaneKind.GRPC)
    assert [rate.lane for rate in rates] == ["shm", "tcp", "grpc"]
    for rate in rates:
        assert rate.best_gb_per_s >= rate.gb_per_s > 0
        assert rate.first_byte_s > 0


def test_a_lane_that_is_not_there_is_left_out_and_not_measured_as_grpc(source):
    assert [rate.lane for rate in measured(source, LaneKind.UCX, LaneKind.GRPC)] == ["grpc"]
    with pytest.raises(AstraflowError) as caught:
        measured(source, LaneKind.UCX)
    assert caught.value.reason is Reason.LANE_UNAVAILABLE


def test_who_has_another_token_is_not_let_in(source):
    with pytest.raises(AstraflowError) as caught:
        measured((source[0], "guess"), LaneKind.GRPC)
    assert caught.value.reason is Reason.TOKEN_INVALID


def test_where_the_serving_end_is_stands_among_other_lines():
    other = ("log\n", "[]\n", '{"event": "bound"}\n', '{"endpoint": "h:1", "token": null}\n')
    assert read_source([*other, '{"endpoint": "h:1", "token": "t"}\n']) == ("h:1", "t")
    with pytest.raises(AstraflowError, match="did not start") as caught:
        read_source(other)
    assert caught.value.reason is Reason.NOT_READY


def test_a_serving_end_that_does_not_start_is_told(monkeypatch):
    monkeypatch.setenv("ASTRAFLOW_LOG_FORMAT", "xml")
    with pytest.raises(AstraflowError, match="did not start"):
        pull_here(1_000_000, lanes=[LaneKind.GRPC], rounds=1, as_json=True)


@pytest.mark.slow
def test_both_ends_are_processes_and_both_end():
    command = [sys.executable, "-m", "astraflow", "bench", "link", "--mb", "1", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--lane", "tcp", "--json"], stdout=subprocess.PIPE, text=True, check=True
    )
    (rate,) = json.loads(done.stdout.splitlines()[-1])
    assert rate["lane"] == "tcp"
    assert rate["gb_per_s"] > 0
