"""What every member does, whatever its role: its session, and deadlines of its calls."""

from itertools import pairwise
from time import monotonic
from typing import Any, Final

import grpc

from astraflow.conformance.checks import Broken, ContractCheck
from astraflow.conformance.faults import EndSession
from astraflow.conformance.stage import Law, Stage, first_of
from astraflow.conformance.tap import Tap
from astraflow.core.errors import Reason

KEPT_ALIVE: Final = ContractCheck(
    name="session.kept_alive",
    expected="sends KeepAlive every Session.keep_alive_interval, and never lets the ttl pass",
    source="common/v1/session.proto, Session.keep_alive_interval",
)
RESUMED: Final = ContractCheck(
    name="session.resumed",
    expected="joins again once a call was answered with SESSION_ENDED; always with SessionResume"
    " and the same incarnation",
    source="common/v1/failure.proto, REASON_SESSION_ENDED; common/v1/session.proto, SessionResume",
)
DEADLINES: Final = ContractCheck(
    name="calls.deadlines",
    expected="gives every unary call to the run a deadline",
    source="common/v1/session.proto, Session",
)
VALID: Final = ContractCheck(
    name="calls.valid",
    expected="sends messages that parse, with fields in their ranges, to methods of the contract:"
    " no call is answered with INVALID_ARGUMENT or UNIMPLEMENTED",
    source="common/v1/failure.proto, REASON_INVALID_FIELD",
)
SECRETS: Final = ContractCheck(
    name="calls.secrets",
    expected="carries Session.token as metadata astraflow-session-bin on every call to the run"
    " after the one that joins, and Session.transfer_token as astraflow-transfer-bin to a source",
    source="common/v1/session.proto, Session; docs/clients.md, Every member",
)
DRAINED: Final = ContractCheck(
    name="member.drained",
    expected="finishes or hands back what it holds after DIRECTIVE_KIND_DRAIN, calls EndSession,"
    " and exits with code 0",
    source="common/v1/session.proto, DIRECTIVE_KIND_DRAIN",
)


EVERY_MEMBERS: Final = (RESUMED, KEPT_ALIVE, SECRETS, VALID, DEADLINES, DRAINED)


def laws_of_sessions(join: str) -> dict[str, Law]:
    """Return what holds all the time for every member, once `join` let it in."""
    return {
        RESUMED.name: _resumes(join),
        SECRETS.name: _secrets,
        VALID.name: _valid,
        KEPT_ALIVE.name: _keep_alives(join),
        DEADLINES.name: _deadlines,
    }


def _deadlines(tap: Tap) -> str | None:
    """Return a unary call without a deadline."""
    for call in tap.calls:
        streams = call.method.client_streaming or call.method.server_streaming
        if not streams and call.service != "TransferService" and call.timeout_s is None:
            return f"{call.name} came without a deadline"
    return None


def _valid(tap: Tap) -> str | None:
    """Return a call that says what nobody can make sense of."""
    for path in tap.strange_paths:
        return f"{path} was called, which the contract does not have for members"
    for call in tap.calls:
        if call.code is grpc.StatusCode.INVALID_ARGUMENT:
            return f"{call.name} was refused: {call.text} [{call.reason}]"
    return None


def _secrets(tap: Tap) -> str | None:
    """Return a call without the secret of its session."""
    for call in tap.calls:
        if call.reason in (Reason.TOKEN_INVALID, Reason.ROLE_NOT_ALLOWED):
            return f"{call.name} was refused: {call.text} [{call.reason}]"
    return None


def _keep_alives(join: str) -> Law:
    def law(tap: Tap) -> str | None:
        opened = first_of(call for call in tap.of(join) if call.responses)
        if opened is None:
            return None
        session = opened.responses[0].session
        ttl_s, interval_s = (
            span.ToMilliseconds() / 1000 for span in (session.ttl, session.keep_alive_interval)
        )
        times = [opened.began_s, *(call.began_s for call in tap.of("KeepAlive"))]
        if not tap.of("EndSession"):
            times.append(monotonic())
        for before, after in pairwise(times):
            if after - before > ttl_s:
                return f"{after - before:.1f} s passed without one, asked for are {interval_s:g} s"
        return None

    return law


def _resumes(join: str) -> Law:
    """Return the law that who joins again says whom it was."""

    def law(tap: Tap) -> str | None:
        tokens: list[bytes] = []
        incarnation = 1
        for call in tap.of(join):
            resume = call.requests[0].resume
            if not tokens:
                incarnation = max(resume.incarnation, 1)
            elif resume.resume_token not in tokens:
                return f"{join} came again without the token of the session before"
            elif resume.incarnation != incarnation:
                return (
                    f"SessionResume.incarnation is {resume.incarnation}; the same start of a"
                    f" process keeps {incarnation}"
                )
            tokens += [response.session.token for response in call.responses]
        return None

    return law


async def check_keep_alive(stage: Stage) -> None:
    """Wait for the second KeepAlive."""
    with stage.check(KEPT_ALIVE.name):
        await stage.until(
            lambda: True if len(stage.tap.of("KeepAlive")) > 1 else None, "two KeepAlive calls"
        )


async def check_resume(stage: Stage, join: str) -> None:
    """End the session, and look at how the member comes back."""
    fault = EndSession(_session(stage, join).token, join=join)
    with stage.check(RESUMED.name):
        stage.tap.faults.append(fault)
        again = await stage.until(lambda: fault.rejoined, f"another {join} after SESSION_ENDED")
        await stage.until(lambda: again.responses or None, f"a {join} that can be answered")
        stage.tap.faults.remove(fault)


def _session(stage: Stage, join: str) -> Any:
    opened = stage.tap.answered(join)
    if opened is None:
        raise Broken(f"no {join} was answered")
    return opened.responses[0].session


async def check_drain(stage: Stage, join: str) -> None:
    """Drain the member, and wait until it has left."""
    member_id = _session(stage, join).member_id
    with stage.check(DRAINED.name):
        control = await stage.run.control()
        await control.drain_member(member_id, grace_s=None)
        await stage.until(
            lambda: first_of(c for c in stage.tap.of("EndSession") if c.code is not None),
            "EndSession after DIRECTIVE_KIND_DRAIN",
        )
        code = await stage.left()
        if code:
            raise Broken(f"its exit code is {code}: {stage.last_lines()}")
