"""Coder and tester: one policy writes a program, another writes test cases for the problem.

The program runs on the tester's cases. When it fails one of them, the coder reads what came of each
and writes another program, below its first. What decides that is what two policies wrote and what
a program did: neither the true tests nor a reference has a part in it, so that an episode goes on
in production as it does in training.

Rewards: an attempt has the scorer's, of the true tests, for itself. The tester's is
(R_valid + R_diag) / 2. R_valid: a right program passes all its cases. R_diag: R_valid, and the
first attempt passes all its cases exactly if it passes the true tests.
"""

import json
import re
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from astraflow.config.strict import Options as AnyOptions
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.workflows.building import build_sandboxes
from astraflow.workflows.episode import Episode, Recorder
from astraflow.workflows.prompts import ChatMessage, PromptOptions, fill, go_on, show_prompt
from astraflow.workflows.protocol import Score
from astraflow.workflows.rewards.code import (
    CallCase,
    CaseVerdict,
    CheckCase,
    CodeTests,
    OutputCase,
    judge,
    parse_tests,
    program_of,
)
from astraflow.workflows.sandbox.guest import decoded
from astraflow.workflows.sandbox.pool import SandboxPool
from astraflow.workflows.scoring import GuardedScorer, needs_scorer

_TEST = """{problem}

A candidate program:

{program}

Write exactly {count} test cases that follow the problem, not the candidate. Reason first; then end
with one block of JSON of this form, and nothing after it:

{form}"""

_FORMS = {
    "call": '```json\n{"inputs": [[argument, …], …], "outputs": [result, …]}\n```',
    "stdin": '```json\n{"inputs": ["the whole input", …], "outputs": ["the whole output", …]}\n```',
}
_EXAMPLES = re.compile(
    r"^[ \t#*-]*(?:examples?|samples?)\b[^\n.]{0,30}$.*?"
    r"(?=^[ \t#*-]*(?:constraints?|notes?|hints?|explanations?)\b[^\n.]{0,20}$|\Z)",
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)
_LEAST_LEFT = 0.25
_SHOWN_CHARS = 300
_KEPT = 4096


class CoderTesterOptions(PromptOptions):
    """Who does what, and how they are asked; the prompt's own keys are the coder's."""

    coder: str = "coder"
    """The policy that writes programs."""
    tester: str = "tester"
    """The policy that writes cases."""
    test: PromptOptions = PromptOptions(messages=(ChatMessage(role="user", content=_TEST),))
    """The tester's prompt. {problem} is the problem without its examples, {program} what the coder
    wrote, {form} the JSON that is wanted, {count} how many cases."""
    feedback: str = (
        "The program was run on test cases that somebody else wrote; some of them may be wrong.\n\n"
        "{results}\n\nWrite the whole program again."
    )
    """What the coder is told after its program has failed a case; {results} is a line for each."""
    problem: str = "prompt"
    """Field with the problem."""
    solution: str = "solution"
    """Field with a right program, or with a list of them."""
    tests: str = "tests"
    """Field with the true tests: only the function's name, and whether there is one, is read."""
    cases: int = Field(default=2, ge=1)
    """So many cases; more are cut, fewer are no cases."""
    right_reward: float = 1.0
    """A program is right when the scorer gives at least this."""
    time_s: float = Field(default=6.0, gt=0)
    """Seconds for one case."""
    workers: int = Field(default=2, ge=1)
    """Programs that run on cases at once, beside those of the scorer."""
    ready: int = Field(default=2, ge=0)
    """Sandboxes that are started ahead."""
    sandbox: str = "bubblewrap"
    """Where programs run."""
    sandbox_options: AnyOptions = Field(default={})
    """Its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A program, and what it is worth.

    Attributes:
        talk: The coder's chat so far.
        program: None when there is no block of code in what it wrote.
        score: By the true tests.
        is_cut: Whether the coder ran out of tokens.
    """

    talk: Recorder
    program: str | None
    score: Score
    is_cut: bool


