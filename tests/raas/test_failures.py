import asyncio
import gc

import structlog
from structlog.testing import capture_logs

from astraflow.core.errors import Failure, Reason
from astraflow.raas.failures import NodeFailureLog, report_unawaited

BUG = Failure(
    reason=Reason.SCORER_FAILED, message="odd", cause="KeyError at mine.py:3", traceback="here"
)


def test_a_traceback_is_sent_at_every_doubling():
    notes = NodeFailureLog()
    with capture_logs() as logs:
        sent = [notes.record(BUG).traceback for _ in range(9)]
    assert sent == ["here", "here", "", "here", "", "", "", "here", ""]
    assert notes.record(BUG).cause == BUG.cause
    assert [line["log_level"] for line in logs] == ["error", "warning", "warning", "warning"]
    assert logs[0]["exception"] == "here"
    assert logs[-1]["count"] == 8


def test_each_cause_is_told():
    notes = NodeFailureLog()
    other = Failure(reason=Reason.MESSAGE_TOO_LARGE, message="too large")
    fault = Failure(reason=Reason.POLICY_FAULT, message="it hangs", cause="x", traceback="y")
    with capture_logs() as logs:
        for failure in (BUG, other, fault):
            assert notes.record(failure) == failure
    assert [line["log_level"] for line in logs] == ["error", "error", "info"]


async def test_what_nobody_awaits_is_reported_with_its_line():
    loop, reports = asyncio.get_running_loop(), []
    report_unawaited(loop, reports.append)

    async def forgotten():
        raise KeyError("unit")  # the line

    try:
        task = loop.create_task(forgotten())
        await asyncio.wait([task])
        del task
        gc.collect()
        assert [each.reason for each in reports] == [Reason.ENVIRONMENT_FAILED]
        assert "KeyError: 'unit'" in reports[0].message
        assert "# the line" in reports[0].traceback
        with structlog.testing.capture_logs():
            loop.call_exception_handler({"message": "of the loop itself"})
        assert len(reports) == 1
    finally:
        loop.set_exception_handler(None)
