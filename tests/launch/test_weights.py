"""The weights of a live run, as the command line shows and pulls them."""

import asyncio
import json
import os

import pytest

from astraflow.config.loader import dump_recipe
from astraflow.config.run_dir import HubEndpoint, RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.weights import (
    pull_version,
    show_diff,
    show_version,
    show_versions,
    verify_weights,
)
from astraflow.storage.weight_files import read_weights
from astraflow.testing import small_recipe, start_run


@pytest.fixture
async def run(tmp_path):
    recipe = small_recipe(
        tmp_path,
        workflow="single_turn",
        prompts=[{"prompt": str(n)} for n in range(8)],
        changes={"policies.solver.trainer.step_count": 3},
    )
    folder = RunDir(tmp_path / "run")
    async with start_run(recipe, run_dir=folder.root) as run:
        folder.write_endpoint(
            HubEndpoint(
                address=run.address,
                pid=os.getpid(),
                operator_token=run.operator_token,
                join_token=run.join_token,
            )
        )
        folder.recipe.write_text(dump_recipe(recipe))
        run.add_trainer()
        control = await run.control()
        while not await control.versions("solver"):  # noqa: ASYNC110  an operator cannot watch them
            await asyncio.sleep(0)
        yield folder


async def test_a_version_is_listed_inspected_pulled_verified_and_compared(run, tmp_path, capsys):
    def printed():
        # The hub of this test logs to the same place.
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    await show_versions(run, policy=None, as_json=True)
    assert [(row["policy_id"], row["version"]) for row in printed()] == [("solver", 0)]
    await show_version(run, policy=None, version=0, as_json=True)
    shown = printed()
    digest = shown["content_digest"]
    assert len(shown["signing_key"]) == 64

    out = tmp_path / "out"
    await pull_version(run, policy="solver", version=None, out=out, as_json=True)
    assert printed()["file"] == str(out / "model.safetensors")
    assert not read_weights(out)["w"].bits.any()

    await verify_weights(out, run_dir=run, policy=None, version=None, as_json=True)
    found = printed()
    assert (found["version"], found["content_digest"]) == (0, digest)

    changed = tmp_path / "changed.safetensors"
    data = bytearray((out / "model.safetensors").read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    with pytest.raises(AstraflowError) as caught:
        await verify_weights(changed, run_dir=run, policy=None, version=0, as_json=True)
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    show_diff(out, changed, as_json=True)
    assert printed()["changed"] == 1


async def test_people_see_tables(run, tmp_path, capsys):
    await show_versions(run, policy="solver", as_json=False)
    await show_version(run, policy="solver", version=None, as_json=False)
    await pull_version(run, policy=None, version=0, out=tmp_path / "out", as_json=False)
    await verify_weights(tmp_path / "out", run_dir=None, policy=None, version=None, as_json=False)
    show_diff(tmp_path / "out", tmp_path / "out", as_json=False)
    shown = capsys.readouterr().out
    for word in ("solver", "content", "nothing", "origin", "0 of 100 elements differ"):
        assert word in shown


async def test_a_version_that_is_not_there_is_named(run):
    with pytest.raises(AstraflowError, match="version 9 cannot be pulled; there are: 0") as caught:
        await show_version(run, policy=None, version=9, as_json=True)
    assert caught.value.reason is Reason.VERSION_UNKNOWN
