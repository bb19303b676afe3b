"""A run as a folder of files: all that the page asks for is there, and no folder is overrun."""

import json
import re
import shutil
from pathlib import Path

import pytest

from astraflow.cli.ui import ui
from astraflow.core.errors import AstraflowError
from astraflow.ui.export import export_page, file_of
from astraflow.ui.server import WEB, shown_runs


async def test_an_export_answers_as_the_server_does(recorded, serve, tmp_path):
    (run,) = shown_runs([recorded])
    count = await export_page(run, tmp_path / "page")
    assert count == len(run.rollouts)
    step = run.step("solver", 2)
    recorded_id = run.rollouts.ids[0]
    paths = ["curves/reward/mean", "steps/solver/2", "timeline", "evals", f"rollouts/{recorded_id}"]
    async with serve(recorded) as page:
        for path in paths:
            answer = (await page.get(f"/api/runs/small/{path}")).json()
            assert answered(tmp_path / "page", f"runs/small/{path}") == answer
    assert answered(tmp_path / "page", "runs/small/steps/solver/2") == json.loads(json.dumps(step))


def answered(folder, path):
    text = (folder / "data" / file_of(path)).read_text()
    said, content = re.fullmatch(r'astraflowAnswer\("([^"]*)", (.*)\);\n', text).groups()
    assert said == path
    return json.loads(content)


async def test_an_export_asks_nobody_and_lets_its_own_scripts_run_alone(recorded, tmp_path):
    await export_page(shown_runs([recorded])[0], tmp_path / "page")
    page = (tmp_path / "page" / "index.html").read_text()
    assert "connect-src" not in page
    assert "default-src 'none'" in page
    assert not re.search(r"https?://", page)
    for name in re.findall(r'(?:src|href)="([\w./-]+)"', page):
        assert (tmp_path / "page" / name).exists(), name


async def test_an_export_is_written_again_but_not_over_something_else(recorded, tmp_path):
    (run,) = shown_runs([recorded])
    await export_page(run, tmp_path / "page")
    await export_page(run, tmp_path / "page")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(AstraflowError, match="not empty"):
        await export_page(run, tmp_path / "mine")
    site = tmp_path / "site"
    (site / "data").mkdir(parents=True)
    (site / "index.html").write_text("<title>Mine</title>")
    (site / "data" / "mine.csv").write_text("1")
    with pytest.raises(AstraflowError, match="not empty"):
        await export_page(run, site)
    assert (site / "data" / "mine.csv").read_text() == "1"


def test_a_damaged_run_hides_no_other(recorded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(recorded, "runs/small")
    Path("runs/torn").mkdir()
    Path("runs/torn/recipe.yaml").write_text("name: [")
    ui(None, export=Path("page"))
    assert "small" in answered(Path("page"), "runs")["runs"][0]["key"]


def test_every_module_is_named_on_the_page():
    page = (WEB / "index.html").read_text()
    modules = {path.name for path in WEB.glob("*.js")} - {"main.js", "theme.js"}
    assert set(re.findall(r'modulepreload" href="([\w.]+)"', page)) == modules
