"""Agents as workflows: a program that finds the policy at OPENAI_BASE_URL, or one from elsewhere.

`command` starts the program itself, for one episode or to stay; `agent` offers episodes to whoever
asks the node for one.
"""

import asyncio
import contextlib
import json
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from astraflow.config.strict import Strict
from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.agents.harnesses import harness_named
from astraflow.workflows.agents.session import (
    AgentServer,
    AgentSession,
    SessionEndpoint,
    describe,
)
from astraflow.workflows.episode import Episode
from astraflow.workflows.kept.program import (
    ExitCause,
    Program,
    ProgramExit,
    ProgramFolder,
    ProgramLimits,
    environment,
    trim_output,
)
from astraflow.workflows.protocol import Score
from astraflow.workflows.scoring import GuardedScorer


class AgentOptions(Strict):
    """Of every workflow whose episodes are run by an agent."""

    models: dict[str, str] = Field(default={})
    """Policy by the model name that the agent asks for; `*`: any other name. Names that are left
    out mean the workflow's only policy, or have to be a policy's own."""
    sampling: Literal["recipe", "agent"] = "recipe"
    """Who chooses temperature, truncation and penalties."""
    infra_error: Literal["retry", "zero"] = "retry"
    """What an agent or an engine that fails makes of an episode. retry: a rollout that is void;
    it is run again, up to rollouts.max_attempts, then its group goes on without it. zero: a reward
    of 0 for what was sampled until then."""


# Of an agent or an engine: these say what became of it whatever `infra_error` is.
_NO_FAILURE_OF_ITS = frozenset(
    {Reason.CONTEXT_TOO_LONG, Reason.SCORER_FAILED, Reason.SCORER_TIMEOUT}
)


class AgentWorkflow:
    """Has episodes run by an agent, and says what each is worth once its agent is done."""

    def __init__(self, options: AgentOptions, scorer: GuardedScorer | None) -> None:
        self._agent = options
        self._scorer = scorer

    async def run(self, episode: Episode) -> Score:
        """Run one episode.

        Raises:
            AstraflowError: What failed, unless it was the agent or an engine and the recipe wants a
                reward of 0.
        """
        try:
            return await self.play(episode)
        except AstraflowError as error:
            is_its_failure = error.reason not in _NO_FAILURE_OF_ITS
            if self._agent.infra_error == "retry" or not (is_its_failure and episode.has_sampled):
                raise
            return Score(reward=0.0, parts={"infra_error": 1.0})

    async def play(self, episode: Episode) -> Score:
        """Have an agent run one episode."""
        raise NotImplementedError

    def session(self, episode: Episode) -> AgentSession:
        """Begin a session of an episode."""
        options = self._agent
        return AgentSession(
            episode, models=options.models, chooses_sampling=options.sampling == "agent"
        )

    async def score(self, session: AgentSession, answer: str) -> Score:
        """Return what an episode is worth that is over; without a reward, the answer is scored.

        Raises:
            AstraflowError: What failed in an engine; ENVIRONMENT_FAILED without reward and scorer.
        """
        session.raise_infrastructure()
        score = session.score
        if score is None:
            if self._scorer is None:
                raise AstraflowError(
                    Reason.ENVIRONMENT_FAILED,
                    "the agent reported no reward, and its workflow names no scorer; do one of the "
                    "two",
                )
            score = await self._scorer(session.episode.prompt, answer)
        return replace(score, truncated=score.truncated or session.is_cut)


class Served(AgentWorkflow):
    """Offers each episode to whoever asks the node for one, and waits until it is ended."""

    class Options(AgentOptions):
        """Who gets the episodes."""

        lane: str = ""
        """Agents ask for the episodes of a lane: POST /sessions?lane=..."""

    def __init__(self, options: Options, scorer: GuardedScorer | None) -> None:
        super().__init__(options, scorer)
        self._lane = options.lane

    async def play(self, episode: Episode) -> Score:
        """Wait for an agent from elsewhere."""
        session = self.session(episode)
        async with episode.agent_server.open(session):
            episode.agent_server.offer(session, self._lane)
            _require_done(session, await session.ended())
        return await self.score(session, session.last_text)


def agent_failed(message: str) -> AstraflowError:
    """Return that an agent failed; no fault of the policy."""
    return AstraflowError(Reason.ENVIRONMENT_FAILED, message, retryable=True)


@dataclass(frozen=True, slots=True, eq=False)
class _KeptProgram:
    """A program that stays, the lane on which it asks for episodes, the folder of its output."""

    program: Program
    lane: str
    folder: ProgramFolder

    async def stop(self) -> None:
        try:
            await self.program.stop()
        finally:
            self.folder.cleanup()


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
    attempts: int = Field(default=3, ge=1)
    """Times that an agent is started for one episode while it samples nothing, with growing pauses;
    what fails later is run again by the hub."""


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


