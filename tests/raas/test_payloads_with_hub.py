"""Whole runs whose rollouts go by way of a payload store: hub, node and trainer on real sockets."""

import asyncio
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from rich.console import Console

from astraflow.client.payloads import MARKER
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.members import Contract, RegisterTrainer
from astraflow.core.status import RunState
from astraflow.launch.samples import find_rollouts, show_rollouts
from astraflow.raas.policies import ServedModel
from astraflow.rpc.access import Grant
from astraflow.testing import CharTokenizer, SmallEngine, small_recipe, start_run
from astraflow.testing.nodes import make_node

pytest.importorskip("fsspec")

DIGITS = "0123456789"
STEPS = 12


@pytest.fixture
def recipe_of(tmp_path):
    def make(folder, **payloads):
        changes = {
            "policies.solver.sampling.max_new_tokens": 6,
            "policies.solver.trainer.groups_per_batch": 4,
            "policies.solver.trainer.max_staleness": 0,
            "policies.solver.trainer.step_count": STEPS,
            "rollouts.group_size": 4,
            "metrics.listen": "127.0.0.1:0",
        }
        if payloads:
            changes["rollouts.payloads"] = payloads
        (tmp_path / folder).mkdir()
        prompts = [{"prompt": str(100 + n)} for n in range(64)]
        return small_recipe(
            tmp_path / folder, workflow="test_digits", prompts=prompts, changes=changes
        )

    return make


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


def objects(store):
    return [path for path in store.rglob("*") if path.is_file() and path.name != MARKER]


def read(url):
    with urlopen(url) as page:
        return page.read().decode()


def answer(prompt):
    return str(int(prompt) * 37)[-3:]


async def train(recipe, folder):
    async with start_run(recipe, run_dir=folder) as run:
        await run.add_node(alphabet=DIGITS, answer=answer)
        training = run.add_trainer()
        status = await run.finish()
    return status, training.result()


async def test_batches_are_the_same_by_way_of_a_store(recipe_of, store, tmp_path):
    inline = await train(recipe_of("inline"), tmp_path / "run1")
    large = recipe_of("large", url=f"file://{store}", above_nbytes=0)
    fetched = await train(large, tmp_path / "run2")
    for (status, trained), (_, other) in zip((inline, fetched), (fetched, inline), strict=True):
        assert status.state is RunState.DONE
        assert len(trained.batches) == STEPS
        for batch, twin in zip(trained.batches, other.batches, strict=True):
            assert batch.header.part_count == twin.header.part_count == len(batch.parts)
            assert batch.header.token_count == twin.header.token_count
            for part, same in zip(batch.parts, twin.parts, strict=True):
                assert part.columns.keys() == same.columns.keys()
                np.testing.assert_array_equal(part.row_offsets, same.row_offsets)
                for name in part.columns:
                    np.testing.assert_array_equal(part.values(name), same.values(name))
    # The run is over: nothing is left of it.
    assert not [path for path in store.rglob("*") if path.is_file()]


async def test_what_was_trained_on_is_removed_while_the_run_goes_on(
    recipe_of, store, tmp_path, capsys
):
    recipe = recipe_of("run", url=f"file://{store}", above_nbytes=0)
    counts, seen = [], set()
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await run.add_node(alphabet=DIGITS)
        training = run.add_trainer()
        shown = await asyncio.to_thread(read, f"http://{run.hub.metrics_address}/metrics")
        assert "astraflow_payloads_removed_total" in shown
        control = await run.control()
        async for status in control.watch_run(min_interval_s=0.01):
            there = [path.name for path in objects(store)]
            counts.append(len(there))
            seen.update(there)
            if status.state in (RunState.DONE, RunState.FAILED):
                break
        await run.finish()
        removed = run.hub.payloads.removed_count
    rows = find_rollouts(run.run_dir, count=1000)
    assert {row["trajectories"][0]["payload"]["name"] for row in rows} <= seen
    show_rollouts(Console(), run.run_dir, rows[-1:], as_json=False)
    assert "is missing)" in " ".join(capsys.readouterr().out.split())
    assert training.result().end.batch_count == STEPS
    # 16 rollouts a step; at no time all of them were there.
    assert 16 <= max(counts) < 16 * STEPS
    assert removed >= 16 * (STEPS - 5)


async def test_a_lost_payload_costs_its_rollout_and_the_run_goes_on(recipe_of, store, tmp_path):
    recipe = recipe_of("run", url=f"file://{store}", above_nbytes=0)
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await run.add_node(alphabet=DIGITS)
        line = await run.open_line()
        # The first batch waits for the trainer, and is damaged meanwhile.
        line.hold("StreamBatches")
        training = run.add_trainer(line=line)
        control = await run.control()
        async for status in control.watch_run(min_interval_s=0.01):
            if status.policies[0].fresh_count == 16:
                break
        missing, wrong = objects(store)[:2]
        missing.unlink()
        wrong.write_bytes(b"something else")
        line.release("StreamBatches")
        status = await run.finish()
        (account,) = run.hub.run.accounts()
    assert status.state is RunState.DONE
    assert len(training.result().batches) == STEPS
    drops = {drop.reason: drop.count for drop in account.drops}
    assert drops[Reason.PAYLOAD_LOST] == 2
    assert account.is_balanced


async def test_a_node_that_sees_another_folder_does_not_work(recipe_of, store, tmp_path):
    recipe = recipe_of("run", url=f"file://{store}", above_nbytes=0)
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        (marker,) = store.rglob(MARKER)
        marker.unlink()
        tokenizer = CharTokenizer(DIGITS)
        model = ServedModel(engine=SmallEngine(tokenizer), tokenizer=tokenizer)
        join = {"hub": run.address, "token": run.join_token, "models": {"solver": model}}
        with pytest.raises(AstraflowError, match="not the payload store that the hub") as caught:
            await make_node(recipe, name="raas-1", capacity=4, **join).run()
    assert caught.value.reason is Reason.SOURCE_UNREACHABLE


async def test_a_trainer_that_reads_no_payloads_is_refused(recipe_of, store, tmp_path):
    recipe = recipe_of("run", url=f"file://{store}", above_nbytes=0)
    register = RegisterTrainer(
        policy_id="solver", name="old", contract=Contract(), groups_per_batch=4
    )
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        with pytest.raises(AstraflowError, match="no capability payloads") as caught:
            await run.hub.register_trainer(register, Grant.parse("trainer"))
    assert caught.value.reason is Reason.CONTRACT_UNSUPPORTED


async def test_a_store_that_the_hub_cannot_write_keeps_it_from_starting(recipe_of, tmp_path):
    (tmp_path / "file").write_text("no folder")
    recipe = recipe_of("run", url=f"file://{tmp_path / 'file'}", above_nbytes=0)
    with pytest.raises((AstraflowError, ExceptionGroup)) as caught:
        async with start_run(recipe, run_dir=tmp_path / "run"):
            pass
    error = caught.value
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert error.reason is Reason.SOURCE_UNREACHABLE
    assert str(Path(tmp_path / "file")) in error.message
