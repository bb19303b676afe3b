"""Lots: what came in one message is decided together."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from astraflow.core.events import Event, RolloutArrived, Ticked
from astraflow.dataflow.hub import Hub
from astraflow_proto.rollout.v1 import rollout_pb2

# An event, and the message that a RolloutArrived came in.
Arrival: TypeAlias = tuple[Event, rollout_pb2.Rollout | None]


def apply_lot(hub: Hub, lot: Sequence[Arrival]) -> list[Any]:
    """Decide what comes of events that came together, in order, at less cost than one by one.

    A rollout that is of no use is not applied: so a node that sends the same ones for ever does not
    fill the journal with them.

    Returns:
        Their answers, as `Hub.apply`.

    Raises:
        AstraflowError: As the event's docstring says; those before it have happened.
    """
    answers: list[Any] = []
    is_open = False
    try:
        for number, (event, received) in enumerate(lot, 1):
            goes_on = number < len(lot)
            refusal = hub.run.refusal(event) if isinstance(event, RolloutArrived) else None
            if refusal is None:
                answers.append(hub.apply(event, received=received, goes_on=goes_on))
            elif refusal.event is not None:
                answers.append(hub.apply(refusal.event, goes_on=goes_on))
            else:
                answers.append(refusal.ack)
                continue
            is_open = goes_on
    finally:
        if is_open:
            # Nothing came of the last one: what comes of those before it is decided now.
            hub.apply(Ticked())
    return answers
