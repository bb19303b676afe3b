from dataclasses import replace
from datetime import UTC, datetime

from rich.console import Console

from astraflow.core.errors import Failure, Reason
from astraflow.core.members import MemberRole, MemberState, MemberStatus, RaasLoad
from astraflow.core.status import (
    FailureCause,
    FailureReport,
    PolicyStatus,
    RunState,
    RunStatus,
    WaitCause,
    WaitReason,
)
from astraflow.launch.status import curve_of, staleness_of, tables_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def status() -> RunStatus:
    policy = PolicyStatus(
        policy_id="solver",
        version=7,
        step=7,
        open_group_count=3,
        max_open_group_count=32,
        fresh_count=8,
        leased_count=0,
        trained_count=40,
        staleness_counts={0: 8, 1: 4},
        buffer_group_count=2,
        buffer_nbytes=1_500_000,
    )
    nodes = tuple(
        MemberStatus(
            member_id=name,
            name=name,
            role=MemberRole.RAAS,
            state=MemberState.LIVE,
            region=region,
            versions={"solver": version},
            load=RaasLoad(tokens_per_s=500),
            outstanding_count=5,
            max_outstanding=8,
            join_time=NOW,
            keep_alive_time=NOW,
        )
        for name, region, version in (("a", "east", 7), ("b", "west", 4), ("c", "west", 7))
    )
    return RunStatus(
        run_id="r",
        state=RunState.RUNNING,
        policies=(policy,),
        members=nodes,
        start_time=NOW,
        server_time=NOW,
    )


def test_a_table_tells_policies_pool_and_waits():
    wait = WaitReason(cause=WaitCause.NO_CREDIT, waiter_id="solver", message="no credit is left")
    console = Console(width=160, record=True, file=None)
    with console.capture() as shown:
        console.print(tables_of(status(), [wait]))
    text = shown.get()
    for words in (
        "2 groups, 1.5 MB",
        "3/32",
        "0 █▅ 1",
        "10/16",
        "1,000",
        "≤ 3",
        "no credit is left",
    ):
        assert words in text


def test_what_fails_has_a_table_and_the_traceback_of_the_worst():
    last = Failure(
        reason=Reason.SCORER_FAILED, message="it [raised]", cause="c", traceback="in line 7"
    )
    cause = FailureCause(
        cause="KeyError at a.py:7", count=312, last=last, first_time=NOW, last_time=NOW
    )
    failures = FailureReport(
        finished_count=1000,
        failed_count=300,
        recent_count=100,
        recent_failed_count=50,
        causes=(cause,),
    )
    console = Console(width=160, record=True, file=None)
    with console.capture() as shown:
        console.print(tables_of(replace(status(), failures=failures), []))
    text = shown.get()
    for words in (
        "300 of 1,000 training rollouts failed (30%), of the last 100 50%",
        "312 times",
        "KeyError at a.py:7",
        "it [raised]",
        "in line 7",
    ):
        assert words in text


def test_staleness_is_a_histogram_in_one_line():
    assert staleness_of({}) == "-"
    assert staleness_of({0: 8, 2: 4}) == "0 █▁▅ 2"


def test_a_curve_is_one_line_of_means():
    assert curve_of({3: -2.0}) == "▁ -2.000 → -2.000, steps 3 to 3"
    long = curve_of({step: float(step) for step in range(1, 1001)})
    assert long.startswith("▁")
    assert long.endswith("█ 13.000 → 988.000, steps 1 to 1,000")


def test_what_is_watched_fits_80_columns():
    console = Console(width=80)
    wait = WaitReason(cause=WaitCause.NO_CREDIT, waiter_id="solver", message="no credit is left")
    with console.capture() as shown:
        console.print(
            tables_of(status(), [wait], rewards={"solver": dict.fromkeys(range(90), 1.0)})
        )
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert "solver reward" in shown.get()
