"""Recipes that come with the package are begun in a folder of one's own."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from astraflow.cli.main import app
from astraflow.config.loader import load_recipe
from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.init import init_recipe, packaged_recipes


@pytest.mark.parametrize("name", packaged_recipes())
def test_every_recipe_has_what_it_needs_in_its_folder(name, tmp_path):
    assert packaged_recipes()[name]
    path = init_recipe(name, tmp_path / "mine")
    recipe = load_recipe(path, ())
    named = [each.path for each in recipe.data.values() if each.path is not None]
    for each in named if name != "template" else ():
        assert each.is_relative_to(tmp_path)
        assert each.exists()


def test_what_is_said_of_a_folder_with_a_space_can_be_pasted(tmp_path):
    target = tmp_path / "my first"
    said = CliRunner().invoke(app, ["init", "sort", str(target)]).stdout
    command = said.partition(": ")[2].partition(" && ")[0]
    done = subprocess.check_output(f"{command} && pwd", shell=True, text=True)
    assert done.strip() == str(target)


@pytest.mark.parametrize("name", ["sort", "preferences"])
def test_its_code_is_found_there_too(name, tmp_path):
    path = init_recipe(name, tmp_path / "mine")
    # Here the recipes' folder is on the path, there it is not.
    command = [sys.executable, "-m", "astraflow", "check", path.name, "--runs", str(tmp_path)]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "other"), [("math-efficient-data", "plain"), ("preferences", "reward_model")]
)
def test_another_recipe_of_the_folder_is_there_too(name, other, tmp_path):
    path = init_recipe(name, tmp_path / "mine")
    assert sorted(each.stem for each in path.parent.glob("*.yaml")) == sorted(["recipe", other])
    assert load_recipe(path.with_stem(other), ()).code == path.parent


def test_settings_for_gpus_are_another_file_of_the_same_task(tmp_path):
    path = init_recipe("math", tmp_path / "mine", machine="gpu-8")
    assert path.read_text() != (init_recipe("math", tmp_path / "cpu")).read_text()
    assert not [*path.parent.glob("cpu*")]


def test_what_is_not_there_is_named_and_nothing_is_overwritten(tmp_path):
    with pytest.raises(AstraflowError, match=r"there is no recipe 'maths'; there are .*math,"):
        init_recipe("maths", tmp_path / "mine")
    with pytest.raises(AstraflowError, match="is not for 'tpu', but for cpu, gpu-8, gpu-2x8"):
        init_recipe("math", tmp_path / "mine", machine="tpu")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "recipe.yaml").write_text("mine")
    with pytest.raises(AstraflowError) as caught:
        init_recipe("sort", tmp_path / "full")
    assert caught.value.reason is Reason.NAME_TAKEN
    assert (tmp_path / "full" / "recipe.yaml").read_text() == "mine"


@pytest.mark.long
def test_a_wheel_has_the_recipes(tmp_path):
    root, source = Path(__file__).parents[2], tmp_path / "source"
    # What was built in the checkout, or runs in it, is not of the source.
    left_out = shutil.ignore_patterns(".*", "build", "runs", "node_modules", "__pycache__", "*.so")
    shutil.copytree(root, source, ignore=left_out)
    command = (sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", tmp_path, source)
    subprocess.run(command, check=True, timeout=280)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("sort.yaml", "math/cpu.yaml", "math/train.jsonl", "textcraft/recursive.py"):
        assert f"astraflow/recipes/{name}" in names
    assert not [name for name in names if "__pycache__" in name]
