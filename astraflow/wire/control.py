"""astraflow.control.v1: the run's state, its accounting, where its rollouts are, and its scale."""

from datetime import timedelta

from astraflow.core.autoscale import (
    MemberBalance,
    PolicyBalance,
    PoolBalance,
    ScaleAction,
    ScaleAdvice,
)
from astraflow.core.ids import BatchId, MemberId, PolicyId, PromptId, RunId
from astraflow.core.members import MemberState, MemberStatus, RaasLoad, TrainerLoad
from astraflow.core.status import (
    DeadLetter,
    DropCount,
    FailureCause,
    FailureReport,
    LedgerAccount,
    PolicyCheckpoint,
    PolicyStatus,
    RolloutPlace,
    RolloutPlacement,
    RolloutRecord,
    RunState,
    RunStatus,
    SavedRun,
    StopMode,
)
from astraflow.wire.common import (
    REASONS,
    ROLES,
    decode_failure,
    decode_raas_load,
    decode_resources,
    decode_trainer_load,
    encode_failure,
    encode_raas_load,
    encode_resources,
    encode_trainer_load,
)
from astraflow.wire.fields import (
    EnumTable,
    decode_time,
    encode_span,
    encode_time,
    encode_versions,
    optional,
    optional_span,
    optional_time,
)
from astraflow.wire.rollout import decode_rollout, encode_rollout
from astraflow.wire.tasks import decode_prompt, encode_prompt
from astraflow_proto.control.v1 import control_service_pb2, ledger_pb2, run_pb2, scale_pb2

RUN_STATES = EnumTable(RunState, run_pb2.RunState, "RUN_STATE")

MEMBER_STATES = EnumTable(MemberState, run_pb2.MemberState, "MEMBER_STATE")

_FAILURE_NUMBERS = ("finished_count", "failed_count", "recent_count", "recent_failed_count")

STOP_MODES = EnumTable(StopMode, control_service_pb2.StopMode, "STOP_MODE")


def encode_stop_mode(mode: StopMode) -> control_service_pb2.StopMode:
    return STOP_MODES.encode(mode)


def decode_stop_mode(number: int) -> StopMode:
    """Read a StopMode.

    Raises:
        AstraflowError: INVALID_FIELD for an unknown one.
    """
    return STOP_MODES.decode(number)


def encode_saved_run(saved: SavedRun, *, path: str) -> control_service_pb2.SaveRunResponse:
    """Return a SavedRun for the wire, and where its own part is described."""
    return control_service_pb2.SaveRunResponse(
        path=path,
        policies=(
            control_service_pb2.PolicyCheckpoint(
                policy_id=each.policy_id,
                step=each.step,
                version=each.version,
                fresh_group_count=each.fresh_group_count,
            )
            for each in saved.policies
        ),
        drawn_counts=saved.drawn_counts,
        save_time=encode_time(saved.save_time),
    )


def decode_saved_run(
    message: control_service_pb2.SaveRunResponse, *, checkpoint_id: str
) -> tuple[SavedRun, str]:
    """Read the SavedRun that was asked for, and where its own part is described."""
    policies = tuple(
        PolicyCheckpoint(
            policy_id=PolicyId(each.policy_id),
            step=each.step,
            version=optional(each, "version"),
            fresh_group_count=each.fresh_group_count,
        )
        for each in message.policies
    )
    saved = SavedRun(
        checkpoint_id=checkpoint_id,
        policies=policies,
        drawn_counts=dict(message.drawn_counts),
        save_time=decode_time(message.save_time),
    )
    return saved, message.path


def encode_run_status(status: RunStatus) -> run_pb2.Run:
    return run_pb2.Run(
        run_id=status.run_id,
        state=RUN_STATES.encode(status.state),
        policies=map(encode_policy_status, status.policies),
        members=map(encode_member_status, status.members),
        dead_letter_count=status.dead_letter_count,
        epochs=status.epochs,
        failure=None if status.failure is None else encode_failure(status.failure),
        failures=encode_failures(status.failures),
        start_time=encode_time(status.start_time),
        server_time=encode_time(status.server_time),
    )


def encode_failures(report: FailureReport) -> run_pb2.Failures:
    causes = (
        run_pb2.FailureCause(
            cause=each.cause,
            count=each.count,
            last=encode_failure(each.last),
            first_time=encode_time(each.first_time),
            last_time=encode_time(each.last_time),
        )
        for each in report.causes
    )
    numbers = {name: getattr(report, name) for name in _FAILURE_NUMBERS}
    return run_pb2.Failures(causes=causes, **numbers)


