"""F1: words that a short answer shares with the right one."""

import re
from typing import Literal

from astraflow.config.recipe import Strict
from astraflow.core.tasks import Prompt
from astraflow.workflows.protocol import Score
from astraflow.workflows.rewards.answers import gold_answers, measures
from astraflow.workflows.rewards.exact import answer_of


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
            answer = next(iter(re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[-1:]), None)
        found = measures(answer, golds)
        return Score(reward=found[options.reward], metrics=found)
