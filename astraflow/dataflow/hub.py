"""The hub: the one writer of a run, and the hands that carry out what it decides.

Every call ends in one event, decided at once on the event loop. Its effects go to outboxes,
watches and the recorder, and its answer to the caller, once the journal holds the event. What has
to be read from a disk is read by one worker and comes back as an event of its own.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from astraflow.core.autoscale import ScaleAdvice
from astraflow.core.clock import Clock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.evals import EvalRun
from astraflow.core.events import (
    BatchStreamOpened,
    Event,
    RaasJoined,
    RolloutArrived,
    SaveRequested,
    Secrets,
    Ticked,
    TrainerRegistered,
)
from astraflow.core.ids import EvalRunId, MemberId, PolicyId
from astraflow.core.members import (
    JoinPool,
    PoolMembership,
    RegisterTrainer,
    SessionResume,
    TrainerRegistration,
)
from astraflow.core.run import Run
from astraflow.core.saves import SavedRun
from astraflow.core.status import RunStatus, WaitReason
from astraflow.core.versions import VersionInfo
from astraflow.dataflow.alarm import Alarm
from astraflow.dataflow.commits import Commits, Decided
from astraflow.dataflow.draws import read_draw
from astraflow.dataflow.hands import Hands
from astraflow.dataflow.mailroom import BatchItem
from astraflow.dataflow.memory import Memory
from astraflow.dataflow.prompts import DataSets, PromptSources
from astraflow.dataflow.recorder import Recorder
from astraflow.dataflow.tallies import Tallies
from astraflow.dataflow.traces import HubTraces
from astraflow.rpc.outbox import Outbox
from astraflow.rpc.tokens import SessionTokens, without_secrets
from astraflow.storage.journal import Journal
from astraflow.wire.journal import record_bytes, with_decision
from astraflow_proto.rollout.v1 import rollout_pb2

log = structlog.get_logger(__name__)

Told = TypeVar("Told")
# How often a run that is being saved is looked at.
_LOOK_S = 0.25


class Hub:
    """One run, as the servicers see it."""

    def __init__(
        self,
        run: Run,
        *,
        data_sets: DataSets,
        sources: PromptSources,
        recorder: Recorder,
        clock: Clock,
        journal: Journal | None = None,
        memory: Memory | None = None,
        transfer_token: bytes | None = None,
    ) -> None:
        """Put a hub around a run.

        Args:
            run: Fresh, or as its journal has it; nobody else applies events to it.
            data_sets: Read for evaluations.
            sources: Prompts to train on.
            recorder: Gets what is kept for people.
            clock: Tells the time.
            journal: Gets every event; None: nothing outlives the process.
            memory: What is known of members; None: nothing.
            transfer_token: Shared by all members; None: a fresh one.
        """
        self.run = run
        self.memory = memory or Memory()
        self.tallies = Tallies()
        self.hands = Hands(
            recorder=recorder,
            draws=Outbox(),
            memory=self.memory,
            tallies=self.tallies,
            traces=HubTraces(run.status(clock.now()).run_id),
        )
        self.commits = Commits(journal, self._carry_out, on_commit=self.tallies.committed)
        self.metrics_address = ""
        self.event_count = 0
        self.max_apply_s = 0.0
        self._data_sets = data_sets
        self._sources = sources
        self._path_of = recorder.saved_path
        self._clock = clock
        self._keeps_records = journal is not None
        self._transfer_token = transfer_token or SessionTokens.mint()
        self._alarm = Alarm(lambda: run.next_deadline, clock)

    def now(self) -> datetime:
        """Return the run's time."""
        return self._clock.now()

    async def take(self, event: Event) -> Any:
        """Let something happen; return once it is safe and carried out.

        Returns:
            The answer that the event's docstring names.

        Raises:
            AstraflowError: As the event's docstring says; nothing has changed then.
        """
        try:
            return self.apply(event)
        finally:
            await self.safe()

    async def safe(self, ticket: int | None = None) -> None:
        """Wait until what was decided so far is safe, or up to a ticket of `commits`."""
        await self.commits.passed(self.commits.ticket if ticket is None else ticket)

    async def told(self, answer: Told) -> Told:
        """Return what a reader asked for, once all that it may tell of is safe."""
        await self.safe()
        return answer

    def apply(
        self,
        event: Event,
        *,
        received: rollout_pb2.Rollout | None = None,
        goes_on: bool = False,
    ) -> Any:
        """Decide what comes of an event; it is carried out when the journal holds it.

        Args:
            event: What happens.
            received: The message that a RolloutArrived came in.
            goes_on: Whether the next event comes at once, as `Run.apply`.

        Returns:
            The answer that the event's docstring names; it is safe after `safe`.

        Raises:
            AstraflowError: As the event's docstring says; nothing has changed then.
        """
        now, started = self._clock.now(), time.thread_time()
        kept = without_secrets(event)
        record = b""
        if self._keeps_records:
            record = record_bytes(kept, now, received=received, goes_on=goes_on)
        outcome = self.run.apply(event, now, goes_on=goes_on)
        if self._keeps_records:
            record = with_decision(record, outcome.digest)
        self.event_count += 1
        self.commits.put(
            Decided(
                event=kept,
                time=now,
                answer=outcome.answer,
                effects=outcome.effects,
                record=record,
            )
        )
        self.max_apply_s = max(self.max_apply_s, time.thread_time() - started)
        if not goes_on:
            self._alarm.note()
        return outcome.answer

    def _carry_out(self, decided: Decided) -> None:
        event = decided.event
        if isinstance(event, RolloutArrived):
            self.tallies.ack.observe((self._clock.now() - decided.time).total_seconds())
        if isinstance(event, BatchStreamOpened):
            self.hands.mail.open_batches(event.member_id, event.rank)
        for effect in decided.effects:
            self.hands.carry_out(effect, decided.time)
        self.hands.traces.see(event, decided.answer)
        self.memory.note(event, decided.answer, decided.time)
        self.hands.watches.touch()

    async def draw(self) -> None:
        """Draw prompts as the run asks for them, for ever."""
        while True:
            for draw in await self.hands.draws.take():
                self.apply(await read_draw(draw, self._sources, self._data_sets))

    async def tick(self) -> None:
        """Tell the run when a deadline of it has passed, for ever."""
        while True:
            if await self._alarm.rung():
                self.apply(Ticked())

    async def wait_over(self) -> None:
        """Wait until the run is over and its members are gone."""
        await self.hands.over.wait()

    async def join_pool(self, request: JoinPool) -> PoolMembership:
        """Admit a RaaS."""
        secrets, resumes = self._secrets(), self._resumed(request.resume)
        event = RaasJoined(request=request, secrets=secrets, resumes=resumes)
        membership: PoolMembership = await self.take(event)
        log.info("RaaS joined", member=membership.session.member_id, name=request.name)
        return membership

    async def register_trainer(self, request: RegisterTrainer) -> TrainerRegistration:
        """Admit a trainer."""
        secrets, resumes = self._secrets(), self._resumed(request.resume)
        event = TrainerRegistered(request=request, secrets=secrets, resumes=resumes)
        registration: TrainerRegistration = await self.take(event)
        log.info("trainer joined", member=registration.session.member_id, name=request.name)
        return registration

    async def open_batches(self, event: BatchStreamOpened) -> Outbox[BatchItem]:
        """Return what the stream of one rank has to send, from what is not settled on."""
        await self.take(event)
        return self.hands.mail.batches(event.member_id, event.rank)

    async def explain(self, member_id: MemberId) -> tuple[WaitReason, ...]:
        """Return what a trainer waits for, link by link; empty: nothing."""
        return await self.told(self.run.explain(self.memory.policies[member_id], self.now()))

    async def watch_versions(
        self, policy_id: PolicyId, after: int | None, caller: MemberId
    ) -> AsyncIterator[VersionInfo]:
        """Yield the versions after one, and then each as it is announced, to one member.

        Raises:
            AstraflowError: POLICY_UNKNOWN.
        """
        known = self.run.versions(policy_id, caller)
        async for info in self.hands.watches.versions(policy_id, known, after=after):
            yield await self.told(self.run.version_for(info, caller))

    async def watch_eval(self, eval_run_id: EvalRunId) -> AsyncIterator[EvalRun]:
        """Yield an evaluation at each change until it is final."""
        async for eval_run in self.hands.watches.eval_run(eval_run_id, self.run.eval_run):
            yield await self.told(eval_run)

    async def watch_status(self, interval: timedelta) -> AsyncIterator[RunStatus]:
        """Yield the run after changes until it is final."""
        async for status in self.hands.watches.status(self.status, interval=interval):
            yield await self.told(status)

    async def save(self, checkpoint_id: str, *, within_s: float | None) -> tuple[SavedRun, Path]:
        """Have every trainer save; return what they did, and the file that says so.

        Args:
            checkpoint_id: Of all parts.
            within_s: None: however long it takes.

        Raises:
            AstraflowError: INVALID_FIELD, RUN_ENDED; NOT_READY when a trainer is missing, or has
                not saved in time.
        """
        await self.take(SaveRequested(checkpoint_id=checkpoint_id))
        look = partial(self.run.saved, checkpoint_id)
        try:
            async with asyncio.timeout(within_s):
                saved = await self.hands.watches.saved(look, every_s=_LOOK_S)
                return await self.told(saved), self._path_of(checkpoint_id)
        except TimeoutError as error:
            raise AstraflowError(
                Reason.NOT_READY,
                f"not every trainer has saved {checkpoint_id} within {within_s:.1f} s: a step may "
                "take longer, or none begins; ask again with the same id to go on waiting",
                retryable=True,
            ) from error

    def status(self) -> RunStatus:
        """Return the whole state."""
        return self.run.status(self.now())

    def scale_advice(self, window: timedelta | None = None) -> ScaleAdvice:
        """Return how large the pool should be; window None: that of the recipe."""
        return self.run.scale_advice(self.now(), window)

    def _secrets(self) -> Secrets:
        return Secrets(token=SessionTokens.mint(), transfer_token=self._transfer_token)

    def _resumed(self, resume: SessionResume | None) -> MemberId | None:
        return None if resume is None else self.memory.sessions.owner_of(resume.resume_token)
