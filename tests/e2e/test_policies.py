"""Two policies in lockstep, and a trainer that is killed."""

import pytest

from .by_hand import by_hand

pytestmark = [pytest.mark.e2e, pytest.mark.long]

LOCKSTEP = (
    "policies.solver.model.warm_up.step_count=20",
    "policies.verifier.model.warm_up.step_count=20",
    "policies.solver.trainer.step_count=400",
    "policies.verifier.trainer.step_count=400",
    "policies.solver.trainer.groups_per_batch=4",
    "policies.verifier.trainer.groups_per_batch=4",
    "evals={}",
    "hub.session_ttl_s=1",
    "relation.kind=lockstep",
    "relation.timeout_s=3",
)


def start_all(run):
    for policy in ("solver", "verifier"):
        run.start_trainer(policy)
    run.start_node(0)
    run.until(lambda: min(run.step("solver"), run.step("verifier")) >= 3)


def test_the_other_goes_on_alone_after_the_timeout(tmp_path, cache, nursery):
    with by_hand(
        "sort-pair.yaml", *LOCKSTEP, run_dir=tmp_path / "run", cache=cache, nursery=nursery
    ) as run:
        start_all(run)
        assert abs(run.step("solver") - run.step("verifier")) <= 1
        run.kill("trainer-verifier")
        killed_at = run.step("verifier")
        run.until(lambda: run.step("solver") > killed_at + 4)
        ledger = run.ledger()
    assert ledger["holds"]


def test_the_run_stops_when_it_is_told_to(tmp_path, cache, nursery):
    stop = (*LOCKSTEP, "relation.on_timeout=stop")
    with by_hand(
        "sort-pair.yaml", *stop, run_dir=tmp_path / "run", cache=cache, nursery=nursery
    ) as run:
        start_all(run)
        run.kill("trainer-verifier")
        code = run.wait("hub")
        run.wait("trainer-solver")
        ledger = run.ledger()
    assert code == 1
    assert "verifier had no trainer for 3 s" in run.last_words()
    assert ledger["holds"]
