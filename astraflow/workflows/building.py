"""Makes workflows and tutors from what a recipe says of them."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from astraflow.config.loader import invalid_fields
from astraflow.config.recipe import Recipe, Strict
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId, WorkflowId
from astraflow.core.tasks import RegisteredCode, WorkflowSpec
from astraflow.workflows.protocol import Scorer, Workflow
from astraflow.workflows.registry import Kind, code_digest, find
from astraflow.workflows.runner import LoadedWorkflow
from astraflow.workflows.sandbox.protocol import SandboxProvider
from astraflow.workflows.scoring import GuardedScorer
from astraflow.workflows.tutors import Tutor


def workflow_specs(recipe: Recipe) -> tuple[WorkflowSpec, ...]:
    """Return the workflows of a recipe with the digests of their code; runs none of it.

    Raises:
        AstraflowError: CODE_UNKNOWN when a workflow or a scorer is not here.
    """
    return tuple(
        WorkflowSpec(
            workflow_id=WorkflowId(name),
            code=_registered(Kind.WORKFLOW, settings.name),
            options=settings.options,
            scorer=_registered(Kind.SCORER, settings.scorer) if settings.scorer else None,
            scorer_options=settings.scorer_options,
            policy_ids=tuple(map(PolicyId, recipe.policies_of(name))),
            policy_fault_reward=recipe.rollouts.policy_fault_reward,
        )
        for name, settings in recipe.workflows.items()
    )


def recipe_codes(recipe: Recipe) -> tuple[RegisteredCode, ...]:
    """Return the workflows and scorers of a recipe, each once."""
    specs = workflow_specs(recipe)
    codes = [code for spec in specs for code in (spec.code, spec.scorer) if code is not None]
    return tuple(dict.fromkeys(codes))


def build_workflows(specs: Sequence[WorkflowSpec]) -> Mapping[WorkflowId, LoadedWorkflow]:
    """Make every workflow of a run from the code that is here.

    Raises:
        AstraflowError: CODE_UNKNOWN when code is not here, CODE_MISMATCH when it is not
            what the run has, INVALID_FIELD for options that it does not take, or that it raises at.
    """
    return {spec.workflow_id: _build(spec) for spec in specs}


async def close_workflows(workflows: Iterable[LoadedWorkflow]) -> None:
    """Let workflows and scorers with a `close` let go of what they hold, such as processes."""
    for each in workflows:
        close = getattr(each.workflow, "close", None)
        if close is not None:
            await close()
        if each.scorer is not None:
            await each.scorer.close()


def build_tutor(name: str, options: Mapping[str, Any]) -> Tutor:
    """Make a tutor.

    Raises:
        AstraflowError: CODE_UNKNOWN, or INVALID_FIELD for options that it does not take.
    """
    made = find(Kind.TUTOR, name)
    tutor: Tutor = made(parse_options(made, options, where=f"tutor {name}: options"))
    return tutor


def parse_options(made: Any, options: Mapping[str, Any], *, where: str) -> BaseModel:
    """Read the options of a class with its own `Options`.

    Raises:
        AstraflowError: INVALID_FIELD; lists every problem.
    """
    model = cast("type[BaseModel]", getattr(made, "Options", Strict))
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        raise invalid_fields(error, model, where=where) from error


def _build(spec: WorkflowSpec) -> LoadedWorkflow:
    made = find(Kind.WORKFLOW, spec.code.name)
    digest = _checked_digest(Kind.WORKFLOW, spec.code)
    where = f"workflows.{spec.workflow_id}"
    options = parse_options(made, spec.options, where=f"{where}.options")
    scorer = None
    if spec.scorer is not None:
        digest = _checked_digest(Kind.SCORER, spec.scorer)
        made_scorer = build_scorer(
            spec.scorer.name, spec.scorer_options, where=f"{where}.scorer_options"
        )
        scorer = GuardedScorer(made_scorer, name=spec.scorer.name)
    try:
        workflow: Workflow = made(options, scorer)
    except AstraflowError as error:
        raise AstraflowError(error.reason, f"{where}: {error.message}") from error
    except (Exception, SystemExit) as error:
        raise _not_made(spec.code.name, error, where=where) from error
    return LoadedWorkflow(
        workflow_id=spec.workflow_id,
        workflow=workflow,
        scorer=scorer,
        policy_ids=spec.policy_ids,
        scorer_digest=digest,
        policy_fault_reward=spec.policy_fault_reward,
    )


def build_scorer(name: str, options: Mapping[str, Any], *, where: str) -> Scorer:
    """Make a scorer.

    Raises:
        AstraflowError: CODE_UNKNOWN, or INVALID_FIELD for options that it does not take.
    """
    found = find(Kind.SCORER, name)
    parsed = parse_options(found, options, where=where)
    if not inspect.isclass(found):
        return found
    try:
        return cast("Any", found)(parsed)
    except AstraflowError:
        raise
    except (Exception, SystemExit) as error:
        raise _not_made(name, error, where=where) from error


def _not_made(name: str, error: BaseException, *, where: str) -> AstraflowError:
    return AstraflowError(
        Reason.INVALID_FIELD,
        f"{where}: {name} raised {type(error).__name__} when it was made: {error}",
        metadata={"field": where},
    )


def build_sandboxes(name: str, options: Mapping[str, Any], *, where: str) -> SandboxProvider:
    """Make what starts sandboxes of a kind; none is started.

    Raises:
        AstraflowError: CODE_UNKNOWN, or INVALID_FIELD for options that it does not take.
    """
    found = find(Kind.SANDBOX, name)
    provider: SandboxProvider = found(parse_options(found, options, where=where))
    return provider


def _registered(kind: Kind, name: str) -> RegisteredCode:
    return RegisteredCode(name=name, code_digest=code_digest(kind, name))


def _checked_digest(kind: Kind, code: RegisteredCode) -> bytes:
    digest = code_digest(kind, code.name)
    if code.code_digest and code.code_digest != digest:
        raise AstraflowError(
            Reason.CODE_MISMATCH,
            f"{kind}: the source of {code.name} here is not what the run has; "
            "install the same release on every machine",
        )
    return digest
