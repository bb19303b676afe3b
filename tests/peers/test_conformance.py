"""Our own members and those in other languages keep the contract; broken ones are told by name."""

import asyncio
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from astraflow.conformance.checks import CheckVerdict
from astraflow.conformance.commands import RAAS, TRAINER, CheckTerms, examine

PYTHON = Path(__file__).parent / "python"
ROLES = {"trainer": TRAINER, "raas": RAAS}

# They wait most of the time; a trainer of ours takes one of the few threads of the loop.
AT_ONCE = 2

# What is broken, and the check that says so.
BROKEN = {
    "trainer": {
        "skips_version": "versions.next",
        "lies_about_digest": "weights.state",
        "corrupt_chunk": "weights.chunks",
        "never_acks": "batches.acked",
        "acks_early": "batches.backpressure",
        "hoards": "batches.backpressure",
    },
    "raas": {
        "trusts_chunks": "weights.corrupt_chunk",
        "lies_about_capacity": "tasks.credit",
        "repeats_itself": "rollouts.backpressure",
        "never_resends": "rollouts.redelivered",
        "never_reconciles": "tasks.recovered",
    },
}

pytestmark = pytest.mark.slow


async def findings(role, command, *, patience_s=30.0, turn=None):
    """Return what failed, by name, with what was seen."""
    async with turn or nullcontext():
        checks = await examine(ROLES[role], CheckTerms(command=command, patience_s=patience_s))
    if checks.are_kept:
        return {}
    return {
        check.name: check.seen for check in checks.all if check.verdict is not CheckVerdict.PASSED
    }


@pytest.mark.parametrize("role", ROLES)
async def test_our_own_member_passes_every_check(role):
    script = PYTHON / f"{role}.py"

    assert await findings(role, f"{sys.executable} {script} {{hub}} {{token}}") == {}


@pytest.mark.peers
@pytest.mark.parametrize("role", ROLES)
async def test_a_member_in_another_language_passes_every_check(peers, role):
    assert await findings(role, command(peers, role)) == {}


@pytest.mark.long
@pytest.mark.peers
@pytest.mark.parametrize("role", ROLES)
async def test_a_broken_member_fails_the_check_that_names_what_is_wrong(typescript, role):
    faults = BROKEN[role]
    turn = asyncio.Semaphore(AT_ONCE)
    found = await asyncio.gather(
        *(
            findings(role, f"{command(typescript, role)} --fault {fault}", patience_s=5, turn=turn)
            for fault in faults
        )
    )

    told = {fault: [*filter(seen.get, seen)] for fault, seen in zip(faults, found, strict=True)}
    assert {fault: names[:1] for fault, names in told.items()} == {
        fault: [name] for fault, name in faults.items()
    }


def command(peers, role):
    return f"{peers[role]} --hub {{hub}} --token {{token}}"
