"""astraflow.dataflow.v1: how a RaaS joins, takes tasks and hands in rollouts."""

from astraflow.core.ids import PolicyId, RunId, TaskId
from astraflow.core.members import JoinPool, PoolMembership, ServedPolicy
from astraflow.core.rollouts import Disposition, ItemAck
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
from astraflow.wire.fields import EnumTable, at_least, invalid, optional, required
from astraflow.wire.tasks import decode_code, decode_workflow, encode_code, encode_workflow
from astraflow_proto.dataflow.v1 import raas_service_pb2

CANCEL_REASONS = EnumTable(CancelReason, raas_service_pb2.CancelReason, "CANCEL_REASON")
DISPOSITIONS = EnumTable(Disposition, raas_service_pb2.Disposition, "DISPOSITION")


def encode_join_pool(join: JoinPool) -> raas_service_pb2.JoinPoolRequest:
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
    return raas_service_pb2.JoinPoolResponse(
        session=encode_session(membership.session),
        run_id=membership.run_id,
        workflows=map(encode_workflow, membership.workflows),
    )


def decode_pool_membership(message: raas_service_pb2.JoinPoolResponse) -> PoolMembership:
    return PoolMembership(
        session=decode_session(message.session),
        run_id=RunId(message.run_id),
        workflows=tuple(map(decode_workflow, message.workflows)),
    )


def encode_task_credit(credit: TaskCredit) -> raas_service_pb2.TaskCredit:
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
    return raas_service_pb2.TaskCancellation(
        task_id=cancellation.task_id,
        reason=CANCEL_REASONS.encode(cancellation.reason),
        sample_indexes=cancellation.sample_indexes,
    )


def decode_task_cancellation(message: raas_service_pb2.TaskCancellation) -> TaskCancellation:
    return TaskCancellation(
        task_id=TaskId(required(message.task_id, "task_id")),
        reason=CANCEL_REASONS.decode(message.reason),
        sample_indexes=tuple(message.sample_indexes),
    )


def encode_item_ack(ack: ItemAck) -> raas_service_pb2.ItemAck:
    return raas_service_pb2.ItemAck(
        item_id=ack.item_id,
        disposition=DISPOSITIONS.encode(ack.disposition),
        reason=None if ack.reason is None else REASONS.encode(ack.reason),
        message=ack.message,
    )


def decode_item_ack(message: raas_service_pb2.ItemAck) -> ItemAck:
    return ItemAck(
        item_id=required(message.item_id, "item_id"),
        disposition=DISPOSITIONS.decode(message.disposition),
        reason=REASONS.decode(message.reason) if message.reason else None,
        message=message.message,
    )
