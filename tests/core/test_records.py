from dataclasses import replace

import numpy as np

from astraflow.core.rollouts import ROUTED_EXPERTS, Column, ColumnAxis
from astraflow.core.samples import AcceptedRollout, RolloutRecords


def entry(rollout_of, name, tokens):
    class Task:
        task_id, group_id, attempt = "t", "g", 0

    rollout = rollout_of(Task, 0, versions={"solver": (0,) * (tokens - 1)}, name=name)
    return AcceptedRollout(rollout=rollout, prompt_id="p", member_id="m", placements={})


def names(records):
    return [record.rollout.rollout_id for record in records.newest_first()]


def test_window_is_bounded_by_number(rollout_of):
    records = RolloutRecords(max_count=2, max_nbytes=1 << 20)
    for name in "abc":
        records.add(entry(rollout_of, name, 4))
    assert names(records) == ["c", "b"]


def test_columns_count_for_the_bytes(rollout_of):
    known = entry(rollout_of, "a", 5)
    (trajectory,) = known.rollout.trajectories
    routes = Column(axis=ColumnAxis.TOKEN, values=np.zeros((5, 48, 8), np.uint16))
    routed = replace(trajectory, columns={ROUTED_EXPERTS: routes})
    rollout = replace(known.rollout, trajectories=(routed,))
    with_columns = AcceptedRollout(rollout=rollout, prompt_id="p", member_id="m", placements={})
    assert with_columns.nbytes == known.nbytes + routes.values.nbytes


def test_window_is_bounded_by_bytes(rollout_of):
    records = RolloutRecords(max_count=100, max_nbytes=100)
    for name in "abc":
        records.add(entry(rollout_of, name, 5))
    assert names(records) == ["c", "b"]
    records.add(entry(rollout_of, "huge", 50))
    assert names(records) == []
