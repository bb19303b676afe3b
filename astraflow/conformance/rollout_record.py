"""What a RaaS did, as the tap has it."""

from typing import Any

from astraflow.conformance.tap import Call, Tap


def items(call: Call) -> list[Any]:
    """Return what was sent on a StreamRollouts, in order."""
    return [item for message in call.requests for item in message.items]


def id_of(item: Any) -> str:
    """Return the id under which an item is acknowledged."""
    return item.rollout.rollout_id if item.HasField("rollout") else item.result.task_id


def results(tap: Tap) -> list[Any]:
    """Return the results of tasks that the member sent."""
    sent = [item for call in tap.of("StreamRollouts") for item in items(call)]
    return [item.result for item in sent if item.HasField("result")]


def tasks(tap: Tap) -> list[Any]:
    """Return the tasks that reached the member."""
    events = [event for call in tap.of("StreamTasks") for event in call.responses]
    return [event.task for event in events if event.HasField("task")]


def nacks(tap: Tap) -> list[Any]:
    """Return the tasks that the member gave back."""
    asked = [message for call in tap.of("StreamTasks") for message in call.requests]
    return [message.nack for message in asked if message.HasField("nack")]


def first_of(found: Any) -> Any:
    """Return the first of what was found; None of nothing."""
    return next(iter(found), None)
