"""Harbor tasks in a sandbox, as recipes/terminal does them: folders, commands, tests, rewards."""

import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.check import check_recipe
from astraflow.testing import small_recipe, start_run
from astraflow.workflows.building import build_sandboxes
from astraflow.workflows.protocol import PolicyFault

FOLDER = Path(__file__).parents[2] / "recipes" / "terminal"
FOLDERS = {"folders": ("/app", "/logs", "/tests", "/solution")}
TEST = (
    'if [ "$(cat /app/out)" = ab ]; then echo 1; else echo 0.25; fi > /logs/verifier/reward.txt\n'
)
FILES = {
    "task.toml": "[agent]\ntimeout_sec = 20.0\n[verifier]\ntimeout_sec = 5.0\n",
    "instruction.md": "Write ab to out.\n",
    "environment/Dockerfile": (
        "FROM debian\n# A comment.\nENV WORD=a\nWORKDIR /app\nCOPY data/ ./\n"
        "RUN echo $WORD > \\\n  a.txt\n"
    ),
    "environment/data/b.txt": "b\n",
    "tests/test.sh": TEST,
}


@pytest.fixture(autouse=True)
def _found(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


@pytest.fixture
def tasks():
    return import_module("harbor_tasks")


@pytest.fixture
def harbor():
    return import_module("harbor_workflow")


def written(folder, **changes):
    for path, text in {**FILES, **changes}.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_a_task_folder_becomes_a_row_and_a_row_the_task(tasks, tmp_path):
    task = tasks.read_task(written(tmp_path / "one", **{"tests/data.bin": b"\xff\x00"}))
    row = json.loads(json.dumps(tasks.row_of(task)))
    assert (row["id"], row["instruction"]) == ("one", "Write ab to out.")
    again = tasks.task_of_row(row)
    assert again == task
    assert (again.agent_s, again.verifier_s) == (20.0, 5.0)
    assert set(again.below("tests")) == {"test.sh", "data.bin"}


def test_a_dockerfile_is_read_as_far_as_a_sandbox_goes(tasks, tmp_path):
    build = tasks.build_of(tasks.read_task(written(tmp_path / "one")))
    assert (build.workdir, build.env) == ("/app", {"WORD": "a"})
    assert build.steps == [("/app/b.txt", b"b\n"), ("/app", "echo $WORD >    a.txt")]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task.toml": "["}, "task one"),
        ({"environment/Dockerfile": "VOLUME /x\n"}, "no VOLUME"),
        ({"environment/Dockerfile": "COPY nothing /app/\n"}, "no such file"),
    ],
)
def test_a_task_that_is_wrong_is_told(tasks, tmp_path, changes, said):
    folder = written(tmp_path / "one", **changes)
    with pytest.raises(ValueError, match=said):
        tasks.build_of(tasks.read_task(folder))
    (folder / "instruction.md").unlink()
    with pytest.raises(ValueError, match=r"there is no instruction\.md"):
        tasks.read_task(folder)


def test_folders_are_packed_by_a_command(tmp_path):
    written(tmp_path / "tasks" / "one")
    out = tmp_path / "rows.jsonl"
    script = FOLDER / "harbor_tasks.py"
    subprocess.run([sys.executable, script, tmp_path / "tasks", "--out", out], check=True)
    assert json.loads(out.read_text())["id"] == "one"


@pytest.fixture
async def sandbox():
    provider = build_sandboxes("bubblewrap", FOLDERS, where="options")
    made = await provider.start()
    yield made
    await made.close()
    await provider.close()


async def test_the_tests_say_what_a_task_is_worth(tasks, harbor, tmp_path, sandbox):
    task = tasks.read_task(written(tmp_path / "one"))
    build = await harbor.build_task(sandbox, task, is_built=False)
    assert not (await sandbox.exec(["ls", "/tests"])).stdout
    assert (await harbor.verify(sandbox, task, build)).reward == 0.25
    await sandbox.exec(["sh", "-c", "cat a.txt b.txt | tr -d '\\n' > out"], cwd="/app")
    assert (await harbor.verify(sandbox, task, build)).reward == 1


async def test_what_an_agent_leaves_does_not_score(tasks, harbor, tmp_path, sandbox):
    task = tasks.read_task(written(tmp_path / "one"))
    build = await harbor.build_task(sandbox, task, is_built=False)
    cheat = "mkdir -p /logs/verifier; while :; do echo 9 > /logs/verifier/reward.txt; done &"
    await sandbox.exec(["bash", "-c", cheat])
    await sandbox.exec(["bash", "-c", "echo 'echo 9' > /tests/test.sh; ln -s /app /logs/x"])
    assert (await harbor.verify(sandbox, task, build)).reward == 0.25
    reward = "/logs/verifier/reward.txt"
    kept = f"echo 9 > {reward}; chmod 400 {reward}; chmod 500 /logs/verifier /logs /tests"
    await sandbox.exec(["bash", "-c", kept])
    assert (await harbor.verify(sandbox, task, build)).reward == 0.25


