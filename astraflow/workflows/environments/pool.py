"""Pools: the processes in which environments live, one line of JSON to each at a time."""

import asyncio
import json
import math
import os
import shutil
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, cast

from pydantic import Field

import astraflow
from astraflow.config.strict import Options, Strict
from astraflow.core.code import load
from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.environments.protocol import Observation, Step
from astraflow.workflows.kept.program import MAX_LINE_NBYTES, LineWorker, ProgramLimits
from astraflow.workflows.kept.program import environment as environment_variables
from astraflow.workflows.registry import Kind, target_of

_WORKER = Path(__file__).with_name("worker.py")
_PACKAGES = Path(astraflow.__file__).parents[1]
_SHOWN_CHARS = 600


class PoolOptions(Strict):
    """Which environment, and the processes in which it lives."""

    environment: str = Field(min_length=1)
    """Built in, an entry point of the group astraflow.environments, or module:Class."""
    environment_options: Options = Field(default={})
    """Keywords that it is made with."""
    python: str = ""
    """Interpreter of a venv that has the environment's packages; empty: this one."""
    env: dict[str, str] = Field(default={})
    """Variables of the processes beside the node's own; those that begin with ASTRAFLOW_ are not
    passed on."""
    workers: int = Field(default=2, ge=1)
    """Processes, which stay; one is started when an episode needs it."""
    per_worker: int = Field(default=16, ge=1)
    """Environments in each, one an episode; they take turns. 1: where one fills a process."""
    step_time_s: float = Field(default=30.0, gt=0)
    """Seconds for a step or a reset; a process that takes longer is killed and replaced."""
    start_time_s: float = Field(default=120.0, gt=0)
    """Seconds until a process has imported and made its first environment."""
    memory_mb: int = Field(default=4096, ge=64)
    """MiB of private memory of a process, its children included."""
    processes: int = Field(default=64, ge=1)
    """Processes that one may have below it, itself included."""


@dataclass(slots=True, eq=False)
class _Host:
    """A place for one process.

    Attributes:
        free: Numbers of environments that no episode has.
        turn: Held while the process is asked.
        process: None: it is started when it is asked.
    """

    free: set[int]
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    process: LineWorker | None = None


class EnvironmentPool:
    """Environments of one kind, in processes that are started when they are needed.

    A process that dies, or takes too long, fails the episodes that are played in it, and is
    replaced.
    """

    def __init__(self, options: PoolOptions) -> None:
        """Check what can be told without a process.

        Raises:
            AstraflowError: CODE_UNKNOWN or INVALID_FIELD, as far as can be told before a process
                is started.
        """
        self._options = options
        if options.python and shutil.which(options.python) is None:
            raise _refused("python", f"{options.python} is no program here")
        is_elsewhere = bool(options.python)
        self._target = target_of(Kind.ENVIRONMENT, options.environment, or_as_it_is=is_elsewhere)
        if self._target.startswith(f"{__package__}."):
            # What it adapts is not needed to know its options.
            made = signature(load(self._target, what=f"environment {options.environment}"))
            try:
                made.bind(**options.environment_options)
            except TypeError as error:
                known = ", ".join(made.parameters)
                raise _refused("environment_options", f"{error}; known are {known}") from error
        self._hosts = [_Host(set(range(options.per_worker))) for _ in range(options.workers)]
        self._places = asyncio.Semaphore(options.workers * options.per_worker)
        self._refusal: AstraflowError | None = None
        self._asking: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncGenerator["PooledEnvironment"]:
        """Have an environment for one episode; waits for a free one."""
        async with self._places:
            host = max(self._hosts, key=lambda each: len(each.free))
            # The lowest: as few environments are made as are played at once.
            number = min(host.free)
            host.free.remove(number)
            try:
                yield PooledEnvironment(self, host, number)
            finally:
                host.free.add(number)

    async def close(self) -> None:
        """Stop every process; idempotent. Nobody may be in the middle of an episode."""
        for task in tuple(self._asking):
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        for host in self._hosts:
            async with host.turn:
                await _clear(host)

    async def ask(
        self, host: _Host, told: Mapping[str, Any], started: LineWorker | None
    ) -> tuple[dict[str, Any], LineWorker]:
        """Send a line to a process, and return the answer and the process that gave it.

        A process that is in the middle of an answer finishes it, though nobody may wait for it.

        Args:
            host: Whose process.
            told: The line.
            started: The process that it is for; None: any, and one is started where there is none.

        Raises:
            AstraflowError: ENVIRONMENT_FAILED; CODE_UNKNOWN or INVALID_FIELD when the environment
                cannot be made.
        """
        task = asyncio.ensure_future(self._send(host, told, started))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        # Nobody may wait for what it raises.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _send(
        self, host: _Host, told: Mapping[str, Any], started: LineWorker | None
    ) -> tuple[dict[str, Any], LineWorker]:
        options = self._options
        async with host.turn:
            process = host.process
            if process is None or (started is not None and process is not started):
                if started is not None:
                    raise self._failed("the process that it was in is gone")
                process = host.process = await self._start()
            try:
                async with asyncio.timeout(options.step_time_s):
                    answer = await process.ask(told)
            except TimeoutError:
                await _clear(host)
                what = "reset" if "task" in told else f"step on {told['action']!r}"
                raise self._failed(
                    f"{what[:_SHOWN_CHARS]} took longer than {options.step_time_s:g} s "
                    "(step_time_s), and its process was killed"
                ) from None
            except ValueError as error:
                await _clear(host)
                raise self._failed(
                    f"its answer cannot be read: {error}; an observation has at most "
                    f"{MAX_LINE_NBYTES // 2**20} MiB"
                ) from error
            if answer is None:
                words = process.last_words or "it said nothing"
                await _clear(host)
                raise self._failed(
                    f"its process died: {words}; where it needs more than {options.memory_mb} MiB,"
                    " raise memory_mb"
                )
        if "error" in answer:
            raise self._failed(answer["error"], answer)
        return answer, process

    async def _start(self) -> LineWorker:
        if self._refusal is not None:
            raise self._refusal
        options = self._options
        own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} if not options.python else {}
        # The order of sets is in what some environments say.
        fixed = {"PYTHONHASHSEED": "0", **own, **options.env}
        process = await LineWorker.start(
            (options.python or sys.executable, str(_WORKER)),
            (str(_PACKAGES), self._target, json.dumps(options.environment_options)),
            limits=ProgramLimits(
                time_s=None, memory_mb=options.memory_mb, processes=options.processes
            ),
            env=environment_variables(fixed),
        )
        try:
            await self._started(process)
        except BaseException:
            await process.stop()
            raise
        return process

    async def _started(self, process: LineWorker) -> None:
        """Wait until a process has made its first environment."""
        options = self._options
        try:
            async with asyncio.timeout(options.start_time_s):
                answer = await process.ask(None)
        except TimeoutError:
            raise self._failed(
                f"it was not made within {options.start_time_s:g} s (start_time_s)"
            ) from None
        if answer is None:
            raise self._failed(f"its process did not start: {process.last_words}")
        if "error" not in answer:
            return
        reason = Reason(answer["reason"])
        if reason is Reason.ENVIRONMENT_FAILED:
            raise self._failed(answer["error"], answer)
        cure = ""
        if reason is Reason.CODE_UNKNOWN:
            cure = "; install it there, or name an interpreter that has it (options.python)"
        message = f"environment {options.environment} in {options.python or sys.executable}: "
        # Another process would say the same.
        self._refusal = AstraflowError(reason, f"{message}{answer['error']}{cure}")
        raise self._refusal

    def _failed(self, why: str, said: Mapping[str, str] | None = None) -> AstraflowError:
        """Return a failure; what a process said of it has the line of the environment."""
        said = said or {}
        return AstraflowError(
            Reason.ENVIRONMENT_FAILED,
            f"environment {self._options.environment}: {why}",
            retryable=True,
            cause=said.get("cause", ""),
            traceback=said.get("traceback", ""),
        )


