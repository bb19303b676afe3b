"""Effects: what a run asks of the process around it, in this order, after each event.

An effect is carried out or given up; nothing that comes of it is assumed. What matters comes
back as an event: a rollout, an ack, or the end of a session.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any, Final, get_args
from zlib import crc32

from astraflow.core.batches import BatchHeader, EndOfData, IssuedPrompt, TrainedRow
from astraflow.core.evals import EvalRun
from astraflow.core.frozen import fast_init
from astraflow.core.ids import BatchId, EvalRunId, MemberId, PolicyId, TaskId
from astraflow.core.members import Directive
from astraflow.core.packing import Share
from astraflow.core.rollouts import ItemAck, Rollout
from astraflow.core.status import RunState, SavedRun
from astraflow.core.tasks import CancelReason, Prompt, RolloutTask, TaskPurpose
from astraflow.core.versions import VersionInfo, VersionReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """The answer to a KeepAlive."""

    ttl: timedelta
    directive: Directive
    server_time: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTask:
    """Put a task on the member's StreamTasks; it waits there until a stream reads it."""

    member_id: MemberId
    task: RolloutTask


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCancellation:
    """Withdraw a task, or some samples of it (none named: all), on the member's StreamTasks."""

    member_id: MemberId
    task_id: TaskId
    reason: CancelReason
    sample_indexes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDirective:
    """Put an order on the member's StreamTasks, or on the stream of rank 0 of a trainer."""

    member_id: MemberId
    directive: Directive


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPublishOrder:
    """Ask a trainer for a version after the step in progress, on the stream of rank 0."""

    member_id: MemberId


