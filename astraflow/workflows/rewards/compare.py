"""Scorers that compare a text with the right answer, whatever that is: letters, words, a number.

Patterns and mathematics run in a process of their own, since some never end.
"""

import importlib
import logging
import math
import re
from decimal import Decimal
from typing import Any, Literal

from pydantic import Field, field_validator

from astraflow.config.strict import Strict
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.workflows.kept.scorer import KeptOptions, KeptScorer
from astraflow.workflows.protocol import Score
from astraflow.workflows.rewards.answers import gold_answers, measures


class Exact:
    """1 for the answer itself, else 0."""

    class Options(Strict):
        """How answers are compared."""

        field: str = "answer"
        """Field of the prompt with the right answer."""
        strip: bool = True
        """Ignore white space around both."""
        ignore_case: bool = False
        """Compare in lower case."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(self, prompt: Prompt, text: str) -> Score:
        right = self._normal(self.gold(prompt))
        return Score(reward=float(self._normal(text) == right))

    def gold(self, prompt: Prompt) -> str:
        return str(answer_of(prompt, self._options.field))

    def _normal(self, text: str) -> str:
        text = text.strip() if self._options.strip else text
        return text.casefold() if self._options.ignore_case else text


def answer_of(prompt: Prompt, field: str) -> object:
    """Return a field of the prompt.

    Raises:
        AstraflowError: SCORER_FAILED when the prompt has no such field, or null there.
    """
    if field not in prompt.fields:
        raise AstraflowError(
            Reason.SCORER_FAILED,
            f"prompt {prompt.prompt_id} has no field '{field}', only {', '.join(prompt.fields)}; "
            "name the right one in scorer_options",
        )
    if prompt.fields[field] is None:
        raise AstraflowError(
            Reason.SCORER_FAILED,
            f"prompt {prompt.prompt_id} has null in its field '{field}'; leave its row out",
        )
    return prompt.fields[field]


# U+2212 is a minus, too.
_NUMBER = re.compile(r"[-+\u2212]?(?:\d[\d,]*)?\.?\d+(?:[eE][-+]?\d+)?")


class Numeric:
    """1 when the last number of the text is the answer, else 0; parts say which it was."""

    class Options(Strict):
        """How numbers are compared."""

        field: str = "answer"
        """Field of the prompt with the right answer; of a text, its last number."""
        tolerance: float = 1e-6
        """Difference that still counts as equal: relative, but absolute below 1."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(self, prompt: Prompt, text: str) -> Score:
        right = last_number(self.gold(prompt))
        if right is None or math.isinf(right):
            why = "no number" if right is None else "a number beyond all floats"
            raise AstraflowError(
                Reason.SCORER_FAILED,
                f"prompt {prompt.prompt_id}: '{self._options.field}' has {why} in it",
            )
        said = last_number(text)
        slack = self._options.tolerance * max(1.0, abs(right))
        is_right = said is not None and abs(said - right) <= slack
        return Score(
            reward=float(is_right), parts={"right": float(is_right), "none": float(said is None)}
        )

    def gold(self, prompt: Prompt) -> str:
        return str(answer_of(prompt, self._options.field))


def last_number(text: str) -> float | None:
    """Return the last number in a text; commas between digits are skipped.

    Example:
        >>> last_number("3 apples at 1,250.50 make")
        1250.5
    """
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


class F1:
    """Compares the answer with a field of the row, which is a text or a list of right ones.

    Exact match and F1 are both in the metrics, `em` and `f1`; one of them is the reward.
    """

    class Options(Strict):
        """What is compared, and what counts."""

        field: str = "answer"
        """Of the row: a text, or a list of which the best counts."""
        tag: str = ""
        """The answer stands in the last <tag>...</tag>; empty: it is the whole text."""
        reward: Literal["f1", "em"] = "f1"
        """em: 1 for an exact match, else 0."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Return what an answer is worth; one without its tag is worth nothing."""
        options = self._options
        golds = gold_answers(answer_of(prompt, options.field))
        answer: str | None = text
        if options.tag:
            tag = re.escape(options.tag)
            # One that was opened in passing, and not closed, is none.
            within = rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>"
            answer = next(iter(re.findall(within, text, re.DOTALL)[-1:]), None)
        found = measures(answer, golds)
        return Score(reward=found[options.reward], metrics=found)


