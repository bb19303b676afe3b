"""The script for a trainer: a real run serves it, and a node of ours trusts what it publishes."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from astraflow.conformance.checks import Broken, ContractCheck
from astraflow.conformance.faults import FirstResponse, cut
from astraflow.conformance.session_checks import (
    EVERY_MEMBERS,
    check_drain,
    check_keep_alive,
    check_resume,
    laws_of_sessions,
)
from astraflow.conformance.stage import DIGITS, Law, ScriptEnded, Stage, first_of
from astraflow.conformance.tap import Call, Fault, Tap
from astraflow.conformance.weights import CHECKS as WEIGHT_CHECKS
from astraflow.conformance.weights import CheckedSource, check_source
from astraflow.core.errors import Reason
from astraflow.core.ids import PolicyId
from astraflow.core.packing import laid_out
from astraflow.core.versions import VersionInfo
from astraflow.rpc.auth import SESSION_KEY
from astraflow.wire.rollout import decode_batch_part
from astraflow.wire.versions import decode_version_info
from astraflow_proto.dataflow.v1 import trainer_service_pb2 as pb

BACKPRESSURE: Final = ContractCheck(
    name="batches.backpressure",
    expected="takes no more than max_outstanding batches: settles one as CONSUMED once all its"
    " parts came, opens no second stream beside the first, and stays alive while they are late",
    source="dataflow/v1/trainer_service.proto, StreamBatchesRequest.max_outstanding",
)


class PaceWatch(Fault):
    """Lets everything pass, and notes the first thing by which a trainer gets ahead of itself."""

    def __init__(self) -> None:
        self._seen: str | None = None
        self._missing = defaultdict[str, int](int)
        self._streams: list[Call] = []

    @property
    def is_open(self) -> bool:
        """Whether the header of a batch passed whose parts did not."""
        return any(missing > 0 for missing in self._missing.values())

    def law(self, tap: Tap) -> str | None:
        del tap
        return self._seen

    def request(self, call: Call, message: Any) -> Sequence[Any]:
        """Look at what the trainer asks for and settles."""
        if call.name == "StreamBatches":
            self._note(self._opened(call, message))
        elif call.name == "AckBatch":
            self._note(self._acknowledged(message))
        return [message]

    def response(self, call: Call, message: Any) -> Sequence[Any]:
        """Count the parts that are still to come of each batch."""
        if call.name == "StreamBatches" and message.HasField("header"):
            self._missing[message.header.batch_id] = message.header.part_count
        elif call.name == "StreamBatches" and message.HasField("part"):
            self._missing[message.part.batch_id] -= 1
        return [message]

    def _note(self, seen: str | None) -> None:
        self._seen = self._seen or seen

    def _opened(self, call: Call, message: Any) -> str | None:
        open_calls = [
            each for each in self._streams if each.code is None and not each.broken.done()
        ]
        self._streams = [*open_calls, call]
        if message.max_outstanding < 1:
            return f"max_outstanding is {message.max_outstanding}; it is 1 or more"
        for other in open_calls:
            is_same_session = other.metadata.get(SESSION_KEY) == call.metadata.get(SESSION_KEY)
            if is_same_session and other.requests[0].rank == message.rank:
                return f"rank {message.rank} opened a second stream while its first one was open"
        return None

    def _acknowledged(self, message: Any) -> str | None:
        missing = self._missing[message.batch_id]
        if missing > 0 and message.outcome == pb.BATCH_OUTCOME_CONSUMED:
            return f"{message.batch_id} was settled as CONSUMED, {missing} parts before its last"
        return None


async def _check_pace(stage: Stage) -> None:
    """Keep the parts of a batch back for a while: the trainer waits, and stays alive."""
    (pacing,) = (fault for fault in stage.tap.faults if isinstance(fault, PaceWatch))
    with (
        stage.check(BACKPRESSURE.name),
        stage.tap.held("StreamBatches", lambda message: message.HasField("part")),
    ):
        await stage.until(lambda: pacing.is_open or None, "the header of another batch")
        count = len(stage.tap.of("KeepAlive"))
        await stage.call("KeepAlive", "KeepAlive while parts are late", after=count + 1)


JOIN: Final = "RegisterTrainer"
_FIRST: Final = 0

# The record grows with every batch, and is looked through at every message.
_TOKEN_S: Final = 0.005

CHECKS: Final = (
    ContractCheck(
        name="trainer.registered",
        expected="registers for the policy, with contract_version, groups_per_batch and where it"
        " serves weights",
        source="dataflow/v1/trainer_service.proto, RegisterTrainerRequest",
    ),
    ContractCheck(
        name="versions.first",
        expected="publishes RegisterTrainerResponse.next_version before it trains",
        source="dataflow/v1/trainer_service.proto, RegisterTrainerResponse.next_version",
    ),
    *WEIGHT_CHECKS,
    ContractCheck(
        name="versions.next",
        expected="publishes the newest version plus one, with one content per version",
        source="dataflow/v1/trainer_service.proto, PublishVersion",
    ),
    ContractCheck(
        name="batches.acked",
        expected="settles a batch that it was sent once all its parts came",
        source="dataflow/v1/trainer_service.proto, AckBatch",
    ),
    ContractCheck(
        name="acks.repeated",
        expected="repeats an ack whose answer was lost, with the same outcome",
        source="dataflow/v1/trainer_service.proto, AckBatch: idempotent for the same outcome",
    ),
    ContractCheck(
        name="batches.redelivered",
        expected="opens a stream again that was cut, takes the batch whole as it comes again, and"
        " settles it once",
        source="dataflow/v1/trainer_service.proto, StreamBatches",
    ),
    ContractCheck(
        name="batches.sources",
        expected="gets the same rows whether its parts have sources or columns",
        source="dataflow/v1/trainer_service.proto, StreamBatchesRequest.sources",
    ),
    BACKPRESSURE,
    *EVERY_MEMBERS,
)


def laws() -> dict[str, Law]:
    """Return what must hold all the time."""
    return {
        "versions.first": partial(_versions_are_taken, is_first=True),
        "versions.next": partial(_versions_are_taken, is_first=False),
        "batches.acked": _acked_are_held,
        "acks.repeated": _outcome_stays,
        **laws_of_sessions(JOIN),
    }


async def play(stage: Stage) -> None:
    """Go through all checks, one after the other."""
    with stage.check("trainer.registered"):
        joined = await stage.joined(JOIN)
        request = joined.requests[0]
        if not request.weight_endpoints:
            raise Broken("weight_endpoints is empty: nobody could pull its versions")
    with stage.check("versions.first"):
        first = (await stage.call("PublishVersion", "a version")).requests[0].version.version
        if first != _FIRST:
            raise Broken(f"the first version is {first}, the run asked for {_FIRST}")

    def registered() -> VersionInfo:
        infos = _published(stage.tap, _FIRST)
        patches = {patch.root_digest: patch for info in infos for patch in info.patches}
        return replace(infos[0], patches=tuple(patches.values()))

    source = CheckedSource(
        address=request.weight_endpoints[0].endpoint,
        token=joined.responses[0].session.transfer_token,
        registered=registered,
    )
    if not await check_source(stage.checks, source, keep_laws=stage.require_peer):
        raise ScriptEnded
    with stage.check("batches.acked"):
        await stage.call("AckBatch", "an AckBatch after the parts of a batch")
    await _check_pace(stage)
    await _check_lost_ack(stage)
    await _check_cut_stream(stage)
    await check_resume(stage, JOIN)
    with stage.check("versions.next"):
        await stage.until(lambda: _published(stage.tap, 1) or None, "the version after the first")
    await check_keep_alive(stage)
    await check_drain(stage, JOIN)


def _versions_are_taken(tap: Tap, *, is_first: bool) -> str | None:
    # A signature is over the number, too.
    reasons = Reason.VERSION_NOT_NEXT, Reason.REQUEST_CONFLICT, Reason.SIGNATURE_INVALID
    for call in _refused(tap, "PublishVersion", *reasons):
        if is_first is (tap.answered("PublishVersion") is None):
            return f"version {call.requests[0].version.version} was refused: {call.text}"
    return None


def _acked_are_held(tap: Tap) -> str | None:
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


async def _check_lost_ack(stage: Stage) -> None:
    with stage.check("acks.repeated"):
        fault = FirstResponse("AckBatch")
        stage.tap.faults.append(fault)
        lost = await stage.until(lambda: fault.call, "another AckBatch")
        wanted = lost.requests[0]
        again = await stage.until(
            lambda: first_of(stage.tap.of("AckBatch", after=lost)),
            "the ack again, whose answer was lost",
        )
        found = again.requests[0]
        if found.batch_id != wanted.batch_id:
            raise Broken(f"{wanted.batch_id} was not settled again; {found.batch_id} came instead")
        if found.outcome != wanted.outcome:
            names = [pb.BatchOutcome.Name(each.outcome)[14:] for each in (found, wanted)]
            raise Broken(f"{wanted.batch_id} was settled as {' after '.join(names)}")


class OtherForm(Fault):
    """Asks for the other form of what was lost when a stream was cut, on the stream after it.

    The trainer sees nothing of that, but for a stream that is cut again.
    """

    def __init__(self, first: FirstResponse) -> None:
        self.part: Any = None
        self._first = first
        self._call: Call | None = None

    def request(self, call: Call, message: Any) -> Sequence[Any]:
        if call.name == "StreamBatches" and self._first.message and self._call is None:
            self._call = call
            message.sources = not message.sources
        return [message]

    def response(self, call: Call, message: Any) -> Sequence[Any]:
        if call is not self._call:
            return [message]
        wanted = self._first.message.part
        if (message.part.batch_id, message.part.index) == (wanted.batch_id, wanted.index):
            self.part = message.part
            cut(message)
        return []


async def _check_cut_stream(stage: Stage) -> None:
    fault = FirstResponse("StreamBatches", lambda message: message.HasField("part"))
    other = OtherForm(fault)
    with stage.check("batches.redelivered"):
        stage.tap.faults += [fault, other]
        lost = await stage.until(lambda: fault.message, "the part of another batch")
        batch_id = lost.part.batch_id

        def header() -> Any:
            later = stage.tap.of("StreamBatches", after=fault.call)
            events = (event for call in later for event in call.responses)
            return first_of(event for event in events if event.header.batch_id == batch_id)

        def ack() -> Call | None:
            acks = stage.tap.of("AckBatch")
            return first_of(call for call in acks if call.requests[0].batch_id == batch_id)

        opened = await stage.until(header, "a new StreamBatches, on which the batch comes again")
        await stage.until(ack, f"the ack of {batch_id}")
    with stage.check("batches.sources"):
        require_same_rows(lost.part, other.part, opened.header.policy_ids)


def require_same_rows(one: Any, other: Any, policy_ids: Sequence[PolicyId]) -> None:
    """Require that of two forms of a part one has sources, and that both come to equal columns."""
    if bool(one.sources) is bool(other.sources):
        raise Broken(f"parts of {one.batch_id} are alike, asked for with sources and without")
    with_sources, plain = sorted(map(decode_batch_part, (one, other)), key=lambda p: not p.sources)
    made = laid_out(with_sources, policy_ids)
    for name in sorted(made.columns.keys() | plain.columns.keys()):
        found = [each.columns[name] for each in (made, plain) if name in each.columns]
        said = {(each.axis, each.values.dtype, each.values.tobytes()) for each in found}
        if len(found) < len((made, plain)) or len(said) > 1:
            raise Broken(f"column {name} of {one.batch_id} is another one, made of its sources")


async def set_up(stage: Stage) -> None:
    """Bring the node that rolls out for the trainer, and watch the trainer's pace."""
    pacing = PaceWatch()
    stage.tap.faults.append(pacing)
    stage.laws = {BACKPRESSURE.name: pacing.law, **stage.laws}
    await stage.run.add_node(token_s=_TOKEN_S, alphabet=DIGITS)
