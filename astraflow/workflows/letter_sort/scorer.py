"""Scores an answer, and says which kind of answer it is."""

from astraflow.config.recipe import Strict
from astraflow.core.tasks import Prompt
from astraflow.workflows.letter_sort.task import ASK, Answer, kind_of, sort_letters
from astraflow.workflows.protocol import Score
from astraflow.workflows.rewards.exact import answer_of


class LetterSort:
    """1 for the sorted letters, else 0; the parts say which kind of answer it was."""

    class Options(Strict):
        """What the prompt is made of."""

        field: str = "prompt"
        """Field with the letters; the `>` behind them is left out."""

    def __init__(self, options: Options) -> None:
        self._field = options.field

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Score one answer."""
        kind = kind_of(self._letters(prompt), text)
        return Score(
            reward=float(kind is Answer.RIGHT),
            parts={answer.value: float(answer is kind) for answer in Answer},
        )

    def gold(self, prompt: Prompt) -> str:
        """Return the right answer."""
        return sort_letters(self._letters(prompt))

    def _letters(self, prompt: Prompt) -> str:
        return str(answer_of(prompt, self._field)).rstrip(ASK)
