"""The commands of a page, pasted in order into one shell, in a copy of this repository.

What a reader leaves running in a terminal of its own goes on in the background once it has said
that it is up, and is ended by Ctrl-C, the last first. All else has to end with 0. Whole runs have
few steps; what `pip` would install beside what is here it only resolves.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from crash_ends.postgres import free_port
from tests.e2e.conftest import WARM_UP
from tests.e2e.places import has_slurm, slurm_cluster
from tests.e2e.test_recipes import SHORT

from .conftest import PAGES, ROOT, fences, files, name_of

# ruff: noqa: E501
# fmt: off
_CONTRIBUTOR = "the lock has gigabytes; tests/docs/test_install.py holds it against what is asked for"
_DATAFLOW = "a Dataflow of others; tests/gateway/test_upstream.py, marker upstream"
_OWN = "a model of one's own; tests/engines/test_models.py has such"
_PEERS = "tests/peers, marker peers, with the tools of each language"
_QUICK = "another language in place of Python; tests/docs/test_quickstart.py, marker peers"
_STANDBY = "two hosts; tests/dataflow/test_takeover.py, marker postgres"
_TINKER = "a model for GPUs; tests/tinker/test_cookbook.py, marker tinker"
_VERIFIERS = "tests/workflows/agents/test_verifiers.py, marker verifiers"
_SGLANG = "a server of gigabytes; tests/engines/served, marker sglang"
_VLLM = "a server of gigabytes; tests/engines/served, marker vllm"
ELSEWHERE = {
    ("README.md", "make test"): "what runs this",
    ("README.md", "python3 -m venv sglang"): _SGLANG,
    ("README.md", "export ASTRAFLOW_SGLANG_PYTHON"): _SGLANG,
    ("README.md", "astraflow run big-run/recipe.yaml"): "eight GPUs and SGLang; tests/recipes checks the recipe",
    ("benchmarks/README.md", "sudo python"): "an emulated link; tests/benchmarks/test_long_way.py, marker root",
    ("docs/adapters.md", "ASTRAFLOW_VLLM_PYTHON"): _VLLM,
    ("docs/agents.md", "python -m venv my-venv"): _VERIFIERS,
    ("docs/agents.md", "astraflow data verifiers"): _VERIFIERS,
    ("docs/cli.md", "astraflow models get ~/"): _OWN,
    ("docs/cli.md", "astraflow data verifiers"): _VERIFIERS,
    ("docs/cli.md", "astraflow run recipes/sort.yaml --on slurm"): "docs/clusters.md has it, too",
    ("docs/cli.md", "astraflow track"): "accounts of others; tests/launch/tracking/test_extras.py",
    ("docs/cli.md", "astraflow ledger runs/live --requeue"): "nothing was given up; tests/core/test_dead_letters.py",
    ("docs/cli.md", "astraflow token runs/live --revoke"): "an id that was printed; tests/dataflow/test_revocation.py",
    ("docs/cli.md", "astraflow gateway raas"): _DATAFLOW,
    ("docs/cli.md", "astraflow tinker --model /models"): _TINKER,
    ("docs/cli.md", "astraflow weights verify s3:"): "a store; tests/e2e/test_object_store.py",
    ("docs/cli.md", "astraflow bench link --from"): "a token that was printed; tests/launch/bench/test_link.py",
    ("docs/cli.md", "astraflow conformance weights"): "a member that serves; tests/conformance/test_weights.py",
    ("docs/clients.md", "buf generate protos"): _PEERS,
    ("docs/clients.md", 'cp -r "$ASTRAFLOW/tests/peers/'): _PEERS,
    ("docs/clients.md", 'buf generate "$ASTRAFLOW/protos"'): _PEERS,
    ("docs/clients.md", "go mod tidy"): _PEERS,
    ("docs/clients.md", "ASTRAFLOW_PROTOS="): _PEERS,
    ("docs/clusters.md", "helm install"): "tests/launch/test_chart.py, marker kubernetes",
    ("docs/clusters.md", "astraflow run recipe.yaml --on ssh"): "tests/e2e/test_ssh.py, marker ssh",
    ("docs/clusters.md", "astraflow run recipe.yaml --on ray"): "tests/e2e/test_ray.py, marker ray",
    ("docs/engines.md", "scripts/install_vllm_cpu.sh"): _VLLM,
    ("docs/engines.md", "export ASTRAFLOW_VLLM_PYTHON"): _VLLM,
    ("docs/engines.md", "astraflow run"): _VLLM,
    ("docs/evaluation.md", "astraflow eval runs/live --live --version"): "nodes may have left it; tests/launch/test_live_eval.py",
    ("docs/http-pools.md", "astraflow gateway raas"): _DATAFLOW,
    ("docs/install.md", "python3 -m venv"): _VLLM,
    ("docs/install.md", "export ASTRAFLOW_VLLM_PYTHON"): _VLLM,
    ("docs/install.md", "docker"): "a registry; tests/docs/test_install.py reads the images",
    ("docs/install.md", ".venv/bin/pip"): _CONTRIBUTOR,
    ("docs/journal.md", "export ASTRAFLOW_JOIN_TOKEN"): _STANDBY,
    ("docs/journal.md", "astraflow dataflow serve"): _STANDBY,
    ("docs/metrics.md", "astraflow track"): "MLflow's package; tests/launch/tracking/test_extras.py",
    ("docs/models.md", "astraflow models get ~/"): _OWN,
    ("docs/quickstart.md", 'cp -r "$ASTRAFLOW/tests/peers'): _QUICK,
    ("docs/quickstart.md", "cd letters-"): _QUICK,
    ("docs/quickstart.md", "PATH=$PWD"): _QUICK,
    ("docs/quickstart.md", "npx tsc"): _QUICK,
    ("docs/quickstart.md", "mkdir"): _QUICK,
    ("docs/quickstart.md", "go "): _QUICK,
    ("docs/ranks.md", "torchrun"): "four machines; tests/e2e/test_ranks.py has one",
    ("docs/tinker.md", "astraflow tinker"): _TINKER,
    ("docs/tinker.md", "TINKER_API_KEY"): _TINKER,
    ("recipes/alfworld/README.md", "python -m venv"): "games to download; tests/recipes/test_alfworld.py, marker slow",
    ("recipes/alfworld/README.md", "ALFWORLD_DATA="): "games to download; tests/recipes/test_alfworld.py, marker slow",
    ("recipes/math-efficient-data/README.md", "python recipes"): "six whole runs; tests/recipes/test_math_efficient_data.py",
}
# fmt: on
"""By page and how a command begins: why it is not run here."""

UP = {
    r"\S+ dataflow serve": "hub serves",
    r"\S+ trainer run": "joined",
    r"\S+ raas join": "joined",
    r"\S+ gateway serve": "gateway serves",
    r"\S+ tinker": "serves",
    r"\S+ ui(?!.*--export)": "http://",
    r"\S+ bench link --listen": "serving",
    r"\S+ autoscale \S+$": r"\S",
    r".* --(watch|follow)\b": r"\S",
    r".*# .*in a terminal of its own": ": step [1-9]",
}
"""What does not end by itself, and what it says once it is up."""

FROM_ABOVE = {"docs/quickstart.md"}
"""Pages whose reader stands beside the clone, not in it."""

NEEDS = {
    "docs/clients.md": [pytest.mark.skipif(not shutil.which("npm"), reason="npm is missing")],
    "docs/clusters.md": [
        pytest.mark.slurm,
        pytest.mark.skipif(not has_slurm(), reason="Slurm is missing: scripts/install_clusters.sh"),
    ],
}
STEPS = 4
FEW = "data.held_out.limit=32"
SHORT_SORT = [
    WARM_UP,
    f"policies.solver.trainer.step_count={STEPS}",
    "policies.solver.trainer.optimizer.decay=null",
    FEW,
]
VARIANTS = {
    "recipes/sort-pair-lora.yaml": ("solver", "verifier"),
    "recipes/preferences/cpu.yaml": ("sorter",),
    "recipes/preferences/reward_model.yaml": ("judge",),
}
PORTS = re.compile(r"\b(7000|7070|7100|8000|19190)\b")
SHELL = """set -eo pipefail -m
pip() { if [ "$1$VIRTUAL_ENV" = install ]; then set -- "$@" --dry-run; fi; command pip "$@"; }
left=()
up() {
    left+=($!)
    until grep -Eqs "$1" "$2"; do
        if ! kill -0 $! 2>/dev/null; then wait $!; return; fi
        sleep 0.2
    done
}
end() {
    for ((n = ${#left[@]} - 1; n >= 0; n--)); do
        code=0
        kill -INT -- "-${left[n]}" 2>/dev/null || true
        wait "${left[n]}" || code=$?
        if [ $code != 0 ] && [ $code != 130 ]; then echo "$n ended with $code"; exit $code; fi
    done
}
"""


def commands(path):
    """Return the commands of a page, as lines that are whole."""
    code = "".join(fence.code for fence in fences(path) if fence.language == "bash")
    lines = re.sub(r"\\\n\s*", "", code).splitlines()
    return [line for line in lines if line and line[0] != "#"]


def reason(path, command):
    """Return why a command is not run here, if it is not."""
    told = [(begin, why) for (page, begin), why in ELSEWHERE.items() if page == name_of(path)]
    return next((why for begin, why in told if f"{command}\n".startswith(begin)), None)


def is_run(path):
    return any(reason(path, command) is None for command in commands(path))


def sets(recipe):
    """Return the arguments that make a run of a recipe short."""
    policies = VARIANTS.get(recipe, ("solver",))
    folder = "math" if recipe.startswith("my-run/") else Path(recipe).parent.name
    short = [each.replace("solver", policy) for policy in policies for each in SHORT_SORT]
    if recipe == "recipes/preferences/reward_model.yaml":
        # It is not evaluated.
        short.remove(FEW)
    keys = SHORT.get(folder, short)
    if recipe.startswith("my-run/"):
        keys = [key.replace("../tools/", "../recipes/tools/") for key in keys]
    return shlex.join(each for key in keys for each in ("--set", key))


def shortened(command):
    few = re.sub(r"step_count=\d+", f"step_count={2 * STEPS}", command)
    few = re.sub(r"step_\d{6}", f"step_{STEPS:06}", few)
    if "--dry-run" in few:
        return few
    return re.sub(r"astraflow run (\S+\.yaml)", lambda run: f"{run[0]} {sets(run[1])}", few)


def script(path, logs):
    """Return what the shell is given; what stays up says where it writes."""
    lines = [SHELL]
    for count, command in enumerate(commands(path)):
        words = next((words for form, words in UP.items() if re.match(form, command)), None)
        if reason(path, command):
            continue
        lines.append(f"echo $SECONDS s: {shlex.quote(command)}")
        if words is None or command.endswith("&"):
            lines.append(shortened(command))
        else:
            log = logs / str(count)
            soon = f"--set {WARM_UP} --set {FEW}"
            early = re.sub(r"astraflow run \S+\.yaml", rf"\g<0> {soon}", command)
            lines.append(f"{{ {early}\n}} > {log} 2>&1 &\nup {shlex.quote(words)} {log}")
    return "\n".join([*lines, "end"])


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Models that pages get or warm up, once for all of them."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def clone(tmp_path):
    """A copy of this repository, with an environment that `make demo` has nothing to add to."""
    junk = (".git", ".venv", ".*_cache", "build", "dist", "runs", "node_modules", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "astraflow", ignore=shutil.ignore_patterns(*junk))
    programs = tmp_path / "astraflow" / ".venv" / "bin"
    programs.mkdir(parents=True)
    for program in ("astraflow", "python"):
        (programs / program).symlink_to(Path(sys.executable).with_name(program))
    (programs.parent / ".demo").touch()
    return tmp_path / "astraflow"


@pytest.fixture
def places(path, tmp_path_factory):
    """What the environment says of a cluster, on the page that has one."""
    if name_of(path) != "docs/clusters.md":
        yield {}
        return
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as said:
        yield said


def paste(text, folder, environment, log):
    """Return the exit code; nothing that was started is left."""
    with log.open("w") as said:
        shell = subprocess.Popen(
            ["bash", "-c", text],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        return shell.wait(1400)
    finally:
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getsid(process.pid) == shell.pid:
                    process.send_signal(signal.SIGKILL)


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=NEEDS.get(name_of(path), ()), id=name_of(path))
        for path in PAGES
        if is_run(path)
    ],
)
def test_a_page_can_be_pasted(path, clone, cache, places, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    folder = tmp_path if name_of(path) in FROM_ABOVE else clone
    environment = os.environ | places
    environment["ASTRAFLOW"] = str(clone)
    environment["BROWSER"] = "true"
    environment["HOME"] = str(tmp_path)
    environment["NO_COLOR"] = "1"
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment["RUN_ARGS"] = sets("recipes/sort.yaml")
    environment["XDG_CACHE_HOME"] = str(cache)
    for name in ("VIRTUAL_ENV", *(["PYTHONPATH"] if folder == tmp_path else [])):
        environment.pop(name, None)
    ports = {}

    def with_free_ports(text):
        return PORTS.sub(lambda found: str(ports.setdefault(found[0], free_port())), text)

    for title, code in files(path).items():
        (folder / title).write_text(with_free_ports(code))
    code = paste(with_free_ports(script(path, logs)), folder, environment, logs / "shell")
    said = sorted(logs.iterdir(), key=lambda log: log.name)
    assert code == 0, "\n".join(f"{log.name}:\n{log.read_text()[-4000:]}" for log in said)


def test_what_is_not_run_is_there():
    shown = [(name_of(path), command) for path in PAGES for command in commands(path)]
    for (page, begin), why in ELSEWHERE.items():
        found = [each for name, each in shown if page == name and f"{each}\n".startswith(begin)]
        assert found, (page, begin)
        assert all((ROOT / place).exists() for place in re.findall(r"(?:tests|docs)/[\w./]+", why))
