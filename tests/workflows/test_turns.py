"""Turns become trajectories: what extends is one, what parts is a branch, trained once."""

from dataclasses import replace

import numpy as np

from astraflow.core.rollouts import FinishReason, VersionSpan
from astraflow.core.tasks import SamplingParams
from astraflow.engines.protocol import Generation
from astraflow.workflows.turns import TurnTree, trajectories_of


def said(*tokens, version=1):
    return Generation(
        tokens=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), -0.5, np.float32),
        version_spans=(VersionSpan(version=version, length=len(tokens)),) if tokens else (),
        finish_reason=FinishReason.STOP,
    )


def talk(tree, prompt, *tokens, version=1):
    return tree.add(tree.open(prompt), said(*tokens, version=version), SamplingParams())


def rows(tree):
    return [
        (each.tokens.tolist(), np.flatnonzero(each.sampled_mask).tolist(), each.branch_offset)
        for each in trajectories_of(tree, "solver", engine="e/1", prefix="r")
    ]


def test_turns_that_extend_each_other_are_one_trajectory():
    tree = TurnTree()
    talk(tree, [1, 2], 3, 4)
    talk(tree, [1, 2, 3, 4, 5], 6, version=2)
    assert rows(tree) == [([1, 2, 3, 4, 5, 6], [2, 3, 5], 0)]
    (trajectory,) = trajectories_of(tree, "solver", engine="e/1", prefix="r")
    assert [(span.version, span.length) for span in trajectory.version_spans] == [(1, 2), (2, 1)]


def test_a_turn_that_is_extended_twice_is_trained_once():
    tree = TurnTree()
    talk(tree, [1], 2)
    talk(tree, [1, 2, 3], 4)
    talk(tree, [1, 2, 5], 6)
    first, second = trajectories_of(tree, "solver", engine="e/1", prefix="r")
    assert rows(tree) == [([1, 2, 3, 4], [1, 3], 0), ([1, 2, 5, 6], [3], 2)]
    assert (first.parent_trajectory_id, second.parent_trajectory_id) == (None, first.trajectory_id)


def test_a_sub_agent_and_a_summary_begin_anew():
    tree = TurnTree()
    talk(tree, [1, 2], 3)
    talk(tree, [9], 8)  # another agent
    talk(tree, [1, 2, 3, 4], 5)
    talk(tree, [1, 7], 6)  # a summary in place of what was said
    assert rows(tree) == [([9, 8], [1], 0), ([1, 2, 3, 4, 5], [2, 4], 0), ([1, 7, 6], [2], 0)]
    assert [
        each.segment_index for each in trajectories_of(tree, "solver", engine="e/1", prefix="r")
    ] == [0, 1, 2]


def test_a_branch_draws_with_a_seed_of_its_own_and_what_extends_does_not():
    tree = TurnTree()
    first, again = tree.open([1]), tree.open([1])
    tree.add(first, said(2), SamplingParams())
    tree.add(again, said(2, 3), SamplingParams())
    assert [first.branch, again.branch] == [0, 1]
    assert tree.open([1, 2, 4]).branch == 0
    assert tree.open([1, 2, 3, 4]).branch == 1
    assert tree.open([7]).branch == 2


def test_a_turn_without_a_token_is_none():
    tree = TurnTree()
    talk(tree, [1])
    assert rows(tree) == []


def test_what_a_grammar_drew_is_seen_and_not_trained_on():
    tree = TurnTree()
    drawn = replace(said(2, 3, 4), constrained=np.array([True, False, True]))
    tree.add(tree.open([1]), drawn, SamplingParams())
    talk(tree, [1, 2, 3, 4, 5], 6, version=2)
    (trajectory,) = trajectories_of(tree, "solver", engine="e/1", prefix="r")
    assert rows(tree) == [([1, 2, 3, 4, 5, 6], [2, 5], 0)]
    assert [(span.version, span.length) for span in trajectory.version_spans] == [(1, 1), (2, 1)]
    assert np.flatnonzero(trajectory.logprobs).tolist() == [2, 5]


def test_a_branch_of_nothing_but_a_grammar_is_left_out():
    tree = TurnTree()
    drawn = replace(said(2), constrained=np.array([True]))
    tree.add(tree.open([1]), drawn, SamplingParams())
    assert rows(tree) == []
    talk(tree, [1, 2, 3], 4)
    talk(tree, [1, 2, 5], 6)
    assert rows(tree) == [([1, 2, 3, 4], [3], 0), ([1, 2, 5, 6], [3], 2)]
