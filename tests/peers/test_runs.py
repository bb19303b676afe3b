"""Members in other languages, which share nothing with ours but the contract, in real runs."""

import asyncio
import json
import shlex
from functools import partial

import numpy as np
import pytest

from astraflow.core.tensors import Dtype, Layout
from astraflow.testing import small_recipe, start_run, train_counter

pytestmark = [pytest.mark.peers, pytest.mark.slow]

PROMPTS = [{"prompt": f"row {number}", "answer": "yes"} for number in range(64)]


async def join(run, command, *, line=None):
    address = run.address if line is None else line.address
    parts = [*shlex.split(command), "--hub", address, "--token", run.join_token]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*parts, stdout=pipe, stderr=pipe)


async def said(peer):
    out, error = await peer.communicate()
    assert peer.returncode == 0, error.decode()
    return json.loads(out)


async def test_a_trainer_and_a_raas_of_one_language_make_a_run(peers, tmp_path):
    recipe = small_recipe(tmp_path, scorer="exact", prompts=PROMPTS)
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        raas = await join(run, peers["raas"])
        trainer = await join(run, peers["trainer"])
        trained, sampled = await asyncio.gather(said(trainer), said(raas))
        await run.finish(timeout_s=200)

    assert trained == {"step": 3, "version": 3}
    (account,) = run.accounts()
    assert account.trained_count == 12
    assert sampled["rollouts"] >= 12


def wandering(version):
    """Return weights of which about a tenth differs from those before, by little or by much."""
    rng = np.random.default_rng(version)
    bits = np.arange(1 << 15, dtype=np.uint16)
    at = rng.random(bits.size) < 0.05
    bits[at] ^= rng.integers(1, 1 << 12, at.sum(), np.uint16) >> rng.choice(12, at.sum()).astype(
        np.uint16
    )
    return {"w": bits}


async def test_a_raas_takes_the_patches_of_our_trainer(peers, tmp_path):
    changes = {"policies.solver.trainer.step_count": 12}
    recipe = small_recipe(tmp_path, scorer="exact", prompts=PROMPTS, changes=changes)
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        raas = await join(run, peers["raas"])
        weights = Layout.of([("w", Dtype.BF16, (1 << 15,))]), wandering
        train = partial(train_counter, run.address, token=run.join_token, weights=weights)
        run.add_thread(train)
        sampled = await said(raas)
        await run.finish(timeout_s=200)

    assert sampled["rollouts"] >= 48
    versions = {record.rollout.policy_versions["solver"] for record in run.rollouts()}
    assert max(versions) >= 9


async def test_our_node_takes_the_versions_of_a_trainer(peers, tmp_path):
    recipe = small_recipe(tmp_path, scorer="exact", prompts=PROMPTS)
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await run.add_node()
        trainer = await join(run, peers["trainer"])
        assert await said(trainer) == {"step": 3, "version": 3}
        await run.finish(timeout_s=200)


async def test_members_go_on_where_their_lines_were_cut(peers, tmp_path):
    changes = {"policies.solver.trainer.step_count": 12}
    recipe = small_recipe(tmp_path, scorer="exact", prompts=PROMPTS, changes=changes)
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        lines = [await run.open_line(), await run.open_line()]
        raas = await join(run, peers["raas"], line=lines[0])
        trainer = await join(run, peers["trainer"], line=lines[1])
        for count in range(2, 11, 2):
            await lines[1].until(lambda: lines[1].calls["AckBatch"] >= count)  # noqa: B023 - awaited
            for line in lines:
                line.cut()
        trained, _ = await asyncio.gather(said(trainer), said(raas))
        await run.finish(timeout_s=200)

    assert trained == {"step": 12, "version": 12}
    (account,) = run.accounts()
    assert account.trained_count == 48


async def test_tasks_that_a_cut_swallowed_are_played(peers, tmp_path):
    recipe = small_recipe(tmp_path, scorer="exact", prompts=PROMPTS)
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        line = await run.open_line()
        line.stretch(0.4)
        raas = await join(run, peers["raas"], line=line)
        run.add_trainer()
        while not run.accounts()[0].issued_count:  # noqa: ASYNC110 - it is the hub's
            await asyncio.sleep(0.01)
        # They are on the way.
        line.cut()
        line.stretch(0.0)
        await said(raas)
        await run.finish(timeout_s=200)

    assert run.accounts()[0].trained_count == 12
