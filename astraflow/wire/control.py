"""astraflow.control.v1 and evals.v1: a run's state, accounts, rollouts, scale and evaluations."""

from datetime import timedelta

from astraflow.core.autoscale import (
    MemberBalance,
    PolicyBalance,
    PoolBalance,
    ScaleAction,
    ScaleAdvice,
)
from astraflow.core.evals import EvalRun, EvalSuiteInfo
from astraflow.core.events import EvalCreated
from astraflow.core.ids import MemberId
from astraflow.core.status import (
    DeadLetter,
    LedgerAccount,
    PolicyCheckpoint,
    RolloutQuery,
    RolloutRecord,
    RunStatus,
    SavedRun,
    StopMode,
)
from astraflow.wire.converters import FieldRule, converter
from astraflow.wire.fields import (
    EnumTable,
    decode_time,
    encode_span,
    encode_time,
    optional_span,
    optional_time,
    required,
)
from astraflow_proto.control.v1 import (
    control_service_pb2,
    ledger_pb2,
    ledger_service_pb2,
    run_pb2,
    scale_pb2,
)
from astraflow_proto.evals.v1 import eval_pb2, eval_service_pb2

STOP_MODES = EnumTable(StopMode, control_service_pb2.StopMode, "STOP_MODE")

encode_run_status, decode_run_status = converter(RunStatus, run_pb2.Run)

encode_ledger_account, decode_ledger_account = converter(
    LedgerAccount, ledger_pb2.LedgerAccount, is_balanced=FieldRule(name="balanced")
)

encode_dead_letter, decode_dead_letter = converter(DeadLetter, ledger_pb2.DeadLetter)

encode_rollout_record, decode_rollout_record = converter(RolloutRecord, ledger_pb2.RolloutRecord)

encode_rollout_query, decode_rollout_query = converter(
    RolloutQuery,
    ledger_service_pb2.ListRolloutsRequest,
    without={"view", "page_size", "page_token"},
)

_encode_checkpoint, _decode_checkpoint = converter(
    PolicyCheckpoint, control_service_pb2.PolicyCheckpoint
)


def encode_saved_run(saved: SavedRun, *, path: str) -> control_service_pb2.SaveRunResponse:
    """Return a SavedRun for the wire, and where its own part is described."""
    return control_service_pb2.SaveRunResponse(
        path=path,
        policies=map(_encode_checkpoint, saved.policies),
        drawn_counts=saved.drawn_counts,
        save_time=encode_time(saved.save_time),
    )


def decode_saved_run(
    message: control_service_pb2.SaveRunResponse, *, checkpoint_id: str
) -> tuple[SavedRun, str]:
    """Read the SavedRun that was asked for, and where its own part is described."""
    saved = SavedRun(
        checkpoint_id=checkpoint_id,
        policies=tuple(map(_decode_checkpoint, message.policies)),
        drawn_counts=dict(message.drawn_counts),
        save_time=decode_time(message.save_time),
    )
    return saved, message.path


SCALE_ACTIONS = EnumTable(ScaleAction, scale_pb2.ScaleAction, "SCALE_ACTION")
_COUNTS = ("produced_count", "entered_count", "consumed_count", "stale_count")

_encode_policy, _decode_policy = converter(PolicyBalance, scale_pb2.PolicyAdvice)

_encode_member, _decode_member = converter(
    MemberBalance,
    scale_pb2.MemberAdvice,
    without={"accepted_count", "retire"},
    is_live=FieldRule(name="live"),
)


def encode_advice(advice: ScaleAdvice) -> scale_pb2.ScaleAdvice:
    balance, cooldown = advice.balance, advice.cooldown_time
    message = scale_pb2.ScaleAdvice(
        action=SCALE_ACTIONS.encode(advice.action),
        accelerator_count=advice.accelerator_count,
        target_accelerator_count=advice.target_accelerator_count,
        member_count=advice.member_count,
        target_member_count=advice.target_member_count,
        wait_fraction=balance.wait_fraction,
        busy_fraction=balance.busy_fraction,
        members=map(_encode_member, advice.members),
        policies=map(_encode_policy, balance.policies),
        message=advice.message,
        window=encode_span(balance.span),
        cooldown_time=None if cooldown is None else encode_time(cooldown),
        **{name: sum(getattr(policy, name) for policy in balance.policies) for name in _COUNTS},
    )
    for member in message.members:
        member.accepted_count = member.produced_count
        member.retire = member.member_id in advice.retired
    return message


def decode_advice(message: scale_pb2.ScaleAdvice) -> ScaleAdvice:
    """Read a ScaleAdvice; the hub's own measures of speed are not on the wire."""
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


encode_eval_run, decode_eval_run = converter(EvalRun, eval_pb2.EvalRun, eval_run_id=required)

encode_eval_suite, decode_eval_suite = converter(EvalSuiteInfo, eval_pb2.EvalSuite, suite=required)

encode_eval_created, decode_eval_created = converter(
    EvalCreated, eval_service_pb2.CreateEvalRunRequest, request_id=required
)
