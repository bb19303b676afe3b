"""Workflows and scorers with the bugs that users write, each marked where it is to be found."""

import asyncio
import sys
from pathlib import Path

from letter_sort import LetterSort

from astraflow.config.recipe import Strict
from astraflow.workflows.protocol import Score

IN_SCORER = ("raising", "wrong type", "not a number", "missing file", "exit", "no numbers")
IN_WORKFLOW = ("endless", "bad template", "dead server", "nothing sampled", "huge", "stray task")
BUGS = IN_SCORER + IN_WORKFLOW


def score(prompt, text):  # bug: wrong type, not a number, no numbers
    bug, _, answer = text.partition(":")
    match bug:
        case "raising":
            return {"a": 1.0}[answer + "!"]  # bug: raising
        case "wrong type":
            return "right"
        case "not a number":
            return float("nan")
        case "missing file":
            return len(Path("/no/such/answers.txt").read_text())  # bug: missing file
        case "exit":
            sys.exit("no licence")  # bug: exit
        case "no numbers":
            return Score(reward=1.0, parts={"tool": object()})
    return LetterSort(LetterSort.Options())(prompt, answer)


class Buggy:
    """Has another bug in each of the first samples of a group; the others are well."""

    def __init__(self, options, scorer):
        self._scorer = scorer
        self._tasks = []

    async def run(self, episode):  # bug: nothing sampled, huge
        bug = dict(enumerate(BUGS)).get(episode.sample_index, "none")
        if bug == "nothing sampled":
            return 1.0
        prompt = episode.prompt.fields["prompt"]
        if bug == "bad template":
            prompt = "{question}".format(**episode.prompt.fields)  # bug: bad template
        talk = episode.trajectory()
        talk.observe(prompt)
        answer = (await talk.sample()).text
        match bug:
            case "endless":
                await asyncio.Event().wait()  # bug: endless
            case "dead server":
                await asyncio.open_connection("127.0.0.1", 1)  # bug: dead server
            case "huge":
                return Score(reward=1.0, metrics={f"{n}{'x' * 2**20}": 1.0 for n in range(80)})
            case "stray task":
                asyncio.get_running_loop().create_task(self._forgotten())
        return await self._scorer(episode.prompt, f"{bug}:{answer}")

    async def _forgotten(self):
        raise LookupError("no such unit")  # bug: stray task


class Blocking:
    """Waits without letting go of the event loop."""

    class Options(Strict):
        hint: str = ""

    def __init__(self, options, scorer):
        self._scorer = scorer

    async def run(self, episode):
        while True:  # bug: blocking
            pass
