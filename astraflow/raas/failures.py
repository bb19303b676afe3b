"""What fails on a node beside the score of a rollout: logged once per cause, sent to the run."""

import asyncio
import faulthandler
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog

from astraflow.core.errors import BLOCKED_EXIT, Failure, Reason
from astraflow.telemetry.tracebacks import CodePlace, bounded, place_of, place_of_stack

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class NodeFailureLog:
    """Logs each cause once, with its traceback, and keeps what is sent of the others short.

    The 1st, 2nd, 4th, 8th ... failure of a cause carries its traceback: the run may have refused
    the rollout that carried the one before. A million equal failures send it 20 times.
    """

    def __init__(self) -> None:
        self._counts = Counter[str]()

    def record(self, failure: Failure) -> Failure:
        """Return a failure as it is to be sent."""
        name = failure.cause or failure.reason
        self._counts[name] += 1
        count = self._counts[name]
        is_power_of_two = not count & (count - 1)
        if is_power_of_two and failure.reason is not Reason.TASK_CANCELLED:
            _log_failure(failure, count)
        if is_power_of_two or not failure.traceback:
            return failure
        return replace(failure, traceback="")


def report_unawaited(
    loop: asyncio.AbstractEventLoop, report: Callable[[Failure], None]
) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Report what tasks raise that code of a user began and nobody awaits.

    Returns:
        The handler, as it was set.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        place = None if error is None else place_of(error)
        if place is None or not place.is_users:
            loop.default_exception_handler(context)
            return
        failure = Failure(
            reason=Reason.ENVIRONMENT_FAILED,
            message=f"a task that nobody awaits raised {type(error).__name__}: "
            f"{bounded(str(error))}; await it, or begin it in an asyncio.TaskGroup",
            cause=place.cause,
            traceback=place.traceback,
        )
        report(failure)

    loop.set_exception_handler(handle)
    return handle


def _log_failure(failure: Failure, count: int) -> None:
    is_first = count == 1
    at = {"cause": failure.cause} if failure.cause else {}
    if failure.reason is Reason.POLICY_FAULT:
        if is_first:
            log.info("the policy broke a rollout", why=failure.message, **at)
    elif not is_first:
        log.warning("seen again", reason=failure.reason, count=count, **at)
    else:
        if failure.traceback:
            # The name under which logs show tracebacks.
            at["exception"] = failure.traceback
        log.error("failed", reason=failure.reason, why=failure.message, **at)


_BEAT_S = 0.5

# A line that holds the interpreter's lock, such as an endless regular expression, lets no other
# thread run: what C prints after so many times `blocked_s` names it, in the node's log alone.
_LOCKED_TIMES = 2.5


class LoopWatch:
    """A thread that looks whether an event loop goes on.

    A loop that stands still in code of a user's own is told once per line. One that does so for
    too long ends the process: nothing else can interrupt it.
    """

    def __init__(
        self,
        report: Callable[[Failure], None],
        *,
        ends_after_s: float,
        blocked_s: float,
    ) -> None:
        """Watch nothing before `with`.

        Args:
            report: Called in the thread.
            ends_after_s: Of standing still in code of a user's own; then the process exits.
            blocked_s: After which the loop counts as blocked.
        """
        self._report = report
        self._ends_after_s = max(ends_after_s, 2 * blocked_s)
        self._blocked_s = blocked_s
        self._closing = threading.Event()
        self._beaten_s = self._armed_s = 0.0
        self._beating: asyncio.TimerHandle | None = None
        self._reported_cause = ""
        self._loop_thread = 0
        self._has_stderr = False

    def start(self) -> None:
        """Begin, on the loop that is watched."""
        self._loop_thread = threading.get_ident()
        self._has_stderr = sys.stderr is sys.__stderr__
        self._beat()
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()

    def close(self) -> None:
        """End, on the loop."""
        self._closing.set()
        if self._beating is not None:
            self._beating.cancel()
        if self._has_stderr:
            faulthandler.cancel_dump_traceback_later()

    def _beat(self) -> None:
        self._beaten_s = time.monotonic()
        if self._has_stderr and self._beaten_s - self._armed_s >= self._blocked_s:
            self._armed_s = self._beaten_s
            faulthandler.dump_traceback_later(_LOCKED_TIMES * self._blocked_s)
        self._beating = asyncio.get_running_loop().call_later(_BEAT_S, self._beat)

    def _watch(self) -> None:
        while not self._closing.wait(_BEAT_S):
            still_s = time.monotonic() - self._beaten_s
            if still_s < self._blocked_s:
                continue
            place = self._place(still_s)
            if place is None:
                continue
            if place.cause != self._reported_cause:
                self._reported_cause = place.cause
                self._report_blocked(place, still_s)
            if still_s >= self._ends_after_s and place.is_users:
                log.error(
                    "the node ends: nothing else stops this line",
                    cause=place.cause,
                    exit=BLOCKED_EXIT,
                )
                os._exit(BLOCKED_EXIT)

    def _place(self, still_s: float) -> CodePlace | None:
        # The documented way, in spite of its name.
        frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        if frame is None:
            return None
        said = (
            f"the event loop has stood still for {still_s:.0f} s in this line, and every rollout "
            "of the node with it; await instead of waiting, and hand long work to asyncio.to_thread"
        )
        return place_of_stack(frame, name="Blocked", said=said)

    def _report_blocked(self, place: CodePlace, still_s: float) -> None:
        if not place.is_users:
            log.warning("the event loop stands still", s=round(still_s, 1), cause=place.cause)
            return
        log.error("code blocks the event loop", cause=place.cause, exception=place.traceback)
        failure = Failure(
            reason=Reason.ENVIRONMENT_FAILED,
            message=f"code of a workflow or scorer has blocked the node for {still_s:.0f} s",
            cause=place.cause,
            traceback=place.traceback,
        )
        try:
            self._report(failure)
        except Exception as error:  # noqa: BLE001 - the watch goes on whatever a report comes to
            log.warning("the run did not hear of it", why=str(error))
