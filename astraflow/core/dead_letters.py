"""Dead letters: prompts that are issued no more, and why."""

from collections.abc import Iterator

from astraflow.core.ids import PromptId
from astraflow.core.status import DeadLetter

_KEPT_COUNT = 1000


class DeadLetters:
    """The last prompts that were given up, one letter each.

    Attributes:
        count: All that ever were.
    """

    def __init__(self) -> None:
        self.count = 0
        self._letters: dict[PromptId, DeadLetter] = {}

    def __len__(self) -> int:
        return len(self._letters)

    def __iter__(self) -> Iterator[DeadLetter]:
        """Oldest first."""
        return iter(self._letters.values())

    def __contains__(self, prompt_id: PromptId) -> bool:
        return prompt_id in self._letters

    def add(self, letter: DeadLetter) -> None:
        """Give a prompt up."""
        self.count += 1
        self._letters.pop(letter.prompt.prompt_id, None)
        self._letters[letter.prompt.prompt_id] = letter
        while len(self._letters) > _KEPT_COUNT:
            del self._letters[next(iter(self._letters))]

    def take(self, prompt_id: PromptId) -> DeadLetter | None:
        """Take a letter out, so that its prompt is issued again."""
        return self._letters.pop(prompt_id, None)
