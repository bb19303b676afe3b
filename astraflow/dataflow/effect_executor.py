"""The effect executor: it carries out what the run decides, and never waits."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, TypeAlias

import structlog

from astraflow.core.batches import StreamBatches
from astraflow.core.effects import (
    AnnounceVersion,
    ClearOutbox,
    CloseHub,
    CloseSession,
    DrawAgain,
    DrawEvalPrompts,
    DrawPrompts,
    Effect,
    EvalChanged,
    RecordBatch,
    RecordRollout,
    RecordVersion,
    ReleasePayloads,
    RunSaved,
    RunStateChanged,
)
from astraflow.core.events import RolloutArrived, TaskFinished
from astraflow.core.ids import MemberId, PolicyId
from astraflow.core.versions import VersionReport, VersionState
from astraflow.dataflow.commits import Decided
from astraflow.dataflow.counters import HubCounters
from astraflow.dataflow.members import MemberDirectory
from astraflow.dataflow.payloads import PayloadCleaner
from astraflow.dataflow.recorder import RunRecorder
from astraflow.dataflow.stream_outboxes import StreamEffect, StreamOutboxes
from astraflow.dataflow.traces import HubTraces
from astraflow.dataflow.watches import Watches
from astraflow.rpc.access import ended_error, fenced_error
from astraflow.rpc.concurrency import Outbox
from astraflow.rpc.streams import StreamClosed, StreamRegistry, StreamReplaced
from astraflow.storage.fault_points import FaultPoint, armed, hit
from astraflow.telemetry.traces import is_tracing

log = structlog.get_logger(__name__)

# They say nothing new of a member.
_ITEMS: Final = (RolloutArrived, TaskFinished)

PromptRequest: TypeAlias = DrawPrompts | DrawAgain | DrawEvalPrompts


@dataclass(kw_only=True, eq=False)
class EffectExecutor:
    """Turns effects into messages, wake-ups and records.

    Attributes:
        payloads: The run's payload store; None: it has none.
        prompt_requests: What has to be read from data sets.
        streams: Who streams what.
        outboxes: What waits for the streams.
        watches: Who wants to see what change.
        over: Set when the hub may close.
    """

    recorder: RunRecorder
    directory: MemberDirectory
    traces: HubTraces
    payloads: PayloadCleaner | None = None
    counters: HubCounters = field(default_factory=HubCounters)
    prompt_requests: Outbox[PromptRequest] = field(default_factory=Outbox[PromptRequest])
    streams: StreamRegistry = field(default_factory=StreamRegistry)
    outboxes: StreamOutboxes = field(default_factory=StreamOutboxes)
    watches: Watches = field(default_factory=Watches)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    _reports: dict[MemberId, dict[PolicyId, VersionReport]] = field(
        init=False, default_factory=dict[MemberId, dict[PolicyId, VersionReport]]
    )

    def carry_out(self, group: Sequence[Decided]) -> None:
        """Do what comes of events that the journal holds."""
        traces = self.traces if is_tracing() else None
        for decided in group:
            event, now = decided.event, decided.time
            if isinstance(event, StreamBatches):
                self.outboxes.open_batches(event.member_id, event.rank)
            for effect in decided.effects:
                self._do(effect if traces is None else traces.stamp(effect, now), now)
            if traces is not None:
                traces.see(event, decided.answer)
            if not isinstance(event, _ITEMS):
                self.directory.note(event, decided.answer, now)
            if armed:
                hit(FaultPoint.CARRIED_OUT_HALF)
        self.watches.change.touch()

    def _do(self, effect: Effect, now: datetime) -> None:
        match effect:
            # The most frequent one first: each line is a question.
            case RecordRollout():
                region = self.directory.history.accept(effect.member_id)
                self.counters.rollout(effect, region)
                self.recorder.record(effect, now)
            case RecordVersion() if self._is_repeated(effect):
                pass
            case RecordBatch() | RecordVersion():
                self.directory.see(effect, now)
                self.counters.see(effect, self.directory.history)
                self.recorder.record(effect, now)
            case _ if isinstance(effect, StreamEffect):
                self.outboxes.post(effect)
            case ClearOutbox():
                self.outboxes.clear(effect.member_id)
                # Nobody may read them any more: what is sent again would be lost there.
                resumed = StreamReplaced(f"the session of {effect.member_id} was resumed")
                self.streams.end(effect.member_id, resumed, among=("tasks", "batches/"))
            case CloseSession():
                self._reports.pop(effect.member_id, None)
                self.directory.see(effect, now)
                self.counters.see(effect, self.directory.history)
                self._close_session(effect)
            case DrawPrompts() | DrawAgain() | DrawEvalPrompts():
                self.prompt_requests.put(effect)
            case _:
                self._show(effect, now)

    def _is_repeated(self, effect: RecordVersion) -> bool:
        """Whether it was told before that a version is live: the answer was lost on its way."""
        report, last = effect.report, self._reports.setdefault(effect.member_id, {})
        before, last[report.policy_id] = last.get(report.policy_id), report
        return report == before and report.state is VersionState.LIVE

    def _show(self, effect: Effect, now: datetime) -> None:
        """Carry out what is for watchers and for the record."""
        match effect:
            case AnnounceVersion():
                self.watches.announce(effect.info)
            case EvalChanged():
                self.counters.see(effect, self.directory.history)
                self.watches.evals.touch()
                self.recorder.record(effect, now)
            case RunSaved():
                self.recorder.record(effect, now)
                self.watches.saves.touch()
            case RunStateChanged():
                log.info("run state", state=effect.state)
                self.watches.state.touch()
            case ReleasePayloads():
                if self.payloads is not None:
                    self.payloads.release(effect.names)
            case CloseHub():
                self.over.set()
            case _:
                raise TypeError(f"nobody carries out {type(effect).__name__}")

    def _close_session(self, effect: CloseSession) -> None:
        member_id = effect.member_id
        log.info("session ended", member=member_id, lost=effect.is_lost, message=effect.message)
        error: Exception = StreamClosed(member_id)
        if effect.is_fenced:
            error = fenced_error(member_id)
        elif effect.is_lost:
            error = ended_error(member_id, effect.message)
        self.streams.end(member_id, error)
        self.outboxes.drop(member_id)
