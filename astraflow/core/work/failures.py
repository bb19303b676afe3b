"""Failures: what goes wrong in rollouts, by cause, how much of it a run bears, prompts given up."""

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime

from astraflow.core.errors import Failure, Reason
from astraflow.core.ids import PromptId
from astraflow.core.status import DeadLetter, FailureCause, FailureReport

RECENT_COUNT = 128

"""Training rollouts that a share is taken of."""

LEAST_COUNT = 32

"""Before so many have finished no share is judged."""

# Nobody's code is at fault when members come and go: issued again, and told elsewhere.
_OF_THE_POOL = frozenset(
    {
        Reason.BUFFER_FULL,
        Reason.CAPACITY_EXCEEDED,
        Reason.MEMBER_DRAINING,
        Reason.MEMBER_LOST,
        Reason.NOT_READY,
        Reason.RUN_ENDED,
        Reason.SESSION_ENDED,
        Reason.SESSION_FENCED,
        Reason.STALE,
        Reason.TASK_CANCELLED,
        Reason.TASK_EXPIRED,
        Reason.TASK_UNKNOWN,
        Reason.VERSION_EVICTED,
        Reason.VERSION_NOT_SERVED,
    }
)

# Told, and no failure of whoever wrote the recipe.
_NOT_OF_THE_RECIPE = frozenset({Reason.ENGINE_FAILED, Reason.POLICY_FAULT})

_KEPT_CAUSES = 64

_SHOWN_CAUSES = 16

_NUMBER = re.compile(r"\d+")


class FailureLog:
    """Counts failures by cause, and the share of training rollouts that fail.

    Example:
        Of 128 rollouts that finished last 32 failed: the share is 0.25. A node that is killed
        takes 16 with it: they count nowhere, and nor does a program of the policy that hangs.
    """

    def __init__(self) -> None:
        self._causes: dict[str, FailureCause] = {}
        self._recent = deque[bool](maxlen=RECENT_COUNT)
        self._finished_count = self._failed_count = 0

    def note(self, failure: Failure, now: datetime) -> None:
        if failure.reason in _OF_THE_POOL:
            return
        failure = failure.shortened()
        name = failure.cause or f"{failure.reason}: {_NUMBER.sub('#', failure.message)[:120]}"
        known = self._causes.get(name)
        if known is None:
            if len(self._causes) >= _KEPT_CAUSES:
                # The rarest one goes, the oldest of equal ones.
                del self._causes[min(self._causes, key=lambda each: self._causes[each].count)]
            self._causes[name] = FailureCause(
                cause=name, count=1, last=failure, first_time=now, last_time=now
            )
        else:
            last = failure if failure.traceback or not known.last.traceback else known.last
            count = known.count + 1
            self._causes[name] = replace(known, count=count, last=last, last_time=now)

    def finish(self, failure: Failure | None, now: datetime) -> None:
        """Count a training rollout that came to an end; None: a good one."""
        if failure is not None:
            self.note(failure, now)
            if failure.reason in _OF_THE_POOL or failure.reason is Reason.ENGINE_FAILED:
                return
        is_failed = failure is not None and failure.reason not in _NOT_OF_THE_RECIPE
        self._recent.append(is_failed)
        self._finished_count += 1
        self._failed_count += is_failed

    def begin_again(self) -> None:
        """Take shares of what finishes from now on."""
        self._recent.clear()

    def report(self) -> FailureReport:
        """Return the counts, and the causes, most frequent first."""
        found = sorted(self._causes.values(), key=lambda cause: -cause.count)
        return FailureReport(
            finished_count=self._finished_count,
            failed_count=self._failed_count,
            recent_count=len(self._recent),
            recent_failed_count=sum(self._recent),
            causes=tuple(found[:_SHOWN_CAUSES]),
        )

    def traceback_of(self, cause: str) -> str:
        """Return the newest traceback of a cause; empty: none came."""
        known = self._causes.get(cause)
        return "" if known is None else known.last.traceback

    def unbearable(self, max_share: float) -> Failure | None:
        """Return why the run cannot go on where more than a share of it fails; None: it can."""
        count, failed = len(self._recent), sum(self._recent)
        if count < LEAST_COUNT or failed <= max_share * count:
            return None
        causes = self._causes.values()
        of_recipe = [each for each in causes if each.last.reason not in _NOT_OF_THE_RECIPE]
        # Those of the recipe may be forgotten, each rarer than others that came since.
        worst = max(of_recipe or causes, key=lambda cause: cause.count)
        return Failure(
            reason=worst.last.reason,
            message=f"{failed} of the last {count} training rollouts failed, more than "
            f"rollouts.max_failed_share ({max_share:g}) allows; the most frequent cause, "
            f"{worst.cause}, was seen {worst.count} times: {worst.last.message}",
            metadata=worst.last.metadata,
            cause=worst.cause,
            traceback=worst.last.traceback,
        )


_KEPT_LETTERS = 1000


class DeadLetters:
    """The last prompts that were given up, one letter each.

    Attributes:
        count: All that ever were.
    """

    def __init__(self) -> None:
        self.count = 0
        self._letters: dict[PromptId, DeadLetter] = {}

    def __len__(self) -> int:
        return len(self._letters)

    def __iter__(self) -> Iterator[DeadLetter]:
        """Oldest first."""
        return iter(self._letters.values())

    def __contains__(self, prompt_id: PromptId) -> bool:
        return prompt_id in self._letters

    def add(self, letter: DeadLetter) -> None:
        self.count += 1
        self._letters.pop(letter.prompt.prompt_id, None)
        self._letters[letter.prompt.prompt_id] = letter
        while len(self._letters) > _KEPT_LETTERS:
            del self._letters[next(iter(self._letters))]

    def take(self, prompt_id: PromptId) -> DeadLetter | None:
        """Take a letter out, so that its prompt is issued again."""
        return self._letters.pop(prompt_id, None)
