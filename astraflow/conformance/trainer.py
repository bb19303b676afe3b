"""The script for a trainer: a real run serves it, and a node of ours trusts what it publishes."""

from dataclasses import replace
from typing import Any, Final

from astraflow.conformance.checks import Broken, Check
from astraflow.conformance.faults import CutResponse
from astraflow.conformance.pacing import BACKPRESSURE, Pacing, check_pace
from astraflow.conformance.session_checks import (
    EVERY_MEMBERS,
    check_drain,
    check_pulse,
    check_resume,
    laws_of_sessions,
)
from astraflow.conformance.stage import DIGITS, Law, Settled, Stage
from astraflow.conformance.tap import Call, Tap
from astraflow.conformance.weights import CHECKS as WEIGHT_CHECKS
from astraflow.conformance.weights import Source, check_source
from astraflow.core.errors import Reason
from astraflow.core.versions import VersionInfo
from astraflow.wire.versions import decode_version_info
from astraflow_proto.dataflow.v1 import trainer_service_pb2 as pb

JOIN: Final = "RegisterTrainer"
_FIRST: Final = 0
# The record grows with every batch, and is looked through at every message.
_TOKEN_S: Final = 0.005

CHECKS: Final = (
    Check(
        name="trainer.registered",
        expected="registers for the policy, with contract_version, groups_per_batch and where it"
        " serves weights",
        source="dataflow/v1/trainer_service.proto, RegisterTrainerRequest",
    ),
    Check(
        name="versions.first",
        expected="publishes RegisterTrainerResponse.next_version before it trains",
        source="dataflow/v1/trainer_service.proto, RegisterTrainerResponse.next_version",
    ),
    *WEIGHT_CHECKS,
    Check(
        name="versions.next",
        expected="publishes the newest version plus one, with one content per version",
        source="dataflow/v1/trainer_service.proto, PublishVersion",
    ),
    Check(
        name="batches.acked",
        expected="settles a batch that it was sent once all its parts came",
        source="dataflow/v1/trainer_service.proto, AckBatch",
    ),
    Check(
        name="acks.repeated",
        expected="repeats an ack whose answer was lost, with the same outcome",
        source="dataflow/v1/trainer_service.proto, AckBatch: idempotent for the same outcome",
    ),
    Check(
        name="batches.redelivered",
        expected="opens a stream again that was cut, takes the batch whole as it comes again, and"
        " settles it once",
        source="dataflow/v1/trainer_service.proto, StreamBatches",
    ),
    BACKPRESSURE,
    *EVERY_MEMBERS,
)


def laws() -> dict[str, Law]:
    """Return what must hold all the time."""
    return {
        "versions.first": _first_is_taken,
        "versions.next": _versions_are_next,
        "batches.acked": _settled_are_held,
        "acks.repeated": _outcome_stays,
        **laws_of_sessions(JOIN),
    }


async def play(stage: Stage) -> None:
    """Go through all checks, one after the other.

    Raises:
        Settled: One failed.
    """
    with stage.check("trainer.registered"):
        joined = await stage.joined(JOIN)
        _require_registration(joined)
    with stage.check("versions.first"):
        _require_first(await stage.call("PublishVersion", "a version"))
    source = _source(joined, stage.tap)
    if not await check_source(stage.checks, source, keep_laws=stage.require_peer):
        raise Settled
    with stage.check("batches.acked"):
        await stage.call("AckBatch", "an AckBatch after the parts of a batch")
    await check_pace(stage)
    await _check_lost_ack(stage)
    await _check_cut_stream(stage)
    await check_resume(stage, JOIN)
    with stage.check("versions.next"):
        await stage.until(lambda: _published(stage.tap, 1) or None, "the version after the first")
    await check_pulse(stage)
    await check_drain(stage, JOIN)


def _require_registration(call: Call) -> None:
    request = call.requests[0]
    if request.contract.contract_version < 1:
        raise Broken("contract.contract_version is not set; it is 1 or more")
    if not request.weight_endpoints:
        raise Broken("weight_endpoints is empty: nobody could pull its versions")


def _require_first(call: Call) -> None:
    version = call.requests[0].version.version
    if version != _FIRST:
        raise Broken(f"the first version is {version}, the run asked for {_FIRST}")