@dataclass(frozen=True, slots=True, kw_only=True)
class SendScrubOrder:
    """Tell a trainer that a reader could not verify a version, on the stream of rank 0."""

    member_id: MemberId
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSaveOrder:
    """Ask a trainer for a checkpoint after the step in progress, on the stream of rank 0."""

    member_id: MemberId
    checkpoint_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSaved:
    """Every trainer has saved: write what the checkpoint is made of."""

    saved: SavedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearOutbox:
    """Forget what a member's streams have not taken yet.

    Comes first when a session is opened or opened again; what still counts follows as new
    effects.
    """

    member_id: MemberId


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    """End the member's streams and refuse its token with SESSION_ENDED from now on.

    Attributes:
        is_lost: Whether it went silent; False: it left by itself, overstayed or was fenced.
        is_fenced: Whether a newer incarnation took over; its token then answers
            SESSION_FENCED, and a new session of the same member_id is open already.
        message: For the log.
    """

    member_id: MemberId
    is_lost: bool = False
    is_fenced: bool = False
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendBatch:
    """Put a batch on the stream of one rank: the header, then the parts."""

    member_id: MemberId
    rank: int
    header: BatchHeader
    parts: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class SendEndOfData:
    """Put the end of the data on the stream of one rank, then end the stream with OK."""

    member_id: MemberId
    rank: int
    end_of_data: EndOfData


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceVersion:
    """Send a version to all who watch its policy; again when it gained patches or sources."""

    info: VersionInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawPrompts:
    """Read the next training prompts of a data set; answer with PromptsOffered.

    Asked once at a time for each data set: the next request follows the answer.
    """

    data_set: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawAgain:
    """Read prompts again that were drawn before; answer with PromptsOffered, in this order."""

    prompts: tuple[IssuedPrompt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawEvalPrompts:
    """Read the data sets of an evaluation; answer with EvalPromptsOffered."""

    eval_run_id: EvalRunId
    data_sets: tuple[str, ...]


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRollout:
    """A rollout was accepted: note it if it is sampled for the record."""

    member_id: MemberId
    rollout: Rollout
    prompt: Prompt
    purpose: TaskPurpose


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBatch:
    """A batch was consumed: write its line of metrics.

    Attributes:
        step: Optimizer steps done, this one included.
        version: Newest version when the batch was drawn.
        metrics: Of the hub and of the trainer.
        staleness_counts: Its rollouts by staleness in versions.
        trained_rows: Its rows, in order.
    """

    policy_id: PolicyId
    batch_id: BatchId
    step: int
    version: int
    metrics: Mapping[str, float]
    staleness_counts: Mapping[int, int] = field(default_factory=dict[int, int])
    trained_rows: tuple[TrainedRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordVersion:
    """A version went live, or failed to, on a member: write its line."""

    member_id: MemberId
    report: VersionReport


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalChanged:
    """An evaluation moved on: wake its watchers; write its line when `eval_run.state` is final."""

    eval_run: EvalRun


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStateChanged:
    """The run is in another state: wake the watchers of the run."""

    state: RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseHub:
    """The run is over and its members are gone, or their grace is: write the end and exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasePayloads:
    """Nobody has a use for these objects of the payload store: remove them, now or later."""

    names: tuple[str, ...]


# New ones come last: the digests of decisions count them.
Effect = (
    SendTask
    | SendCancellation
    | SendDirective
    | ClearOutbox
    | CloseSession
    | SendBatch
    | SendEndOfData
    | SendPublishOrder
    | SendScrubOrder
    | SendSaveOrder
    | RunSaved
    | AnnounceVersion
    | DrawPrompts
    | DrawAgain
    | DrawEvalPrompts
    | RecordRollout
    | RecordBatch
    | RecordVersion
    | EvalChanged
    | RunStateChanged
    | CloseHub
    | ReleasePayloads
)


@fast_init
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
        answer, effects = self.answer, self.effects
        only = effects[0] if len(effects) == 1 else None
        if type(answer) is ItemAck and type(only) is RecordRollout:
            # What most events come to, as the other lines say it.
            said = f"({answer.item_id!r}, '{answer.disposition}', '{answer.reason}')"
            text = f"({said}, [({only.rollout.rollout_id!r}, {only.member_id!r})])"
        else:
            first, *others = _plain([answer, *effects])
            text = repr((first, others))
        return crc32(text.encode())


class Effects:
    """What is to be done because of the event in progress, in order."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def do(self, effect: Effect) -> None:
        self._effects.append(effect)

    def take(self) -> tuple[Effect, ...]:
        """Return the effects of the event, and begin anew."""
        effects, self._effects = tuple(self._effects), []
        return effects


def _plain(values: Iterable[Any]) -> list[Any]:
    """Return values as plain data whose text is the same in every process."""
    return [_encoder(value.__class__)(value) for value in values]


@cache
def _encoder(kind: type[Any]) -> Callable[[Any], Any]:
    """Return what says values of a type."""
    if kind in _SHORT:
        return _SHORT[kind]
    if is_dataclass(kind):
        names = [each.name for each in fields(kind) if each.name not in _LATER]
        # Not its name, which may be another one in the next release.
        number = _EFFECTS.index(kind) if kind in _EFFECTS else None
        return lambda value: (
            number,
            *[_encoder(each.__class__)(each) for each in [getattr(value, name) for name in names]],
        )
    fitting = (tell for base, tell in _ENCODERS if issubclass(kind, base))
    return next(fitting, _OMITTED)


_OMITTED: Final[Callable[[Any], None]] = lambda _: None  # noqa: E731 - beside the others


def _said(value: Mapping[Any, Any]) -> list[tuple[str, str]]:
    texts = map(repr, _plain(value.values()))
    return sorted(zip(map(str, value), texts, strict=True))


_ENCODERS: Final[Sequence[tuple[Any, Callable[[Any], Any]]]] = (
    (str, str),
    (float, "{:.5g}".format),
    # The secrets of a session are bytes, and no journal has them.
    (bytes, _OMITTED),
    ((int, type(None), datetime, timedelta), lambda value: value),
    (Mapping, _said),
    (Set, lambda value: sorted(map(repr, _plain(value)))),
    (Sequence, _plain),
)

# Fields that the release before this one had not: bytes, which do not count, and what is for the
# record alone, so that its journals are gone on with.
_LATER: Final = frozenset({"signature", "signing_key", "signing_seed", "trained_rows"})

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
        _said(each.versions),
        each.deadline,
    ),
    SendBatch: lambda each: (
        each.member_id,
        each.rank,
        each.header.batch_id,
        each.header.version,
        each.header.part_count,
        each.header.row_count,
        each.header.token_count,
        [group.group_id for group in each.header.groups],
    ),
    # Its rows are those of the groups in the header.
    Share: _OMITTED,
}
