"""What is cheap stays cheap: importing the package and asking for help load nothing heavy."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from astraflow.cli.main import app, main

# Typer loads them for help, and releases of it to read options.
TYPERS = {"rich", "pydantic", "pydantic_core"}

HEAVY = {"torch", "transformers", "grpc", "numpy", "structlog", "google.protobuf", *TYPERS}


def loaded(code: str) -> set[str]:
    """Return which heavy packages a fresh interpreter loaded for some code."""
    code += "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return HEAVY & set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_loads_nothing_heavy():
    assert loaded("import astraflow") == set()


def test_the_command_line_loads_nothing_heavy():
    assert loaded("import astraflow.cli.main") == set()


def test_help_loads_nothing_heavy():
    code = """
import sys
from contextlib import suppress
from astraflow.cli.main import main
for command in ("", "run", "raas join", "gateway serve", "trainer run", "weights ls", "doctor"):
    sys.argv = ["astraflow", *command.split(), "--help"]
    with suppress(SystemExit):
        main()
"""
    assert loaded(code) - TYPERS == set()


def test_every_command_explains_itself():
    said = CliRunner().invoke(app, ["--help"]).stdout
    commands = ("run", "status", "eval", "rollouts", "doctor", "dataflow", "raas", "trainer")
    for command in commands:
        assert command in said


def test_an_error_is_one_line_with_its_reason_and_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["astraflow", "status", "/no/such/run"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no running hub" in line
    assert "NOT_READY" in line


def test_a_package_that_is_missing_is_named_with_what_installs_it():
    code = """
import sys
sys.modules["tokenizers"] = sys.modules["torch"] = None
from astraflow.cli.main import main
sys.argv = ["astraflow", "check", "recipes/sort.yaml"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "error: this needs tokenizers: pip install 'tokenizers>=0.21'"


@pytest.mark.parametrize(
    ("module", "requirement"),
    [
        ("starlette", "starlette>=0.40"),
        ("zmq", "pyzmq>=26"),
        ("psycopg", "psycopg[binary]>=3.2"),
        ("math_verify", "math-verify>=0.8"),
    ],
)
def test_a_module_is_cured_by_what_brings_it(module, requirement, monkeypatch, capsys):
    def command():
        raise ModuleNotFoundError(name=f"{module}.part")

    monkeypatch.setattr("astraflow.cli.main.app", command)
    with pytest.raises(SystemExit):
        main()
    cure = f"error: this needs {module}: pip install '{requirement}'"
    assert capsys.readouterr().err.strip() == cure


def test_a_dry_run_prints_the_resolved_recipe():
    arguments = ["run", "recipes/sort.yaml", "--dry-run", "--set", "seed=7"]
    said = CliRunner().invoke(app, arguments).stdout
    assert "seed: 7" in said
    assert "max_staleness: 2" in said


@pytest.mark.parametrize("name", ["12", "2026-11-28", "1e5", "true"])
def test_a_run_may_be_called_what_yaml_takes_for_a_number(name):
    arguments = ["run", "recipes/sort.yaml", "--dry-run", "--name", name]
    assert f"name: '{name}'\n" in CliRunner().invoke(app, arguments).stdout


@pytest.mark.slow
def test_doctor_tells_machines_what_works():
    done = subprocess.run(
        [sys.executable, "-m", "astraflow", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["python"]["works"]
    assert checks["embedded"]["works"]
    lanes = {name for name, check in checks.items() if check["area"] == "lanes"}
    assert lanes >= {"grpc", "tcp", "shm", "ucx"}
