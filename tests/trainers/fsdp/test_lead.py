"""Rank 0."""

from astraflow.trainers.engine import TellsLikelihoods
from astraflow.trainers.fsdp.lead import LeadEngine


def test_rank_0_offers_nothing_that_the_other_ranks_would_not_do_with_it():
    assert not issubclass(LeadEngine, TellsLikelihoods)
