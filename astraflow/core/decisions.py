"""Decisions: what a run answers to an event, and what it asks for."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any, Final, cast, get_args
from zlib import crc32

from astraflow.core.effects import Effect, RecordRollout
from astraflow.core.packing import Share
from astraflow.core.rollouts import ItemAck, Rollout
from astraflow.core.tasks import Prompt, RolloutTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What came of an event.

    Attributes:
        answer: To the caller; its type is named in the event's docstring.
        effects: To be carried out in order.
    """

    answer: Any
    effects: tuple[Effect, ...]

    @property
    def digest(self) -> int:
        """32 bits over the answer and the effects: who gets what, and what counts.

        Equal decisions have equal ones in every process. Of rollouts, tasks and prompts their ids
        count, of numbers with a fraction five digits; bytes and tensors do not.
        """
        return crc32(repr((_plain(self.answer), _plain(self.effects))).encode())


def _plain(value: Any) -> Any:
    """Return a value as plain data whose text is the same in every process."""
    kind = cast("type[Any]", type(value))
    return _encoder(kind)(value)


@cache
def _encoder(kind: type[Any]) -> Callable[[Any], Any]:
    """Return what says values of a type."""
    if kind in _SHORT:
        return _SHORT[kind]
    if is_dataclass(kind):
        names = tuple(each.name for each in fields(kind))
        # Not its name, which may be another one in the next release.
        number = _EFFECTS.index(kind) if kind in _EFFECTS else None
        return lambda value: (number, *[_plain(getattr(value, name)) for name in names])
    fitting = (tell for base, tell in _ENCODERS if issubclass(kind, base))
    return next(fitting, _omit)


def _omit(value: Any) -> None:
    del value


_ENCODERS: Final[Sequence[tuple[Any, Callable[[Any], Any]]]] = (
    (str, str),
    (float, "{:.5g}".format),
    # The secrets of a session are bytes, and no journal has them.
    (bytes, _omit),
    ((int, type(None), datetime, timedelta), lambda value: value),
    (Mapping, lambda value: sorted((str(key), repr(_plain(of))) for key, of in value.items())),
    (Set, lambda value: sorted(repr(_plain(each)) for each in value)),
    (Sequence, lambda value: [_plain(each) for each in value]),
)
_EFFECTS: Final[Sequence[Any]] = get_args(Effect)
_SHORT: Final[Mapping[type[Any], Callable[[Any], Any]]] = {
    str: str,
    # What most events come to.
    ItemAck: lambda each: (each.item_id, str(each.disposition), str(each.reason)),
    RecordRollout: lambda each: (each.rollout.rollout_id, each.member_id),
    Rollout: lambda each: each.rollout_id,
    Prompt: lambda each: (each.data_set, each.epoch, each.prompt_id),
    RolloutTask: lambda each: (
        each.task_id,
        each.attempt,
        each.sample_indexes,
        _plain(each.versions),
        each.deadline,
    ),
    # Its rows are those of the groups in the header.
    Share: _omit,
}
