"""Rank 0, and what becomes of ranks that lose it."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from astraflow.trainers.engine import TellsLikelihoods
from astraflow.trainers.fsdp.lead import LeadEngine

JOINED = """
import sys

from astraflow.config.policies import Fsdp
from astraflow.trainers.fsdp.ranks import joined_ranks

with joined_ranks(device="cpu", fsdp=Fsdp()):
    print("joined", flush=True)
    sys.stdin.read()
"""

FOLLOWS = """
import sys
from pathlib import Path

from astraflow.client.loop_thread import LoopThread
from astraflow.config.recipe import PolicyConfig
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError
from astraflow.trainers.fsdp.main import train_rank
from astraflow.trainers.joining import TrainerPlace

folder = Path(sys.argv[1])
policy = PolicyConfig.model_validate(
    {"model": {"path": "model"}, "trainer": {"ranks": 2, "device": "cpu"}}
)
place = TrainerPlace(hub="127.0.0.1:1", token="", run_dir=RunDir(folder))
try:
    with LoopThread() as loop:
        train_rank("solver", policy, place, model_dir=folder, loop=loop)
except AstraflowError as error:
    print(error.reason, error.message, flush=True)
"""


PUBLISHES = """
from contextlib import ExitStack

import numpy as np

from astraflow.config.policies import Fsdp
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, Layout
from astraflow.trainers.fsdp.ranks import joined_ranks
from astraflow.trainers.fsdp.weights import publish_shard, shard_publisher
from astraflow.wire.transfers import TransferSpec

policy = PolicyId("solver")
layout = Layout.of([("w", Dtype.BF16, (64, 8))])
with joined_ranks(device="cpu", fsdp=Fsdp()) as ranks, ExitStack() as reading:
    publisher = shard_publisher(policy, layout, ranks)
    publisher.store.keep = 2
    rows = np.zeros((32, 8), np.uint16)
    for version in range(7):
        info = publish_shard(publisher, {"w": rows}, ranks, version=version, step=version)
        spec = TransferSpec(policy_id=policy, version=version, base_version=None)
        if version == 0 and ranks.rank == 0:
            own = publisher.store.plan(spec)
            reading.enter_context(publisher.store.reading([each.info for each in own]))
        if version == 4:
            reading.close()
        way = [(each.info.base_version, each.info.version) for each in publisher.store.plan(spec)]
        print("way", version, way, flush=True)
        rows[version] += 1
    ranks.wait()
"""


def rank(number, port, program, *arguments):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **place, "RANK": str(number), "WORLD_SIZE": "2"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_rank_that_is_lost_while_the_other_makes_its_engine_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as stack:
        lost, follower = (
            stack.enter_context(rank(number, port, program, str(tmp_path)))
            for number, program in enumerate((JOINED, FOLLOWS))
        )
        stack.callback(follower.kill)
        stack.callback(lost.kill)
        assert any("the ranks have met" in line for line in follower.stdout)
        assert any("joined" in line for line in lost.stdout)
        lost.communicate()
        output, _ = follower.communicate()
    assert "MEMBER_LOST rank 1 lost another rank of its trainer" in output


@pytest.mark.slow
def test_a_new_node_goes_the_same_way_with_all_ranks_whoever_reads_from_one_of_them():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as stack:
        ranks = [stack.enter_context(rank(number, port, PUBLISHES)) for number in range(2)]
        ways = [
            [line for line in each.communicate()[0].splitlines() if line.startswith("way")]
            for each in ranks
        ]
    assert len(ways[0]) == 7
    assert ways[0] == ways[1]


def test_rank_0_offers_nothing_that_the_other_ranks_would_not_do_with_it():
    assert not issubclass(LeadEngine, TellsLikelihoods)
