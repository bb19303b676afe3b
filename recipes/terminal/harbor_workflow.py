"""Harbor tasks for agents that know OpenAI's API and a shell: the workflow of recipes/terminal.

The agent is a program on the node, started for each episode. What it runs, it runs by `TASK_SHELL
-c COMMAND`, in the sandbox of the episode, which has no network and sees no file of the node. The
tests are brought there when the agent is done and all that it left running is dead, and their
reward is read from where Harbor's tests write it.
"""

import asyncio
import json
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from harbor_tasks import Build, Task, build_of, task_of_row
from pydantic import Field

from astraflow.config.strict import Options as AnyOptions
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.workflows.agents.workflows import Command, CommandOptions
from astraflow.workflows.building import build_sandboxes
from astraflow.workflows.episode import Episode
from astraflow.workflows.protocol import PolicyFault, Score
from astraflow.workflows.sandbox.pool import SandboxPool
from astraflow.workflows.sandbox.protocol import Sandbox
from astraflow.workflows.scoring import GuardedScorer

_HERE = Path(__file__).parent
_FOLDERS = ("/app", "/logs", "/tests", "/solution")
_REWARD = "/logs/verifier/reward.txt"
_TIMEOUT_CODE = 124
# What is in a folder that may not be written to is not removed otherwise.
_EMPTIED = (
    "chmod -R u+rwX /tests /logs; "
    "rm -rf /tests/* /tests/.[!.]* /logs/* /logs/.[!.]*; mkdir -p /logs/verifier"
)


class HarborOptions(CommandOptions):
    """The agent, and where its commands run."""

    persistent: Literal[0] = 0
    """An agent is started for each episode."""
    build: Literal["dockerfile", "image"] = "dockerfile"
    """Who makes the task's files: what its Dockerfile copies and runs is done in the sandbox, whose
    base is what the sandbox has; or the sandbox's image has all of it."""
    command_s: float = Field(default=30.0, gt=0)
    """Seconds for one command of the agent."""
    workers: int = Field(default=64, ge=1)
    """Episodes at once."""
    ready: int = Field(default=4, ge=0)
    """Sandboxes that are started ahead."""
    sandbox: str = "bubblewrap"
    """Where commands run."""
    sandbox_options: AnyOptions = Field(default={})
    """Its own; folders are /app, /logs, /tests and /solution unless they say otherwise."""


class HarborTask:
    """Builds a task in a sandbox, lets an agent do it, runs its tests."""

    Options = HarborOptions

    def __init__(self, options: HarborOptions, scorer: GuardedScorer | None) -> None:
        del scorer  # The tests are.
        self._options = options
        provider = build_sandboxes(
            options.sandbox,
            {"folders": _FOLDERS, **options.sandbox_options},
            where="options.sandbox_options",
        )
        self._pool = SandboxPool(provider, workers=options.workers, ready=options.ready)

    def lacks(self) -> Iterator[str]:
        """Yield that the agent is not here."""
        yield from Command(self._command("", {}), None).lacks()

    async def run(self, episode: Episode) -> Score:
        """Run one episode."""
        task = _task_of(episode.prompt)
        async with self._pool.take() as sandbox:
            build = await build_task(sandbox, task, is_built=self._options.build == "image")

            async def verified(prompt: Prompt, answer: str) -> Score:
                del prompt, answer
                return await verify(sandbox, task, build)

            async with self._shell(sandbox, build) as env:
                settings = self._command(task.instruction, env, agent_s=task.agent_s)
                command = Command(settings, GuardedScorer(verified, name="tests/test.sh"))
                return await command.run(episode)

    async def close(self) -> None:
        """End all its sandboxes."""
        await self._pool.close()

    def _command(
        self, instruction: str, env: dict[str, str], *, agent_s: float | None = None
    ) -> CommandOptions:
        """Return what the workflow `command` is told of one episode."""
        given = self._options
        fields = {name: getattr(given, name) for name in CommandOptions.model_fields}
        names = {"{instruction}": instruction, "{folder}": str(_HERE)}
        command = [
            names[each] if each in names else each.replace("{folder}", str(_HERE))
            for each in given.command
        ]
        time_s = min(given.time_s, agent_s or given.time_s)
        return CommandOptions(
            **{**fields, "command": command, "env": {**given.env, **env}, "time_s": time_s}
        )

    @asynccontextmanager
    async def _shell(self, sandbox: Sandbox, build: Build) -> AsyncIterator[dict[str, str]]:
        """Listen for the agent's commands; yield what tells it where."""
        one_at_a_time = asyncio.Lock()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                asked = json.loads(await reader.readline())
                async with one_at_a_time:
                    answer = await self._ran(sandbox, build, str(asked["command"]))
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
            except (OSError, ValueError, KeyError, TypeError):
                pass  # Whoever asked has gone, or is no shell of ours.
            finally:
                writer.close()

        with tempfile.TemporaryDirectory(prefix="astraflow-shell-") as folder:
            path = f"{folder}/socket"
            server = await asyncio.start_unix_server(serve, path, limit=2**24)
            shell = shlex.join([sys.executable, "-I", "-S", str(_HERE / "sandbox_shell.py")])
            async with server:
                yield {"TASK_SHELL": shell, "TASK_SOCKET": path}

    async def _ran(self, sandbox: Sandbox, build: Build, command: str) -> dict[str, Any]:
        """Run a command of the agent; what it broke is told, and shows when the tests run."""
        try:
            done = await sandbox.exec(
                ["bash", "-c", command],
                cwd=build.workdir,
                env=build.env,
                time_s=self._options.command_s,
            )
        except (PolicyFault, AstraflowError) as error:
            return {"stdout": "", "stderr": f"the shell is gone: {error}\n", "code": 1}
        stderr = done.stderr.decode("utf-8", "replace")
        code = done.exit_code if done.exit_code is not None else 128 + (done.signal or 0)
        if done.is_timeout:
            code = _TIMEOUT_CODE
            stderr += f"it took longer than {self._options.command_s:g} s, and was ended\n"
        return {"stdout": done.stdout.decode("utf-8", "replace"), "stderr": stderr, "code": code}


