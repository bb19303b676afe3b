"""The page on scaling: its files are read by the real schemas, and its maintainer runs."""

import yaml

from astraflow.config.recipe import AutoscaleConfig
from astraflow.launch.autoscale import fill
from astraflow.simulate.scenario import load_scenario
from astraflow.testing import small_recipe, start_run


def test_the_start_commands_are_sound(blocks):
    shown = [code for kind, title, code in blocks("scaling.md") if kind == "yaml" and title]
    commands = [yaml.safe_load(code) for code in shown if "start:" in code]
    assert len(commands) == 3
    values = {"name": "n-1", "hub": "h:1", "recipe": "r.yaml", "run": "runs/r"}
    for found in commands:
        settings = AutoscaleConfig.model_validate(found["autoscale"])
        assert "n-1" in fill(settings.start, values)
        assert "n-1" in fill(settings.stop, values)


def test_the_scenario_is_one(blocks, tmp_path):
    [code] = [code for _, title, code in blocks("scaling.md") if title == "my-pool.yaml"]
    (tmp_path / "my-pool.yaml").write_text(code)
    assert load_scenario(tmp_path / "my-pool.yaml", ["hours=1"]).pools["far"].flapping.share == 0.2


async def test_the_maintainer_starts_what_is_missing(blocks, tmp_path):
    [code] = [code for kind, _, code in blocks("scaling.md") if kind == "python"]
    names = {}
    exec(code, names)
    recipe = small_recipe(tmp_path)
    started = []

    async def start_node():
        started.append(await run.add_node())

    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await names["maintain"](run.address, run.operator_token, start_node, lambda _: True)
        assert len(started) == 1
