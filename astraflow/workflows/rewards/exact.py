"""Exact match with an answer that the prompt carries."""

from astraflow.config.recipe import Strict
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.workflows.protocol import Score


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
        """Compare."""
        right = self._normal(self.gold(prompt))
        return Score(reward=float(self._normal(text) == right))

    def gold(self, prompt: Prompt) -> str:
        """Return the right answer."""
        return str(answer_of(prompt, self._options.field))

    def _normal(self, text: str) -> str:
        text = text.strip() if self._options.strip else text
        return text.casefold() if self._options.ignore_case else text


def answer_of(prompt: Prompt, field: str) -> object:
    """Return a field of the prompt.

    Raises:
        AstraflowError: SCORER_FAILED when the prompt has no such field.
    """
    if field not in prompt.fields:
        raise AstraflowError(
            Reason.SCORER_FAILED,
            f"prompt {prompt.prompt_id} has no field '{field}', only {', '.join(prompt.fields)}; "
            "name the right one in scorer_options",
        )
    return prompt.fields[field]