class PooledEnvironment:
    """An environment in a process of the pool; for one episode."""

    def __init__(self, pool: EnvironmentPool, host: _Host, number: int) -> None:
        """Take over a place; `EnvironmentPool.open` is the way to get one."""
        self._pool = pool
        self._host = host
        self._number = number
        self._process: LineWorker | None = None

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """Begin the episode.

        Raises:
            AstraflowError: ENVIRONMENT_FAILED with what the environment raised.
        """
        told = {"slot": self._number, "task": dict(task), "seed": seed}
        answer, self._process = await self._pool.ask(self._host, told, None)
        return _observation(answer["observation"], "reset")

    async def step(self, action: str) -> Step:
        """Do what the policy says.

        Raises:
            AstraflowError: ENVIRONMENT_FAILED with what the environment raised, or when a number
                that it gave is not finite.
        """
        told = {"slot": self._number, "action": action}
        answer, _ = await self._pool.ask(self._host, told, self._process)
        numbers = {"the reward": answer["reward"], **answer["metrics"]}
        strange = [
            f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)
        ]
        if strange:
            raise AstraflowError(
                Reason.ENVIRONMENT_FAILED,
                f"after {action[:_SHOWN_CHARS]!r} {', '.join(strange)}, which nothing can be "
                "trained on; the environment has to give finite numbers",
            )
        return Step(
            observation=_observation(answer["observation"], "step"),
            reward=answer["reward"],
            is_done=answer["is_done"],
            metrics=answer["metrics"],
        )


def _refused(field_name: str, why: str) -> AstraflowError:
    return AstraflowError(
        Reason.INVALID_FIELD, f"{field_name}: {why}", metadata={"field": field_name}
    )


async def _clear(host: _Host) -> None:
    process, host.process = host.process, None
    if process is not None:
        await process.stop()


def _observation(said: Any, call: str) -> Observation:
    shown = str(said)[:_SHOWN_CHARS]
    if isinstance(said, str):
        return said
    messages: list[Any] = cast("list[Any]", said) if isinstance(said, list) else [None]
    if all(isinstance(one, dict) and "role" in one and "content" in one for one in messages):
        return messages
    raise AstraflowError(
        Reason.ENVIRONMENT_FAILED,
        f"the observation of {call} is neither text nor messages with role and content: {shown}",
    )
