"""The book: workflows as they were registered, and prompts as orders of them."""

import json
from datetime import timedelta
from itertools import count
from typing import Any, Final

import structlog

from astraflow.core.ids import EvalRunId, GroupId, PolicyId, PromptId, TaskId
from astraflow.core.tasks import Prompt, RolloutTask, TaskPurpose
from astraflow.gateway.edge.errors import RefusedError
from astraflow.gateway.pool.orders import Order
from astraflow.gateway.pool.registrations import Registration, registration_of
from astraflow.gateway.pool.requests import RegisterWorkflow, Submit
from astraflow.gateway.pool.settings import PoolSettings
from astraflow.workflows.building import workflow_specs

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_PROMPT_IDS: Final = ("prompt_id", "query_id", "task_id", "id", "qid")


class OrderBook:
    """Makes orders.

    Attributes:
        specs: Workflows of the recipe.
    """

    def __init__(self, settings: PoolSettings) -> None:
        """Begin without a registration.

        Raises:
            AstraflowError: CODE_UNKNOWN when a workflow or a scorer is not here.
        """
        self.specs = workflow_specs(settings.recipe)
        self._settings = settings
        self._sampling = {
            PolicyId(name): policy.sampling.params
            for name, policy in settings.recipe.policies.items()
        }
        self._registered: dict[str, Registration] = {}
        self._numbers = count(1)

    @property
    def names(self) -> list[str]:
        """Of what was registered."""
        return sorted(self._registered)

    @property
    def sample_count(self) -> int:
        """Rollouts of a prompt, at most."""
        counts = (each.sample_count for each in self._registered.values())
        return max(counts, default=self._settings.recipe.rollouts.group_size)

    def register(self, asked: RegisterWorkflow) -> dict[str, Any]:
        """Name a workflow; the same name again counts from now on.

        Raises:
            RefusedError: See `registration_of`.
        """
        default = self._settings.recipe.rollouts.group_size
        made = registration_of(asked, self.specs, self._sampling, sample_count=default)
        self._registered[asked.workflow_id] = made
        if made.ignored:
            log.warning(
                "options of a workflow are ignored", workflow=asked.workflow_id, names=made.ignored
            )
        return {
            "workflow_id": asked.workflow_id,
            "registered": True,
            "total_workflows": len(self._registered),
            "ignored": list(made.ignored),
        }

    def order(self, asked: Submit, purpose: TaskPurpose) -> Order:
        """Return the order of a prompt.

        Raises:
            RefusedError: 404 for a workflow that was not registered, 422 for data that is no JSON.
        """
        known = self._registered.get(asked.workflow_id)
        if known is None:
            raise RefusedError(
                404, f"workflow {asked.workflow_id} is not registered: POST /register_workflow"
            )
        _require_plain(asked.data)
        number, rollouts = next(self._numbers), self._settings.recipe.rollouts
        pattern = self._pattern(number, asked.data, known, purpose)
        return Order(number=number, pattern=pattern, max_attempts=rollouts.max_attempts)

    def _pattern(
        self, number: int, data: dict[str, Any], known: Registration, purpose: TaskPurpose
    ) -> RolloutTask:
        group_id = GroupId(f"{self._settings.uid}-{number}")
        named = (data[name] for name in _PROMPT_IDS if data.get(name) is not None)
        prompt_id = PromptId(str(next(named, group_id)))
        return RolloutTask(
            task_id=TaskId(group_id),
            group_id=group_id,
            purpose=purpose,
            workflow_id=known.spec.workflow_id,
            prompt=Prompt(prompt_id=prompt_id, data_set=self._settings.uid, fields=data),
            sample_indexes=tuple(range(known.sample_count)),
            versions={},
            sampling=known.sampling,
            eval_run_id=EvalRunId(group_id) if purpose is TaskPurpose.EVAL else None,
            timeout=timedelta(seconds=self._settings.recipe.rollouts.timeout_s),
        )


def _require_plain(data: dict[str, Any]) -> None:
    try:
        json.dumps(data)
    except (TypeError, ValueError, RecursionError) as error:
        raise RefusedError(
            422, f"data: {error}; nodes get texts, numbers, lists and dicts of them"
        ) from None
