import asyncio
import threading

import pytest

from astraflow.core.errors import CONFIGURATION_EXIT, AstraflowError
from astraflow.raas.main import _join, main_join
from astraflow.raas.node import NodeSettings
from astraflow.testing import small_recipe


@pytest.fixture
def join(capfd, tmp_path):
    """Runs the process entry in this process; returns its exit code and its log."""

    def run(**policy):
        recipe = small_recipe(tmp_path, scorer="exact", changes={"policies.solver": policy})
        code = main_join(recipe, hub="127.0.0.1:1", token="t")
        return code, capfd.readouterr().err

    return run


def test_a_warm_up_model_must_be_given(join):
    code, log = join(model={"warm_up": {"tutor": "letter_sort:SortTutor"}})
    assert code == CONFIGURATION_EXIT
    assert "--model solver=DIR" in log


def test_a_folder_without_a_model_is_named(join, tmp_path):
    code, log = join(model={"path": str(tmp_path / "missing")})
    assert code == CONFIGURATION_EXIT
    assert "missing has no config.json" in log


async def test_rollouts_that_block_in_threads_leave_some_to_the_node(tmp_path):
    recipe = small_recipe(tmp_path, scorer="exact")
    settings = NodeSettings(hub="127.0.0.1:1", token="t", name="n", capacity=100, codes=())
    with pytest.raises(AstraflowError, match=r"has no config\.json"):
        await _join(recipe, settings, {})
    all_block = threading.Barrier(settings.capacity)
    opened = threading.Event()

    def block():
        all_block.wait(timeout=60)
        opened.wait()

    blocking = [asyncio.create_task(asyncio.to_thread(block)) for _ in range(settings.capacity)]
    async with asyncio.timeout(60):
        assert await asyncio.to_thread(lambda: "decoded") == "decoded"
    opened.set()
    await asyncio.gather(*blocking)
