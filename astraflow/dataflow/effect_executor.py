"""The effect executor: it carries out what the run decides, and never waits."""

import asyncio
from datetime import datetime
from typing import TypeAlias

import structlog

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
    SendBatch,
    SendCancellation,
    SendDirective,
    SendEndOfData,
    SendPublishOrder,
    SendSaveOrder,
    SendScrubOrder,
    SendTask,
)
from astraflow.dataflow.counters import HubCounters
from astraflow.dataflow.members import MemberDirectory
from astraflow.dataflow.payloads import PayloadCleaner
from astraflow.dataflow.recorder import RunRecorder
from astraflow.dataflow.stream_outboxes import StreamOutboxes
from astraflow.dataflow.traces import HubTraces
from astraflow.dataflow.watches import Watches
from astraflow.rpc.access import ended_error, fenced_error
from astraflow.rpc.concurrency import Outbox
from astraflow.rpc.streams import StreamClosed, StreamRegistry
from astraflow.telemetry.traces import is_tracing

log = structlog.get_logger(__name__)

PromptRequest: TypeAlias = DrawPrompts | DrawAgain | DrawEvalPrompts


class EffectExecutor:
    """Turns effects into messages, wake-ups and records.

    Attributes:
        directory: What is known of members.
        counters: What is counted.
        traces: What is traced.
        prompt_requests: What has to be read from data sets.
        streams: Who streams what.
        outboxes: What waits for the streams.
        watches: Who wants to see what change.
        over: Set when the hub may close.
    """

    def __init__(
        self,
        *,
        recorder: RunRecorder,
        prompt_requests: Outbox[PromptRequest],
        directory: MemberDirectory,
        counters: HubCounters,
        traces: HubTraces,
        payloads: PayloadCleaner | None = None,
    ) -> None:
        self.directory = directory
        self.counters = counters
        self.traces = traces
        self.prompt_requests = prompt_requests
        self.streams = StreamRegistry()
        self.outboxes = StreamOutboxes()
        self.watches = Watches()
        self.over = asyncio.Event()
        self._recorder = recorder
        self._payloads = payloads

    def carry_out(self, effect: Effect, now: datetime) -> None:
        """Do what one effect asks for."""
        if is_tracing():
            effect = self.traces.stamp(effect, now)
        self.directory.see(effect, now)
        self.counters.see(effect, self.directory.history)
        match effect:
            # The most frequent one first: each line is a question.
            case RecordRollout():
                self._record_rollout(effect, now)
            case SendTask() | SendCancellation() | SendDirective():
                self.outboxes.post(effect)
            case SendBatch() | SendEndOfData():
                self.outboxes.post(effect)
            case SendPublishOrder() | SendScrubOrder() | SendSaveOrder():
                self.outboxes.post(effect)
            case ClearOutbox():
                self.outboxes.clear(effect.member_id)
            case CloseSession():
                self._close_session(effect)
            case DrawPrompts() | DrawAgain() | DrawEvalPrompts():
                self.prompt_requests.put(effect)
            case _:
                self._show(effect, now)

    def _show(self, effect: Effect, now: datetime) -> None:
        """Carry out what is for watchers and for the record."""
        match effect:
            case AnnounceVersion():
                self.watches.announce(effect.info)
            case RecordBatch():
                self._recorder.batch(now, effect)
            case RecordVersion():
                self._recorder.version(now, effect.member_id, effect.report)
            case EvalChanged():
                self.watches.touch_evals()
                if effect.eval_run.state.is_final:
                    self._recorder.eval_run(now, effect.eval_run)
            case RunSaved():
                self._recorder.saved(effect.saved)
                self.watches.touch_saves()
            case RunStateChanged():
                log.info("run state", state=effect.state)
                self.watches.touch_state()
            case ReleasePayloads():
                if self._payloads is not None:
                    self._payloads.release(effect.names)
            case CloseHub():
                self.over.set()
            case _:
                raise TypeError(f"nobody carries out {type(effect).__name__}")

    def _record_rollout(self, effect: RecordRollout, now: datetime) -> None:
        if self._recorder.keeps(effect.rollout.group_id):
            self._recorder.rollout(
                now,
                effect.rollout,
                prompt=effect.prompt,
                purpose=effect.purpose,
                member_id=effect.member_id,
            )

    def _close_session(self, effect: CloseSession) -> None:
        member_id = effect.member_id
        log.info("session ended", member=member_id, lost=effect.is_lost, message=effect.message)
        if effect.is_fenced:
            error: Exception = fenced_error(member_id)
        else:
            is_lost = effect.is_lost
            error = ended_error(member_id, effect.message) if is_lost else StreamClosed(member_id)
        self.streams.end(member_id, error)
        self.outboxes.drop(member_id)
