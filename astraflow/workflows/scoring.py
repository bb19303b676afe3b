"""Scorers as workflows use them: awaited, always a Score, failures told apart from bad answers."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.telemetry.tracebacks import bounded, place_of, place_of_definition
from astraflow.telemetry.traces import span
from astraflow.workflows.protocol import PolicyFault, Score, Scorer


class GuardedScorer:
    """Calls a scorer; whatever it raises is SCORER_FAILED, but for a PolicyFault."""

    def __init__(self, scorer: Scorer, *, name: str) -> None:
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
        return checked_score(score, what=f"scorer {self._name}", made_by=self._scorer)

    async def close(self) -> None:
        """Let a scorer with a `close` let go of what it holds, such as processes."""
        closed = getattr(self._scorer, "close", lambda: None)()
        if inspect.isawaitable(closed):
            await closed

    def _failed(self, prompt: Prompt, error: BaseException) -> AstraflowError:
        place = place_of(error)
        return AstraflowError(
            Reason.SCORER_FAILED,
            f"scorer {self._name} raised {type(error).__name__} on prompt {prompt.prompt_id}: "
            f"{bounded(str(error))}",
            cause=place.cause,
            traceback=place.traceback,
        )


def checked_score(score: object, *, what: str, made_by: Callable[..., Any] | None) -> Score:
    """Return a score whose numbers are floats.

    Args:
        score: What a user's code returned: a Score, or a number.
        what: Whose, for the message.
        made_by: What returned it; None: it is told where it was raised.

    Raises:
        AstraflowError: SCORER_FAILED; names the value, and where the code is defined.
    """
    if not isinstance(score, Score):
        number = _number(score)
        if number is None:
            why = f"returned {_shown(score)}, not a number or a Score"
            raise _unsound(f"{what} {why}", score, made_by)
        score = Score(reward=number)
    reward = _number(score.reward)
    if reward is None or not math.isfinite(reward):
        raise _unsound(f"{what} gave a reward of {_shown(score.reward)}", score.reward, made_by)
    numbers = {"parts": score.parts, "metrics": score.metrics}
    checked: dict[str, dict[str, float]] = {name: {} for name in numbers}
    for name, given in numbers.items():
        if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - it is a user's
            raise _unsound(f"{what} gave {name} of {_shown(given)}", given, made_by)
        for key, value in given.items():
            number = _number(value)
            if number is None or not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                why = f"{name} with {_shown(key)}: {_shown(value)}, not a name and a number"
                raise _unsound(f"{what} gave {why}", value, made_by)
            checked[name][key] = number
    return Score(reward=reward, truncated=bool(score.truncated), **checked)


def score_of_fault(fault: PolicyFault, default: float) -> Score:
    """Return what a fault of the policy is worth, `default` where it does not say it itself."""
    return Score(reward=default if fault.reward is None else fault.reward, parts=fault.parts)


def _number(value: object) -> float | None:
    """Return a number as such; text that reads as one is none."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(cast("Any", value))
    except (TypeError, ValueError, OverflowError):
        return None


def _shown(value: object) -> str:
    return f"{type(value).__name__} {bounded(repr(value), 80)}"


def _unsound(message: str, value: object, made_by: Callable[..., Any] | None) -> AstraflowError:
    if made_by is None:
        return AstraflowError(Reason.SCORER_FAILED, message)
    place = place_of_definition(made_by, name=f"{type(value).__name__} returned", said=message)
    return AstraflowError(
        Reason.SCORER_FAILED, message, cause=place.cause, traceback=place.traceback
    )


def refuse_scorer(scorer: GuardedScorer | None, why: str) -> None:
    """Refuse a scorer where a workflow rewards by itself.

    Raises:
        AstraflowError: INVALID_FIELD when the recipe names one.
    """
    if scorer is not None:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{why}; leave the scorer out",
            metadata={"field": "scorer"},
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
