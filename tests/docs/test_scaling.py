"""The page on scaling: its files are read by the real schemas, and its maintainer runs."""

import yaml

from astraflow.config.recipe import AutoscaleConfig
from astraflow.launch.autoscale import fill


def test_the_start_commands_are_sound(blocks):
    shown = [code for kind, title, code in blocks("scaling.md") if kind == "yaml" and title]
    commands = [yaml.safe_load(code) for code in shown if "start:" in code]
    assert len(commands) == 3
    values = {"name": "n-1", "hub": "h:1", "recipe": "r.yaml", "run": "runs/r"}
    for found in commands:
        settings = AutoscaleConfig.model_validate(found["autoscale"])
        assert "n-1" in fill(settings.start, values)
        assert "n-1" in fill(settings.stop, values)
