"""What fails on a node beside the score of a rollout: told once per cause, and to the run."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog

from astraflow.core.errors import Failure, Reason
from astraflow.telemetry.tracebacks import bounded, place_of

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class FailureNotes:
    """Logs each cause once, with its traceback, and keeps what is sent of the others short.

    The 1st, 2nd, 4th, 8th ... failure of a cause carries its traceback: the run may have refused
    the rollout that carried the one before. A million equal failures send it 20 times.
    """

    def __init__(self) -> None:
        self._counts = Counter[str]()

    def tell(self, failure: Failure) -> Failure:
        """Return a failure as it is to be sent."""
        name = failure.cause or failure.reason
        self._counts[name] += 1
        count = self._counts[name]
        is_power_of_two = not count & (count - 1)
        if is_power_of_two and failure.reason is not Reason.TASK_CANCELLED:
            _log(failure, count)
        if is_power_of_two or not failure.traceback:
            return failure
        return replace(failure, traceback="")


def tell_strays(
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


def _log(failure: Failure, count: int) -> None:
    is_first = count == 1
    at = {"cause": failure.cause} if failure.cause else {}
    if failure.reason is Reason.POLICY_FAULT:
        if is_first:
            log.info("the policy broke a rollout", why=failure.message, **at)
    elif not is_first:
        log.warning("seen again", reason=failure.reason, count=count, **at)
    elif failure.traceback:
        # The name under which logs show tracebacks.
        at["exception"] = failure.traceback
        log.error("failed", reason=failure.reason, why=failure.message, **at)
    else:
        log.error("failed", reason=failure.reason, why=failure.message, **at)
