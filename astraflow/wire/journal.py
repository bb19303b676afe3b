"""astraflow.journal.v1, records: every event of a run, with its time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from typing import Any

from google.protobuf.message import DecodeError

from astraflow.core import events as ev
from astraflow.core.batches import AckBatch, StreamBatches
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import EvalRunId, MemberId
from astraflow.core.members import JoinPool
from astraflow.core.requests import REQUESTS
from astraflow.core.tasks import TaskCredit
from astraflow.wire import dataflow, tasks
from astraflow.wire.converters import FieldRule, converter
from astraflow.wire.fields import decode_time, message_field, set_time, tag_of
from astraflow.wire.rollout import decode_rollout
from astraflow_proto.journal.v1 import record_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOpened:
    """The first record of a journal.

    Attributes:
        settings_digest: 16 bytes over what it was set up with.
        step_counts: Batches that each policy was to train on; 0: until the data ends. Empty: a
            release wrote it that kept none.
    """

    run_id: str
    settings_digest: bytes
    data_set_sizes: dict[str, int]
    software: str
    step_counts: Mapping[str, int] = field(default_factory=dict[str, int])


def _encode_joined(event: ev.RaasJoined | ev.TrainerRegistered) -> pb.Joined:
    message = pb.Joined(
        token_digest=event.secrets.token,
        resumes=event.resumes or "",
        token_id=event.secrets.token_id,
        is_relay=event.secrets.is_relay,
    )
    request = event.request
    if request.resume is not None:
        request = replace(request, resume=replace(request.resume, resume_token=b""))
    if isinstance(request, JoinPool):
        message.raas.CopyFrom(dataflow.encode_join_pool(request))
    else:
        message.trainer.CopyFrom(dataflow.encode_register_trainer(request))
    return message


def _decode_joined(message: pb.Joined) -> ev.RaasJoined | ev.TrainerRegistered:
    secrets = ev.SessionSecrets(
        token=message.token_digest,
        transfer_token=b"",
        token_id=message.token_id,
        is_relay=message.is_relay,
    )
    resumes = MemberId(message.resumes) if message.resumes else None
    if message.WhichOneof("member") == "raas":
        request = dataflow.decode_join_pool(message.raas)
        return ev.RaasJoined(request=request, secrets=secrets, resumes=resumes)
    request = dataflow.decode_register_trainer(message.trainer)
    return ev.TrainerRegistered(request=request, secrets=secrets, resumes=resumes)


def _encode_credit(credit: TaskCredit) -> pb.CreditGiven:
    return pb.CreditGiven(member_id=credit.member_id, credit=dataflow.encode_task_credit(credit))


def _decode_credit(message: pb.CreditGiven) -> TaskCredit:
    return replace(
        dataflow.decode_task_credit(message.credit), member_id=MemberId(message.member_id)
    )


def _encode_stream(stream: StreamBatches) -> pb.BatchStreamOpened:
    message = dataflow.encode_stream_batches(stream)
    return pb.BatchStreamOpened(member_id=stream.member_id, stream=message)


def _decode_stream(message: pb.BatchStreamOpened) -> StreamBatches:
    stream = dataflow.decode_stream_batches(message.stream)
    return replace(stream, member_id=MemberId(message.member_id))


def _encode_ack(ack: AckBatch) -> pb.BatchAcked:
    # The seconds are kept to the last bit, which a Duration is not.
    message = dataflow.encode_ack_batch(replace(ack, wait_s=0.0, train_s=0.0))
    return pb.BatchAcked(
        member_id=ack.member_id, ack=message, wait_s=ack.wait_s, train_s=ack.train_s
    )


def _decode_ack(message: pb.BatchAcked) -> AckBatch:
    return replace(
        dataflow.decode_ack_batch(message.ack),
        member_id=MemberId(message.member_id),
        wait_s=message.wait_s,
        train_s=message.train_s,
    )


def _encode_eval_prompts(event: ev.EvalPromptsOffered) -> pb.EvalPromptsOffered:
    data_sets = [
        pb.DataSetPrompts(data_set=name, prompts=map(tasks.encode_prompt, prompts))
        for name, prompts in event.prompts.items()
    ]
    return pb.EvalPromptsOffered(
        eval_run_id=event.eval_run_id, data_sets=data_sets, goes_on=event.goes_on
    )


def _decode_eval_prompts(message: pb.EvalPromptsOffered) -> ev.EvalPromptsOffered:
    prompts = {
        each.data_set: tuple(map(tasks.decode_prompt, each.prompts)) for each in message.data_sets
    }
    return ev.EvalPromptsOffered(
        eval_run_id=EvalRunId(message.eval_run_id), prompts=prompts, goes_on=message.goes_on
    )


Entry = ev.Event | RunOpened


def record_bytes(
    entry: Entry,
    time: datetime,
    *,
    received: bytes | None = None,
    goes_on: bool = False,
) -> bytes:
    """Return one record; `received` is a RolloutArrived's rollout, serialized, as it came."""
    # Fields of a message may follow each other in pieces.
    head = _head(time, goes_on)
    if received is not None and isinstance(entry, ev.RolloutArrived):
        arrived = [_member(entry.member_id), *message_field(_ROLLOUT_TAG, [received])]
        return b"".join((head, *message_field(_ARRIVED_TAG, arrived)))
    field, encode = _ENCODERS[type(entry)]
    record = pb.Record()
    getattr(record, field).CopyFrom(encode(entry))
    return head + record.SerializeToString()


