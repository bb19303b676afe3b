"""Mathematics as the answer: expressions that are equal, however they are written (math-verify)."""

import importlib
import logging
from typing import Any

from pydantic import Field

from astraflow.config.strict import Strict
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.workflows.kept.scorer import KeptOptions, KeptScorer
from astraflow.workflows.protocol import Score, Scorer
from astraflow.workflows.rewards.exact import answer_of


class MathOptions(Strict):
    """What is compared."""

    field: str = "answer"
    """Field of the prompt with the right answer, in LaTeX or plain."""


class Equal:
    """Compares in this process; needs the package math-verify."""

    Options = MathOptions

    def __init__(self, options: MathOptions) -> None:
        try:
            self._tool: Any = importlib.import_module("math_verify")
        except ImportError as error:
            raise AstraflowError(
                Reason.CODE_UNKNOWN, "scorer math: pip install math-verify on every node"
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
        """Return the right answer."""
        return str(answer_of(prompt, self._field))

    def _parsed(self, text: str) -> Any:
        """Return the expressions of a text; one that is nothing else needs no marks around it."""
        parse = self._tool.parse
        return parse(text, parsing_timeout=None) or parse(f"${text}$", parsing_timeout=None)


class Math:
    """1 when the last expression of the text equals the answer, else 0."""

    class Options(MathOptions, KeptOptions):
        """What is compared, and what that may take."""

        time_s: float = Field(default=10.0, gt=0)
        """Seconds for one answer."""

    def __init__(self, options: Options) -> None:
        inner = {name: getattr(options, name) for name in MathOptions.model_fields}
        self._scorer = KeptScorer("astraflow.workflows.rewards.math:Equal", inner, options)

    async def __call__(self, prompt: Prompt, text: str) -> Score:
        """Compare."""
        return await self._scorer(prompt, text)

    def in_process(self) -> Scorer:
        """Return the scorer for this process."""
        return self._scorer.in_process()

    async def close(self) -> None:
        """Stop its processes."""
        await self._scorer.close()