def decode_failures(message: run_pb2.Failures) -> FailureReport:
    """Read a FailureReport.

    Raises:
        AstraflowError: INVALID_FIELD for an unknown reason.
    """
    causes = tuple(
        FailureCause(
            cause=each.cause,
            count=each.count,
            last=decode_failure(each.last),
            first_time=decode_time(each.first_time),
            last_time=decode_time(each.last_time),
        )
        for each in message.causes
    )
    return FailureReport(
        causes=causes, **{name: getattr(message, name) for name in _FAILURE_NUMBERS}
    )


def decode_run_status(message: run_pb2.Run) -> RunStatus:
    return RunStatus(
        run_id=RunId(message.run_id),
        state=RUN_STATES.decode(message.state),
        policies=tuple(map(decode_policy_status, message.policies)),
        members=tuple(map(decode_member_status, message.members)),
        dead_letter_count=message.dead_letter_count,
        epochs=dict(message.epochs),
        failure=decode_failure(message.failure) if message.HasField("failure") else None,
        failures=decode_failures(message.failures),
        start_time=decode_time(message.start_time),
        server_time=decode_time(message.server_time),
    )


_POLICY_NUMBERS = (
    "step",
    "open_group_count",
    "max_open_group_count",
    "fresh_count",
    "leased_count",
    "trained_count",
    "replay_count",
    "wait_fraction",
    "tokens_per_s",
    "buffer_group_count",
    "buffer_nbytes",
    "replay_nbytes",
    "leased_batch_count",
    "filtered_group_count",
)


def encode_policy_status(status: PolicyStatus) -> run_pb2.PolicyStatus:
    return run_pb2.PolicyStatus(
        policy_id=status.policy_id,
        version=status.version,
        mean_reward=status.mean_reward,
        drops=map(encode_drop, status.drops),
        staleness_counts=status.staleness_counts,
        metrics=status.metrics,
        window=encode_span(status.window),
        **{name: getattr(status, name) for name in _POLICY_NUMBERS},
    )


def decode_policy_status(message: run_pb2.PolicyStatus) -> PolicyStatus:
    return PolicyStatus(
        policy_id=PolicyId(message.policy_id),
        version=optional(message, "version"),
        mean_reward=optional(message, "mean_reward"),
        drops=tuple(map(decode_drop, message.drops)),
        staleness_counts=dict(message.staleness_counts),
        metrics=dict(message.metrics),
        window=optional_span(message, "window") or timedelta(),
        **{name: getattr(message, name) for name in _POLICY_NUMBERS},
    )


def encode_drop(drop: DropCount) -> run_pb2.DropCount:
    return run_pb2.DropCount(
        reason=REASONS.encode(drop.reason), filter=drop.filter, count=drop.count
    )


def decode_drop(message: run_pb2.DropCount) -> DropCount:
    """Read a DropCount.

    Raises:
        AstraflowError: INVALID_FIELD for an unknown reason.
    """
    return DropCount(
        reason=REASONS.decode(message.reason), filter=message.filter, count=message.count
    )


def encode_member_status(status: MemberStatus) -> run_pb2.Member:
    load = status.load
    return run_pb2.Member(
        member_id=status.member_id,
        name=status.name,
        role=ROLES.encode(status.role),
        state=MEMBER_STATES.encode(status.state),
        region=status.region,
        versions=encode_versions(status.versions),
        resources=encode_resources(status.resources),
        raas=encode_raas_load(load) if isinstance(load, RaasLoad) else None,
        trainer=encode_trainer_load(load) if isinstance(load, TrainerLoad) else None,
        accepted_count=status.accepted_count,
        reissued_count=status.reissued_count,
        outstanding_count=status.outstanding_count,
        max_outstanding=status.max_outstanding,
        join_time=encode_time(status.join_time),
        keep_alive_time=encode_time(status.keep_alive_time),
    )


def decode_member_status(message: run_pb2.Member) -> MemberStatus:
    return MemberStatus(
        member_id=MemberId(message.member_id),
        name=message.name,
        role=ROLES.decode(message.role),
        state=MEMBER_STATES.decode(message.state),
        region=message.region,
        versions={PolicyId(name): version for name, version in message.versions.items()},
        resources=decode_resources(message.resources),
        load=_load(message),
        accepted_count=message.accepted_count,
        reissued_count=message.reissued_count,
        outstanding_count=message.outstanding_count,
        max_outstanding=message.max_outstanding,
        join_time=decode_time(message.join_time),
        keep_alive_time=decode_time(message.keep_alive_time),
    )


