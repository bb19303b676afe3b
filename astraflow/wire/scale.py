"""astraflow.control.v1, scale: how large the pool should be."""

from datetime import timedelta

from astraflow.core.autoscale import MemberBalance, ScaleAction, ScaleAdvice
from astraflow.core.ids import MemberId, PolicyId
from astraflow.core.pool_size import PolicyBalance, PoolBalance
from astraflow.wire.enums import EnumTable
from astraflow.wire.fields import encode_span, encode_time, optional, optional_span, optional_time
from astraflow_proto.control.v1 import scale_pb2

SCALE_ACTIONS = EnumTable(ScaleAction, scale_pb2.ScaleAction, "SCALE_ACTION")

_COUNTS = ("produced_count", "entered_count", "consumed_count", "stale_count")


def encode_advice(advice: ScaleAdvice) -> scale_pb2.ScaleAdvice:
    """Return a ScaleAdvice for the wire."""
    balance, cooldown = advice.balance, advice.cooldown_time
    return scale_pb2.ScaleAdvice(
        action=SCALE_ACTIONS.encode(advice.action),
        accelerator_count=advice.accelerator_count,
        target_accelerator_count=advice.target_accelerator_count,
        member_count=advice.member_count,
        target_member_count=advice.target_member_count,
        wait_fraction=balance.wait_fraction,
        busy_fraction=balance.busy_fraction,
        members=(_encode_member(m, retire=m.member_id in advice.retired) for m in advice.members),
        policies=map(_encode_policy, balance.policies),
        message=advice.message,
        window=encode_span(balance.span),
        cooldown_time=None if cooldown is None else encode_time(cooldown),
        **{name: sum(getattr(policy, name) for policy in balance.policies) for name in _COUNTS},
    )


def decode_advice(message: scale_pb2.ScaleAdvice) -> ScaleAdvice:
    """Read a ScaleAdvice; the hub's own measures of speed are not on the wire.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
    return ScaleAdvice(
        action=SCALE_ACTIONS.decode(message.action),
        accelerator_count=message.accelerator_count,
        target_accelerator_count=message.target_accelerator_count,
        member_count=message.member_count,
        target_member_count=message.target_member_count,
        balance=PoolBalance(
            span=optional_span(message, "window") or timedelta(),
            accelerator_count=float(message.accelerator_count),
            busy_fraction=message.busy_fraction,
            policies=tuple(map(_decode_policy, message.policies)),
        ),
        members=tuple(map(_decode_member, message.members)),
        retired=frozenset(MemberId(m.member_id) for m in message.members if m.retire),
        message=message.message,
        cooldown_time=optional_time(message, "cooldown_time"),
    )


def _encode_policy(policy: PolicyBalance) -> scale_pb2.PolicyAdvice:
    return scale_pb2.PolicyAdvice(
        policy_id=policy.policy_id,
        wait_fraction=policy.wait_fraction,
        **{name: getattr(policy, name) for name in _COUNTS},
    )


def _decode_policy(message: scale_pb2.PolicyAdvice) -> PolicyBalance:
    return PolicyBalance(
        policy_id=PolicyId(message.policy_id),
        wait_fraction=message.wait_fraction,
        **{name: getattr(message, name) for name in _COUNTS},
    )


def _encode_member(member: MemberBalance, *, retire: bool) -> scale_pb2.MemberAdvice:
    return scale_pb2.MemberAdvice(
        member_id=member.member_id,
        name=member.name,
        accelerator_count=member.accelerator_count,
        produced_count=member.produced_count,
        accepted_count=member.produced_count,
        tokens_per_s=member.tokens_per_s,
        price_per_hour=member.price_per_hour,
        inflight_count=member.inflight_count,
        retire=retire,
        live=member.is_live,
    )


def _decode_member(message: scale_pb2.MemberAdvice) -> MemberBalance:
    return MemberBalance(
        member_id=MemberId(message.member_id),
        name=message.name,
        accelerator_count=message.accelerator_count,
        produced_count=message.produced_count,
        tokens_per_s=message.tokens_per_s,
        price_per_hour=optional(message, "price_per_hour"),
        inflight_count=message.inflight_count,
        is_live=message.live,
    )