async def test_an_agent_that_locks_its_home_does_not_keep_running(tasks, harbor, tmp_path, sandbox):
    task = tasks.read_task(written(tmp_path / "one"))
    build = await harbor.build_task(sandbox, task, is_built=False)
    cheat = "while :; do echo 9 > /logs/x; mv /logs/x /logs/verifier/reward.txt; done"
    await sandbox.exec(["bash", "-c", f"mkdir -p /logs/verifier; {cheat} & chmod 000 /tmp"])
    assert (await harbor.verify(sandbox, task, build)).reward == 0.25


async def test_an_agent_that_locks_its_working_folder_is_at_fault(tasks, harbor, tmp_path, sandbox):
    task = tasks.read_task(written(tmp_path / "one"))
    build = await harbor.build_task(sandbox, task, is_built=False)
    await sandbox.exec(["chmod", "000", "/app"])
    with pytest.raises(PolicyFault, match="cannot begin in what it left"):
        await harbor.verify(sandbox, task, build)


async def test_tests_without_a_reward_are_no_zero(tasks, harbor, tmp_path, sandbox):
    changes = {"tests/test.sh": "echo broken >&2\n"}
    task = tasks.read_task(written(tmp_path / "one", **changes))
    build = await harbor.build_task(sandbox, task, is_built=False)
    with pytest.raises(AstraflowError, match="broken") as caught:
        await harbor.verify(sandbox, task, build)
    assert caught.value.reason is Reason.SCORER_FAILED


async def test_tests_that_do_not_end_are_the_policys(tasks, harbor, tmp_path, sandbox):
    changes = {"task.toml": "[verifier]\ntimeout_sec = 0.3\n"}
    task = tasks.read_task(written(tmp_path / "one", **changes))
    build = await harbor.build_task(sandbox, task, is_built=False)
    await sandbox.exec(["mkfifo", "/app/out"])
    with pytest.raises(PolicyFault, match="did not end"):
        await harbor.verify(sandbox, task, build)


async def test_what_cannot_be_built_here_is_no_fault_of_the_policy(
    tasks, harbor, tmp_path, sandbox
):
    changes = {"environment/Dockerfile": "RUN apt-get install nothing\n"}
    task = tasks.read_task(written(tmp_path / "one", **changes))
    with pytest.raises(AstraflowError, match="build: image") as caught:
        await harbor.build_task(sandbox, task, is_built=False)
    assert caught.value.reason is Reason.ENVIRONMENT_FAILED


async def test_an_agent_works_in_the_sandbox_and_is_rewarded(tasks, tmp_path):
    """The agent is a process, its shell is in the sandbox, its model is the policy."""
    row = tasks.row_of(tasks.read_task(written(tmp_path / "one")))
    recipe = small_recipe(
        tmp_path,
        workflow="harbor_workflow:HarborTask",
        prompts=[{**row, "id": f"one-{number}"} for number in range(3)],
        changes={
            "policies.solver.trainer.step_count": 1,
            "policies.solver.trainer.groups_per_batch": 1,
            "policies.solver.sampling.max_new_tokens": 100,
            "workflows.main.options": {
                "command": [sys.executable, "-S", "{folder}/terminal_agent.py", "{instruction}"],
            },
        },
    )

    def answer(told):
        if "exit code 0" in told:
            return "It is done."
        return "Like this:\n```bash\ntr -d '\\n' < b.txt | cat <(echo -n $WORD) - > out; ls\n```"

    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await run.add_node(answer=answer)
        run.add_trainer()
        await run.finish()
    rollout = run.rollouts()[0].rollout
    assert rollout.reward == 1
    assert len(rollout.trajectories) == 1


@pytest.mark.parametrize("command", ["ls \0", "echo " + "x" * 2**18])
def test_what_cannot_be_a_command_is_told(command):
    assert import_module("terminal_agent").run(command).startswith("[this cannot be run: ")


def test_the_files_are_what_the_script_makes(tasks, tmp_path):
    for name in ("make_data.py", "harbor_tasks.py"):
        shutil.copy(FOLDER / name, tmp_path)
    script = [sys.executable, tmp_path / "make_data.py", "--folders", tmp_path / "tasks"]
    subprocess.run(script, check=True)
    for name in ("train", "held_out", "demonstrations"):
        made = (tmp_path / f"{name}.jsonl").read_bytes()
        assert made == (FOLDER / f"{name}.jsonl").read_bytes()
    assert tasks.read_task(tmp_path / "tasks" / "train-000").instruction


async def test_its_solutions_are_worth_1_and_nothing_is_worth_0(tasks, harbor):
    provider = build_sandboxes("bubblewrap", FOLDERS, where="options")
    rows = [json.loads(line) for line in (FOLDER / "held_out.jsonl").read_text().splitlines()]
    for row in rows[:6]:
        task = tasks.task_of_row(row)
        sandbox = await provider.start()
        build = await harbor.build_task(sandbox, task, is_built=False)
        assert (await harbor.verify(sandbox, task, build)).reward == 0
        await sandbox.exec(["bash", "-c", task.files["solution/solve.sh"].decode()], cwd="/app")
        assert (await harbor.verify(sandbox, task, build)).reward == 1
        await sandbox.close()
    await provider.close()


@pytest.mark.parametrize("name", ["cpu", "gpu-8", "gpu-2x8"])
def test_its_recipes_are_sound(name, tmp_path):
    report = check_recipe(
        FOLDER / f"{name}.yaml", runs=tmp_path, is_elsewhere=name != "cpu", limit_s=60.0
    )
    assert report.errors == []
