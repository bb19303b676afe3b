"""astraflow.dataflow.v1: how members join, take work and hand in results."""

from astraflow.core.batches import AckBatch, BatchOutcome, StreamBatches
from astraflow.core.ids import BatchId, PolicyId, RunId, TaskId
from astraflow.core.members import (
    JoinPool,
    PoolMembership,
    RegisterTrainer,
    ServedPolicy,
    TrainerRegistration,
)
from astraflow.core.rollouts import Disposition, ItemAck
from astraflow.core.status import WaitCause, WaitReason
from astraflow.core.tasks import CancelReason, TaskCancellation, TaskCredit
from astraflow.wire.common import (
    REASONS,
    decode_contract,
    decode_identity,
    decode_resources,
    decode_resume,
    decode_session,
    encode_contract,
    encode_identity,
    encode_resources,
    encode_resume,
    encode_session,
)
from astraflow.wire.enums import EnumTable
from astraflow.wire.fields import (
    at_least,
    invalid,
    optional,
    optional_span,
    optional_time,
    required,
    set_span,
    set_time,
)
from astraflow.wire.tasks import decode_code, decode_workflow, encode_code, encode_workflow
from astraflow.wire.weights import decode_weight_endpoint, encode_weight_endpoint
from astraflow_proto.dataflow.v1 import raas_service_pb2, trainer_service_pb2, wait_pb2

CANCEL_REASONS = EnumTable(CancelReason, raas_service_pb2.CancelReason, "CANCEL_REASON")
DISPOSITIONS = EnumTable(Disposition, raas_service_pb2.Disposition, "DISPOSITION")
BATCH_OUTCOMES = EnumTable(BatchOutcome, trainer_service_pb2.BatchOutcome, "BATCH_OUTCOME")
WAIT_CAUSES = EnumTable(WaitCause, wait_pb2.WaitCause, "WAIT_CAUSE")


def encode_join_pool(join: JoinPool) -> raas_service_pb2.JoinPoolRequest:
    """Return a JoinPool for the wire."""
    return raas_service_pb2.JoinPoolRequest(
        name=join.name,
        contract=encode_contract(join.contract),
        resume=None if join.resume is None else encode_resume(join.resume),
        capacity=join.capacity,
        policies=map(_encode_served, join.policies),
        codes=map(encode_code, join.codes),
        resources=encode_resources(join.resources),
        region=join.region,
        relay_endpoint=join.relay_endpoint,
    )


def decode_join_pool(message: raas_service_pb2.JoinPoolRequest) -> JoinPool:
    """Read a JoinPool.

    Raises:
        AstraflowError: INVALID_FIELD without a name, capacity or policy.
    """
    if not message.policies:
        raise invalid("policies", "a RaaS serves at least one")
    return JoinPool(
        name=required(message.name, "name"),
        contract=decode_contract(message.contract),
        resume=decode_resume(message.resume) if message.HasField("resume") else None,
        capacity=at_least(message.capacity, 1, "capacity"),
        policies=tuple(map(_decode_served, message.policies)),
        codes=tuple(map(decode_code, message.codes)),
        resources=decode_resources(message.resources),
        region=message.region,
        relay_endpoint=message.relay_endpoint,
    )


def _encode_served(served: ServedPolicy) -> raas_service_pb2.ServedPolicy:
    return raas_service_pb2.ServedPolicy(
        policy_id=served.policy_id,
        version=served.version,
        identity=encode_identity(served.identity),
        max_context_token_count=served.max_context_token_count,
    )


def _decode_served(message: raas_service_pb2.ServedPolicy) -> ServedPolicy:
    return ServedPolicy(
        policy_id=PolicyId(required(message.policy_id, "policy_id")),
        version=optional(message, "version"),
        identity=decode_identity(message.identity),
        max_context_token_count=at_least(
            message.max_context_token_count, 1, "max_context_token_count"
        ),
    )


