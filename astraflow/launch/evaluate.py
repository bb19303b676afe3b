"""Evaluation without a run: saved checkpoints measured in this process."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from astraflow.config.recipe import EvalSet, Recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.evals import EvalAccumulator, EvalDataSet, EvalResult, overall
from astraflow.core.ids import EvalRunId, GroupId, PolicyId, TaskId, WorkflowId
from astraflow.core.rollouts import Rollout
from astraflow.core.tasks import RolloutTask, SamplingParams, TaskPurpose
from astraflow.raas.policies import ServedModel, chat_template, turn_end_ids
from astraflow.workflows.building import build_workflows, close_workflows, workflow_specs
from astraflow.workflows.data_sets import open_data_set
from astraflow.workflows.episode import Episode
from astraflow.workflows.runner import LoadedWorkflow, run_episode


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResult:
    """What a suite came to.

    Attributes:
        suite: Its name in the recipe.
        checkpoints: Directory of each policy.
        results: One per data set.
        overall: Their mean.
    """

    suite: str
    checkpoints: Mapping[str, Path]
    results: Sequence[EvalResult]
    overall: EvalResult | None


async def evaluate_suite(
    recipe: Recipe,
    suite: str,
    checkpoints: Mapping[str, Path],
    *,
    note: Callable[[Failure], None],
) -> SuiteResult:
    """Run a suite of a recipe on checkpoints, as an evaluation beside training would.

    Prompts, sampling and seeds are those of the run, so the same weights give the same result.

    Args:
        recipe: Names suites, workflows, data sets and engines.
        suite: One of `recipe.evals`.
        checkpoints: Directory of every policy, of Hugging Face or with adapters.
        note: Told why a rollout has no reward, once for each cause in a data set.
    """
    models = {PolicyId(name): await _load(recipe, name, path) for name, path in checkpoints.items()}
    workflows = build_workflows(workflow_specs(recipe))
    sampling = {
        PolicyId(name): replace(
            policy.sampling.params, **recipe.evals[suite].sampling.changes, seed=recipe.seed
        )
        for name, policy in recipe.policies.items()
    }
    try:
        results = [
            await _evaluate_set(recipe, part, models, workflows, sampling=sampling, note=note)
            for part in recipe.evals[suite].data_sets
        ]
    finally:
        await close_workflows(workflows.values())
        await asyncio.gather(*(model.engine.close() for model in models.values()))
    return SuiteResult(
        suite=suite, checkpoints=checkpoints, results=results, overall=overall(results)
    )


async def _load(recipe: Recipe, policy: str, directory: Path) -> ServedModel:
    from astraflow.engines.embedded.engine import checkpoint_engine  # noqa: PLC0415 - loads torch
    from astraflow.engines.tokenizer import load_tokenizer  # noqa: PLC0415

    engine = checkpoint_engine(
        directory, recipe.raas.engine, PolicyId(policy), lora=recipe.policies[policy].model.lora
    )
    await engine.load_directory(version=0, model_dir=directory)
    tokenizer, template = load_tokenizer(directory), chat_template(recipe, policy, directory)
    return ServedModel(
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        turn_end_ids=turn_end_ids(template, tokenizer),
    )


async def _evaluate_set(
    recipe: Recipe,
    part: EvalSet,
    models: Mapping[PolicyId, ServedModel],
    workflows: Mapping[WorkflowId, LoadedWorkflow],
    *,
    sampling: Mapping[PolicyId, SamplingParams],
    note: Callable[[Failure], None],
) -> EvalResult:
    reader = open_data_set(part.data_set, recipe.data[part.data_set], Path(), seed=recipe.seed)
    prompts = list(reader.epoch(0))
    settings = EvalDataSet(
        data_set=part.data_set,
        workflow_id=WorkflowId(part.workflow),
        prompt_count=len(prompts),
        repeats=part.repeats,
        correct_reward=part.correct_reward,
    )
    tally = EvalAccumulator(settings, len(prompts))
    policies = [PolicyId(name) for name in recipe.policies_of(part.workflow)]
    places = asyncio.Semaphore(recipe.raas.capacity)
    told: set[str] = set()

    async def sample(task: RolloutTask, index: int) -> Rollout:
        async with places:
            ports = {policy: models[policy].port(policy, task, index) for policy in policies}
            episode = Episode(task=task, sample_index=index, policies=ports)
            return await run_episode(workflows[task.workflow_id], episode)

    async def answer(task: RolloutTask) -> None:
        rollouts = await asyncio.gather(*(sample(task, i) for i in range(part.repeats)))
        for rollout in rollouts:
            if rollout.reward is not None:
                tally.add(rollout.reward, rollout.metrics)
                continue
            tally.missing_count += 1
            failure = rollout.failure
            if failure is not None and (cause := failure.cause or failure.reason) not in told:
                told.add(cause)
                note(failure)
        tally.close([each.reward for each in rollouts if each.reward is not None])

    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            task = RolloutTask(
                task_id=TaskId(f"eval-{prompt.prompt_id}"),
                group_id=GroupId(f"eval-{prompt.prompt_id}"),
                purpose=TaskPurpose.EVAL,
                workflow_id=WorkflowId(part.workflow),
                prompt=prompt,
                sample_indexes=tuple(range(part.repeats)),
                versions={},
                sampling=sampling,
                timeout=timedelta(seconds=recipe.rollouts.timeout_s),
                eval_run_id=EvalRunId("offline"),
            )
            group.create_task(answer(task))
    return tally.result()


def find_checkpoints(recipe: Recipe, run_dir: RunDir, step: str) -> dict[str, Path]:
    """Return the checkpoint of every policy at a step of a run.

    Args:
        recipe: Of the run.
        run_dir: Of the run.
        step: `first`, `last`, or a number of steps.

    Raises:
        AstraflowError: CHECKPOINT_UNKNOWN when a policy has none there, naming those it has.
    """
    found: dict[str, Path] = {}
    for policy in recipe.policies:
        paths = sorted(run_dir.checkpoints(policy).glob("step_*"))
        named = {int(path.name.removeprefix("step_")): path for path in paths}
        if not named:
            raise AstraflowError(
                Reason.CHECKPOINT_UNKNOWN,
                f"{run_dir.root} has no checkpoint of {policy}; did its trainer start?",
            )
        steps = {"first": min(named), "last": max(named)}
        number = steps.get(step, int(step) if step.isdecimal() else -1)
        if number not in named:
            raise AstraflowError(
                Reason.CHECKPOINT_UNKNOWN,
                f"{policy} has no checkpoint at step {step}; it has {', '.join(map(str, named))}",
            )
        found[policy] = named[number]
    return found
