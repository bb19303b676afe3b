"""Every fenced block of every page: what it shows holds.

YAML is a recipe to which the product's own check has no objection, Python runs against real
objects (test_python.py), commands have a parser, files and keys that are there.
"""

import ast
import json
import re

import pytest
import yaml

from astraflow.launch.check import Severity, check_recipe
from astraflow.simulate.scenario import load_scenario

from .commands import faults_of
from .conftest import DOCS, PAGES, RECIPES, fences, files, name_of

LANGUAGES = {"bash", "go", "json", "python", "text", "ts", "yaml"}
RUN_ELSEWHERE = {
    ("docs/quickstart.md", "ts"): "test_quickstart.py, in node",
    ("docs/quickstart.md", "go"): "test_quickstart.py, by go",
    ("docs/quickstart.md", "python"): "test_quickstart.py, with a hub of its own",
    ("docs/tinker.md", "python"): "tests/tinker/test_sdk.py, where the SDK is",
    ("benchmarks/README.md", "python"): "tests/benchmarks/test_link.py has this link, as root",
}
"""Blocks that another test runs: it needs what only some machines have, or minutes."""

_COMMAND = re.compile(r"(\w+=\S+ )*(astraflow|pip|python3?|make|cp|cd|npm|buf|docker|scripts/)\b")


def pages_with(*languages, title=None):
    """Return the pages that have such a block which no other test runs."""
    found = [
        path
        for path in PAGES
        for fence in fences(path)
        if fence.language in languages and (name_of(path), fence.language) not in RUN_ELSEWHERE
        if title is None or bool(fence.title and "." in fence.title) is title
    ]
    return pytest.mark.parametrize("path", [*dict.fromkeys(found)], ids=name_of)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_block_says_what_it_is(path):
    for language, title, code in fences(path):
        assert language in LANGUAGES, f"{path.name}: a fence of '{language}'"
        is_known = language in ("bash", "json", "python", "text", "yaml")
        assert is_known or (name_of(path), language) in RUN_ELSEWHERE, f"{path.name}: {language}"
        if language == "python":
            compile(code, path.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if language == "text":
            hidden = [line for line in code.splitlines() if _COMMAND.match(line)]
            assert hidden == [], f"{path.name}: commands in a block that is no bash"
        assert (
            title is None
            or "." not in title
            or title.rsplit(".", 1)[1] in ({"python": "py", "bash": "sh"}.get(language, language))
        )


def test_what_another_test_runs_is_there():
    shown = {(name_of(path), fence.language) for path in PAGES for fence in fences(path)}
    assert RUN_ELSEWHERE.keys() <= shown


@pages_with("json")
def test_json_can_be_read(path):
    for code in [code for language, _, code in fences(path) if language == "json"]:
        assert all(isinstance(json.loads(line), dict) for line in code.splitlines())


ROW = {"prompt": "1 + 1 =", "answer": "2", "a": 1, "b": 1, "problem": "1 + 1", "id": "one"}
ROWS = {"sandbox.md": {"prompt": "Add.", "tests": ["assert add(1, 1) == 2"]}}
ALSO = {"durability.md": ["evals.held_out.data_sets=[{data_set: train, workflow: main}]"]}
"""Keys that a snippet leaves out and means."""
EXCUSED = {
    "executor.options.mount": "the folder of the run is where its cluster has it",
    "executor": "the package of that cluster is not here",
}


@pages_with("yaml")
def test_yaml_is_a_recipe_that_the_check_has_nothing_against(path, tmp_path, monkeypatch):
    for title, code in files(path).items():
        (tmp_path / title).write_text(code)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS.get(path.name, ROW)))
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, RECIPES, RECIPES / "trainers"):
        monkeypatch.syspath_prepend(folder)
    for code in [code for language, _, code in fences(path) if language == "yaml"]:
        (tmp_path / "shown.yaml").write_text(code)
        snippet = yaml.safe_load(code)
        if "pools" in snippet:
            assert load_scenario(tmp_path / "shown.yaml", []).pools.keys() == {*snippet["pools"]}
            continue
        rest = [*what_is_left_out(snippet), *ALSO.get(path.name, ())]
        report = check_recipe(tmp_path / "shown.yaml", rest, is_elsewhere=True)
        errors = [each for each in report.findings if each.severity is Severity.ERROR]
        assert [each for each in errors if each.place not in EXCUSED] == [], code


def what_is_left_out(snippet):
    """Yield overrides that make a whole recipe of a part of one."""
    if "name" not in snippet:
        yield "name=shown"
    for name, policy in snippet.get("policies", {"solver": {}}).items():
        model = policy.get("model", {})
        if not model.keys() & {"path", "name", "hub", "tiny"}:
            yield f"policies.{name}.model.path=."
    if "workflows" not in snippet:
        yield "workflows={main: {name: single_turn, scorer: exact}}"
    rollouts, data = snippet.get("rollouts", {}), snippet.get("data", {})
    if "workflow" not in rollouts:
        yield f"rollouts.workflow={next(iter(snippet.get('workflows', ['main'])))}"
    drawn = rollouts.get("data_set", next(iter(data), "train"))
    if "data_set" not in rollouts:
        yield f"rollouts.data_set={drawn}"
    wanted = {drawn} if isinstance(drawn, str) else {*drawn}
    for suite in snippet.get("evals", {}).values():
        wanted |= {each["data_set"] for each in suite["data_sets"]}
    for name in sorted(wanted - data.keys()):
        yield f"data.{name}.path=rows.jsonl"


@pages_with("bash")
def test_commands_name_what_is_there(path):
    found = [fault for _, _, code in bash(path) for fault in faults_of(code, files(path))]
    assert found == []


def bash(path):
    return [each for each in fences(path) if each.language == "bash"]


@pytest.mark.parametrize("path", [*PAGES, *sorted(RECIPES.rglob("*.yaml"))], ids=name_of)
def test_nobody_is_told_to_install_another_projects_package(path):
    told = re.findall(r"pip install ([^`\n]+)", path.read_text(encoding="utf-8"))
    named = [each for each in told if re.search(r"(?<![\w/-])astraflow(?! \w|-[\d*])", each)]
    assert named == [], "write '.[extra]' or the path of a wheel; docs/install.md says why"


# The same tests that a reader would copy, with a run each.
@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if any(name.startswith("test_") for name in files(path))],
    ids=name_of,
)
def test_the_tests_that_are_shown_pass(path, run_example):
    tests = [name for name in files(path) if name.startswith("test_")]
    assert f"{len(tests)} passed" in run_example(path)


@pytest.mark.parametrize(
    ("name", "file", "most"),
    [
        ("algorithms.md", "my_algorithms.py", 20),
        ("workflows.md", "my_workflows.py", 20),
        ("trainers.md", "my_trainer.py", 32),
    ],
)
def test_code_of_ones_own_is_short(name, file, most):
    lines = files(DOCS / name)[file].splitlines()
    assert len([line for line in lines if line.strip() and "import " not in line]) <= most
