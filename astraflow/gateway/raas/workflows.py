"""What a Dataflow says of work, as tasks of the recipe's workflows."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from typing import Any, Final

import structlog
from pydantic import Field
from starlette.exceptions import HTTPException

from astraflow.config.recipe import Recipe
from astraflow.core.ids import EvalRunId, GroupId, PolicyId, PromptId, TaskId
from astraflow.core.tasks import Prompt, RolloutTask, SamplingParams, TaskPurpose, WorkflowSpec
from astraflow.gateway.http import Fields
from astraflow.gateway.raas.orders import Order
from astraflow.workflows.building import workflow_specs

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_PROMPT_IDS: Final = ("prompt_id", "query_id", "task_id", "id", "qid")
# Published default: all tokens.
_ALL_TOKENS: Final = 100_000_000


class GconfigOverrides(Fields):
    """Of a workflow; what is not said is the recipe's."""

    n_samples: int = Field(default=1, ge=1, le=4096, description="Rollouts of a prompt.")
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=_ALL_TOKENS, description="0 or less: all.")
    frequency_penalty: float = Field(default=0.0, allow_inf_nan=False)
    max_new_tokens: int = Field(default=0, ge=0)
    min_new_tokens: int = Field(default=0, ge=0)
    ignore_eos: bool = False
    greedy: bool = Field(default=False, description="The likeliest token, whatever else is said.")
    stop: list[str] | None = None
    stop_token_ids: list[int] = Field(default=[])
    skip_special_tokens: Any = Field(default=None, description="Ignored: ids are what counts.")
    max_tokens: Any = Field(default=None, description="Ignored; see max_new_tokens.")
    lora_name: Any = Field(default=None, description="Ignored: there is one set of weights.")

    def onto(self, ours: SamplingParams) -> SamplingParams:
        """Return the recipe's with what was said."""
        same = self.model_fields_set & {*_SAME}
        found: dict[str, Any] = {name: getattr(self, name) for name in same}
        if "top_k" in self.model_fields_set:
            found["top_k"] = self.top_k if 0 < self.top_k < _ALL_TOKENS else None
        if "stop" in self.model_fields_set:
            found["stop_strings"] = tuple(self.stop or ())
        if "stop_token_ids" in self.model_fields_set:
            found["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.greedy:
            found["temperature"] = 0.0
        return replace(ours, **found)


_SAME: Final = (
    *("temperature", "top_p", "frequency_penalty"),
    *("max_new_tokens", "min_new_tokens", "ignore_eos"),
)


class RegisterWorkflow(Fields):
    """A workflow is named, with its settings."""

    workflow_id: str = Field(min_length=1, max_length=200, description="Its name from now on.")
    workflow_cls: str = Field(min_length=1, description="Workflow of the recipe: its id or name.")
    reward_fn: str | None = Field(default=None, description="Its scorer, by name.")
    gconfig_overrides: GconfigOverrides | None = None
    workflow_kwargs: dict[str, Any] = Field(
        default={}, description="Options; where the recipe has one, its value has to be the same."
    )


class SubmitPrompt(Fields):
    """A prompt."""

    data: dict[str, Any] = Field(description="What the workflow reads: plain data.")
    workflow_id: str = Field(default="default", description="As it was registered.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A workflow that prompts can be submitted to."""

    spec: WorkflowSpec
    sample_count: int
    sampling: Mapping[PolicyId, SamplingParams]


class WorkflowRegistry:
    """The recipe's workflows under the names that a Dataflow gave them.

    HTTPException 404 says that one is not here, 409 that options or scorer differ.
    """

    def __init__(self, recipe: Recipe, uid: str) -> None:
        """Begin without a registration; ids of tasks begin with the uid."""
        self.specs = workflow_specs(recipe)
        self._recipe = recipe
        self._uid = uid
        self._registered: dict[str, Registered] = {}
        self._numbers = count(1)

    @property
    def names(self) -> list[str]:
        """Of what was registered."""
        return sorted(self._registered)

    @property
    def sample_count(self) -> int:
        """Rollouts of a prompt, at most."""
        counts = (each.sample_count for each in self._registered.values())
        return max(counts, default=self._recipe.rollouts.group_size)

    def register(self, asked: RegisterWorkflow) -> dict[str, Any]:
        """Name a workflow; the same name again counts from now on."""
        spec = _spec_of(asked, self.specs)
        for name, value in asked.workflow_kwargs.items():
            if name in spec.options and spec.options[name] != value:
                raise HTTPException(
                    409,
                    f"workflow_kwargs.{name} is {value!r}, the recipe's workflows."
                    f"{spec.workflow_id}.options has {spec.options[name]!r}; nodes have the "
                    "recipe's",
                )
        changes, policies = asked.gconfig_overrides or GconfigOverrides(), self._recipe.policies
        has_count = "n_samples" in changes.model_fields_set
        self._registered[asked.workflow_id] = Registered(
            spec=spec,
            sample_count=changes.n_samples if has_count else self._recipe.rollouts.group_size,
            sampling={
                each: changes.onto(policies[each].sampling.params) for each in spec.policy_ids
            },
        )
        ignored = sorted(asked.workflow_kwargs.keys() - spec.options.keys())
        if ignored:
            log.warning(
                "options of a workflow are ignored", workflow=asked.workflow_id, names=ignored
            )
        return {
            "workflow_id": asked.workflow_id,
            "registered": True,
            "total_workflows": len(self._registered),
            "ignored": ignored,
        }

    def order(self, asked: SubmitPrompt, purpose: TaskPurpose) -> Order:
        """Return the order of a prompt."""
        known = self._registered.get(asked.workflow_id)
        if known is None:
            raise HTTPException(
                404, f"workflow {asked.workflow_id} is not registered: POST /register_workflow"
            )
        try:
            json.dumps(asked.data)
        except (TypeError, ValueError, RecursionError) as error:
            why = f"data: {error}; nodes get texts, numbers, lists and dicts of them"
            raise HTTPException(422, why) from None
        number = next(self._numbers)
        group_id = GroupId(f"{self._uid}-{number}")
        named = (asked.data[name] for name in _PROMPT_IDS if asked.data.get(name) is not None)
        prompt_id = PromptId(str(next(named, group_id)))
        task = RolloutTask(
            task_id=TaskId(group_id),
            group_id=group_id,
            purpose=purpose,
            workflow_id=known.spec.workflow_id,
            prompt=Prompt(prompt_id=prompt_id, data_set=self._uid, fields=asked.data),
            sample_indexes=tuple(range(known.sample_count)),
            versions={},
            sampling=known.sampling,
            eval_run_id=EvalRunId(group_id) if purpose is TaskPurpose.EVAL else None,
            timeout=timedelta(seconds=self._recipe.rollouts.timeout_s),
        )
        return Order(number=number, task=task)


def _spec_of(asked: RegisterWorkflow, specs: Sequence[WorkflowSpec]) -> WorkflowSpec:
    name, reward = asked.workflow_cls, asked.reward_fn
    named = [spec for spec in specs if name in (spec.workflow_id, spec.code.name)]
    if not named:
        known = ", ".join(sorted({str(spec.workflow_id) for spec in specs}))
        raise HTTPException(404, f"workflow_cls {name} is none of the recipe's: {known}")
    fitting = [each for each in named if reward is None or _scorer_of(each) in (None, reward)]
    if not fitting:
        ours = ", ".join(sorted({str(_scorer_of(each)) for each in named}))
        raise HTTPException(409, f"reward_fn is {reward}, the recipe scores {name} by {ours}")
    return fitting[0]


def _scorer_of(spec: WorkflowSpec) -> str | None:
    return None if spec.scorer is None else spec.scorer.name