def encode_pool_membership(membership: PoolMembership) -> raas_service_pb2.JoinPoolResponse:
    """Return a PoolMembership for the wire."""
    return raas_service_pb2.JoinPoolResponse(
        session=encode_session(membership.session),
        run_id=membership.run_id,
        workflows=map(encode_workflow, membership.workflows),
    )


def decode_pool_membership(message: raas_service_pb2.JoinPoolResponse) -> PoolMembership:
    """Read a PoolMembership.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
    return PoolMembership(
        session=decode_session(message.session),
        run_id=RunId(message.run_id),
        workflows=tuple(map(decode_workflow, message.workflows)),
    )


def encode_register_trainer(
    register: RegisterTrainer,
) -> trainer_service_pb2.RegisterTrainerRequest:
    """Return a RegisterTrainer for the wire."""
    return trainer_service_pb2.RegisterTrainerRequest(
        policy_id=register.policy_id,
        name=register.name,
        contract=encode_contract(register.contract),
        resume=None if register.resume is None else encode_resume(register.resume),
        identity=encode_identity(register.identity),
        groups_per_batch=register.groups_per_batch,
        checkpoint_id=register.checkpoint_id,
        last_step=register.last_step,
        version=register.version,
        weight_endpoints=map(encode_weight_endpoint, register.weight_endpoints),
        resources=encode_resources(register.resources),
        region=register.region,
    )


def decode_register_trainer(
    message: trainer_service_pb2.RegisterTrainerRequest,
) -> RegisterTrainer:
    """Read a RegisterTrainer.

    Raises:
        AstraflowError: INVALID_FIELD without a policy, or with less than one group per batch.
    """
    return RegisterTrainer(
        policy_id=PolicyId(required(message.policy_id, "policy_id")),
        name=message.name,
        contract=decode_contract(message.contract),
        resume=decode_resume(message.resume) if message.HasField("resume") else None,
        identity=decode_identity(message.identity),
        groups_per_batch=at_least(message.groups_per_batch, 1, "groups_per_batch"),
        checkpoint_id=message.checkpoint_id,
        last_step=at_least(message.last_step, 0, "last_step"),
        version=optional(message, "version"),
        weight_endpoints=tuple(map(decode_weight_endpoint, message.weight_endpoints)),
        resources=decode_resources(message.resources),
        region=message.region,
    )


def encode_trainer_registration(
    registration: TrainerRegistration,
) -> trainer_service_pb2.RegisterTrainerResponse:
    """Return a TrainerRegistration for the wire."""
    return trainer_service_pb2.RegisterTrainerResponse(
        session=encode_session(registration.session),
        run_id=registration.run_id,
        max_staleness=registration.max_staleness,
        next_version=registration.next_version,
        rolled_back_batch_count=registration.rolled_back_batch_count,
    )


def decode_trainer_registration(
    message: trainer_service_pb2.RegisterTrainerResponse,
) -> TrainerRegistration:
    """Read a TrainerRegistration.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
    return TrainerRegistration(
        session=decode_session(message.session),
        run_id=RunId(message.run_id),
        max_staleness=message.max_staleness,
        next_version=message.next_version,
        rolled_back_batch_count=message.rolled_back_batch_count,
    )


def encode_task_credit(credit: TaskCredit) -> raas_service_pb2.TaskCredit:
    """Return a TaskCredit for the wire."""
    return raas_service_pb2.TaskCredit(
        max_outstanding=credit.max_outstanding,
        max_eval_outstanding=credit.max_eval_outstanding,
        max_eval_extra=credit.max_eval_extra,
    )


def decode_task_credit(message: raas_service_pb2.TaskCredit) -> TaskCredit:
    """Read a TaskCredit.

    Raises:
        AstraflowError: INVALID_FIELD for a negative bound.
    """
    evals = optional(message, "max_eval_outstanding")
    return TaskCredit(
        max_outstanding=at_least(message.max_outstanding, 0, "max_outstanding"),
        max_eval_outstanding=(
            None if evals is None else at_least(evals, 0, "max_eval_outstanding")
        ),
        max_eval_extra=at_least(message.max_eval_extra, 0, "max_eval_extra"),
    )


