"""Mathematics as the answer: expressions that are equal, however they are written (math-verify)."""

from pydantic import Field

from astraflow.config.strict import Strict
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.workflows.kept.scorer import KeptOptions, KeptScorer
from astraflow.workflows.protocol import Score
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
            import math_verify  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise AstraflowError(
                Reason.CODE_UNKNOWN, "scorer math: pip install math-verify on every node"
            ) from error
        self._tool = math_verify  # pyright: ignore[reportUnknownMemberType]
        self._field = options.field

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Compare; the time is kept by who started the process."""
        tool = self._tool  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        right = str(answer_of(prompt, self._field))
        gold = tool.parse(right, parsing_timeout=None) or tool.parse(  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            f"${right}$", parsing_timeout=None
        )
        said = tool.parse(text, parsing_timeout=None)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        is_right = bool(tool.verify(gold, said, timeout_seconds=None))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
        return Score(reward=float(is_right), parts={"none": float(not said)})


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

    async def close(self) -> None:
        """Stop its processes."""
        await self._scorer.close()