class Command(AgentWorkflow):
    """Runs a program per episode, or hands episodes to programs that stay."""

    Options = CommandOptions

    def __init__(self, options: CommandOptions, scorer: GuardedScorer | None) -> None:
        super().__init__(options, scorer)
        self._options = options
        self._free: asyncio.LifoQueue[_KeptProgram | None] = asyncio.LifoQueue()
        for _ in range(options.persistent):
            self._free.put_nowait(None)

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

    async def close(self) -> None:
        """Stop the programs that stay; idempotent. Nobody may be in the middle of an episode."""
        while not self._free.empty():
            process = self._free.get_nowait()
            if process is not None:
                await process.stop()

    async def play(self, episode: Episode) -> Score:
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
        session, options = self.session(episode), self._options
        async with episode.agent_server.open(session) as entrance:
            if options.persistent:
                _require_done(session, await self._handed(session))
                answer = session.last_text
            else:
                answer = await self._started(session, entrance)
        return await self.score(session, answer)

    def _limits(self, time_s: float | None) -> ProgramLimits:
        options = self._options
        return ProgramLimits(time_s, memory_mb=options.memory_mb, processes=options.processes)

    async def _handed(self, session: AgentSession) -> str:
        """Hand an open session to a program that stays; return how it ended, as its `ended`.

        A program is started when an episode needs it. One that takes longer, dies, or whose episode
        is withdrawn is replaced.

        Raises:
            AstraflowError: ENVIRONMENT_FAILED when the program died, ROLLOUT_TIMEOUT.
        """
        process = await self._free.get()
        door = session.episode.agent_server
        try:
            process = process or await self._start_kept(door)
            trim_output(Path(process.folder.name))
            door.offer(session, process.lane)
            return await self._ended(session, process.program)
        except BaseException:
            # Nobody gets it again, however its end goes.
            failed, process = process, None
            if failed is not None:
                await failed.stop()
            raise
        finally:
            self._free.put_nowait(process)

    async def _ended(self, session: AgentSession, program: Program) -> str:
        time_s = self._options.time_s
        dying = asyncio.ensure_future(program.fate())
        ending = asyncio.ensure_future(session.ended())
        try:
            await asyncio.wait({dying, ending}, timeout=time_s, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return ending.result()
            if dying.done():
                raise agent_failed(f"the agent died: {dying.result()}")
            raise AstraflowError(
                Reason.ROLLOUT_TIMEOUT,
                f"the agent took longer than {time_s:g} s (options.time_s)",
                retryable=True,
            )
        finally:
            dying.cancel()
            ending.cancel()

    async def _start_kept(self, door: AgentServer) -> _KeptProgram:
        lane, options = secrets.token_hex(8), self._options
        url, token = await door.queue(lane)
        folder = ProgramFolder(prefix="astraflow-agent-")
        told = {"ASTRAFLOW_TAKE_URL": url, "ASTRAFLOW_TAKE_TOKEN": token}
        with contextlib.ExitStack() as undo:
            undo.callback(folder.cleanup)
            program = await Program.start(
                options.command,
                limits=self._limits(None),
                folder=Path(folder.name),
                env=environment(options.env, url=url) | told,
            )
            undo.pop_all()
        return _KeptProgram(program, lane, folder)

    async def _started(self, session: AgentSession, entrance: SessionEndpoint) -> str:
        """Start a program for this episode alone, and return its answer."""
        options = self._options
        with ProgramFolder(prefix="astraflow-agent-") as name:
            folder = Path(name)
            task = folder / "task.json"
            task.write_text(json.dumps(describe(session)), encoding="utf-8")
            told: dict[str, str] = {}
            if options.harness:
                harness, model = harness_named(options.harness), session.policy_ids[0]
                told = harness.prepare(entrance, model=model, folder=folder)
            episode_env = {
                "OPENAI_BASE_URL": entrance.base_url,
                "OPENAI_API_KEY": entrance.key,
                "ANTHROPIC_BASE_URL": entrance.session_url,
                "ANTHROPIC_API_KEY": entrance.key,
                "ASTRAFLOW_SESSION_URL": entrance.session_url,
                "ASTRAFLOW_TASK_FILE": str(task),
            }
            program = await Program.start(
                options.command,
                limits=self._limits(options.time_s),
                folder=folder,
                env=environment(told | options.env, url=entrance.base_url) | episode_env,
            )
            fate = await program.wait()
            if not fate.is_well and session.score is None:
                raise session.cause_of(_failure(fate, folder, options))
            if not session.is_open:
                _require_done(session, await session.ended())
            printed = options.answer == "stdout"
            return _read(folder / "stdout").strip() if printed else session.last_text


def _require_done(session: AgentSession, failure: str) -> None:
    if failure:
        raise session.cause_of(agent_failed(f"the agent gave up: {failure}"))


def _failure(fate: ProgramExit, folder: Path, options: CommandOptions) -> AstraflowError:
    said = _read(folder / "stderr").strip()[-_SHOWN_CHARS:]
    match fate.ended:
        case ExitCause.TIME:
            message = f"the agent took longer than {options.time_s:g} s (options.time_s)"
            return AstraflowError(Reason.ROLLOUT_TIMEOUT, message, retryable=True)
        case ExitCause.MEMORY:
            return agent_failed(f"the agent took more than {options.memory_mb} MiB: {said}")
        case ExitCause.PROCESSES:
            return agent_failed(f"the agent had more than {options.processes} processes: {said}")
        case _:
            return agent_failed(f"the agent ended with code {fate.code}: {said}")


def _read(path: Path) -> str:
    # An agent may have locked its folder, or removed it.
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(_MAX_ANSWER_NBYTES).decode("utf-8", "replace")
    return ""
