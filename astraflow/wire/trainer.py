"""astraflow.dataflow.v1: how a trainer joins, takes batches and settles them."""

from astraflow.core.batches import AckBatch, BatchOutcome, StreamBatches
from astraflow.core.ids import BatchId, PolicyId, RunId
from astraflow.core.members import RegisterTrainer, TrainerRegistration
from astraflow.wire.common import (
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
from astraflow.wire.fields import (
    EnumTable,
    at_least,
    invalid,
    optional,
    optional_span,
    required,
    set_span,
)
from astraflow.wire.versions import decode_weight_endpoint, encode_weight_endpoint
from astraflow_proto.dataflow.v1 import trainer_service_pb2

BATCH_OUTCOMES = EnumTable(BatchOutcome, trainer_service_pb2.BatchOutcome, "BATCH_OUTCOME")


def encode_register_trainer(
    register: RegisterTrainer,
) -> trainer_service_pb2.RegisterTrainerRequest:
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
    return TrainerRegistration(
        session=decode_session(message.session),
        run_id=RunId(message.run_id),
        max_staleness=message.max_staleness,
        next_version=message.next_version,
        rolled_back_batch_count=message.rolled_back_batch_count,
    )


def encode_stream_batches(stream: StreamBatches) -> trainer_service_pb2.StreamBatchesRequest:
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
