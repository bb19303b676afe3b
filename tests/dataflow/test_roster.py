from datetime import UTC, datetime

import pytest

from astraflow.core.batches import AckBatch, BatchOutcome
from astraflow.core.errors import Failure, Reason
from astraflow.core.members import Contract, JoinPool, RaasLoad, RegisterTrainer, TrainerLoad
from astraflow.core.versions import VersionReport, VersionState
from astraflow.dataflow.members import MemberHistory

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def roster():
    roster = MemberHistory()
    join = JoinPool(name="raas-1", contract=Contract(), capacity=8, policies=())
    register = RegisterTrainer(
        policy_id="solver", name="trainer", contract=Contract(), groups_per_batch=2
    )
    roster.join("r", join, NOW)
    roster.join("t", register, NOW)
    return roster


def row_of(roster, member_id):
    return next(row for row in roster.rows(()) if row["member_id"] == member_id)


def ack(step, wait_s, train_s):
    return AckBatch(
        member_id="t",
        batch_id=f"b-{step}",
        outcome=BatchOutcome.CONSUMED,
        step=step,
        wait_s=wait_s,
        train_s=train_s,
    )


def test_who_left_stays_on_the_roster(roster):
    roster.accept("r")
    roster.leave("r", "stopped", NOW)
    row = row_of(roster, "r")
    assert (row["name"], row["role"], row["accepted_count"]) == ("raas-1", "raas", 1)
    assert (row["leave_time"], row["left_because"]) == (NOW, "stopped")


def test_a_raas_waited_as_much_as_its_reports_say_on_average(roster):
    for wait_fraction in (0.0, 0.5, 1.0):
        roster.report("r", RaasLoad(wait_fraction=wait_fraction, capacity=8))
    load = row_of(roster, "r")["load"]
    assert (load["wait_fraction"], load["capacity"]) == (0.5, 8)


@pytest.mark.parametrize("said", [float("nan"), float("inf")])
def test_a_report_that_is_no_number_does_not_count(roster, said):
    for wait_fraction in (said, 0.0, 0.75, said):
        roster.report("r", RaasLoad(wait_fraction=wait_fraction))
    assert row_of(roster, "r")["load"]["wait_fraction"] == 0.25


def test_a_trainer_waited_as_much_as_its_acks_say(roster):
    roster.train(ack(1, wait_s=3, train_s=1))
    roster.train(ack(2, wait_s=0, train_s=4))
    load = row_of(roster, "t")["load"]
    assert (load["step"], load["wait_fraction"]) == (2, 3 / 8)


def test_a_report_of_a_trainer_does_not_hide_its_acks(roster):
    roster.train(ack(1, wait_s=1, train_s=3))
    roster.report("t", TrainerLoad(step=1, tokens_per_s=9.0, wait_fraction=1.0))
    load = row_of(roster, "t")["load"]
    assert (load["step"], load["wait_fraction"], load["tokens_per_s"]) == (1, 0.25, 9.0)
    roster.train(ack(2, wait_s=1, train_s=3))
    load = row_of(roster, "t")["load"]
    assert (load["step"], load["wait_fraction"], load["tokens_per_s"]) == (2, 0.25, 9.0)


def test_the_versions_of_a_member_are_the_last_that_went_live(roster):
    for version in range(3):
        report = VersionReport(policy_id="solver", version=version, state=VersionState.LIVE)
        roster.update("r", report)
    failure = Failure(reason=Reason.DIGEST_MISMATCH)
    failed = VersionReport(
        policy_id="solver", version=3, state=VersionState.FAILED, failure=failure
    )
    roster.update("r", failed)
    row = row_of(roster, "r")
    assert row["versions"] == {"solver": 2}
    assert row["failed_versions"] == {Reason.DIGEST_MISMATCH: 1}


def test_strangers_are_ignored(roster):
    roster.accept("x")
    roster.report("x", RaasLoad())
    roster.leave("x", "", NOW)
    assert [row["member_id"] for row in roster.rows(())] == ["r", "t"]