class CoderTester:
    """One attempt, cases, and one more attempt if the first fails a case.

    Metrics: `first_try` and `solved` (whether the first and the last attempt are right), `retried`,
    `parsed` (there are cases), `valid` and `diagnosed` (what the tester is paid for).
    """

    Options = CoderTesterOptions

    def __init__(self, options: CoderTesterOptions, scorer: GuardedScorer | None) -> None:
        self._options = options
        self._scorer = needs_scorer(scorer)
        provider = build_sandboxes(
            options.sandbox, options.sandbox_options, where="options.sandbox_options"
        )
        self._pool = SandboxPool(provider, workers=options.workers, ready=options.ready)
        self._references: OrderedDict[str, str] = OrderedDict()
        self._valid: OrderedDict[tuple[str, str], bool] = OrderedDict()

    async def run(self, episode: Episode) -> Score:
        """Run one episode."""
        options, prompt = self._options, episode.prompt
        talk = episode.trajectory(options.coder, agent="coder")
        show_prompt(talk, options, prompt)
        last = first = await self._attempt(prompt, talk)
        is_right = first.score.reward >= options.right_reward

        tester = episode.trajectory(options.tester, agent="tester")
        self._ask_for_cases(tester, prompt, first)
        said = await tester.sample() if tester.has_context else None
        cases = None if said is None else self._cases_of(prompt, said.text)
        verdicts = [] if cases is None else await self._verdicts(first.program, cases)
        passes = all(verdict.is_passed for verdict in verdicts)
        is_valid = cases is not None and await self._is_valid(prompt, cases)
        is_diagnosed = is_valid and passes == is_right
        tester.reward = (is_valid + is_diagnosed) / 2

        if cases is not None and not passes:
            talk = episode.trajectory(agent="coder/2", after=first.talk)
            results = shown_results(cases, verdicts)
            go_on(talk, fill(options.feedback, prompt, results=results))
            if talk.has_context:
                last = await self._attempt(prompt, talk)
        metrics = {
            "first_try": float(is_right),
            "solved": float(last.score.reward >= options.right_reward),
            "retried": float(last is not first),
            "parsed": float(cases is not None),
            "valid": float(is_valid),
            "diagnosed": float(is_diagnosed),
        }
        return replace(
            last.score,
            metrics={**last.score.metrics, **metrics},
            truncated=last.score.truncated or last.is_cut or said is None or said.is_cut,
        )

    async def close(self) -> None:
        """End all its sandboxes."""
        await self._pool.close()

    async def _attempt(self, prompt: Prompt, talk: Recorder) -> Attempt:
        reply = await talk.sample()
        score = await self._scorer(prompt, reply.text)
        talk.reward = score.reward
        program = program_of(reply.text)
        return Attempt(talk=talk, program=program, score=score, is_cut=reply.is_cut)

    def _ask_for_cases(self, tester: Recorder, prompt: Prompt, first: Attempt) -> None:
        options = self._options
        form = _FORMS["call" if self._function_of(prompt) else "stdin"]
        fields = {
            "problem": without_examples(str(prompt.fields[options.problem])),
            "program": (first.program or "").strip(),
            "form": form,
            "count": str(options.cases),
        }
        show_prompt(tester, options.test, replace(prompt, fields={**prompt.fields, **fields}))

    def _function_of(self, prompt: Prompt) -> str:
        """Return the name of the function that is tested; empty: programs read and write.

        Raises:
            AstraflowError: SCORER_FAILED for tests that are code: there is no form for cases.
        """
        match self._true_tests(prompt).cases[0]:
            case CallCase(name=name):
                return name
            case OutputCase():
                return ""
            case CheckCase():
                raise _unsound(prompt, self._options.tests, "tests are code, not input and output")

    def _true_tests(self, prompt: Prompt) -> CodeTests:
        try:
            return parse_tests(prompt.fields.get(self._options.tests))
        except ValueError as error:
            raise _unsound(prompt, self._options.tests, str(error)) from error

    def _cases_of(self, prompt: Prompt, text: str) -> CodeTests | None:
        """Return the cases of the last block of a tester's answer; None when it has none."""
        block = program_of(text.rpartition("</think>")[2])
        count = self._options.cases
        try:
            said: Any = json.loads(block or "")
            inputs, outputs = said["inputs"], said["outputs"]
            fewest = min(len(inputs), len(outputs))
            made = {"inputs": inputs[:count], "outputs": outputs[:count]}
            name = self._function_of(prompt)
            return parse_tests({**made, "fn_name": name}) if fewest >= count else None
        except (ValueError, TypeError, LookupError, RecursionError):
            return None

    async def _verdicts(self, program: str | None, cases: CodeTests) -> list[CaseVerdict]:
        """Run a program; what has ended its sandbox has failed the cases that are left."""
        if program is None:
            return [CaseVerdict(is_passed=False, why="no_code")] * len(cases.cases)
        async with self._pool.take() as sandbox:
            found = await judge(sandbox, program, cases, time_s=self._options.time_s)
        return found + [CaseVerdict(is_passed=False, why="lost")] * (len(cases.cases) - len(found))

    async def _is_valid(self, prompt: Prompt, cases: CodeTests) -> bool:
        """Whether a right program passes all cases. A group often has the same ones: kept."""
        key = (prompt.prompt_id, repr(cases))
        found = self._valid.get(key)
        if found is None:
            verdicts = await self._verdicts(await self._reference(prompt), cases)
            found = all(verdict.is_passed for verdict in verdicts)
            _keep(self._valid, key, found)
        return found

    async def _reference(self, prompt: Prompt) -> str:
        """Return the first of the row's programs that passes the true tests, else the best one.

        Raises:
            AstraflowError: SCORER_FAILED when the row has none.
        """
        kept = self._references.get(prompt.prompt_id)
        if kept is not None:
            return kept
        said = prompt.fields.get(self._options.solution)
        programs = [said] if isinstance(said, str) else list(said or ())
        if not programs:
            raise _unsound(prompt, self._options.solution, "a right program is needed")
        tests, best, best_count = self._true_tests(prompt), "", -1
        for each in programs:
            program = program_of(each, whole_text=True) or ""
            count = sum(one.is_passed for one in await self._verdicts(program, tests))
            if count > best_count:
                best, best_count = program, count
            if count == len(tests.cases):
                break
        _keep(self._references, prompt.prompt_id, best)
        return best


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    kept[key] = value
    if len(kept) > _KEPT:
        kept.popitem(last=False)


