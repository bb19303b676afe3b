"""Ids: opaque strings, prefixed so that people can tell what they name."""

from collections import Counter
from typing import Final, NewType

RunId = NewType("RunId", str)

MemberId = NewType("MemberId", str)

NOBODY: Final = MemberId("")

PolicyId = NewType("PolicyId", str)

PromptId = NewType("PromptId", str)

GroupId = NewType("GroupId", str)

TaskId = NewType("TaskId", str)

RolloutId = NewType("RolloutId", str)

TrajectoryId = NewType("TrajectoryId", str)

BatchId = NewType("BatchId", str)

WorkflowId = NewType("WorkflowId", str)

EvalRunId = NewType("EvalRunId", str)


class IdGenerator:
    """Hands out ids such as `group-<run>-17`, and knows later which ones it handed out.

    What was handed out takes no memory: an id is known by its number.
    """

    def __init__(self, run_id: RunId) -> None:
        self._run_id = run_id
        self._counts = Counter[str]()

    def next(self, kind: str) -> str:
        number = self._counts[kind]
        self._counts[kind] = number + 1
        return f"{kind}-{self._run_id}-{number}"

    def has_issued(self, kind: str, name: str) -> bool:
        """Whether this run handed out an id."""
        head, _, number = name.rpartition("-")
        count = self._counts[kind]
        # Python reads no number of thousands of digits, and a peer may send one.
        is_number = number.isascii() and number.isdigit() and len(number) <= len(str(count))
        is_issued = is_number and str(int(number)) == number and int(number) < count
        return is_issued and head == f"{kind}-{self._run_id}"
