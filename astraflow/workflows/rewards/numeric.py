"""A number as the answer: the last one that the text names."""

import re

from astraflow.config.recipe import Strict
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.workflows.protocol import Score
from astraflow.workflows.rewards.exact import answer_of

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)?\.?\d+(?:[eE][-+]?\d+)?")


class Numeric:
    """1 when the last number of the text is the answer, else 0; parts say which it was."""

    class Options(Strict):
        """How numbers are compared."""

        field: str = "answer"
        """Field of the prompt with the right answer; of a text, its last number."""
        tolerance: float = 1e-6
        """Relative difference that still counts as equal."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Compare."""
        right = last_number(self.gold(prompt))
        if right is None:
            raise AstraflowError(
                Reason.SCORER_FAILED,
                f"prompt {prompt.prompt_id}: '{self._options.field}' has no number in it",
            )
        said = last_number(text)
        slack = self._options.tolerance * max(1.0, abs(right))
        is_right = said is not None and abs(said - right) <= slack
        return Score(
            reward=float(is_right), parts={"right": float(is_right), "none": float(said is None)}
        )

    def gold(self, prompt: Prompt) -> str:
        """Return the right answer."""
        return str(answer_of(prompt, self._options.field))


def last_number(text: str) -> float | None:
    """Return the last number in a text; commas between digits are skipped.

    Example:
        >>> last_number("3 apples at 1,250.50 make")
        1250.5
    """
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
