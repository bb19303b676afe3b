"""An environment of verifiers, in the interpreter that has it, is the workflow."""

import json
import os
import sys
from pathlib import Path

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.testing import CharTokenizer
from astraflow.workflows.agents.verifiers import Verifiers, export_rows
from astraflow.workflows.rewards.compare import Exact
from astraflow.workflows.scoring import GuardedScorer

ENVIRONMENTS = Path(__file__).parent / "environments"
# By the folder of the release.
ENVIRONMENT_OF = {"verifiers": "spelling", "verifiers-0.1": "spelling-rows"}
pytestmark = [pytest.mark.slow, pytest.mark.verifiers]


@pytest.fixture(scope="module", params=ENVIRONMENT_OF)
def release(request):
    return request.param


@pytest.fixture(scope="module")
def python(release):
    """Return an interpreter that `scripts/install_verifiers.py` made."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    found = Path(base, "astraflow", release, "bin", "python")
    if not found.exists():
        pytest.skip("verifiers is not installed; run scripts/install_verifiers.py")
    return str(found)


@pytest.fixture(scope="module")
def rows(release, python, tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "train.jsonl"
    os.environ["PYTHONPATH"], before = str(ENVIRONMENTS), os.environ.get("PYTHONPATH")
    try:
        name = ENVIRONMENT_OF[release]
        count = export_rows(path, name, {}, split="train", python=python)
    finally:
        os.environ["PYTHONPATH"] = before or ""
    made = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert count == len(made)
    return made


@pytest.fixture
async def workflow(release, python, door):
    made = []

    def make(**options):
        env = {"PYTHONPATH": str(ENVIRONMENTS)}
        name = ENVIRONMENT_OF[release]
        options = Verifiers.Options(environment=name, python=python, env=env, **options)
        made.append(Verifiers(options, None))
        return made[-1]

    yield make
    for each in made:
        await each.close()


async def test_the_reward_of_an_environment_is_that_of_the_rollout(workflow, rows, served_episode):
    assert [row["answer"] for row in rows] == ["cba", "pots", "level"]
    spelling = workflow(persistent=1, attempts=1)
    for row, reply, reward in ((rows[1], "pots", 1.0), (rows[0], "abcd", 0.0)):
        run = served_episode(row, lambda text, reply=reply: reply)
        score = await spelling.run(run)
        assert score.reward == {**score.parts, **score.metrics}["is_right"] == reward
        assert score.metrics["letters"] == 4.0
        (trajectory,) = run.trajectories()
        told = CharTokenizer().decode(trajectory.tokens)
        assert told == f"Spell {row['answer'][::-1]} backwards.{reply}"
        assert trajectory.sampled_mask.sum() == len(reply)
    # What fails in an environment is no reward of zero; the process that stays serves on.
    stranger = {"id": "of another release", "idx": 0}
    with pytest.raises(AstraflowError, match="the agent gave up") as caught:
        await spelling.run(served_episode(stranger, str))
    assert caught.value.reason is Reason.ENVIRONMENT_FAILED


@pytest.mark.parametrize("release", ["verifiers"], indirect=True)
def test_an_environment_that_is_not_there_says_so(python, tmp_path):
    with pytest.raises(AstraflowError, match=r"no.such.environment"):
        export_rows(tmp_path / "x", "no-such-environment", {}, split="train", python=python)


def test_what_cannot_be_started_is_told_before_a_rollout(tmp_path):
    with pytest.raises(AstraflowError, match="verifiers"):
        export_rows(tmp_path / "x", "spelling", {}, split="train", python=sys.executable)
    with pytest.raises(AstraflowError, match="cannot be started"):
        export_rows(tmp_path / "x", "spelling", {}, split="train", python="no-such-python")
    with pytest.raises(AstraflowError, match="rubric"):
        Verifiers(
            Verifiers.Options(environment="spelling"),
            GuardedScorer(Exact(Exact.Options()), name="exact"),
        )
