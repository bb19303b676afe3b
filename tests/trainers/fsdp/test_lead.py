"""Rank 0, and what becomes of ranks that lose it."""

import os
import signal
from contextlib import ExitStack

import pytest

from astraflow.trainers.engine import TellsLikelihoods
from astraflow.trainers.fsdp.lead import LeadEngine
from crash_ends.postgres import free_port


@pytest.mark.slow
def test_a_rank_that_is_lost_while_the_other_makes_its_engine_is_named(run_apart, tmp_path):
    port = free_port()
    with run_apart("join", 0, 2, port) as lost, run_apart("follow", 1, 2, port, tmp_path) as other:
        assert any("the ranks have met" in line for line in other)
        told = next(line for line in lost if line.startswith("joined"))
        os.kill(int(told.split()[1]), signal.SIGKILL)
        assert "MEMBER_LOST rank 1 lost another rank of its trainer" in other.read()


@pytest.mark.slow
def test_a_new_node_goes_the_same_way_with_all_ranks_whoever_reads_from_one_of_them(run_apart):
    port = free_port()
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(run_apart("publish_versions", rank, 2, port)) for rank in range(2)
        ]
        ways = [[line for line in each if line.startswith("way")] for each in ranks]
    assert len(ways[0]) == 7
    assert ways[0] == ways[1]


def test_rank_0_offers_nothing_that_the_other_ranks_would_not_do_with_it():
    assert not issubclass(LeadEngine, TellsLikelihoods)
