"""Scorers in a process of their own, which is killed when it takes too long or too much.

`python -m astraflow.workflows.kept.scorer FD '[NAME, OPTIONS]'` is that process: it reads answers
as lines of JSON, and writes what they are worth.
"""

import asyncio
import inspect
import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from io import BufferedRWPair
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from astraflow.config.strict import Options, Strict
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.telemetry.tracebacks import bounded, place_of
from astraflow.workflows.building import build_scorer
from astraflow.workflows.kept.program import LineWorker, ProgramLimits, environment
from astraflow.workflows.protocol import PolicyFault, Score, Scorer
from astraflow.workflows.scoring import checked_score

_STARTING_S = 60.0


class KeptOptions(Strict):
    """What a scorer may take."""

    time_s: float = Field(default=10.0, gt=0)
    """Seconds for one answer; a scorer that takes longer is killed."""
    memory_mb: int = Field(default=2048, ge=64)
    """MiB of private memory."""
    processes: int = Field(default=16, ge=1)
    """Processes at once."""
    workers: int = Field(default=1, ge=1)
    """Answers that are scored at once, each by a process that stays."""
    on_timeout: Literal["policy_fault", "failure"] = "policy_fault"
    """What an answer is that takes longer than time_s. policy_fault: it did that, and is rewarded
    with rollouts.policy_fault_reward. failure: of the scorer, and nothing is trained on."""
    on_death: Literal["policy_fault", "failure"] = "policy_fault"
    """What an answer is at which the process dies: the text that it runs exited, or went beyond
    memory_mb or processes. What the scorer's own code raises is its failure in any case."""


