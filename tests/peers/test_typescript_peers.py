"""Members in another language, which share nothing with ours but the contract, in a real run."""

import asyncio
import json

import pytest

from astraflow.testing import small_recipe, start_run

pytestmark = [pytest.mark.peers, pytest.mark.slow]

PROMPTS = [{"prompt": f"row {number}", "answer": "yes"} for number in range(64)]


async def join(run, script, *arguments):
    command = ["node", script, "--hub", run.address, "--token", run.join_token, *arguments]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)


async def said(peer):
    out, error = await peer.communicate()
    assert peer.returncode == 0, error.decode()
    return json.loads(out)


async def test_a_trainer_and_a_raas_in_typescript_make_a_run(typescript, tmp_path):
    recipe = small_recipe(tmp_path, scorer="exact", prompts=PROMPTS)
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        raas = await join(run, typescript / "raas.js")
        trainer = await join(run, typescript / "trainer.js")
        trained, sampled = await asyncio.gather(said(trainer), said(raas))
        await run.finish(timeout_s=200)

    assert trained == {"step": 3, "version": 3}
    (account,) = run.accounts()
    assert account.trained_count == 12
    assert sampled["rollouts"] >= 12
    assert {record.rollout.trajectories[0].engine for record in run.rollouts()} == {"random"}
