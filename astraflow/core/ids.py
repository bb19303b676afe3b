"""Ids: opaque strings, prefixed so that people can tell what they name."""

from typing import NewType

RunId = NewType("RunId", str)
MemberId = NewType("MemberId", str)
PolicyId = NewType("PolicyId", str)
PromptId = NewType("PromptId", str)
GroupId = NewType("GroupId", str)
TaskId = NewType("TaskId", str)
RolloutId = NewType("RolloutId", str)
TrajectoryId = NewType("TrajectoryId", str)
BatchId = NewType("BatchId", str)
WorkflowId = NewType("WorkflowId", str)
EvalRunId = NewType("EvalRunId", str)
