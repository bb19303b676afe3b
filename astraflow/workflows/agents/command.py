"""Command: any program is the agent; it finds the policy at OPENAI_BASE_URL."""

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.agents.door import Entrance
from astraflow.workflows.agents.harnesses import harness_named
from astraflow.workflows.agents.judging import AgentOptions, Judge
from astraflow.workflows.agents.pool import AgentPool
from astraflow.workflows.agents.served import agent_failed
from astraflow.workflows.agents.session import AgentSession, Ending, describe
from astraflow.workflows.episode import Episode
from astraflow.workflows.kept.program import Ended, Fate, Limits, Program
from astraflow.workflows.protocol import Score
from astraflow.workflows.scoring import GuardedScorer

_FIRST_PAUSE_S = 0.2
_SHOWN_CHARS = 400
_SCRIPTS = (".js", ".mjs", ".py", ".rb", ".sh", ".ts")
_MAX_ANSWER_NBYTES = 2**20


class ProgramOptions(AgentOptions):
    """What a program gets, and what it may take."""

    env: dict[str, str] = Field(default={})
    """Variables beside the node's own; those that begin with ASTRAFLOW_ are not passed on."""
    persistent: int = Field(default=0, ge=0)
    """0: a process per episode. More: so many processes, each of which serves one episode after the
    other, which it asks for at ASTRAFLOW_TAKE_URL."""
    time_s: float = Field(default=120.0, gt=0)
    """Seconds for one episode."""
    memory_mb: int = Field(default=2048, ge=16)
    """MiB of private memory: of each process, and resident of all together."""
    processes: int = Field(default=64, ge=1)
    """Processes at once."""


class CommandOptions(ProgramOptions):
    """The program."""

    command: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments; it runs in the node's working directory."""
    answer: Literal["reply", "stdout"] = "reply"
    """What the scorer reads when no reward was reported: the policy's last words, or what the
    program printed."""
    harness: str = ""
    """A known agent that the command starts, such as codex or claude-code: it gets the variables
    that it reads beside the general ones; see agents.md. Empty: none. `env` has the last word."""

    @field_validator("harness")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name:
            harness_named(name)
        return name

    @model_validator(mode="after")
    def _starts_for_each_episode(self) -> Self:
        if self.harness and self.persistent:
            raise ValueError(
                "a harness is started for each episode; leave persistent out, or the harness"
            )
        return self


class Command:
    """Runs a program per episode, or hands episodes to programs that stay."""

    Options = CommandOptions

    def __init__(self, options: CommandOptions, scorer: GuardedScorer | None) -> None:
        self._options = options
        self._judge = Judge(options, scorer)
        self._pool = AgentPool(
            options.command,
            count=options.persistent,
            env=environment(options.env),
            limits=Limits(time_s=None, memory_mb=options.memory_mb, processes=options.processes),
        )

    def lacks(self) -> Iterator[str]:
        """Yield that the program, or the script that it is to run, is not here."""
        program, *arguments = self._options.command
        path = environment(self._options.env).get("PATH")
        if shutil.which(program, path=path) is None:
            yield f"there is no program {program} here; install it, or name it by its path"
        script = next((each for each in arguments if not each.startswith("-")), "")
        if Path(script).suffix in _SCRIPTS and not Path(script).is_file():
            yield (
                f"there is no {script} in the working directory, {Path.cwd()}; start the command "
                "where it is, or give its whole path"
            )

    async def run(self, episode: Episode) -> Score:
        """Run one episode."""
        try:
            return await self._retried(episode)
        except AstraflowError as error:
            return self._judge.after(error, episode)

    async def _retried(self, episode: Episode) -> Score:
        """Start again, after a pause, what fails before anything was sampled."""
        pause_s = _FIRST_PAUSE_S
        for _ in range(self._options.attempts - 1):
            try:
                return await self._once(episode)
            except AstraflowError as error:
                if not error.retryable or episode.has_sampled:
                    raise
            await asyncio.sleep(pause_s)
            pause_s *= 2
        return await self._once(episode)

    async def _once(self, episode: Episode) -> Score:
        session = AgentSession(episode, self._judge.rules)
        async with episode.door.open(session) as entrance:
            if self._options.persistent:
                answer = await self._handed(session)
            else:
                answer = await self._started(session, entrance)
        return await self._judge.score(session, answer)

    async def _handed(self, session: AgentSession) -> str:
        """Let a program that stays do it."""
        _require_done(session, await self._pool.serve(session, time_s=self._options.time_s))
        return session.last_text

    async def _started(self, session: AgentSession, entrance: Entrance) -> str:
        """Start a program for this episode alone, and return its answer."""
        options = self._options
        with tempfile.TemporaryDirectory(prefix="astraflow-agent-") as name:
            folder = Path(name)
            task = folder / "task.json"
            task.write_text(json.dumps(describe(session)), encoding="utf-8")
            program = await Program.start(
                options.command,
                limits=Limits(
                    time_s=options.time_s,
                    memory_mb=options.memory_mb,
                    processes=options.processes,
                ),
                folder=folder,
                env=environment(self._harness_env(entrance, session, folder) | options.env)
                | entrance_env(entrance, task),
            )
            fate = await program.wait()
            if not fate.is_well and session.score is None:
                raise session.cause_of(_failure(fate, folder, options))
            if not session.is_open:
                _require_done(session, await session.ended())
            printed = options.answer == "stdout"
            return _read(folder / "stdout").strip() if printed else session.last_text

    def _harness_env(
        self, entrance: Entrance, session: AgentSession, folder: Path
    ) -> dict[str, str]:
        """Return the variables of the harness; its files are written."""
        if not self._options.harness:
            return {}
        harness = harness_named(self._options.harness)
        return harness.prepare(entrance, model=session.policy_ids[0], folder=folder)


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return what an agent gets of the node's environment, and more; no secrets of the run."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("ASTRAFLOW_")}
    return own | dict(more)


def entrance_env(entrance: Entrance, task: Path) -> dict[str, str]:
    """Return the variables that tell an agent of its episode."""
    return {
        "OPENAI_BASE_URL": entrance.base_url,
        "OPENAI_API_KEY": entrance.key,
        "ANTHROPIC_BASE_URL": entrance.session_url,
        "ANTHROPIC_API_KEY": entrance.key,
        "ASTRAFLOW_SESSION_URL": entrance.session_url,
        "ASTRAFLOW_TASK_FILE": str(task),
    }


def _require_done(session: AgentSession, ending: Ending) -> None:
    if ending.failure:
        raise session.cause_of(agent_failed(f"the agent gave up: {ending.failure}"))


def _failure(fate: Fate, folder: Path, options: CommandOptions) -> AstraflowError:
    said = _read(folder / "stderr").strip()[-_SHOWN_CHARS:]
    match fate.ended:
        case Ended.TIME:
            message = f"the agent took longer than {options.time_s:g} s (options.time_s)"
            return AstraflowError(Reason.ROLLOUT_TIMEOUT, message, retryable=True)
        case Ended.MEMORY:
            return agent_failed(f"the agent took more than {options.memory_mb} MiB: {said}")
        case Ended.PROCESSES:
            return agent_failed(f"the agent had more than {options.processes} processes: {said}")
        case _:
            return agent_failed(f"the agent ended with code {fate.code}: {said}")


def _read(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(_MAX_ANSWER_NBYTES).decode("utf-8", "replace")
