"""Prompt events: rows of data sets come in, for training and for evaluations."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from astraflow.core.ids import EvalRunId, PolicyId, PromptId
from astraflow.core.tasks import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsOffered:
    """The hub drew training prompts, as DrawPrompts or DrawAgain asked. Answer: None.

    Attributes:
        prompts: The next rows.
        data_set: Of which data set; empty: the run has one.
        is_last: No prompt follows: the data set is through.
        is_again: Whether they were drawn before, of any data set.
    """

    prompts: tuple[Prompt, ...]
    data_set: str = ""
    is_last: bool = False
    is_again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequeued:
    """An operator has a dead letter issued again, its attempts forgotten. Answer: None.

    One that was issued again already changes nothing while its prompt is open.

    Raises:
        AstraflowError: PROMPT_UNKNOWN, RUN_ENDED.
    """

    prompt_id: PromptId


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPromptsOffered:
    """The hub read the data sets of an evaluation, as DrawEvalPrompts asked. Answer: None.

    Attributes:
        eval_run_id: Which.
        prompts: All rows, by data set.
    """

    eval_run_id: EvalRunId
    prompts: Mapping[str, tuple[Prompt, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalCreated:
    """Somebody asks for an evaluation. Answer: EvalRun; the same for a repeated request_id.

    Attributes:
        request_id: Chosen by the caller, not empty.
        suite: By name.
        versions: A policy left out: its newest.
        pool_share: Above 0, at most 1; None: the suite's.

    Raises:
        AstraflowError: EVAL_UNKNOWN, VERSION_UNKNOWN, VERSION_EVICTED, VERSION_NOT_SERVED
            when no RaaS can serve them any more, REQUEST_CONFLICT, INVALID_FIELD, RUN_ENDED.
    """

    request_id: str
    suite: str
    versions: Mapping[PolicyId, int] = field(default_factory=dict[PolicyId, int])
    pool_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalCancelled:
    """Somebody stops an evaluation. Answer: EvalRun.

    Raises:
        AstraflowError: EVAL_UNKNOWN.
    """

    eval_run_id: EvalRunId


PromptEvent = PromptsOffered | PromptRequeued | EvalPromptsOffered | EvalCreated | EvalCancelled