def _first_is_taken(tap: Tap) -> str | None:
    return None if tap.answered("PublishVersion") else _refused_version(tap)


def _versions_are_next(tap: Tap) -> str | None:
    return _refused_version(tap) if tap.answered("PublishVersion") else None


def _refused_version(tap: Tap) -> str | None:
    for call in _refused(tap, "PublishVersion", Reason.VERSION_NOT_NEXT, Reason.REQUEST_CONFLICT):
        return f"version {call.requests[0].version.version} was refused: {call.text}"
    return None


def _settled_are_held(tap: Tap) -> str | None:
    for call in _refused(tap, "AckBatch", Reason.BATCH_UNKNOWN):
        return f"{call.requests[0].batch_id} was settled, which was never sent: {call.text}"
    return None


def _outcome_stays(tap: Tap) -> str | None:
    for call in _refused(tap, "AckBatch", Reason.REQUEST_CONFLICT):
        return f"{call.requests[0].batch_id} was settled in two ways: {call.text}"
    return None


def _refused(tap: Tap, name: str, *reasons: Reason) -> list[Call]:
    return [call for call in tap.of(name) if call.reason in reasons]


def _published(tap: Tap, version: int) -> list[VersionInfo]:
    """Return what was registered of a version, each time that it was published."""
    calls = [call for call in tap.of("PublishVersion") if call.responses]
    infos = [call.requests[0].version for call in calls]
    return [decode_version_info(info) for info in infos if info.version == version]


def _source(joined: Call, tap: Tap) -> Source:
    def told() -> VersionInfo:
        infos = _published(tap, _FIRST)
        patches = {patch.root_digest: patch for info in infos for patch in info.patches}
        return replace(infos[0], patches=tuple(patches.values()))

    return Source(
        address=joined.requests[0].weight_endpoints[0].endpoint,
        token=joined.responses[0].session.transfer_token,
        told=told,
    )


async def _check_lost_ack(stage: Stage) -> None:
    with stage.check("acks.repeated"):
        fault = CutResponse("AckBatch")
        stage.tap.faults.append(fault)
        lost = await stage.until(lambda: fault.call, "another AckBatch")
        wanted = lost.requests[0]
        again = await stage.until(
            lambda: _after(stage.tap.of("AckBatch"), lost), "the ack again, whose answer was lost"
        )
        found = again.requests[0]
        if found.batch_id != wanted.batch_id:
            raise Broken(f"{wanted.batch_id} was not settled again; {found.batch_id} came instead")
        if found.outcome != wanted.outcome:
            names = [pb.BatchOutcome.Name(each.outcome)[14:] for each in (found, wanted)]
            raise Broken(f"{wanted.batch_id} was settled as {' after '.join(names)}")


async def _check_cut_stream(stage: Stage) -> None:
    with stage.check("batches.redelivered"):
        fault = CutResponse("StreamBatches", lambda message: message.HasField("part"))
        stage.tap.faults.append(fault)
        cut = await stage.until(lambda: fault.lost, "the part of another batch")
        batch_id = cut.part.batch_id
        await stage.until(
            lambda: _header(_after(stage.tap.of("StreamBatches"), fault.call), batch_id),
            "a new StreamBatches, on which the batch comes again",
        )
        await stage.until(lambda: _ack(stage.tap, batch_id), f"the ack of {batch_id}")


def _after(calls: list[Call], one: Call | None) -> Call | None:
    following = calls[calls.index(one) + 1 :] if one in calls else []
    return following[0] if following else None


def _header(call: Call | None, batch_id: str) -> Any:
    events = call.responses if call else []
    return next((event for event in events if event.header.batch_id == batch_id), None)


def _ack(tap: Tap, batch_id: str) -> Call | None:
    acks = tap.of("AckBatch")
    return next((c for c in acks if c.requests and c.requests[0].batch_id == batch_id), None)


async def set_up(stage: Stage) -> None:
    """Bring the node that rolls out for the trainer, and watch the trainer's pace."""
    pacing = Pacing()
    stage.tap.faults.append(pacing)
    stage.laws = {BACKPRESSURE.name: pacing.law, **stage.laws}
    await stage.run.add_node(token_s=_TOKEN_S, alphabet=DIGITS)
