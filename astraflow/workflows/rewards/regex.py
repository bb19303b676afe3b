"""A pattern as the answer; the pattern runs in a process of its own, since some never end."""

import re

from pydantic import Field, field_validator

from astraflow.config.strict import Strict
from astraflow.core.tasks import Prompt
from astraflow.workflows.kept.scorer import KeptOptions, KeptScorer
from astraflow.workflows.protocol import Score, Scorer
from astraflow.workflows.rewards.exact import answer_of


class RegexOptions(Strict):
    """What is looked for."""

    pattern: str | None = None
    """Of Python's `re`; unset: the prompt has it."""
    field: str = "answer"
    """Without a pattern: the field of the prompt that has one. With a pattern that has a group: the
    field that the group's last match has to equal."""
    ignore_case: bool = False

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
        """Compare."""
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


class Regex:
    """1 when a pattern is found in the text, and its group is the answer; else 0."""

    class Options(RegexOptions, KeptOptions):
        """What is looked for, and what that may take."""

        time_s: float = Field(default=5.0, gt=0)
        """Seconds for one answer."""

    def __init__(self, options: Options) -> None:
        inner = {name: getattr(options, name) for name in RegexOptions.model_fields}
        self._scorer = KeptScorer("astraflow.workflows.rewards.regex:Match", inner, options)

    async def __call__(self, prompt: Prompt, text: str) -> Score:
        """Compare."""
        return await self._scorer(prompt, text)

    def in_process(self) -> Scorer:
        """Return the scorer for this process."""
        return self._scorer.in_process()

    async def close(self) -> None:
        """Stop its processes."""
        await self._scorer.close()
