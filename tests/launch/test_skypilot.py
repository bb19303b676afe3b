"""Tasks of SkyPilot, as its own package reads them."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from astraflow.config.loader import load_recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import CONFIGURATION_EXIT, AstraflowError, Reason
from astraflow.launch.executors.base import LOST, RunPlace
from astraflow.launch.executors.finding import Placement
from astraflow.launch.executors.skypilot import SkyPilotExecutor, SkyPilotOptions, SkyPilotProcess
from astraflow.launch.processes import RoleCommand

RECIPE = Path(__file__).parents[2] / "recipes" / "sort.yaml"
HAS_SKYPILOT = find_spec("sky") is not None
real = [
    pytest.mark.skypilot,
    pytest.mark.skipif(not HAS_SKYPILOT, reason="pip install 'skypilot[slurm]'"),
    # Of the package and what it loads.
    pytest.mark.filterwarnings("ignore"),
]


def tasks(tmp_path, *overrides):
    recipe = load_recipe(RECIPE, ("executor.name=skypilot", *overrides))
    run_dir = RunDir(tmp_path / "runs" / "run")
    texts = Placement.of(recipe, run_dir, note=lambda _: None).preview(run_dir)
    return {name: yaml.safe_load(text) for name, text in texts.items()}


@pytest.mark.skipif(HAS_SKYPILOT, reason="it is installed")
def test_a_missing_package_is_named_with_its_cure(tmp_path):
    with pytest.raises(AstraflowError, match=r"pip install 'skypilot\[CLOUD\]'") as refused:
        tasks(tmp_path)
    assert refused.value.reason is Reason.CAPABILITY_MISSING
    assert "sky" not in sys.modules


class Api:
    """SkyPilot's, which is away."""

    async def tail_logs(self, *_):
        raise ConnectionError("it is away")

    async def api_status(self):
        raise ConnectionError("it is away")


async def test_a_task_that_came_to_no_process_ends_though_its_log_cannot_be_read(tmp_path):
    recipe = load_recipe(RECIPE, ())
    run_dir = RunDir(tmp_path)
    place = RunPlace(run_dir=run_dir, name="run", code=recipe.code, note=lambda _: None)
    executor = SkyPilotExecutor(place, SkyPilotOptions())
    executor.sdk = Api()
    executor.sky = SimpleNamespace(exceptions=SimpleNamespace(ClusterDoesNotExist=LookupError))
    command = RoleCommand(name="raas-0", arguments=(), log=tmp_path / "raas-0.log")
    process = SkyPilotProcess(command, executor, "af-raas-0")
    await process._end("FAILED_SETUP")
    assert await process.wait() == CONFIGURATION_EXIT
    # A code that is being written to files that are shared.
    written = executor.path(command, "code.0")
    written.parent.mkdir()
    written.write_text("")
    late = SkyPilotProcess(command, executor, "af-raas-0")
    await late._end("FAILED")
    assert await late.wait() == LOST
    await executor.close()


class TestTasks:
    """By the package itself, which refuses what is no task."""

    pytestmark = real

    def test_a_process_is_a_task_whose_secrets_are_not_shown(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", "of the hub of models")
        task = tasks(tmp_path, "executor.options.task={volumes: {/shared: runs}}")["raas-0"]
        assert task["volumes"] == {"/shared": "runs"}
        assert task["secrets"] == {
            **task["secrets"],
            "HF_TOKEN": None,
            "ASTRAFLOW_JOIN_TOKEN": None,
        }
        assert "raas join" in task["run"]
        assert "of the hub" not in str(task)
        assert task["resources"] == {"cpus": "1+"}

    def test_ranks_on_two_machines_are_a_task_of_two_nodes(self, tmp_path):
        sets = ("gpus.count=8", "policies.solver.trainer.ranks=16")
        kinds = "executor.options.task.resources={infra: k8s, accelerators: [H100, A100]}"
        found = tasks(tmp_path, *sets, kinds)
        assert found["trainer-solver"]["num_nodes"] == 2
        assert found["trainer-solver"]["resources"]["accelerators"] == {"H100": 8, "A100": 8}
        assert found["raas-0"]["resources"]["accelerators"] == {"H100": 1, "A100": 1}

    @pytest.mark.parametrize(
        ("override", "words"),
        [
            ("gpus.count=8", "name their kind, such as H100"),
            ("executor.options.task={resorces: {}}", "resorces"),
            ("executor.options.task.resources={infra: awz}", "awz"),
        ],
    )
    def test_what_is_no_task_is_named(self, tmp_path, override, words):
        with pytest.raises(AstraflowError, match=r"executor\.options\.task") as refused:
            tasks(tmp_path, override)
        assert refused.value.reason is Reason.INVALID_FIELD
        assert words in refused.value.message
