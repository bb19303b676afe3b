"""Agents that spawn agents: each gets a part of the goal, all share one world and one budget.

The protocol is that of Recursive Agent Optimization (arXiv 2605.06639) on TextCraft. An agent acts
by `<action type="...">{JSON}</action>`, the first of an answer counts. `spawn` and `finish` are
handled here, all others go to the environment.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import FinishReason
from astraflow.workflows.environments.pool import EnvironmentPool, PooledEnvironment, PoolOptions
from astraflow.workflows.environments.workflow import seed_of
from astraflow.workflows.episode import Episode, Recorder
from astraflow.workflows.protocol import Score
from astraflow.workflows.scoring import GuardedScorer

# One that was opened in passing, and not closed, is none: nor is the rest read for each of them.
_ACTION = re.compile(r'<action type="(\w+)">((?:(?!<action ).)*?)</action>', re.DOTALL)

ACTIONS = """You craft items in Minecraft. Every answer ends with one action:
<action type="get_info">{"items": ["oak door"]}</action> shows recipes and what is held.
<action type="view_inventory">{}</action>
<action type="craft">{"ingredients": {"oak planks": 6}, "target": ["oak door", 3]}</action> \
needs exactly what the recipe says; the total is a multiple of what it gives.
<action type="spawn">{"subtasks": [{"targets": {"oak planks": 6}, "max_steps": 10, "context": \
"..."}]}</action> lets other agents, who share your inventory, craft intermediate items.
<action type="finish">{"message": "done"}</action> when your targets are in the inventory."""


class RecursiveOptions(PoolOptions):
    """The world, and how large the tree of agents may grow."""

    environment: str = "crafting:Crafting"
    """Answers actions that are JSON objects; `view_inventory` with what is held, as JSON."""
    max_steps: int = Field(default=50, ge=1)
    """Answers of all agents of a rollout together."""
    child_steps: int = Field(default=10, ge=1)
    """Answers of a spawned agent for which its parent names no number."""
    max_depth: int = Field(default=3, ge=0)
    """Agents below each other, beside the root; 0: nobody spawns."""
    max_breadth: int = Field(default=4, ge=1)
    """Agents of one spawn; what is asked for beyond it is dropped."""
    at_once: int = Field(default=8, ge=1)
    """Agents of a rollout that sample at the same time. Those that wait for their children do not
    count. With 1, agents begin in an order that does not depend on timing."""
    credit: Literal["added", "team"] = "added"
    """What a spawned agent earns. added: 1 when its targets are held as it finishes and it, with
    those that it spawned, has made what was missing of them; team: what the root earns."""
    system: str = ACTIONS
    """System message of every agent; empty: none."""


@dataclass(eq=False)
class Agent:
    """Who has a part of the goal.

    Attributes:
        talk: What it sees and says.
        targets: Counts of items that have to be held when it finishes.
        missing: Of these, when it began.
        parent: Who spawned it; None: it is the root.
        made: What it, or one that it spawned, has crafted.
        has_finished: It said so itself.
        reward: 0 until it has finished.
    """

    talk: Recorder
    targets: Mapping[str, int]
    missing: Mapping[str, int]
    parent: "Agent | None" = None
    made: Counter[str] = field(default_factory=Counter)
    has_finished: bool = False
    reward: float = 0.0

    @property
    def depth(self) -> int:
        return self.parent.depth + 1 if self.parent else 0

    def note(self, item: str, count: int) -> None:
        self.made[item] += count
        if self.parent:
            self.parent.note(item, count)


@dataclass(eq=False)
class Tree:
    """One rollout.

    Attributes:
        world: Shared by all agents.
        turns: Held while an agent samples, never while it waits for others.
        steps_left: Of all agents.
        agents: In the order in which they began; the root is first.
        unparsable: Answers without an action.
        is_cut: An agent has filled its context.
    """

    episode: Episode
    world: PooledEnvironment
    turns: asyncio.Semaphore
    steps_left: int
    agents: list[Agent] = field(default_factory=list)
    unparsable: int = 0
    is_cut: bool = False

    async def inventory(self) -> Mapping[str, int]:
        said = (await self.world.step('{"type": "view_inventory"}')).observation
        return json.loads(str(said))


class RecursiveAgents:
    """The reward is 1 when the root finishes with all targets in the inventory.

    Every agent is one trajectory. Spawned agents are compared with those of the same targets in
    their group (credit: added), or of the same depth (team).
    """

    Options = RecursiveOptions

    def __init__(self, options: RecursiveOptions, scorer: GuardedScorer | None) -> None:
        if scorer is not None:
            raise AstraflowError(
                Reason.INVALID_FIELD, "the inventory rewards; leave the scorer out"
            )
        self._options = options
        self._pool = EnvironmentPool(options)

    async def run(self, episode: Episode) -> Score:
        options, fields = self._options, episode.prompt.fields
        async with self._pool.open() as world:
            held = json.loads(str(await world.reset(fields, seed_of(episode.prompt))))
            tree = Tree(episode, world, asyncio.Semaphore(options.at_once), options.max_steps)
            root = self._begin(tree, None, fields["targets"], held)
            await self._play(tree, root, steps=options.max_steps, context="")
        return self._score(tree, root)

    async def close(self) -> None:
        await self._pool.close()

    def _begin(
        self,
        tree: Tree,
        parent: Agent | None,
        targets: Mapping[str, int],
        held: Mapping[str, int],
    ) -> Agent:
        name = "root"
        if parent is not None:
            is_team = self._options.credit == "team"
            name = f"depth {parent.depth + 1}" if is_team else _listed(targets)
        agent = Agent(
            talk=tree.episode.trajectory(agent=name),
            targets=targets,
            missing={
                item: count - held.get(item, 0)
                for item, count in targets.items()
                if count > held.get(item, 0)
            },
            parent=parent,
        )
        tree.agents.append(agent)
        return agent

    async def _play(self, tree: Tree, agent: Agent, *, steps: int, context: str) -> str:
        """Let an agent act until it finishes, and return what its parent is told."""
        system = self._options.system
        before = [{"role": "system", "content": system}] if system else []
        steps = min(steps, tree.steps_left)
        said = opening(agent.targets, await tree.inventory(), steps, context)
        message = "ERROR: it used up its steps"
        for _ in range(steps):
            agent.talk.chat([*before, {"role": "user", "content": said}])
            before = []
            try:
                answer = await self._answer(tree, agent)
            except AstraflowError as error:
                if error.reason is not Reason.CONTEXT_TOO_LONG or not agent.talk.sampled_count:
                    raise
                tree.is_cut = True
                message = "ERROR: it has filled its context"
                break
            if answer is None:
                break
            action = action_of(answer)
            if action is None:
                tree.unparsable += 1
                said = 'ERROR: no action; write <action type="...">{JSON}</action>'
            elif action["type"] == "finish":
                agent.has_finished = True
                message = str(action.get("message", ""))
                break
            elif action["type"] == "spawn":
                said = await self._spawn(tree, agent, action.get("subtasks"))
            else:
                said = await self._act(tree, agent, action)
        else:
            agent.talk.finish_reason = FinishReason.TURNS
        await self._reward(tree, agent)
        return message

    async def _answer(self, tree: Tree, agent: Agent) -> str | None:
        """Return what an agent says; None: the rollout's steps are used up."""
        async with tree.turns:
            if not tree.steps_left:
                return None
            tree.steps_left -= 1
            return (await agent.talk.sample()).text

    async def _act(self, tree: Tree, agent: Agent, action: Mapping[str, Any]) -> str:
        step = await tree.world.step(json.dumps(action))
        made = int(step.metrics.get("made", 0))
        if made:
            agent.note(_named(action["target"][0]), made)
        return str(step.observation)

    async def _spawn(self, tree: Tree, agent: Agent, subtasks: Any) -> str:
        """Play the agents that are asked for, all at once, and return what they told."""
        options = self._options
        if agent.depth == options.max_depth:
            return "ERROR: agents cannot be spawned any deeper; craft it yourself"
        if not isinstance(subtasks, list) or not subtasks:
            return 'ERROR: spawn needs {"subtasks": [{"targets": {name: count}}]}'
        asked = [subtask_of(each, options.child_steps) for each in subtasks[: options.max_breadth]]
        parts = [each for each in asked if each is not None]
        if len(parts) < len(asked):
            return "ERROR: a subtask has targets {name: count from 1 on} and max_steps from 1 on"
        held = await tree.inventory()
        children = [self._begin(tree, agent, part.targets, held) for part in parts]
        played = (
            self._play(tree, child, steps=part.steps, context=part.context)
            for child, part in zip(children, parts, strict=True)
        )
        return spawn_result(await _together(played))

    async def _reward(self, tree: Tree, agent: Agent) -> None:
        """Say what an agent has earned by now."""
        held = await tree.inventory()
        is_done = agent.has_finished and all(
            held.get(item, 0) >= count for item, count in agent.targets.items()
        )
        has_added = bool(agent.missing) and all(
            agent.made[item] >= count for item, count in agent.missing.items()
        )
        agent.reward = float(is_done and has_added)
        if agent.parent and self._options.credit == "added":
            agent.talk.reward = agent.reward

    def _score(self, tree: Tree, root: Agent) -> Score:
        spawned = tree.agents[1:]
        metrics = {
            "solved": root.reward,
            "spawned": float(len(spawned)),
            "depth": float(max(agent.depth for agent in tree.agents)),
            "steps": float(self._options.max_steps - tree.steps_left),
            "unparsable": float(tree.unparsable),
        }
        if spawned:
            metrics["spawned_solved"] = sum(each.reward for each in spawned) / len(spawned)
        return Score(reward=root.reward, metrics=metrics, truncated=tree.is_cut)