def _task_of(prompt: Prompt) -> Task:
    try:
        return task_of_row(prompt.fields)
    except ValueError as error:
        raise _failed(f"prompt {prompt.prompt_id}: {error}") from error


async def build_task(sandbox: Sandbox, task: Task, *, is_built: bool) -> Build:
    """Do what the task's Dockerfile says, and return what holds for commands.

    Raises:
        AstraflowError: ENVIRONMENT_FAILED when a step fails here.
    """
    try:
        build = build_of(task)
    except ValueError as error:
        raise _failed(str(error)) from error
    if is_built:
        return build
    await sandbox.exec(["mkdir", "-p", build.workdir])
    for place, what in build.steps:
        if isinstance(what, bytes):
            await sandbox.write(place, what)
            continue
        done = await sandbox.exec(
            ["sh", "-c", f"mkdir -p {shlex.quote(place)} && cd {shlex.quote(place)} && {what}"],
            env=build.env,
            time_s=task.verifier_s,
        )
        if not done.is_well:
            said = done.stderr.decode("utf-8", "replace")[-300:]
            raise _failed(
                f"task {task.name}: RUN {what} failed in the sandbox: {said}; name a sandbox whose "
                "image has it, and build: image"
            )
    return build


async def verify(sandbox: Sandbox, task: Task, build: Build) -> Score:
    """Bring the tests, run them, and read their reward.

    Raises:
        PolicyFault: The tests cannot begin in what the agent left, or come to no end there, or the
            sandbox is gone.
        AstraflowError: SCORER_FAILED when the tests write no reward.
    """
    # Nothing of the agent's runs beside the tests, and nothing that it wrote is taken for theirs.
    # Nor does it keep these commands from their folder: its own and home may be locked.
    await sandbox.exec(["sh", "-c", "kill -9 -1"], cwd="/")
    emptied = await sandbox.exec(
        ["sh", "-c", f"{_EMPTIED} && cd {shlex.quote(build.workdir)}"], cwd="/"
    )
    if not emptied.is_well:
        said = emptied.stderr.decode("utf-8", "replace")[-300:]
        raise PolicyFault(f"its tests cannot begin in what it left: {said}")
    for path, data in task.below("tests").items():
        await sandbox.write(f"/tests/{path}", data)
    done = await sandbox.exec(
        ["bash", "/tests/test.sh"], cwd=build.workdir, env=build.env, time_s=task.verifier_s
    )
    if done.is_timeout or done.is_lost:
        raise PolicyFault(f"its tests did not end within {task.verifier_s:g} s")
    try:
        reward = float(await sandbox.read(_REWARD))
    except (FileNotFoundError, ValueError) as error:
        said = done.stderr.decode("utf-8", "replace")[-300:]
        raise AstraflowError(
            Reason.SCORER_FAILED,
            f"task {task.name}: tests/test.sh wrote no number to {_REWARD}: {said}",
        ) from error
    return Score(reward=reward, parts={"tests": reward})


def _failed(message: str) -> AstraflowError:
    return AstraflowError(Reason.ENVIRONMENT_FAILED, message)
