"""astraflow.control.v1: the books of a run, and where its rollouts are."""

from astraflow.core.ids import BatchId, MemberId, PolicyId, PromptId
from astraflow.core.status import (
    DeadLetter,
    LedgerAccount,
    RolloutPlace,
    RolloutPlacement,
    RolloutRecord,
)
from astraflow.wire.common import REASONS, decode_failure, encode_failure
from astraflow.wire.control import decode_drop, encode_drop
from astraflow.wire.enums import EnumTable
from astraflow.wire.fields import decode_time, encode_time, optional
from astraflow.wire.rollout import decode_rollout, encode_rollout
from astraflow.wire.tasks import decode_prompt, encode_prompt
from astraflow_proto.control.v1 import ledger_pb2

PLACES = EnumTable(RolloutPlace, ledger_pb2.RolloutPlace, "ROLLOUT_PLACE")
_ACCOUNT_NUMBERS = tuple(
    name for name in LedgerAccount.__slots__ if name not in ("policy_id", "drops")
)


def encode_ledger_account(account: LedgerAccount) -> ledger_pb2.LedgerAccount:
    """Return a LedgerAccount for the wire."""
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
    """Return a DeadLetter for the wire."""
    return ledger_pb2.DeadLetter(
        prompt=encode_prompt(letter.prompt),
        attempt_count=letter.attempt_count,
        failures=map(encode_failure, letter.failures),
        create_time=encode_time(letter.create_time),
    )


def decode_dead_letter(message: ledger_pb2.DeadLetter) -> DeadLetter:
    """Read a DeadLetter.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
    return DeadLetter(
        prompt=decode_prompt(message.prompt),
        attempt_count=message.attempt_count,
        failures=tuple(map(decode_failure, message.failures)),
        create_time=decode_time(message.create_time),
    )
