"""The whole hub as a pure state machine: `apply(event, now)` answers and says what to do.

No I/O, no clock, no chance: the same events at the same times give the same run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from astraflow.core.effects import Effect
from astraflow.core.evals import EvalRun, EvalSuite
from astraflow.core.events import Event
from astraflow.core.ids import EvalRunId, PolicyId
from astraflow.core.settings import RunSettings
from astraflow.core.status import DeadLetter, LedgerAccount, RolloutRecord, RunStatus, WaitReason
from astraflow.core.versions import Source, VersionInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of an event.

    Attributes:
        answer: To the caller; its type is named in the event's docstring.
        effects: To be carried out in order.
    """

    answer: Any
    effects: tuple[Effect, ...]


class Run:
    """One run, from its first member to its last."""

    def __init__(self, settings: RunSettings, *, start_time: datetime) -> None:
        raise NotImplementedError

    def apply(self, event: Event, now: datetime) -> Outcome:
        """Decide what comes of an event.

        Raises:
            AstraflowError: As the event's docstring says; nothing has changed then.
        """
        raise NotImplementedError

    @property
    def next_deadline(self) -> datetime | None:
        """When to apply Ticked; None: nothing is due. Read it again after every event."""
        raise NotImplementedError

    def status(self, now: datetime) -> RunStatus:
        """Return the whole state."""
        raise NotImplementedError

    def accounts(self) -> tuple[LedgerAccount, ...]:
        """Return the books."""
        raise NotImplementedError

    def explain(self, policy_id: PolicyId, now: datetime) -> tuple[WaitReason, ...]:
        """Return what a policy's trainer waits for, link by link; empty: nothing.

        Raises:
            AstraflowError: POLICY_UNKNOWN.
        """
        raise NotImplementedError

    def versions(self, policy_id: PolicyId) -> tuple[VersionInfo, ...]:
        """Return what can be pulled, oldest first, with sources.

        Raises:
            AstraflowError: POLICY_UNKNOWN.
        """
        raise NotImplementedError

    def sources(self, policy_id: PolicyId, version: int) -> tuple[Source, ...]:
        """Return who has a version.

        Raises:
            AstraflowError: POLICY_UNKNOWN, VERSION_UNKNOWN, VERSION_EVICTED.
        """
        raise NotImplementedError

    def suites(self) -> tuple[EvalSuite, ...]:
        """Return the evaluations that can be asked for."""
        raise NotImplementedError

    def eval_run(self, eval_run_id: EvalRunId) -> EvalRun:
        """Return where an evaluation stands.

        Raises:
            AstraflowError: EVAL_UNKNOWN.
        """
        raise NotImplementedError

    def rollouts(self) -> Sequence[RolloutRecord]:
        """Return the rollouts that can be listed, newest first."""
        raise NotImplementedError

    def dead_letters(self) -> Sequence[DeadLetter]:
        """Return the prompts given up, newest first."""
        raise NotImplementedError
