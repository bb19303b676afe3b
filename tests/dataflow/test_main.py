"""The hub as a process of its own."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack

import psutil
import pytest

from astraflow.client.control import ControlClient
from astraflow.config.loader import dump_recipe
from astraflow.config.run_dir import HubEndpoint, RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.dataflow.main import tokens_from
from astraflow.dataflow.server import serve_hub
from astraflow.rpc.access import HubTokens
from astraflow.rpc.address import split_address
from astraflow.testing import small_recipe

PROGRAM = """
import sys
from pathlib import Path
from astraflow.config.recipe import Recipe
from astraflow.dataflow.main import main_serve
code = main_serve(Recipe.model_validate_json(sys.argv[1]), run_dir=Path(sys.argv[2]))
heavy = {"torch", "transformers", "matplotlib", "pyarrow", "pandas"} & sys.modules.keys()
print(sorted(heavy), flush=True)
raise SystemExit(code)
"""


def wait_until(process, ready):
    """Wait for a file that a process writes; fail with its words when it ends first."""
    while not ready():
        try:
            process.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
        pytest.fail(process.communicate()[1])


@pytest.fixture
def process_of(tmp_path):
    """Start a hub in a process; return it and its run directory."""
    processes = []

    def start(recipe, before="", *, is_awaited=True):
        run_dir = RunDir(tmp_path / "run")
        program = before + PROGRAM
        command = [sys.executable, "-c", program, recipe.model_dump_json(), str(run_dir.root)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
        if is_awaited:
            wait_until(process, run_dir.endpoint.exists)
        return process, run_dir

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_signal_ends_a_hub_that_leaves_its_account(process_of, recipe_of):
    process, run_dir = process_of(recipe_of())
    endpoint = run_dir.read_endpoint()
    assert endpoint.pid == process.pid
    assert run_dir.endpoint.stat().st_mode & 0o077 == 0
    assert psutil.Process(process.pid).memory_info().rss < 200 << 20
    if sys.platform == "linux":
        assert os.sched_getscheduler(process.pid) == os.SCHED_BATCH
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "[]"
    assert not run_dir.endpoint.exists()
    status = json.loads(run_dir.status.read_text())
    assert status["state"] == "done"
    assert status["hub"]["max_rss_nbytes"] < 200 << 20


def test_a_hub_that_is_ended_while_it_recovers_says_so(process_of, recipe_of, tmp_path):
    recipe = recipe_of()
    process, run_dir = process_of(recipe)
    process.kill()
    process.wait()
    run_dir.endpoint.unlink()
    # It reads its data set for as long as nobody writes it.
    (tmp_path / "train.jsonl").unlink()
    os.mkfifo(tmp_path / "train.jsonl")
    process, _ = process_of(recipe, is_awaited=False)
    assert "hub recovers" in process.stdout.readline()
    process.terminate()
    out, err = process.communicate(timeout=200)
    assert process.returncode == -signal.SIGTERM, err
    assert "the hub ends before it serves" in out


@pytest.mark.parametrize("name", ["core._frozen", "core._arrays", "wire._rollouts"])
def test_a_hub_without_one_of_its_extensions_serves_and_says_so(process_of, recipe_of, name):
    absent = f"import sys; sys.modules['astraflow.{name}'] = None\n"
    process, _ = process_of(recipe_of(), before=absent)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "install a C compiler" in out


def test_a_hub_has_more_connections_than_a_shell_lets_it_open_files(tmp_path):
    recipe, run_dir = tmp_path / "recipe.yaml", RunDir(tmp_path / "run")
    recipe.write_text(dump_recipe(small_recipe(tmp_path, scorer="exact")))
    serve = [sys.executable, "-m", "astraflow", "dataflow", "serve", str(recipe)]
    limited = ["sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh", *serve, "--run-dir", run_dir.root]

    async def is_answered():
        async with ControlClient.of(run_dir, patience_s=5) as control:
            return (await control.get_run()).members == ()

    with subprocess.Popen(limited, stderr=subprocess.PIPE) as process, ExitStack() as exits:
        exits.callback(process.kill)
        wait_until(process, run_dir.endpoint.exists)
        address = split_address(run_dir.read_endpoint().address)
        for _ in range(100):
            exits.enter_context(socket.create_connection(address))
        assert asyncio.run(is_answered())


def test_tokens_come_from_the_environment_or_are_made():
    given = {"ASTRAFLOW_JOIN_TOKEN": "j", "ASTRAFLOW_OPERATOR_TOKEN": "o"}
    assert tokens_from(given) == HubTokens(join="j", operator="o")
    made = tokens_from({"ASTRAFLOW_JOIN_TOKEN": ""})
    assert made.join
    assert made.operator
    assert made != tokens_from({})
    before = HubEndpoint(address="h:1", pid=1, operator_token="o", join_token="j")
    assert tokens_from({}, before) == HubTokens(join="j", operator="o")


async def test_a_port_in_use_is_named(recipe_of, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AstraflowError, match="address already in use") as caught:
            await serve_hub(
                recipe_of(), run_dir=tmp_path / "run", tokens=HubTokens.generate(), listen=address
            )
    assert address in caught.value.message
    assert caught.value.reason is Reason.INVALID_FIELD


async def test_a_data_set_without_rows_is_named(recipe_of, tmp_path):
    with pytest.raises(AstraflowError, match="data set train has no rows"):
        await serve_hub(recipe_of(rows=0), run_dir=tmp_path, tokens=HubTokens.generate())


async def test_a_data_set_that_does_not_exist_is_named(recipe_of, tmp_path):
    recipe = recipe_of(data__train__path=str(tmp_path / "none.jsonl"))
    with pytest.raises(AstraflowError, match=r"none\.jsonl"):
        await serve_hub(recipe, run_dir=tmp_path, tokens=HubTokens.generate())
