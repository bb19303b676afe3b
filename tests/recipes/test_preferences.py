"""The stored pairs of recipes/preferences, and what a run makes of such rows."""

import json
from pathlib import Path

import pytest

from astraflow.config.run_dir import RunDir, read_json_lines
from astraflow.launch.check import check_recipe
from astraflow.testing import small_recipe, start_run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["cpu", "reward_model"])
def test_the_recipes_can_be_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / "recipes")
    report = check_recipe(ROOT / "recipes" / "preferences" / f"{name}.yaml", runs=tmp_path)
    assert report.errors == []


def test_no_held_out_prompt_is_trained_on():
    folder = ROOT / "recipes" / "preferences"
    train, held_out = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held_out")
    )
    assert (len(train), len(held_out)) == (4096, 512)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert all(row["chosen"] == row["answer"] != row["rejected"] for row in train)


async def test_a_pair_is_two_rows_of_a_group_and_nothing_is_sampled_or_pulled(tmp_path):
    recipe = small_recipe(
        tmp_path,
        workflow="stored",
        prompts=[{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(5)],
        changes={
            "rollouts.group_size": 1,
            "rollouts.min_group_size": 1,
            "workflows.main.options": {"text": "{prompt}"},
            "raas.engine.kind": "none",
        },
    )
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        node = await run.add_node()
        run.add_trainer()
        await run.finish()
    assert node.engine.sampled == 0
    chosen, rejected = run.rollouts()[0].rollout.trajectories
    assert (chosen.reward, rejected.reward) == (1.0, 0.0)
    assert (chosen.sampled_mask.sum(), rejected.sampled_mask.sum()) == (len("yes"), len("no"))
    assert not chosen.logprobs.any()
    live = read_json_lines(RunDir(tmp_path / "run").versions)
    assert len(live) > 1
    assert {(row["state"], row["pulled_nbytes"]) for row in live} == {("live", 0)}
