"""astraflow.journal.v1, records: every event of a run, with its time."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from astraflow.core import events as ev
from astraflow.core.batches import AckBatch, StreamBatches
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import EvalRunId, MemberId, PolicyId, PromptId, RolloutId, TaskId
from astraflow.core.members import JoinPool, RaasLoad
from astraflow.core.requests import REQUESTS
from astraflow.core.tasks import Prompt, TaskCredit
from astraflow.wire import common, control, raas, rollout, tasks, trainer, versions
from astraflow.wire.fields import decode_time, optional, optional_span, set_span, set_time
from astraflow_proto.journal.v1 import record_pb2 as pb
from astraflow_proto.rollout.v1 import rollout_pb2, task_pb2

Made = TypeVar(
    "Made",
    ev.BatchAcked,
    ev.BatchStreamOpened,
    ev.CreditGiven,
    AckBatch,
    StreamBatches,
    TaskCredit,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOpened:
    """The first record of a journal.

    Attributes:
        run_id: Which run.
        settings_digest: 16 bytes over what it was set up with.
        data_set_sizes: Rows by data set.
        software: Release that wrote it.
    """

    run_id: str
    settings_digest: bytes
    data_set_sizes: dict[str, int]
    software: str


def write_opened(entry: RunOpened) -> pb.RunOpened:
    return pb.RunOpened(
        run_id=entry.run_id,
        settings_digest=entry.settings_digest,
        data_set_sizes=entry.data_set_sizes,
        software=entry.software,
    )


def read_opened(message: pb.RunOpened) -> RunOpened:
    return RunOpened(
        run_id=message.run_id,
        settings_digest=message.settings_digest,
        data_set_sizes=dict(message.data_set_sizes),
        software=message.software,
    )


def write_joined(event: ev.RaasJoined | ev.TrainerRegistered) -> pb.Joined:
    message = pb.Joined(token_digest=event.secrets.token, resumes=event.resumes or "")
    request = event.request
    if request.resume is not None:
        request = replace(request, resume=replace(request.resume, resume_token=b""))
    if isinstance(request, JoinPool):
        message.raas.CopyFrom(raas.encode_join_pool(request))
    else:
        message.trainer.CopyFrom(trainer.encode_register_trainer(request))
    return message


def read_joined(message: pb.Joined) -> ev.RaasJoined | ev.TrainerRegistered:
    secrets = ev.SessionSecrets(token=message.token_digest, transfer_token=b"")
    resumes = MemberId(message.resumes) if message.resumes else None
    if message.WhichOneof("member") == "raas":
        request = raas.decode_join_pool(message.raas)
        return ev.RaasJoined(request=request, secrets=secrets, resumes=resumes)
    request = trainer.decode_register_trainer(message.trainer)
    return ev.TrainerRegistered(request=request, secrets=secrets, resumes=resumes)


def write_kept_alive(event: ev.MemberKeptAlive) -> pb.MemberKeptAlive:
    message = pb.MemberKeptAlive(member_id=event.member_id)
    if isinstance(event.load, RaasLoad):
        message.raas.CopyFrom(common.encode_raas_load(event.load))
    elif event.load is not None:
        message.trainer.CopyFrom(common.encode_trainer_load(event.load))
    return message


def read_kept_alive(message: pb.MemberKeptAlive) -> ev.MemberKeptAlive:
    member_id = MemberId(message.member_id)
    match message.WhichOneof("load"):
        case "raas":
            load = common.decode_raas_load(message.raas)
        case "trainer":
            load = common.decode_trainer_load(message.trainer)
        case _:
            load = None
    return ev.MemberKeptAlive(member_id=member_id, load=load)


def write_credit(event: ev.CreditGiven) -> pb.CreditGiven:
    credit = raas.encode_task_credit(_made(TaskCredit, event))
    return pb.CreditGiven(member_id=event.member_id, credit=credit)


def read_credit(message: pb.CreditGiven) -> ev.CreditGiven:
    credit = raas.decode_task_credit(message.credit)
    return _made(ev.CreditGiven, credit, member_id=MemberId(message.member_id))


def write_stream(event: ev.BatchStreamOpened) -> pb.BatchStreamOpened:
    stream = trainer.encode_stream_batches(_made(StreamBatches, event))
    return pb.BatchStreamOpened(member_id=event.member_id, stream=stream)


def read_stream(message: pb.BatchStreamOpened) -> ev.BatchStreamOpened:
    stream = trainer.decode_stream_batches(message.stream)
    return _made(ev.BatchStreamOpened, stream, member_id=MemberId(message.member_id))


def write_acked(event: ev.BatchAcked) -> pb.BatchAcked:
    ack = trainer.encode_ack_batch(_made(AckBatch, event))
    return pb.BatchAcked(
        member_id=event.member_id, ack=ack, wait_s=event.wait_s, train_s=event.train_s
    )


def read_acked(message: pb.BatchAcked) -> ev.BatchAcked:
    return _made(
        ev.BatchAcked,
        trainer.decode_ack_batch(message.ack),
        member_id=MemberId(message.member_id),
        wait_s=message.wait_s,
        train_s=message.train_s,
    )


def _made(kind: type[Made], source: object, **more: object) -> Made:
    """Return an object with what a source has under the names of its fields, and `more`."""
    names = (each.name for each in fields(kind) if each.name not in more)
    return kind(**more, **{name: getattr(source, name) for name in names if hasattr(source, name)})


def read_prompts(messages: Iterable[task_pb2.Prompt]) -> tuple[Prompt, ...]:
    return tuple(map(tasks.decode_prompt, messages))


def write_eval_prompts(event: ev.EvalPromptsOffered) -> pb.EvalPromptsOffered:
    data_sets = [
        pb.DataSetPrompts(data_set=name, prompts=map(tasks.encode_prompt, prompts))
        for name, prompts in event.prompts.items()
    ]
    return pb.EvalPromptsOffered(eval_run_id=event.eval_run_id, data_sets=data_sets)


def read_eval_prompts(message: pb.EvalPromptsOffered) -> ev.EvalPromptsOffered:
    prompts = {each.data_set: read_prompts(each.prompts) for each in message.data_sets}
    return ev.EvalPromptsOffered(eval_run_id=EvalRunId(message.eval_run_id), prompts=prompts)


def read_eval_created(message: pb.EvalCreated) -> ev.EvalCreated:
    return ev.EvalCreated(
        request_id=message.request_id,
        suite=message.suite,
        versions={PolicyId(name): version for name, version in message.versions.items()},
        pool_share=optional(message, "pool_share"),
    )


Entry = ev.Event | RunOpened


def record_bytes(
    entry: Entry,
    time: datetime,
    *,
    received: rollout_pb2.Rollout | None = None,
    goes_on: bool = False,
) -> bytes:
    """Return one record.

    Args:
        entry: What happened.
        time: When it was decided.
        received: The rollout of a RolloutArrived as it came, so that it is not encoded again.
        goes_on: Whether the next record came together with it.
    """
    record = pb.Record(goes_on=goes_on)
    set_time(record.time, time)
    if received is not None and isinstance(entry, ev.RolloutArrived):
        record.rollout_arrived.member_id = entry.member_id
        record.rollout_arrived.rollout.CopyFrom(received)
        return record.SerializeToString()
    kind = type(entry)
    getattr(record, _field(kind)).CopyFrom(_FORMS[kind].encode(entry))
    return record.SerializeToString()


def with_decision(record: bytes, digest: int) -> bytes:
    """Return a record with the digest of what was decided."""
    # Fields of one message may follow each other in pieces.
    return record + pb.Record(decision=digest).SerializeToString()


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
        entry = _FIELDS[field].decode(getattr(record, field))
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


@dataclass(frozen=True, slots=True)
class _Form:
    """How the fields of an entry go into its message, and come back."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _with_grace(message: Any, event: Any) -> Any:
    set_span(message.grace, event.grace)
    return message


