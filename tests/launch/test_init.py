"""Recipes that come with the package are begun in a folder of one's own."""

import pytest

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