class KeptScorer:
    """Has answers scored by processes of their own; each is started when it is needed."""

    def __init__(self, name: str, scorer_options: Mapping[str, Any], options: KeptOptions) -> None:
        """Start no process yet."""
        self._name = name
        self._scorer_options = dict(scorer_options)
        self._options = options
        self._idle: asyncio.LifoQueue[LineWorker | None] = asyncio.LifoQueue()
        for _ in range(options.workers):
            self._idle.put_nowait(None)

    async def __call__(self, prompt: Prompt, text: str) -> Score:
        """Return what an answer is worth.

        Raises:
            PolicyFault: The answer took too long or ended the process, as the options say.
            AstraflowError: SCORER_TIMEOUT, or SCORER_FAILED with what the scorer raised.
        """
        worker = await self._idle.get()
        try:
            worker = worker or await self._start()
            async with asyncio.timeout(self._options.time_s):
                answer = await self._request(worker, prompt, text)
        except BaseException as error:
            if worker is not None:
                await worker.stop()
            worker = None
            if isinstance(error, TimeoutError):
                raise self._late() from error
            raise
        finally:
            self._idle.put_nowait(worker)
        return Score(**answer)

    def in_process(self) -> Scorer:
        """Return the scorer as it is in its own process, for this one: nothing limits it.

        Raises:
            AstraflowError: CODE_UNKNOWN, or INVALID_FIELD for options that it does not take.
        """
        return build_scorer(self._name, self._scorer_options, where="scorer_options")

    async def close(self) -> None:
        """Stop its processes."""
        workers = [await self._idle.get() for _ in range(self._options.workers)]
        for worker in workers:
            if worker is not None:
                await worker.stop()
            self._idle.put_nowait(None)

    async def _start(self) -> LineWorker:
        options = self._options
        worker = await LineWorker.start(
            (sys.executable, "-P", "-m", "astraflow.workflows.kept.scorer"),
            (json.dumps([self._name, self._scorer_options]),),
            limits=ProgramLimits(
                time_s=None, memory_mb=options.memory_mb, processes=options.processes
            ),
            env=environment({"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}),
        )
        try:
            async with asyncio.timeout(_STARTING_S):
                answer = await worker.ask(None)
            died = {"error": f"the process of the scorer died: {worker.last_words}"}
            _require_no_error(died if answer is None else answer)
        except TimeoutError as error:
            await worker.stop()
            raise AstraflowError(
                Reason.SCORER_FAILED,
                f"the process of scorer {self._name} was not ready within {_STARTING_S:g} s",
                retryable=True,
            ) from error
        except BaseException:
            await worker.stop()
            raise
        return worker

    def _late(self) -> PolicyFault | AstraflowError:
        message = f"scorer {self._name} took longer than {self._options.time_s:g} s and was killed"
        if self._options.on_timeout == "policy_fault":
            return PolicyFault(message, parts={"timeout": 1.0})
        return AstraflowError(
            Reason.SCORER_TIMEOUT,
            f"{message}; raise scorer_options.time_s or make it faster",
        )

    async def _request(self, worker: LineWorker, prompt: Prompt, text: str) -> dict[str, Any]:
        told = {
            "prompt_id": prompt.prompt_id,
            "data_set": prompt.data_set,
            "fields": dict(prompt.fields),
            "text": text,
        }
        answer = await worker.ask(told)
        if answer is None:
            said = worker.last_words or "it said nothing"
            message = f"the process of scorer {self._name} died at an answer: {said}"
            if self._options.on_death == "policy_fault":
                raise PolicyFault(message, parts={"died": 1.0})
            raise AstraflowError(Reason.SCORER_FAILED, message)
        _require_no_error(answer)
        return answer


class ProcessScorer(KeptScorer):
    """Any scorer, in a process of its own."""

    class Options(KeptOptions):
        """Which."""

        scorer: str
        """Registered scorer, or module:function."""
        scorer_options: Options = Field(default={})
        """Its own."""

    def __init__(self, options: Options) -> None:
        super().__init__(options.scorer, options.scorer_options, options)


def _require_no_error(answer: Mapping[str, Any]) -> None:
    """Raise what a process said of its scorer.

    Raises:
        AstraflowError: SCORER_FAILED.
    """
    if "error" in answer:
        raise AstraflowError(
            Reason.SCORER_FAILED,
            str(answer["error"]),
            cause=str(answer.get("cause", "")),
            traceback=str(answer.get("traceback", "")),
        )


def main() -> None:
    """Score until the owner hangs up."""
    name, options = json.loads(sys.argv[2])
    with socket.socket(fileno=int(sys.argv[1])) as line, line.makefile("rwb") as file:
        try:
            scorer = build_scorer(name, options, where="scorer_options")
        except AstraflowError as error:
            _say(file, {"error": str(error)})
            return
        _say(file, {})
        for asked in file:
            _say(file, asyncio.run(_answer(scorer, json.loads(asked))))


async def _answer(scorer: Scorer, asked: dict[str, Any]) -> dict[str, Any]:
    text = asked.pop("text")
    try:
        score = scorer(Prompt(**asked), text)
        if inspect.isawaitable(score):
            score = await score
    except MemoryError:
        # Of the answer: what it needs is bounded, and the process ends as when it is killed.
        raise
    except SystemExit as error:
        if not _is_of_file(error):
            raise
        return _failed(error)
    except Exception as error:  # noqa: BLE001 - a user's code raises anything
        return _failed(error)
    try:
        made = checked_score(score, what="the scorer", made_by=scorer)
    except AstraflowError as error:
        return _failed(error)
    return asdict(made)


def _failed(error: BaseException) -> dict[str, Any]:
    said = error.message if isinstance(error, AstraflowError) else str(error)
    place = place_of(error)
    return {
        "error": f"{type(error).__name__}: {bounded(said)}",
        "cause": place.cause,
        "traceback": place.traceback,
    }


def _is_of_file(error: BaseException) -> bool:
    """Whether code in a file raised it, and not a text that it ran."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return Path(last.filename).is_file()


def _say(file: BufferedRWPair, what: dict[str, Any]) -> None:
    file.write(json.dumps(what).encode() + b"\n")
    file.flush()


if __name__ == "__main__":
    main()
