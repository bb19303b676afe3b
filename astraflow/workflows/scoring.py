"""Scorers as workflows use them: awaited, always a Score, failures told apart from bad answers."""

import inspect

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.telemetry.traces import span
from astraflow.workflows.protocol import PolicyFault, Score, Scorer


class GuardedScorer:
    """Calls a scorer; whatever it raises is SCORER_FAILED, but for a PolicyFault."""

    def __init__(self, scorer: Scorer, *, name: str) -> None:
        """Guard a scorer.

        Args:
            scorer: A function or an object, async or not.
            name: For messages.
        """
        self._scorer = scorer
        self._name = name

    async def __call__(self, prompt: Prompt, text: str) -> Score:
        """Return what `text` is worth as an answer to `prompt`.

        Raises:
            PolicyFault: When the scorer raised it.
            AstraflowError: SCORER_FAILED, or SCORER_TIMEOUT when the scorer raised that.
        """
        try:
            with span("rl.reward", scorer=self._name):
                score = self._scorer(prompt, text)
                if inspect.isawaitable(score):
                    score = await score
        except PolicyFault:
            raise
        except AstraflowError as error:
            if error.reason in (Reason.SCORER_FAILED, Reason.SCORER_TIMEOUT):
                raise
            raise self._failed(prompt, error) from error
        except (Exception, SystemExit) as error:
            raise self._failed(prompt, error) from error
        return score if isinstance(score, Score) else Score(reward=float(score))

    def _failed(self, prompt: Prompt, error: BaseException) -> AstraflowError:
        return AstraflowError(
            Reason.SCORER_FAILED,
            f"scorer {self._name} raised {type(error).__name__} on prompt {prompt.prompt_id}: "
            f"{error}",
        )


def needs_scorer(scorer: GuardedScorer | None) -> GuardedScorer:
    """Return the scorer of a workflow that cannot do without.

    Raises:
        AstraflowError: INVALID_FIELD when the recipe names none.
    """
    if scorer is None:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            "this workflow needs a scorer; name one, such as scorer: exact",
            metadata={"field": "scorer"},
        )
    return scorer