@lru_cache(maxsize=8)
def _head(time: datetime, goes_on: bool) -> bytes:
    record = pb.Record(goes_on=goes_on)
    set_time(record.time, time)
    return record.SerializeToString()


@lru_cache(maxsize=4096)
def _member(member_id: MemberId) -> bytes:
    return pb.RolloutArrived(member_id=member_id).SerializeToString()


_ARRIVED_TAG = tag_of(pb.Record, "rollout_arrived")
_ROLLOUT_TAG = tag_of(pb.RolloutArrived, "rollout")
_DECISION_TAG = tag_of(pb.Record, "decision")


def with_decision(record: bytes, digest: int) -> bytes:
    """Return a record with the digest of what was decided."""
    return b"".join((record, _DECISION_TAG, digest.to_bytes(4, "little")))


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRecord:
    """One record.

    Attributes:
        entry: What happened.
        time: When it was decided.
        goes_on: Whether the next record came together with it.
        decision: Digest of what was decided; None: the release that wrote it kept none.
    """

    entry: Entry
    time: datetime
    goes_on: bool
    decision: int | None


def read_record(data: bytes) -> JournalRecord:
    """Read one record.

    Raises:
        AstraflowError: JOURNAL_FAILED when this release cannot read it.
    """
    try:
        record = pb.Record.FromString(data)
        field = record.WhichOneof("event")
        entry = _DECODERS[field](getattr(record, field))
        return JournalRecord(
            entry=entry,
            time=decode_time(record.time),
            goes_on=record.goes_on,
            decision=record.decision if record.HasField("decision") else None,
        )
    except (AstraflowError, DecodeError, ValueError, KeyError) as error:
        raise AstraflowError(
            Reason.JOURNAL_FAILED,
            f"a record of the journal cannot be read ({error}); open it with the release that "
            "wrote it, or a newer one",
        ) from error


_encode_arrived, _ = converter(ev.RolloutArrived, pb.RolloutArrived)


def _decode_arrived(message: pb.RolloutArrived) -> ev.RolloutArrived:
    # With the message, which batches and snapshots pass on.
    return ev.RolloutArrived(
        member_id=MemberId(message.member_id), rollout=decode_rollout(message.rollout)
    )


_FUNCTIONS: Mapping[type[Any], tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    RunOpened: converter(RunOpened, pb.RunOpened),
    ev.HubRestarted: converter(ev.HubRestarted, pb.HubRestarted),
    ev.RaasJoined: (_encode_joined, _decode_joined),
    ev.TrainerRegistered: (_encode_joined, _decode_joined),
    ev.MemberKeptAlive: converter(ev.MemberKeptAlive, pb.MemberKeptAlive),
    ev.FailureReported: converter(ev.FailureReported, pb.FailureReported),
    ev.MemberLeft: converter(ev.MemberLeft, pb.SessionLeft),
    TaskCredit: (_encode_credit, _decode_credit),
    ev.TaskNacked: converter(ev.TaskNacked, pb.TaskNacked),
    ev.RolloutArrived: (_encode_arrived, _decode_arrived),
    ev.RolloutRepeated: converter(ev.RolloutRepeated, pb.RolloutRepeated),
    ev.TaskFinished: converter(ev.TaskFinished, pb.TaskFinished),
    StreamBatches: (_encode_stream, _decode_stream),
    AckBatch: (_encode_ack, _decode_ack),
    ev.VersionPublished: converter(
        ev.VersionPublished, pb.VersionPublished, info=FieldRule(name="version")
    ),
    ev.VersionReported: converter(ev.VersionReported, pb.VersionReported),
    ev.PublishRequested: converter(ev.PublishRequested, pb.PublishRequested),
    ev.PromptsOffered: converter(ev.PromptsOffered, pb.PromptsOffered),
    ev.EvalPromptsOffered: (_encode_eval_prompts, _decode_eval_prompts),
    ev.EvalCreated: converter(ev.EvalCreated, pb.EvalCreated),
    ev.EvalCancelled: converter(ev.EvalCancelled, pb.EvalCancelled),
    ev.RunPaused: converter(ev.RunPaused, pb.RunPaused),
    ev.RunResumed: converter(ev.RunResumed, pb.RunResumed),
    ev.SaveRequested: converter(ev.SaveRequested, pb.SaveRequested),
    ev.PromptRequeued: converter(ev.PromptRequeued, pb.PromptRequeued),
    ev.MemberDrained: converter(ev.MemberDrained, pb.MemberDrained),
    ev.TokenRevoked: converter(ev.TokenRevoked, pb.TokenRevoked),
    ev.RunStopped: converter(ev.RunStopped, pb.RunStopped),
    ev.RunBroken: converter(ev.RunBroken, pb.RunBroken),
    ev.Ticked: converter(ev.Ticked, pb.Ticked),
}


_FIELDS = {RunOpened: "run_opened", **{kind: each.journal for kind, each in REQUESTS.items()}}
_ENCODERS: Mapping[type[Any], tuple[str, Callable[[Any], Any]]] = {
    kind: (_FIELDS[kind], encode) for kind, (encode, _) in _FUNCTIONS.items()
}
_DECODERS = {_FIELDS[kind]: decode for kind, (_, decode) in _FUNCTIONS.items()}
