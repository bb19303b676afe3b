"""The hub: the one writer of a run.

Every call ends in one event, decided at once on the event loop. Its effects go to outboxes,
watches and the recorder, and its answer to the caller, once the journal holds the event. What has
to be read from a disk is read by one worker and comes back as an event of its own.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from astraflow.core.autoscale import ScaleAdvice
from astraflow.core.batches import StreamBatches
from astraflow.core.clock import Clock
from astraflow.core.effects import CloseSession
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.evals import EvalRun
from astraflow.core.events import (
    Event,
    MemberLeft,
    RaasJoined,
    SaveRequested,
    SessionSecrets,
    Ticked,
    TokenRevoked,
    TrainerRegistered,
    VersionPublished,
)
from astraflow.core.ids import EvalRunId, MemberId, PolicyId
from astraflow.core.members import (
    Capability,
    JoinPool,
    PoolMembership,
    RegisterTrainer,
    SessionResume,
    TrainerRegistration,
)
from astraflow.core.run import Run
from astraflow.core.status import RunStatus, SavedRun, WaitReason
from astraflow.core.versions import VersionInfo
from astraflow.dataflow.commits import Commits, Decided
from astraflow.dataflow.effect_executor import EffectExecutor
from astraflow.dataflow.members import MemberDirectory
from astraflow.dataflow.payloads import PayloadCleaner
from astraflow.dataflow.prompts import DataSets, PromptSource, read_prompts
from astraflow.dataflow.recorder import RunRecorder
from astraflow.dataflow.stream_outboxes import BatchItem
from astraflow.dataflow.traces import HubTraces
from astraflow.rpc.access import Grant, SessionTokens, without_secrets
from astraflow.rpc.concurrency import Outbox, to_the_end
from astraflow.storage.journal import Journal
from astraflow.wire.fields import invalid
from astraflow.wire.journal import record_bytes, with_decision

log = structlog.get_logger(__name__)

# A deadline that is noticed so late says that the process or its machine stood still; whoever was
# not heard meanwhile says something within the other time.
_LATE_S: Final = 0.2

_HEARD_WITHIN_S: Final = 5.0


class DeadlineTimer:
    """Waits for the next deadline, which may come sooner meanwhile."""

    def __init__(self, next_deadline: Callable[[], datetime | None], clock: Clock) -> None:
        self._next_deadline = next_deadline
        self._clock = clock
        self._due: datetime | None = None
        self._is_sooner = asyncio.Event()

    def refresh(self) -> None:
        """Look at the deadline again: it may have changed."""
        due = self._next_deadline()
        if due is not None and (self._due is None or due < self._due):
            self._is_sooner.set()

    async def passed(self) -> bool:
        """Wait for the deadline, or until there is a sooner one; return whether one has passed."""
        self._is_sooner.clear()
        self._due = due = self._next_deadline()
        wait_s, missed_s, started = None, 0.0, time.monotonic()
        if due is not None:
            # Never 0: a deadline that a tick does not move must not keep the loop.
            wait_s = max(0.001, (due - self._clock.now()).total_seconds())
        try:
            async with asyncio.timeout(wait_s):
                await self._is_sooner.wait()
        except TimeoutError:
            missed_s = time.monotonic() - started - (wait_s or 0.0)
        while missed_s > _LATE_S:
            # What was said to a hub that did not run is taken before silence counts.
            log.info("the hub stood still", seconds=round(missed_s, 3))
            started, pause_s = time.monotonic(), min(missed_s, _HEARD_WITHIN_S)
            await asyncio.sleep(pause_s)
            missed_s = time.monotonic() - started - pause_s
        due = self._next_deadline()
        return due is not None and due <= self._clock.now()


# What a member says of itself goes to everybody who looks at the run.
_MOST_CHARACTERS: Final = 1024


def _must_be_short(request: JoinPool | RegisterTrainer) -> None:
    resources = request.resources
    texts = (resources.accelerator, resources.currency, resources.metrics_address)
    if (count := sum(map(len, (request.name, request.region, *texts)))) > _MOST_CHARACTERS:
        raise invalid(
            "name", f"with region and resources it has {count} > {_MOST_CHARACTERS} characters"
        )


def _is_ending() -> AstraflowError:
    message = "the hub ends, for its run failed to decide; it goes on when it is started again"
    return AstraflowError(Reason.NOT_READY, message, retryable=True)


Told = TypeVar("Told")

# How often a run that is being saved is looked at.
_SAVE_POLL_S = 0.25

# A trainer that lives may take so long to write its last checkpoint.
_LAST_CHECKPOINT_S: Final = 1800.0


class Hub:
    """One run, as the servicers see it.

    Attributes:
        is_hurried: Whether it waits for no trainer once the run is over.
        is_broken: Whether the run failed to decide: what it holds may be half of an event, and
            nothing more is decided by it.
    """

    def __init__(
        self,
        run: Run,
        *,
        data_sets: DataSets,
        sources: Mapping[str, PromptSource],
        recorder: RunRecorder,
        clock: Clock,
        journal: Journal | None = None,
        directory: MemberDirectory | None = None,
        transfer_token: bytes | None = None,
        payloads: PayloadCleaner | None = None,
    ) -> None:
        """Put a hub around a run, to which nobody else applies events."""
        self.run = run
        self.payloads = payloads
        self.directory = directory or MemberDirectory()
        self.executor = EffectExecutor(
            recorder=recorder,
            directory=self.directory,
            traces=HubTraces(run.status(clock.now()).run_id),
            payloads=payloads,
        )
        self.counters = self.executor.counters
        self.commits = Commits(journal, self.executor.carry_out, on_commit=self.counters.committed)
        self.metrics_address = ""
        self.is_hurried = False
        self.event_count = 0
        self.max_apply_s = 0.0
        # About what a replay of the records since the snapshot takes, in CPU seconds.
        self.replay_s = 0.0
        # CPU seconds of the thread where a chain of events began of which each goes on; None: none.
        self._chain_s: float | None = None
        self._together: list[tuple[Event, asyncio.Future[Any]]] = []
        self._data_sets = data_sets
        self._sources = sources
        self._path_of = recorder.saved_path
        self._clock = clock
        self._keeps_records = journal is not None
        self._transfer_token = transfer_token or SessionTokens.generate()
        self._deadline = DeadlineTimer(lambda: run.next_deadline, clock)
        self._broke = asyncio.Event()

    @property
    def is_broken(self) -> bool:
        return self._broke.is_set()

    def now(self) -> datetime:
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
            await self.commits.passed()

    async def take_with_others(self, event: Event) -> Any:
        """Let something happen, as `take`, decided together with what else came meanwhile."""
        if not self._together:
            asyncio.get_running_loop().call_soon(self._decide_together)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._together.append((event, answer))
        try:
            return await answer
        finally:
            await self.commits.passed()

    def _decide_together(self) -> None:
        together, self._together = self._together, []
        is_open, now = False, self.now()
        for left, (event, answer) in zip(range(len(together) - 1, -1, -1), together, strict=True):
            try:
                decided = self.apply(event, goes_on=left > 0, now=now)
            except Exception as error:  # noqa: BLE001 - raised where it was asked for
                if not answer.done():
                    answer.set_exception(error)
                continue
            is_open = left > 0
            if not answer.done():
                answer.set_result(decided)
        if is_open and not self.is_broken:
            # What comes of those before one that was refused.
            self.apply(Ticked())

    async def when_safe(self, answer: Told) -> Told:
        """Return what a reader asked for, once all that it may tell of is safe."""
        await self.commits.passed()
        return answer

    def apply(
        self,
        event: Event,
        *,
        received: bytes | None = None,
        goes_on: bool = False,
        now: datetime | None = None,
    ) -> Any:
        """Decide what comes of an event; it is carried out when the journal holds it.

        Args:
            event: What happens.
            received: The serialized message that a RolloutArrived came in.
            goes_on: Whether the next event comes at once, as `Run.apply`.
            now: When; None: at this moment.

        Returns:
            The answer that the event's docstring names; it is safe after `commits.passed`.

        Raises:
            AstraflowError: As the event's docstring says; nothing has changed then. NOT_READY when
                the hub is broken, or this event breaks it.
        """
        if self.is_broken:
            raise _is_ending()
        now = self._clock.now() if now is None else now
        if self._chain_s is None:
            self._chain_s = time.thread_time()
        kept = without_secrets(event)
        record = b""
        if self._keeps_records:
            record = record_bytes(kept, now, received=received, goes_on=goes_on)
        try:
            outcome = self.run.apply(event, now, goes_on=goes_on)
        except AstraflowError:
            self._chain_s = None
            raise
        except Exception as error:
            # The journal is true, and the run is not: after other events it would not replay.
            log.exception("the run failed to decide", event_kind=type(event).__name__)
            self._broke.set()
            raise _is_ending() from error
        if self._keeps_records:
            record = with_decision(record, outcome.digest)
        self.event_count += 1
        if isinstance(event, RaasJoined | TrainerRegistered):
            # Now, not once it is safe: who was replaced does not speak for the newer one meanwhile.
            for effect in outcome.effects:
                if isinstance(effect, CloseSession) and effect.is_fenced:
                    self.directory.see(effect, now)
        self.commits.put(
            Decided(
                event=kept,
                time=now,
                answer=outcome.answer,
                effects=outcome.effects,
                record=record,
            )
        )
        if not goes_on:
            took_s = time.thread_time() - self._chain_s
            self._chain_s = None
            self.replay_s += took_s
            self.max_apply_s = max(self.max_apply_s, took_s)
            self._deadline.refresh()
        return outcome.answer

    async def read_prompts(self) -> None:
        """Draw prompts as the run asks for them, for ever."""
        while True:
            for request in await self.executor.prompt_requests.take():
                async for event in read_prompts(request, self._sources, self._data_sets):
                    self.apply(event)
                    # Rows of gigabytes do not pile up before the journal.
                    await self.commits.passed()

    async def tick(self) -> None:
        """Tell the run when a deadline of it has passed, for ever."""
        while True:
            if await self._deadline.passed():
                self.apply(Ticked())

    async def wait_broken(self) -> None:
        """Wait until the run has failed to decide, for ever while it does not.

        Raises:
            AstraflowError: INTERNAL, retryable: a hub that is started again goes on.
        """
        await self._broke.wait()
        raise AstraflowError(
            Reason.INTERNAL,
            "the run failed to decide through a defect, which the log of the hub has; the hub goes "
            "on where its journal ends when it is started again: nothing that was acknowledged is "
            "lost",
            retryable=True,
        )

    async def wait_over(self) -> None:
        """Wait until the run is over and its members are gone.

        Others have their grace to leave. A trainer that writes its last checkpoint says so only
        then, and the run goes on from there when it is resumed: for it the hub stays longer.
        """
        await self.executor.over.wait()
        change = self.executor.watches.change
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_CHECKPOINT_S):
                while self.run.has_trainers and not self.is_hurried:
                    await change.passed(change.revision)

    async def join_pool(self, request: JoinPool, grant: Grant) -> PoolMembership:
        _must_be_short(request)
        secrets, resumes = self._secrets(grant), self._resumed(request.resume)
        event = RaasJoined(request=request, secrets=secrets, resumes=resumes)
        membership: PoolMembership = await self.take(event)
        log.info("RaaS joined", member=membership.session.member_id, name=request.name)
        return membership

    async def register_trainer(self, request: RegisterTrainer, grant: Grant) -> TrainerRegistration:
        """Admit a trainer, by what its token grants.

        Raises:
            AstraflowError: CONTRACT_UNSUPPORTED also for one that cannot read payloads.
        """
        _must_be_short(request)
        if self.payloads and Capability.PAYLOADS not in request.contract.capabilities:
            raise AstraflowError(
                Reason.CONTRACT_UNSUPPORTED,
                "the run has a payload store (rollouts.payloads), and this trainer has no "
                "capability payloads; update it, or take the store out of the recipe",
            )
        secrets, resumes = self._secrets(grant), self._resumed(request.resume)
        event = TrainerRegistered(request=request, secrets=secrets, resumes=resumes)
        registration: TrainerRegistration = await self.take(event)
        log.info("trainer joined", member=registration.session.member_id, name=request.name)
        return registration

    async def publish(self, member_id: MemberId, info: VersionInfo) -> int:
        """Enter a version of a trainer; return what its next one must be numbered.

        Raises:
            AstraflowError: As VersionPublished says; INVALID_FIELD also for a new one that nobody
                could pull, and for weights of a version that was not before it.
        """
        if not info.patches and info.version == self.run.next_version(info.policy_id):
            raise invalid("patches", f"there is none, so that nobody could pull {info.version}")
        if info.restored_from is not None and not 0 <= info.restored_from < info.version:
            raise invalid("restored_from", f"{info.restored_from} is not before {info.version}")
        next_version: int = await self.take(VersionPublished(member_id=member_id, info=info))
        return next_version

    async def open_batches(self, event: StreamBatches) -> Outbox[BatchItem]:
        """Return what the stream of one rank has to send, from what is not settled on."""
        await self.take(event)
        return self.executor.outboxes.batches(event.member_id, event.rank)

    async def explain(self, member_id: MemberId) -> tuple[WaitReason, ...]:
        """Return what a trainer waits for, link by link; empty: nothing."""
        return await self.when_safe(
            self.run.explain(self.directory.policies[member_id], self.now())
        )

    async def watch_versions(
        self, policy_id: PolicyId, after: int | None, caller: MemberId
    ) -> AsyncIterator[VersionInfo]:
        """Yield the versions after one, and then each as it is announced, to one member.

        Raises:
            AstraflowError: POLICY_UNKNOWN.
        """
        known = self.run.listed_versions(policy_id)
        async for info in self.executor.watches.versions(policy_id, known, after=after):
            yield await self.when_safe(self.run.version_for(info, caller))

    async def watch_eval(self, eval_run_id: EvalRunId) -> AsyncIterator[EvalRun]:
        """Yield an evaluation at each change until it is final."""
        async for eval_run in self.executor.watches.eval_run(eval_run_id, self.run.eval_run):
            yield await self.when_safe(eval_run)

    async def watch_status(self, interval: timedelta) -> AsyncIterator[RunStatus]:
        """Yield the run after changes until it is final."""
        async for status in self.executor.watches.status(self.status, interval=interval):
            yield await self.when_safe(status)

    async def save(self, checkpoint_id: str, *, within_s: float | None) -> tuple[SavedRun, Path]:
        """Have every trainer save; return what they did, and the file that says so.

        Raises:
            AstraflowError: INVALID_FIELD, RUN_ENDED; NOT_READY when a trainer is missing, or has
                not saved in time.
        """
        await self.take(SaveRequested(checkpoint_id=checkpoint_id))
        look = partial(self.run.saved, checkpoint_id)
        try:
            async with asyncio.timeout(within_s):
                saved = await self.executor.watches.saved(look, every_s=_SAVE_POLL_S)
                return await self.when_safe(saved), self._path_of(checkpoint_id)
        except TimeoutError as error:
            raise AstraflowError(
                Reason.NOT_READY,
                f"not every trainer has saved {checkpoint_id} within {within_s:.1f} s: a step may "
                "take longer, or none begins; ask again with the same id to go on waiting",
                retryable=True,
            ) from error

    def status(self) -> RunStatus:
        return self.run.status(self.now())

    def scale_advice(self, window: timedelta | None = None) -> ScaleAdvice:
        """Return how large the pool should be; window None: that of the recipe."""
        return self.run.scale_advice(self.now(), window)

    async def revoke(self, token_id: str) -> list[MemberId]:
        """Take a token of a role back, and end the sessions that it opened; return whose.

        It is done to its end though the caller gives up waiting.
        """
        return await to_the_end(self._revoke(token_id))

    async def _revoke(self, token_id: str) -> list[MemberId]:
        await self.take(TokenRevoked(token_id=token_id))
        # From here on it opens nothing; what it opened while that was written has to be there.
        await self.commits.passed()
        ended = self._end_sessions_of(token_id)
        await self.commits.passed()
        log.info("a token was revoked", token_id=token_id, members=ended)
        return ended

    def end_revoked(self) -> None:
        """End what revoked tokens have opened: a hub may have died before it came to that."""
        for token_id in sorted(self.directory.sessions.revoked):
            self._end_sessions_of(token_id)

    def _end_sessions_of(self, token_id: str) -> list[MemberId]:
        ended = self.directory.sessions.opened_with(token_id)
        for member_id in ended:
            self.apply(MemberLeft(member_id=member_id, message="its token was revoked"))
        return ended

    def _secrets(self, grant: Grant) -> SessionSecrets:
        return SessionSecrets(
            token=SessionTokens.generate(),
            transfer_token=self._transfer_token,
            token_id=grant.token_id,
            is_relay=grant.is_relay,
        )

    def _resumed(self, resume: SessionResume | None) -> MemberId | None:
        return None if resume is None else self.directory.sessions.owner_of(resume.resume_token)
