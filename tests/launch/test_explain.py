import asyncio
import json

import pytest

from astraflow.config.run_dir import HubEndpoint
from astraflow.core.versions import SourceKind
from astraflow.launch.status import show_waits
from astraflow.testing.recipes import small_recipe
from astraflow.testing.run import JOIN_TOKEN, OPERATOR_TOKEN, start_run


@pytest.fixture
def recipe(tmp_path):
    prompts = [{"prompt": f"row {number}", "answer": "a"} for number in range(64)]
    return small_recipe(tmp_path, scorer="exact", prompts=prompts)


async def told(run):
    run.run_dir.write_endpoint(
        HubEndpoint(
            address=run.address, pid=1, operator_token=OPERATOR_TOKEN, join_token=JOIN_TOKEN
        )
    )
    return await show_waits(run.run_dir, as_json=False)


async def until(run, words):
    """Return the explanation once it says some words; the run's watch wakes us at each change."""
    async for _ in (await run.control()).watch_run(min_interval_s=0.01):
        text = await told(run)
        if words in text:
            return text
    raise AssertionError(words)


async def test_a_run_without_members_waits_for_a_trainer(recipe, tmp_path):
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        assert "└─ no trainer of solver has joined" in await told(run)
        machine = json.loads(await show_waits(run.run_dir, as_json=True))
    assert machine["policies"]["solver"][0]["cause"] == "no_trainer"


async def test_a_run_without_nodes_says_so(recipe, tmp_path):
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        run.add_trainer()
        text = await until(run, "no RaaS serves")
    assert "└─ 0 of 2 groups are whole" in text


async def test_a_trainer_that_works_is_what_is_waited_for(recipe, tmp_path):
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await run.add_node()
        run.add_trainer(step_s=0.5)
        assert "holds the 1 batches" in await until(run, "holds the 1 batches")


async def test_a_version_that_no_node_can_have_is_named(recipe, tmp_path, capsys):
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await run.add_node(kinds=frozenset({SourceKind.OBJECT_STORE}))
        run.add_trainer()
        text = await until(run, "no RaaS has loaded the weights yet; there are raas-1")
        (member,) = [m.member_id for m in run.status().members if m.name == "raas-1"]
        said = capsys.readouterr().out
        while "] joined " not in said:
            # The hub knows of the node before the node knows.
            await asyncio.sleep(0.01)
            said += capsys.readouterr().out
    assert "└─ 0 of 2 groups are whole" in text
    lines = said.splitlines()
    joined = [line for line in lines if "RaaS joined" in line or "] joined " in line]
    assert len(joined) == 2
    for line in joined:
        assert f"member={member}" in line
        assert "run=test-" in line