def _load(message: run_pb2.Member) -> RaasLoad | TrainerLoad | None:
    match message.WhichOneof("load"):
        case "raas":
            return decode_raas_load(message.raas)
        case "trainer":
            return decode_trainer_load(message.trainer)
        case _:
            return None


PLACES = EnumTable(RolloutPlace, ledger_pb2.RolloutPlace, "ROLLOUT_PLACE")

_ACCOUNT_NUMBERS = tuple(
    name for name in LedgerAccount.__slots__ if name not in ("policy_id", "drops")
)


def encode_ledger_account(account: LedgerAccount) -> ledger_pb2.LedgerAccount:
    return ledger_pb2.LedgerAccount(
        policy_id=account.policy_id,
        drops=map(encode_drop, account.drops),
        balanced=account.is_balanced,
        **{name: getattr(account, name) for name in _ACCOUNT_NUMBERS},
    )


def decode_ledger_account(message: ledger_pb2.LedgerAccount) -> LedgerAccount:
    """Read a LedgerAccount; whether it balances is counted again here.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
    return LedgerAccount(
        policy_id=PolicyId(message.policy_id),
        drops=tuple(map(decode_drop, message.drops)),
        **{name: getattr(message, name) for name in _ACCOUNT_NUMBERS},
    )


def encode_rollout_record(
    record: RolloutRecord, *, with_trajectories: bool = True
) -> ledger_pb2.RolloutRecord:
    """Return a RolloutRecord for the wire, whole or without its trajectories."""
    rollout = encode_rollout(record.rollout)
    if not with_trajectories:
        rollout.ClearField("trajectories")
    return ledger_pb2.RolloutRecord(
        rollout=rollout,
        prompt_id=record.prompt_id,
        member_id=record.member_id,
        placements=map(_encode_placement, record.placements),
    )


def decode_rollout_record(message: ledger_pb2.RolloutRecord) -> RolloutRecord:
    """Read a RolloutRecord that was sent whole.

    Raises:
        AstraflowError: INVALID_FIELD, ROLLOUT_INVALID.
    """
    return RolloutRecord(
        rollout=decode_rollout(message.rollout),
        prompt_id=PromptId(message.prompt_id),
        member_id=MemberId(message.member_id),
        placements=tuple(map(_decode_placement, message.placements)),
    )


def _encode_placement(placement: RolloutPlacement) -> ledger_pb2.RolloutPlacement:
    reason = placement.reason
    return ledger_pb2.RolloutPlacement(
        policy_id=placement.policy_id,
        place=PLACES.encode(placement.place),
        batch_id=placement.batch_id or "",
        step=placement.step,
        staleness=placement.staleness,
        use_count=placement.use_count,
        reason=None if reason is None else REASONS.encode(reason),
        filter=placement.filter,
    )


def _decode_placement(message: ledger_pb2.RolloutPlacement) -> RolloutPlacement:
    return RolloutPlacement(
        policy_id=PolicyId(message.policy_id),
        place=PLACES.decode(message.place),
        batch_id=BatchId(message.batch_id) if message.batch_id else None,
        step=optional(message, "step"),
        staleness=optional(message, "staleness"),
        use_count=message.use_count,
        reason=REASONS.decode(message.reason) if message.reason else None,
        filter=message.filter,
    )


def encode_dead_letter(letter: DeadLetter) -> ledger_pb2.DeadLetter:
    return ledger_pb2.DeadLetter(
        prompt=encode_prompt(letter.prompt),
        attempt_count=letter.attempt_count,
        failures=map(encode_failure, letter.failures),
        create_time=encode_time(letter.create_time),
    )


def decode_dead_letter(message: ledger_pb2.DeadLetter) -> DeadLetter:
    return DeadLetter(
        prompt=decode_prompt(message.prompt),
        attempt_count=message.attempt_count,
        failures=tuple(map(decode_failure, message.failures)),
        create_time=decode_time(message.create_time),
    )


SCALE_ACTIONS = EnumTable(ScaleAction, scale_pb2.ScaleAction, "SCALE_ACTION")

_COUNTS = ("produced_count", "entered_count", "consumed_count", "stale_count")


def encode_advice(advice: ScaleAdvice) -> scale_pb2.ScaleAdvice:
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
