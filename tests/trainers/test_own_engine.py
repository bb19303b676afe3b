"""An engine that a recipe or a command line names trains a run, and what it lacks is named."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from astraflow.config.loader import dump_recipe
from astraflow.config.recipe import OwnEngine, TrainerConfig
from astraflow.config.run_dir import RunDir, read_json_lines
from astraflow.core.errors import CONFIGURATION_EXIT, AstraflowError, Reason
from astraflow.testing import start_run
from astraflow.trainers.engine import make_engine, prepare
from tests.trainers.engine_runs import EXAMPLES, example, vowel_recipe

HERE = "tests.trainers.test_own_engine"


class Whole:
    """Has all that is asked for."""

    step_count = 0

    def __init__(self, size=4, settings=None, model_dir=None):
        self.size, self.settings, self.model_dir = size, settings, model_dir

    def prepare(self):
        self.named_parameters = lambda: iter([("table", np.zeros(self.size))])

    def train_step(self, batch): ...

    def save(self, directory): ...

    def wait_for_save(self): ...

    def restore(self, directory): ...


class Halting(Whole):
    wait_for_save = restore = None


class Countless(Whole):
    @property
    def step_count(self):
        raise AttributeError


def broken():
    raise ValueError("the table has no legs")


def made(name, **options):
    own = OwnEngine(name=f"{HERE}:{name}", options=options)
    return make_engine(own, TrainerConfig(), model_dir=Path("model"))


def test_a_factory_gets_its_options_and_what_it_asks_for():
    engine = made("Whole", size=7)
    prepare(engine)
    assert (engine.size, engine.settings, engine.model_dir) == (7, TrainerConfig(), Path("model"))


@pytest.mark.parametrize(
    ("name", "reason", "said"),
    [
        ("Nothing", Reason.CODE_UNKNOWN, "has no attribute 'Nothing'"),
        ("broken", Reason.INVALID_FIELD, "raised ValueError: the table has no legs, in "),
        ("HERE", Reason.INVALID_FIELD, "'str' object is not callable"),
    ],
)
def test_a_factory_that_makes_nothing_is_named(name, reason, said):
    with pytest.raises(AstraflowError) as caught:
        made(name)
    assert caught.value.reason is reason
    assert f"the engine {HERE}:{name}" in caught.value.message
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dict", "dict is no train engine: it lacks prepare()"),
        ("Halting", "Halting is no train engine: it lacks wait_for_save(), restore();"),
        ("Countless", "Countless is no train engine: it lacks step_count;"),
    ],
)
def test_what_an_engine_lacks_is_named(name, said):
    with pytest.raises(AstraflowError) as caught:
        prepare({} if name == "dict" else made(name))
    assert caught.value.reason is Reason.CAPABILITY_MISSING
    assert said in caught.value.message


def test_a_module_that_fails_while_it_is_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "half_an_engine.py").write_text("import no_such_package\n")
    (tmp_path / "no_engine.py").write_text("x = 1\nx.y()\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module, reason, said in (
        ("nowhere_at_all", Reason.CODE_UNKNOWN, "No module named 'nowhere_at_all'"),
        ("half_an_engine", Reason.CODE_UNKNOWN, "No module named 'no_such_package'"),
        ("no_engine", Reason.CODE_UNKNOWN, "'int' object has no attribute 'y'"),
    ):
        with pytest.raises(AstraflowError, match=said) as caught:
            make_engine(OwnEngine(name=f"{module}:make"), TrainerConfig(), model_dir=tmp_path)
        assert caught.value.reason is reason


def test_a_recipe_names_module_and_factory_and_one_rank():
    assert TrainerConfig.model_validate({"engine": "mine:Engine"}).engine == OwnEngine(
        name="mine:Engine"
    )
    with pytest.raises(ValueError, match="pattern"):
        TrainerConfig.model_validate({"engine": "mine"})
    with pytest.raises(ValueError, match="needs ranks: 1"):
        TrainerConfig.model_validate({"engine": "mine:Engine", "ranks": 2})


@pytest.mark.slow
@pytest.mark.parametrize("told_by", ["recipe", "command"])
async def test_it_trains_a_run_from_a_process_of_its_own(tmp_path, told_by):
    engine = "numpy_bigram:BigramEngine"
    keys = {"engine": {"name": engine, "options": {"rate": 0.25}}} if told_by == "recipe" else {}
    recipe = vowel_recipe(tmp_path, export_dtype="f32", **keys)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        node = await run.add_node()
        trainer = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "astraflow", "trainer", "run", str(tmp_path / "recipe.yaml")),
            *("--policy", "solver", "--hub", run.address, "--run-dir", str(tmp_path / "run")),
            *(() if keys else ("--engine", engine)),
            cwd=EXAMPLES,
            env={**os.environ, "ASTRAFLOW_JOIN_TOKEN": run.join_token},
        )
        await run.finish()
        assert await trainer.wait() == 0
    assert run.status().policies[0].version == 3
    steps = read_json_lines(RunDir(tmp_path / "run").metrics)
    assert [line["step"] for line in steps] == [1, 2, 3]
    restored = example("numpy_bigram").BigramEngine()
    restored.restore(RunDir(tmp_path / "run").checkpoint("solver", 3))
    assert np.array_equal(node.engine.tensors["table"].view(np.float32), restored.table)


async def started_with(engine, tmp_path):
    """Return the exit code of a trainer, and what it said."""
    recipe = vowel_recipe(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    trainer = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "astraflow", "trainer", "run", str(tmp_path / "recipe.yaml")),
        *("--policy", "solver", "--hub", "127.0.0.1:1", "--token", "join"),
        *("--engine", engine),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await trainer.communicate()
    return trainer.returncode, said.decode()


@pytest.mark.slow
async def test_a_command_that_names_no_engine_says_so(tmp_path):
    code, said = await started_with("nowhere_at_all:Engine", tmp_path)
    assert code == CONFIGURATION_EXIT
    assert "No module named 'nowhere_at_all'" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "code"), [("os._exit(3)", 3), ("ctypes.string_at(0)", -signal.SIGSEGV)]
)
async def test_code_that_ends_its_process_is_told_with_its_line(tmp_path, line, code):
    engine = tmp_path / "ends.py"
    engine.write_text(f"import ctypes, os\ndef make(settings):\n    {line}\n")
    ended, said = await started_with("ends:make", tmp_path)
    assert ended == code
    assert f'File "{engine}", line 3' in said
    assert "in make" in said