class RegexOptions(KeptOptions):
    """What is looked for, and what that may take."""

    time_s: float = Field(default=5.0, gt=0)
    """Seconds for one answer."""
    pattern: str | None = None
    """Of Python's `re`; unset: the prompt has it."""
    field: str = "answer"
    """Without a pattern: the field of the prompt that has one. With a pattern that has a group: the
    field that the group's last match has to equal."""
    ignore_case: bool = False
    """Whether large and small letters are the same."""

    @field_validator("pattern")
    @classmethod
    def _is_pattern(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"it is no pattern: {error}") from error
        return pattern


class Match:
    """Compares in this process."""

    Options = RegexOptions

    def __init__(self, options: RegexOptions) -> None:
        self._options = options

    def __call__(self, prompt: Prompt, text: str) -> Score:
        options = self._options
        pattern = options.pattern or str(answer_of(prompt, options.field))
        found = list(re.finditer(pattern, text, re.IGNORECASE if options.ignore_case else 0))
        is_right = bool(found)
        if found and options.pattern is not None and found[-1].re.groups:
            said = (found[-1].group(1) or "").strip()
            is_right = said == str(answer_of(prompt, options.field)).strip()
        return Score(reward=float(is_right), parts={"found": float(bool(found))})

    def gold(self, prompt: Prompt) -> None:
        """Return that no text is known to match."""


class Regex(KeptScorer):
    """1 when a pattern is found in the text, and its group is the answer; else 0."""

    Options = RegexOptions

    def __init__(self, options: RegexOptions) -> None:
        name = "astraflow.workflows.rewards.compare:Match"
        super().__init__(name, options.model_dump(), options)


class MathOptions(KeptOptions):
    """What is compared, and what that may take."""

    field: str = "answer"
    """Field of the prompt with the right answer: an expression, in LaTeX or plain, or a text whose
    last one it is."""


_PLAIN_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
# A text marks where its answer stands, or has words; those of LaTeX and of functions aside.
_MARK = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[|####")
_LATEX = re.compile(r"\\(?:text|textbf|mathrm|mbox|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3,}\b(?!\()")


class Equal:
    """Compares in this process; needs the package math-verify."""

    Options = MathOptions

    def __init__(self, options: MathOptions) -> None:
        try:
            self._tool: Any = importlib.import_module("math_verify")
        except ImportError as error:
            raise AstraflowError(
                Reason.CODE_UNKNOWN, f"scorer math: {error}; pip install math-verify on every node"
            ) from error
        # It warns of every answer that it keeps no time itself.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._field = options.field

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Compare; the time is kept by who started the process."""
        gold = self._parsed(self.gold(prompt))
        said = self._parsed(text)
        is_right = bool(self._tool.verify(gold, said, timeout_seconds=None))
        return Score(reward=float(is_right), parts={"none": float(not said)})

    def gold(self, prompt: Prompt) -> str:
        r"""Return the right answer; a bare expression in a box.

        Without one the parser takes what it knows of it: 10 of 10\sqrt{2}, 2 of 2\pi.
        """
        answer = answer_of(prompt, self._field)
        # In LaTeX the e of 1e-05 is Euler's number.
        text = f"{Decimal(repr(answer)):f}" if isinstance(answer, float) else str(answer).strip()
        is_text = _MARK.search(text) or _WORD.search(_LATEX.sub("", text))
        return text if is_text or _PLAIN_NUMBER.fullmatch(text) else f"\\boxed{{{text}}}"

    def _parsed(self, text: str) -> Any:
        """Return the expressions of a text; one that is nothing else needs no marks around it."""
        parse = self._tool.parse
        return parse(text, parsing_timeout=None) or parse(f"${text}$", parsing_timeout=None)


class Math(KeptScorer):
    """1 when the last expression of the text equals the answer, else 0."""

    Options = MathOptions

    def __init__(self, options: MathOptions) -> None:
        name = "astraflow.workflows.rewards.compare:Equal"
        super().__init__(name, options.model_dump(), options)
