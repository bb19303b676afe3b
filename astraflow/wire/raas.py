"""astraflow.dataflow.v1: how a RaaS joins, takes tasks and hands in rollouts."""

from astraflow.core.members import JoinPool, PoolMembership, ServedPolicy
from astraflow.core.rollouts import ItemAck
from astraflow.core.tasks import TaskCancellation, TaskCredit
from astraflow.wire.converters import converter, least
from astraflow.wire.fields import invalid, required
from astraflow_proto.dataflow.v1 import raas_service_pb2

encode_served, decode_served = converter(
    ServedPolicy,
    raas_service_pb2.ServedPolicy,
    policy_id=required,
    max_context_token_count=least(1),
)


def _must_serve(join: JoinPool) -> None:
    if not join.policies:
        raise invalid("policies", "a RaaS serves at least one")


encode_join_pool, decode_join_pool = converter(
    JoinPool,
    raas_service_pb2.JoinPoolRequest,
    without={"relay_lanes"},
    check=_must_serve,
    name=required,
    capacity=least(1),
)

encode_pool_membership, decode_pool_membership = converter(
    # What is in the store is a matter of members, not of the run.
    PoolMembership,
    raas_service_pb2.JoinPoolResponse,
    without={"payload_store"},
)

encode_task_credit, decode_task_credit = converter(
    TaskCredit,
    raas_service_pb2.TaskCredit,
    without={"member_id"},
    max_outstanding=least(0),
    max_eval_outstanding=least(0),
    max_eval_extra=least(0),
)

encode_task_cancellation, decode_task_cancellation = converter(
    TaskCancellation, raas_service_pb2.TaskCancellation, task_id=required
)

encode_item_ack, decode_item_ack = converter(ItemAck, raas_service_pb2.ItemAck, item_id=required)
