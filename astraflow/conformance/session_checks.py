"""What every member does, whatever its role: its session, and deadlines of its calls."""

from itertools import pairwise
from typing import Any, Final

from astraflow.conformance.checks import Broken, Check
from astraflow.conformance.faults import EndSession
from astraflow.conformance.stage import Law, Stage
from astraflow.conformance.tap import Call, Tap

KEPT_ALIVE: Final = Check(
    name="session.kept_alive",
    expected="sends KeepAlive every Session.keep_alive_interval, and never lets the ttl pass",
    source="common/v1/session.proto, Session.keep_alive_interval",
)
RESUMED: Final = Check(
    name="session.resumed",
    expected="joins again with SessionResume and the same incarnation once a call was answered"
    " with SESSION_ENDED, and names what it still holds",
    source="common/v1/failure.proto, REASON_SESSION_ENDED; common/v1/session.proto, SessionResume",
)
DEADLINES: Final = Check(
    name="calls.deadlines",
    expected="gives every unary call to the run a deadline",
    source="common/v1/session.proto, Session",
)
DRAINED: Final = Check(
    name="member.drained",
    expected="finishes or hands back what it holds after DIRECTIVE_KIND_DRAIN, calls EndSession,"
    " and exits with code 0",
    source="common/v1/session.proto, DIRECTIVE_KIND_DRAIN",
)


def deadlines(tap: Tap) -> str | None:
    """Return a unary call without a deadline."""
    for call in tap.calls:
        is_to_run = call.method.is_unary and call.method.service != "TransferService"
        if is_to_run and not call.has_deadline:
            return f"{call.name} came without a deadline"
    return None


def pulse(join: str) -> Law:
    """Return the law that a session which `join` opened is kept alive."""

    def law(tap: Tap) -> str | None:
        opened = next((call for call in tap.of(join) if call.responses), None)
        if opened is None:
            return None
        session = opened.responses[0].session
        ttl_s, interval_s = (
            span.ToMilliseconds() / 1000 for span in (session.ttl, session.keep_alive_interval)
        )
        times = [opened.began_s, *(call.began_s for call in tap.of("KeepAlive"))]
        for before, after in pairwise(times):
            if after - before > ttl_s:
                return f"{after - before:.1f} s passed between two, asked for are {interval_s:g} s"
        return None

    return law


async def check_pulse(stage: Stage) -> None:
    """Wait for the second KeepAlive."""
    with stage.check(KEPT_ALIVE.name):
        await stage.until(
            lambda: True if len(stage.tap.of("KeepAlive")) > 1 else None, "two KeepAlive calls"
        )


async def check_resume(stage: Stage, join: str) -> None:
    """End the session, and look at how the member comes back."""
    token = _session(stage, join).token
    fault = EndSession(token, join=join)
    with stage.check(RESUMED.name):
        stage.tap.faults.append(fault)
        again = await stage.until(lambda: fault.rejoined, f"another {join} after SESSION_ENDED")
        stage.tap.faults.remove(fault)
        _require_resume(again, token)


def _session(stage: Stage, join: str) -> Any:
    opened = stage.tap.answered(join)
    if opened is None:
        raise Broken(f"no {join} was answered")
    return opened.responses[0].session


def _require_resume(again: Call, token: bytes) -> None:
    resume = again.requests[0].resume
    if resume.resume_token != token:
        raise Broken(f"{again.name} came without the token of the session that ended")
    if resume.incarnation < 1:
        raise Broken(f"SessionResume.incarnation is {resume.incarnation}; it counts from 1")


async def check_drain(stage: Stage, join: str) -> None:
    """Drain the member, and wait until it has left."""
    member_id = _session(stage, join).member_id
    with stage.check(DRAINED.name):
        control = await stage.run.control()
        await control.drain_member(member_id, grace_s=None)
        await stage.until(
            lambda: next((c for c in stage.tap.of("EndSession") if c.code is not None), None),
            "EndSession after DIRECTIVE_KIND_DRAIN",
        )
        code = await stage.left()
        if code:
            raise Broken(f"its exit code is {code}: {stage.said()}")
