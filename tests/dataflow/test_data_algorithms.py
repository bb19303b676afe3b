"""Data algorithms of a recipe, in a hub that is killed and goes on."""

import asyncio
import json

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.events import PromptsOffered
from astraflow.core.members import SessionResume
from astraflow.core.status import RunState
from astraflow.dataflow.recovery import beginning_of, replay
from astraflow.launch.ledger import read_ledger
from astraflow.storage.snapshot import SnapshotFile
from astraflow.storage.sqlite import JournalReader


@pytest.fixture
def recipe(recipe_of, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"prompt": f"other {n}"}) + "\n" for n in range(64)))
    return recipe_of(
        rows=64,
        data__other={"path": str(other)},
        rollouts__data_set={"train": 3, "other": 1},
        rollouts__selectors=["greso", {"name": "curriculum", "options": {"floor": 0.5}}],
        rollouts__filters=["zero_advantage"],
        policies__solver__trainer__replay={"ratio": 0.5, "order": "prioritised"},
        policies__solver__trainer__guards=["distinct_prompts"],
        policies__solver__trainer__step_count=4,
    )


async def drawn(recipe, run_dir):
    """Return the prompts that the journal says were read, by data set."""
    found = {}

    def look(event, _):
        if isinstance(event, PromptsOffered):
            found.setdefault(event.data_set, []).extend(p.prompt_id for p in event.prompts)

    reader = JournalReader(run_dir.journal)
    try:
        await replay(reader, SnapshotFile(run_dir.snapshot), beginning_of(recipe), observe=look)
    finally:
        reader.close()
    return found


async def test_a_composition_goes_on_where_a_killed_hub_was(start_hub, recipe):
    async with start_hub(recipe) as hub:
        trainer, raas = hub.trainer(), hub.raas()
        await trainer.register()
        await raas.join()
        # Until the first batch comes; then the hub is gone.
        working = [asyncio.ensure_future(raas.work())]
        await trainer.publish()
        await trainer.batches().read()
        before = hub.hub.run.drawn_counts
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
    async with start_hub(recipe) as hub:
        assert hub.hub.run.drawn_counts == before
        again = hub.raas(live={"solver": 0})
        await again.join(SessionResume(resume_token=raas.token, incarnation=1, held_task_ids=()))
        trained = hub.trainer()
        trained.token, trained.next_version = trainer.token, 1
        await asyncio.gather(again.work(), trained.train())
        status = await hub.serving
    assert status.state is RunState.DONE
    [books] = json.loads(hub.run_dir.status.read_text())["books"]
    assert books["balanced"]
    assert books["replayed_count"] >= 2
    assert status.policies[0].metrics["data/mix/train"] == pytest.approx(0.75, abs=0.1)
    ledger = await read_ledger(hub.run_dir)
    assert ledger.holds
    for prompts in (await drawn(recipe, hub.run_dir)).values():
        # No prompt was read twice, and none was left out, over both hubs.
        assert len(set(prompts[:64])) == min(64, len(prompts))


async def test_a_mistake_in_options_stops_the_start(start_hub, recipe_of):
    recipe = recipe_of(rollouts__selectors=[{"name": "greso", "options": {"p_maks": 1}}])
    with pytest.raises(BaseExceptionGroup) as caught:
        async with start_hub(recipe):
            pass
    error = caught.value.exceptions[0]
    assert isinstance(error, AstraflowError)
    assert error.reason is Reason.INVALID_FIELD
    assert "did you mean p_max?" in error.message
