"""The process of a scorer: reads answers as lines of JSON, writes what they are worth.

`python -m astraflow.workflows.kept.worker FD '[NAME, OPTIONS]'`.
"""

import asyncio
import inspect
import json
import socket
import sys
import traceback
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from astraflow.core.errors import AstraflowError
from astraflow.core.tasks import Prompt
from astraflow.telemetry.tracebacks import bounded, place_of
from astraflow.workflows.building import build_scorer
from astraflow.workflows.protocol import Scorer
from astraflow.workflows.scoring import checked_score


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
    return {
        "reward": made.reward,
        "parts": dict(made.parts),
        "metrics": dict(made.metrics),
        "truncated": made.truncated,
    }


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