def _bare(message: type[Any], event: type[Any]) -> _Form:
    return _Form(lambda _: message(), lambda _: event())


def _of_member(message: type[Any], event: type[Any], /, **parts: tuple[Any, Any, str]) -> _Form:
    """Return the form of an event with a member_id and parts, each (encode, decode, field)."""

    def encode(said: Any) -> Any:
        fields = {name: code(getattr(said, own)) for own, (code, _, name) in parts.items()}
        return message(member_id=said.member_id, **fields)

    def decode(read: Any) -> Any:
        fields = {own: code(getattr(read, name)) for own, (_, code, name) in parts.items()}
        return event(member_id=MemberId(read.member_id), **fields)

    return _Form(encode, decode)


def _policy_ids(names: Iterable[str]) -> tuple[PolicyId, ...]:
    return tuple(map(PolicyId, names))


_FAILURE = (common.encode_failure, common.decode_failure, "failure")

_FORMS: dict[type[Any], _Form] = {
    RunOpened: _Form(write_opened, read_opened),
    ev.HubRestarted: _Form(
        lambda event: pb.HubRestarted(software=event.software),
        lambda message: ev.HubRestarted(software=message.software),
    ),
    ev.RaasJoined: _Form(write_joined, read_joined),
    ev.TrainerRegistered: _Form(write_joined, read_joined),
    ev.MemberKeptAlive: _Form(write_kept_alive, read_kept_alive),
    ev.FailureReported: _of_member(pb.FailureReported, ev.FailureReported, failure=_FAILURE),
    ev.MemberLeft: _of_member(pb.SessionLeft, ev.MemberLeft, message=(str, str, "message")),
    ev.CreditGiven: _Form(write_credit, read_credit),
    ev.TaskNacked: _of_member(
        pb.TaskNacked,
        ev.TaskNacked,
        task_id=(str, TaskId, "task_id"),
        failure=_FAILURE,
    ),
    ev.RolloutArrived: _of_member(
        pb.RolloutArrived,
        ev.RolloutArrived,
        rollout=(rollout.encode_rollout, rollout.decode_rollout, "rollout"),
    ),
    ev.RolloutRepeated: _of_member(
        pb.RolloutRepeated,
        ev.RolloutRepeated,
        rollout_id=(str, RolloutId, "rollout_id"),
        policy_ids=(list, _policy_ids, "policy_ids"),
    ),
    ev.TaskFinished: _of_member(
        pb.TaskFinished,
        ev.TaskFinished,
        result=(rollout.encode_task_result, rollout.decode_task_result, "result"),
    ),
    ev.BatchStreamOpened: _Form(write_stream, read_stream),
    ev.BatchAcked: _Form(write_acked, read_acked),
    ev.VersionPublished: _of_member(
        pb.VersionPublished,
        ev.VersionPublished,
        info=(versions.encode_version_info, versions.decode_version_info, "version"),
    ),
    ev.VersionReported: _of_member(
        pb.VersionReported,
        ev.VersionReported,
        report=(versions.encode_version_report, versions.decode_version_report, "report"),
    ),
    ev.PublishRequested: _of_member(
        pb.PublishRequested,
        ev.PublishRequested,
        policy_id=(str, PolicyId, "policy_id"),
    ),
    ev.PromptsOffered: _Form(
        lambda e: pb.PromptsOffered(
            prompts=map(tasks.encode_prompt, e.prompts),
            data_set=e.data_set,
            is_last=e.is_last,
            is_again=e.is_again,
        ),
        lambda m: ev.PromptsOffered(
            prompts=read_prompts(m.prompts),
            data_set=m.data_set,
            is_last=m.is_last,
            is_again=m.is_again,
        ),
    ),
    ev.EvalPromptsOffered: _Form(write_eval_prompts, read_eval_prompts),
    ev.EvalCreated: _Form(
        lambda e: pb.EvalCreated(
            request_id=e.request_id,
            suite=e.suite,
            versions={str(name): version for name, version in e.versions.items()},
            pool_share=e.pool_share,
        ),
        read_eval_created,
    ),
    ev.EvalCancelled: _Form(
        lambda e: pb.EvalCancelled(eval_run_id=e.eval_run_id),
        lambda m: ev.EvalCancelled(eval_run_id=EvalRunId(m.eval_run_id)),
    ),
    ev.RunPaused: _bare(pb.RunPaused, ev.RunPaused),
    ev.RunResumed: _bare(pb.RunResumed, ev.RunResumed),
    ev.SaveRequested: _Form(
        lambda e: pb.SaveRequested(checkpoint_id=e.checkpoint_id),
        lambda m: ev.SaveRequested(checkpoint_id=m.checkpoint_id),
    ),
    ev.PromptRequeued: _Form(
        lambda e: pb.PromptRequeued(prompt_id=e.prompt_id),
        lambda m: ev.PromptRequeued(prompt_id=PromptId(m.prompt_id)),
    ),
    ev.MemberDrained: _Form(
        lambda e: _with_grace(pb.MemberDrained(member_id=e.member_id), e),
        lambda m: ev.MemberDrained(
            member_id=MemberId(m.member_id), grace=optional_span(m, "grace")
        ),
    ),
    ev.RunStopped: _Form(
        lambda e: _with_grace(pb.RunStopped(mode=control.encode_stop_mode(e.mode)), e),
        lambda m: ev.RunStopped(
            mode=control.decode_stop_mode(m.mode), grace=optional_span(m, "grace")
        ),
    ),
    ev.RunBroken: _Form(
        lambda e: pb.RunBroken(failure=common.encode_failure(e.failure)),
        lambda m: ev.RunBroken(failure=common.decode_failure(m.failure)),
    ),
    ev.Ticked: _bare(pb.Ticked, ev.Ticked),
}


def _field(kind: type[Any]) -> str:
    return "run_opened" if kind is RunOpened else REQUESTS[kind].journal


_FIELDS = {_field(kind): form for kind, form in _FORMS.items()}