def action_of(text: str) -> Mapping[str, Any] | None:
    """Return the first action of an answer, with its type; None: there is none."""
    found = _ACTION.search(text)
    if found is None:
        return None
    try:
        arguments = json.loads(found.group(2))
    except (ValueError, RecursionError):
        return None
    return {**arguments, "type": found.group(1)} if isinstance(arguments, dict) else None


@dataclass(frozen=True)
class Subtask:
    """What a child is asked for."""

    targets: Mapping[str, int]
    steps: int
    context: str


def subtask_of(asked: Any, steps: int) -> Subtask | None:
    """Return what was asked for, with `steps` where it names no number; None: it makes no sense."""
    match asked:
        case {"targets": dict(targets), **rest} if targets:
            steps = rest.get("max_steps", steps)
            counts = [steps, *targets.values()]
            if all(type(count) is int and count > 0 for count in counts):
                names = {_named(item): count for item, count in targets.items()}
                return Subtask(names, steps, str(rest.get("context", "")))
    return None


def opening(
    targets: Mapping[str, int], held: Mapping[str, int], steps: int, context: str = ""
) -> str:
    """What an agent is told first."""
    note = f"\nNote: {context}" if context else ""
    return f"Craft {_listed(targets)}.\nInventory: {_listed(held)}.\nSteps: {steps}.{note}"


def spawn_result(messages: Iterable[str]) -> str:
    """What an agent is told of those that it spawned: their last words."""
    return f"<spawn_result>{''.join(f'<agent>{each}</agent>' for each in messages)}</spawn_result>"


async def _together(some: Iterable[Coroutine[Any, Any, str]]) -> Sequence[str]:
    """Wait for all of them; the first that fails ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in some]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _named(item: str) -> str:
    return item.removeprefix("minecraft:").replace("_", " ").strip().lower()


def _listed(items: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in items.items()) or "nothing"