def without_examples(problem: str) -> str:
    """Return a problem without its examples, which a tester would copy.

    A part begins at a line that is only a heading such as "Examples", and goes on to the next
    heading of constraints, notes, hints or explanations. Where little would be left, all is kept.
    """
    short = _EXAMPLES.sub("", problem)
    return short if len(short) >= _LEAST_LEFT * len(problem) else problem


def shown_results(cases: CodeTests, verdicts: list[CaseVerdict]) -> str:
    """Return a line for each case: its input, what it expects, and what came of it."""
    lines: list[str] = []
    for case, verdict in zip(cases.cases, verdicts, strict=True):
        if isinstance(case, CallCase):
            given, wanted = ", ".join(map(repr, case.arguments)), repr(case.expected)
        else:
            given, wanted = case.stdin, case.stdout  # type: ignore[union-attr]
        came = "PASS" if verdict.is_passed else f"FAIL: {_shown(verdict)}"
        lines.append(f"input {given[:_SHOWN_CHARS]}, expected {wanted[:_SHOWN_CHARS]}: {came}")
    return "\n".join(lines)


def _shown(verdict: CaseVerdict) -> str:
    if verdict.why == "wrong":
        return f"got {_value(verdict.got.strip())[:_SHOWN_CHARS]}"
    why = verdict.error.strip().splitlines()[-1:]
    return " ".join([verdict.why, *why])[:_SHOWN_CHARS]


def _value(got: str) -> str:
    """Return what a function returned as Python writes it, or what a program wrote."""
    try:
        return repr(decoded(got.encode()))
    except ValueError:
        return got


def _unsound(prompt: Prompt, field: str, why: str) -> AstraflowError:
    return AstraflowError(
        Reason.SCORER_FAILED, f"field '{field}' of prompt {prompt.prompt_id}: {why}"
    )
