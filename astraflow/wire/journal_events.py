"""Events of a journal that need more than their fields: core <-> astraflow.journal.v1."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from astraflow.core import events as ev
from astraflow.core.batches import AckBatch, StreamBatches
from astraflow.core.ids import EvalRunId, MemberId, PolicyId
from astraflow.core.members import JoinPool, RaasLoad
from astraflow.core.tasks import Prompt, TaskCredit
from astraflow.wire import common, raas, tasks, trainer
from astraflow.wire.fields import optional
from astraflow_proto.journal.v1 import record_pb2 as pb
from astraflow_proto.rollout.v1 import task_pb2

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
    """Return a opened record."""
    return pb.RunOpened(
        run_id=entry.run_id,
        settings_digest=entry.settings_digest,
        data_set_sizes=entry.data_set_sizes,
        software=entry.software,
    )


def read_opened(message: pb.RunOpened) -> RunOpened:
    """Read a opened record."""
    return RunOpened(
        run_id=message.run_id,
        settings_digest=message.settings_digest,
        data_set_sizes=dict(message.data_set_sizes),
        software=message.software,
    )


def write_joined(event: ev.RaasJoined | ev.TrainerRegistered) -> pb.Joined:
    """Return a joined record."""
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
    """Read a joined record."""
    secrets = ev.SessionSecrets(token=message.token_digest, transfer_token=b"")
    resumes = MemberId(message.resumes) if message.resumes else None
    if message.WhichOneof("member") == "raas":
        request = raas.decode_join_pool(message.raas)
        return ev.RaasJoined(request=request, secrets=secrets, resumes=resumes)
    request = trainer.decode_register_trainer(message.trainer)
    return ev.TrainerRegistered(request=request, secrets=secrets, resumes=resumes)


def write_kept_alive(event: ev.MemberKeptAlive) -> pb.MemberKeptAlive:
    """Return a kept alive record."""
    message = pb.MemberKeptAlive(member_id=event.member_id)
    if isinstance(event.load, RaasLoad):
        message.raas.CopyFrom(common.encode_raas_load(event.load))
    elif event.load is not None:
        message.trainer.CopyFrom(common.encode_trainer_load(event.load))
    return message


def read_kept_alive(message: pb.MemberKeptAlive) -> ev.MemberKeptAlive:
    """Read a kept alive record."""
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
    """Return a credit record."""
    credit = raas.encode_task_credit(_made(TaskCredit, event))
    return pb.CreditGiven(member_id=event.member_id, credit=credit)


def read_credit(message: pb.CreditGiven) -> ev.CreditGiven:
    """Read a credit record."""
    credit = raas.decode_task_credit(message.credit)
    return _made(ev.CreditGiven, credit, member_id=MemberId(message.member_id))


def write_stream(event: ev.BatchStreamOpened) -> pb.BatchStreamOpened:
    """Return a stream record."""
    stream = trainer.encode_stream_batches(_made(StreamBatches, event))
    return pb.BatchStreamOpened(member_id=event.member_id, stream=stream)


def read_stream(message: pb.BatchStreamOpened) -> ev.BatchStreamOpened:
    """Read a stream record."""
    stream = trainer.decode_stream_batches(message.stream)
    return _made(ev.BatchStreamOpened, stream, member_id=MemberId(message.member_id))


def write_acked(event: ev.BatchAcked) -> pb.BatchAcked:
    """Return a acked record."""
    ack = trainer.encode_ack_batch(_made(AckBatch, event))
    return pb.BatchAcked(
        member_id=event.member_id, ack=ack, wait_s=event.wait_s, train_s=event.train_s
    )


def read_acked(message: pb.BatchAcked) -> ev.BatchAcked:
    """Read a acked record."""
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
    """Read a prompts record."""
    return tuple(map(tasks.decode_prompt, messages))


def write_eval_prompts(event: ev.EvalPromptsOffered) -> pb.EvalPromptsOffered:
    """Return a eval prompts record."""
    data_sets = [
        pb.DataSetPrompts(data_set=name, prompts=map(tasks.encode_prompt, prompts))
        for name, prompts in event.prompts.items()
    ]
    return pb.EvalPromptsOffered(eval_run_id=event.eval_run_id, data_sets=data_sets)


def read_eval_prompts(message: pb.EvalPromptsOffered) -> ev.EvalPromptsOffered:
    """Read a eval prompts record."""
    prompts = {each.data_set: read_prompts(each.prompts) for each in message.data_sets}
    return ev.EvalPromptsOffered(eval_run_id=EvalRunId(message.eval_run_id), prompts=prompts)


def read_eval_created(message: pb.EvalCreated) -> ev.EvalCreated:
    """Read a eval created record."""
    return ev.EvalCreated(
        request_id=message.request_id,
        suite=message.suite,
        versions={PolicyId(name): version for name, version in message.versions.items()},
        pool_share=optional(message, "pool_share"),
    )
