"""astraflow.common.v1: failures, members, sessions; and why somebody waits."""

from astraflow.core.errors import Failure, Reason
from astraflow.core.ids import BatchId, MemberId, TaskId
from astraflow.core.members import (
    Capability,
    Contract,
    Directive,
    DirectiveKind,
    MemberRole,
    ModelIdentity,
    RaasLoad,
    Resources,
    Session,
    SessionResume,
    TrainerLoad,
)
from astraflow.core.status import WaitCause, WaitReason
from astraflow.wire.fields import (
    EnumTable,
    at_least,
    decode_span,
    decode_time,
    encode_span,
    encode_time,
    invalid,
    optional,
    optional_span,
    optional_time,
    required,
    set_span,
    set_time,
)
from astraflow_proto.common.v1 import failure_pb2, member_pb2, model_pb2, session_pb2
from astraflow_proto.dataflow.v1 import wait_pb2

__all__ = ["decode_span", "decode_time", "encode_span", "encode_time"]

REASONS = EnumTable(Reason, failure_pb2.Reason, "REASON")

ROLES = EnumTable(MemberRole, member_pb2.Role, "ROLE")

CAPABILITIES = EnumTable(Capability, session_pb2.Capability, "CAPABILITY")

DIRECTIVES = EnumTable(DirectiveKind, session_pb2.DirectiveKind, "DIRECTIVE_KIND")


def encode_failure(failure: Failure) -> failure_pb2.Failure:
    return failure_pb2.Failure(
        reason=REASONS.encode(failure.reason),
        message=failure.message,
        retryable=failure.retryable,
        metadata=failure.metadata,
        cause=failure.cause,
        traceback=failure.traceback,
    )


def decode_failure(message: failure_pb2.Failure) -> Failure:
    """Read a Failure.

    Raises:
        AstraflowError: INVALID_FIELD for an unknown reason.
    """
    return Failure(
        reason=REASONS.decode(message.reason),
        message=message.message,
        retryable=message.retryable,
        metadata=dict(message.metadata),
        cause=message.cause,
        traceback=message.traceback,
    )


def encode_resources(resources: Resources) -> member_pb2.Resources:
    """Return Resources for the wire."""
    return member_pb2.Resources(
        accelerator=resources.accelerator,
        accelerator_count=resources.accelerator_count,
        core_count=resources.core_count,
        memory_nbytes=resources.memory_nbytes,
        price_per_hour=resources.price_per_hour,
        currency=resources.currency,
        metrics_address=resources.metrics_address,
    )


def decode_resources(message: member_pb2.Resources) -> Resources:
    """Read Resources.

    Raises:
        AstraflowError: INVALID_FIELD for a negative count.
    """
    return Resources(
        accelerator=message.accelerator,
        accelerator_count=at_least(message.accelerator_count, 0, "accelerator_count"),
        core_count=at_least(message.core_count, 0, "core_count"),
        memory_nbytes=at_least(message.memory_nbytes, 0, "memory_nbytes"),
        price_per_hour=optional(message, "price_per_hour"),
        currency=message.currency,
        metrics_address=message.metrics_address,
    )


def encode_raas_load(load: RaasLoad) -> member_pb2.RaasLoad:
    return member_pb2.RaasLoad(**{name: getattr(load, name) for name in RaasLoad.__slots__})


def decode_raas_load(message: member_pb2.RaasLoad) -> RaasLoad:
    return RaasLoad(**{name: getattr(message, name) for name in RaasLoad.__slots__})


def encode_trainer_load(load: TrainerLoad) -> member_pb2.TrainerLoad:
    return member_pb2.TrainerLoad(**{name: getattr(load, name) for name in TrainerLoad.__slots__})


def decode_trainer_load(message: member_pb2.TrainerLoad) -> TrainerLoad:
    return TrainerLoad(**{name: getattr(message, name) for name in TrainerLoad.__slots__})


def encode_identity(identity: ModelIdentity) -> model_pb2.ModelIdentity:
    return model_pb2.ModelIdentity(
        name=identity.name,
        config_digest=identity.config_digest,
        tokenizer_digest=identity.tokenizer_digest,
        chat_template_digest=identity.chat_template_digest,
    )