def encode_task_cancellation(cancellation: TaskCancellation) -> raas_service_pb2.TaskCancellation:
    """Return a TaskCancellation for the wire."""
    return raas_service_pb2.TaskCancellation(
        task_id=cancellation.task_id,
        reason=CANCEL_REASONS.encode(cancellation.reason),
        sample_indexes=cancellation.sample_indexes,
    )


def decode_task_cancellation(message: raas_service_pb2.TaskCancellation) -> TaskCancellation:
    """Read a TaskCancellation.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
    return TaskCancellation(
        task_id=TaskId(required(message.task_id, "task_id")),
        reason=CANCEL_REASONS.decode(message.reason),
        sample_indexes=tuple(message.sample_indexes),
    )


def encode_item_ack(ack: ItemAck) -> raas_service_pb2.ItemAck:
    """Return an ItemAck for the wire."""
    return raas_service_pb2.ItemAck(
        item_id=ack.item_id,
        disposition=DISPOSITIONS.encode(ack.disposition),
        reason=None if ack.reason is None else REASONS.encode(ack.reason),
        message=ack.message,
    )


def decode_item_ack(message: raas_service_pb2.ItemAck) -> ItemAck:
    """Read an ItemAck.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
    return ItemAck(
        item_id=required(message.item_id, "item_id"),
        disposition=DISPOSITIONS.decode(message.disposition),
        reason=REASONS.decode(message.reason) if message.reason else None,
        message=message.message,
    )


def encode_stream_batches(stream: StreamBatches) -> trainer_service_pb2.StreamBatchesRequest:
    """Return a StreamBatches for the wire."""
    return trainer_service_pb2.StreamBatchesRequest(
        rank=stream.rank,
        world_size=stream.world_size,
        max_tokens=stream.max_tokens,
        max_outstanding=stream.max_outstanding,
    )


def decode_stream_batches(message: trainer_service_pb2.StreamBatchesRequest) -> StreamBatches:
    """Read a StreamBatches.

    Raises:
        AstraflowError: INVALID_FIELD for a rank that is none of the world's, or limits below 0.
    """
    if not 0 <= message.rank < message.world_size:
        raise invalid("rank", f"{message.rank} is none of {message.world_size}")
    return StreamBatches(
        rank=message.rank,
        world_size=message.world_size,
        max_tokens=at_least(message.max_tokens, 0, "max_tokens"),
        max_outstanding=at_least(message.max_outstanding, 1, "max_outstanding"),
    )


def encode_ack_batch(ack: AckBatch) -> trainer_service_pb2.AckBatchRequest:
    """Return a AckBatch for the wire."""
    message = trainer_service_pb2.AckBatchRequest(
        batch_id=ack.batch_id,
        rank=ack.rank,
        outcome=BATCH_OUTCOMES.encode(ack.outcome),
        step=ack.step,
        checkpoint_id=ack.checkpoint_id,
        metrics=ack.metrics,
    )
    set_span(message.wait_duration, ack.wait)
    set_span(message.train_duration, ack.train)
    return message


def decode_ack_batch(message: trainer_service_pb2.AckBatchRequest) -> AckBatch:
    """Read a AckBatch.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
    return AckBatch(
        batch_id=BatchId(required(message.batch_id, "batch_id")),
        outcome=BATCH_OUTCOMES.decode(message.outcome),
        rank=optional(message, "rank"),
        step=at_least(message.step, 0, "step"),
        checkpoint_id=message.checkpoint_id,
        wait=optional_span(message, "wait_duration"),
        train=optional_span(message, "train_duration"),
        metrics=dict(message.metrics),
    )


def encode_wait_reason(reason: WaitReason) -> wait_pb2.WaitReason:
    """Return a WaitReason for the wire."""
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
