"""Taking a trainer's place in a run."""

import asyncio
import threading
from contextlib import contextmanager

import pytest

from astraflow.client.loop_thread import LoopThread
from astraflow.config.recipe import TrainerConfig
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.testing import small_recipe, start_run
from astraflow.testing.trainer import counting
from astraflow.trainers import joining
from astraflow.trainers.origin import Publishing
from astraflow.weights.publish.publisher import WeightPublisher

POLICY = PolicyId("solver")


@contextmanager
def joined(run, **place):
    publishing = Publishing(WeightPublisher(POLICY, counting()[0]))
    where = joining.TrainerPlace(
        hub=run.address, token=run.join_token, run_dir=RunDir(run.run_dir.root), **place
    )
    settings = TrainerConfig(groups_per_batch=2)
    with (
        LoopThread() as loop,
        joining.joined(
            POLICY, settings, where, publishing, loop, capabilities=frozenset(), metrics_address=""
        ) as client,
    ):
        yield client


@pytest.mark.parametrize(("ttl_s", "is_patient"), [(10.0, False), (200.0, True)])
async def test_who_resumes_waits_for_as_long_as_the_session_before_may_last(
    tmp_path, monkeypatch, ttl_s, is_patient
):
    """Time is that of the pauses between two tries, a hundred seconds each."""
    leaves, has_left, pauses = threading.Event(), threading.Event(), []
    monkeypatch.setattr(joining, "monotonic", lambda: 100.0 * len(pauses))

    def pause(_):
        pauses.append(len(pauses))
        if len(pauses) == 2:
            leaves.set()
            has_left.wait()

    monkeypatch.setattr(joining, "sleep", pause)

    def before(run, has_joined):
        with joined(run):
            has_joined.set()
            leaves.wait()
        has_left.set()

    def after(run):
        with joined(run, is_resuming=True, session_ttl_s=ttl_s):
            return "joined"

    async with start_run(small_recipe(tmp_path, scorer="exact"), run_dir=tmp_path / "run") as run:
        has_joined = threading.Event()
        first = run.add_thread(lambda: before(run, has_joined))
        await asyncio.to_thread(has_joined.wait)
        second = run.add_thread(lambda: _outcome(after, run))
        outcome = await second
        leaves.set()
        await first
    assert outcome == ("joined" if is_patient else Reason.POLICY_TAKEN)


def _outcome(code, run):
    try:
        return code(run)
    except AstraflowError as error:
        return error.reason