def decode_identity(message: model_pb2.ModelIdentity) -> ModelIdentity:
    """Read a ModelIdentity.

    Raises:
        AstraflowError: INVALID_FIELD for a digest of another size.
    """
    digests = {
        name: getattr(message, name)
        for name in ("config_digest", "tokenizer_digest", "chat_template_digest")
    }
    for name, digest in digests.items():
        if len(digest) not in (0, 32):
            raise invalid(name, "a digest has 32 bytes, or none when it is not compared")
    return ModelIdentity(name=message.name, **digests)


def encode_contract(contract: Contract) -> session_pb2.Contract:
    return session_pb2.Contract(
        contract_version=contract.contract_version,
        capabilities=sorted(CAPABILITIES.encode(each) for each in contract.capabilities),
        software=contract.software,
    )


def decode_contract(message: session_pb2.Contract) -> Contract:
    """Read a Contract; a capability that is unknown here is ignored, as the contract says."""
    known = {number: member for member, number in CAPABILITIES.numbers.items()}
    return Contract(
        contract_version=message.contract_version,
        capabilities=frozenset(known[n] for n in message.capabilities if n in known),
        software=message.software,
    )


def encode_resume(resume: SessionResume) -> session_pb2.SessionResume:
    return session_pb2.SessionResume(
        resume_token=resume.resume_token,
        incarnation=resume.incarnation,
        held_task_ids=resume.held_task_ids,
        held_batch_ids=resume.held_batch_ids,
    )


def decode_resume(message: session_pb2.SessionResume) -> SessionResume:
    """Read a SessionResume.

    Raises:
        AstraflowError: INVALID_FIELD for an incarnation below 1.
    """
    return SessionResume(
        resume_token=message.resume_token,
        incarnation=at_least(message.incarnation, 1, "incarnation"),
        held_task_ids=tuple(map(TaskId, message.held_task_ids)),
        held_batch_ids=tuple(map(BatchId, message.held_batch_ids)),
    )


def encode_session(session: Session) -> session_pb2.Session:
    """Return a Session for the wire, secrets included."""
    return session_pb2.Session(
        member_id=session.member_id,
        token=session.token,
        ttl=encode_span(session.ttl),
        keep_alive_interval=encode_span(session.keep_alive_interval),
        transfer_token=session.transfer_token,
        max_message_nbytes=session.max_message_nbytes,
        held_task_ids=session.held_task_ids,
        held_batch_ids=session.held_batch_ids,
    )


def decode_session(message: session_pb2.Session) -> Session:
    """Read a Session.

    Raises:
        AstraflowError: INVALID_FIELD without a member_id.
    """
    return Session(
        member_id=MemberId(required(message.member_id, "member_id")),
        token=message.token,
        ttl=decode_span(message.ttl),
        keep_alive_interval=decode_span(message.keep_alive_interval),
        transfer_token=message.transfer_token,
        max_message_nbytes=message.max_message_nbytes,
        held_task_ids=tuple(map(TaskId, message.held_task_ids)),
        held_batch_ids=tuple(map(BatchId, message.held_batch_ids)),
    )


def encode_directive(directive: Directive) -> session_pb2.Directive:
    message = session_pb2.Directive(
        kind=DIRECTIVES.encode(directive.kind), message=directive.message
    )
    set_span(message.grace, directive.grace)
    return message


def decode_directive(message: session_pb2.Directive) -> Directive:
    """Read a Directive.

    Raises:
        AstraflowError: INVALID_FIELD for an unknown kind.
    """
    return Directive(
        kind=DIRECTIVES.decode(message.kind),
        grace=optional_span(message, "grace"),
        message=message.message,
    )


WAIT_CAUSES = EnumTable(WaitCause, wait_pb2.WaitCause, "WAIT_CAUSE")


def encode_wait_reason(reason: WaitReason) -> wait_pb2.WaitReason:
    message = wait_pb2.WaitReason(
        cause=WAIT_CAUSES.encode(reason.cause),
        waiter_id=reason.waiter_id,
        subject_id=reason.subject_id,
        message=reason.message,
    )
    set_time(message.since_time, reason.since_time)
    set_time(message.resolve_time, reason.resolve_time)
    return message


def decode_wait_reason(message: wait_pb2.WaitReason) -> WaitReason:
    """Read a WaitReason.

    Raises:
        AstraflowError: INVALID_FIELD for an unknown cause.
    """
    return WaitReason(
        cause=WAIT_CAUSES.decode(message.cause),
        waiter_id=message.waiter_id,
        subject_id=message.subject_id,
        message=message.message,
        since_time=optional_time(message, "since_time"),
        resolve_time=optional_time(message, "resolve_time"),
    )
