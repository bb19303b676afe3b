"""The schedule of evaluations: what the recipe wants measured, and when."""

from datetime import datetime

from astraflow.core.evaluation import Evaluation
from astraflow.core.ids import PolicyId
from astraflow.core.state import State


class EvalSchedule:
    """Starts the evaluations of the recipe."""

    def __init__(self, state: State, evaluation: Evaluation) -> None:
        self._state = state
        self._evaluation = evaluation
        self._started: set[str] = set()
        self._is_last_started = False

    def note_version(self, policy_id: PolicyId, version: int, now: datetime) -> None:
        """Start what is due once this version exists."""
        for suite in self._state.settings.suites:
            policy_ids = suite.suite.policy_ids
            newest = self._state.newest_versions(policy_ids)
            if newest is None or policy_id not in policy_ids:
                continue
            if suite.at_start and suite.suite.suite not in self._started:
                self._started.add(suite.suite.suite)
                self._evaluation.start(suite, dict.fromkeys(policy_ids, 0), now)
            is_due = suite.every is not None and version > 0 and version % suite.every == 0
            if is_due and policy_id == policy_ids[0]:
                self._evaluation.start(suite, newest, now)

    def note_end(self, now: datetime) -> None:
        """Start what is due when training is over; once, and not what was measured already."""
        if self._is_last_started:
            return
        self._is_last_started = True
        if self._state.lifecycle.stop is not None:
            return
        for suite in self._state.settings.suites:
            newest = self._state.newest_versions(suite.suite.policy_ids)
            if not suite.at_end or newest is None or self._evaluation.was_measured(suite, newest):
                continue
            self._evaluation.start(suite, newest, now)
