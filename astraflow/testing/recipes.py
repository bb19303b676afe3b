"""Recipes that are over in a second, and the smallest workflow."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from astraflow.config.recipe import Recipe
from astraflow.workflows.episode import Episode
from astraflow.workflows.protocol import Score

_PROMPTS = tuple({"prompt": f"row {number}"} for number in range(64))


def small_recipe(
    folder: Path,
    *,
    workflow: str = "single_turn",
    scorer: str | None = None,
    prompts: Sequence[Mapping[str, Any]] = _PROMPTS,
    policies: Sequence[str] = ("solver",),
    changes: Mapping[str, Any] | None = None,
) -> Recipe:
    """Return a recipe with batches of two groups of two, for three steps.

    Args:
        folder: Gets the prompts, train.jsonl.
        workflow: Registered name, or module:Class.
        scorer: Registered name, or module:function.
        prompts: Rows of the data set `train`.
        policies: Their names.
        changes: What differs, by dotted key, such as {"rollouts.group_size": 4}.

    Raises:
        pydantic.ValidationError: When what comes out is no recipe.
    """
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in prompts), encoding="utf-8")
    tree: dict[str, Any] = {
        "name": "test",
        "policies": {
            name: {
                "model": {"path": str(folder)},
                "sampling": {"max_new_tokens": 8},
                "trainer": {"groups_per_batch": 2, "max_staleness": 1, "step_count": 3},
            }
            for name in policies
        },
        "data": {"train": {"path": str(data)}},
        "workflows": {"main": {"name": workflow, "scorer": scorer}},
        "rollouts": {"data_set": "train", "workflow": "main", "group_size": 2},
        "hub": {"session_ttl_s": 60},
        "metrics": {"listen": "off"},
    }
    for key, value in (changes or {}).items():
        *parents, last = key.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return Recipe.model_validate(tree)


def one_turn(score: Callable[[str], float | Score]) -> type:
    """Return a workflow that says the prompt, samples once, and scores what was sampled.

    Example:
        >>> Shouts = workflow("shouts")(one_turn(lambda text: float(text.isupper())))
    """

    class OneTurn:
        def __init__(self, options: Any, scorer: Any) -> None:
            del options, scorer

        async def run(self, episode: Episode) -> float | Score:
            talk = episode.trajectory()
            talk.observe(episode.prompt.fields["prompt"])
            return score((await talk.sample()).text)

    OneTurn.__module__ = score.__module__
    return OneTurn
