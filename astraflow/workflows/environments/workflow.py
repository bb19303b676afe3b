"""Environment: the policy acts in a text environment, turn by turn."""

import hashlib
import re
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import FinishReason
from astraflow.core.tasks import Prompt
from astraflow.workflows.environments.pool import EnvironmentPool, PoolOptions
from astraflow.workflows.environments.protocol import Message, Observation
from astraflow.workflows.episode import Episode
from astraflow.workflows.protocol import Score
from astraflow.workflows.scoring import GuardedScorer, refuse_scorer

FindAction = Callable[[str], str | None]


class EnvironmentOptions(PoolOptions):
    """Which environment, and how the policy plays it."""

    max_turns: int = Field(default=16, ge=1)
    """Answers of the policy at most."""
    action: str = "text"
    """What of an answer is the action: text (all of it), last_line, tag:NAME (what stands in the
    last <NAME>...</NAME>), or regex:PATTERN (the last match, or its first group)."""
    on_unparsable: Literal["tell", "end"] = "tell"
    """An answer without an action. tell: the policy hears of it, and a turn is used up. end: the
    episode ends with the reward so far."""
    unparsable: str = ""
    """What the policy hears then; empty: what an action looks like."""
    chat: bool = True
    """Off: plain text, in which the contents of all messages follow each other; for base models."""
    system: str = ""
    """System message of the chat; empty: none."""
    examples: tuple[dict[str, str], ...] = ()
    """Messages before the first observation: {role, content} each."""
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the chat template shows, as in OpenAI's API. What calls them, and what they
    return, is the environment's: its observations may be messages of the role tool."""
    observation: str = "{observation}"
    """The text around each observation, which stands where {observation} does."""
    reward: Literal["sum", "last"] = "sum"
    """sum: of all steps. last: of the last step."""
    solved_reward: float = 1.0
    """An episode with at least this reward counts as solved, in the metrics."""

    @field_validator("action")
    @classmethod
    def _action_is_known(cls, action: str) -> str:
        action_finder(action)
        return action

    @model_validator(mode="after")
    def _tools_are_shown(self) -> Self:
        if self.tools and not self.chat:
            raise ValueError("a chat template shows tools, and chat is off; tell of them in text")
        return self

    @field_validator("observation")
    @classmethod
    def _observation_is_shown(cls, observation: str) -> str:
        if "{observation}" not in observation:
            raise ValueError("the policy sees nothing: put {observation} into it")
        return observation


class EnvironmentWorkflow:
    """A chat in which the environment is the user; its words are masked.

    The reward is the environment's. Metrics: its own, `turns`, `unparsable` and `solved`.
    """

    Options = EnvironmentOptions

    def __init__(self, options: EnvironmentOptions, scorer: GuardedScorer | None) -> None:
        refuse_scorer(scorer, "an environment rewards by itself")
        self._options = options
        self._find_action = action_finder(options.action)
        self._pool = EnvironmentPool(options)

    async def run(self, episode: Episode) -> Score:
        """Run one episode.

        Raises:
            AstraflowError: CONTEXT_TOO_LONG when the very first observation is too long.
        """
        options, talk = self._options, episode.trajectory()
        rewards: list[float] = []
        # Of the environment, the latest of each name.
        metrics: dict[str, float] = {}
        turns = unparsable = 0
        is_done = is_cut = False
        async with self._pool.open() as environment:
            first = await environment.reset(episode.prompt.fields, seed_of(episode.prompt))
            start = [{"role": "system", "content": options.system}] if options.system else []
            messages = [*start, *options.examples, *self._messages(first)]
            while not is_done and turns < options.max_turns:
                if options.chat:
                    talk.chat(messages, options.tools)
                else:
                    talk.observe("".join(str(message["content"]) for message in messages))
                try:
                    reply = await talk.sample()
                except AstraflowError as error:
                    is_cut = error.reason is Reason.CONTEXT_TOO_LONG and turns > 0
                    if is_cut:
                        break
                    raise
                turns += 1
                action = self._find_action(reply.text)
                if action is None:
                    unparsable += 1
                    if options.on_unparsable == "end":
                        is_cut = reply.is_cut
                        break
                    messages = self._messages(options.unparsable or _how(options.action))
                else:
                    step = await environment.step(action)
                    rewards.append(step.reward)
                    metrics.update(step.metrics)
                    is_done, messages = step.is_done, self._messages(step.observation)
        if turns == options.max_turns and not is_done:
            talk.finish_reason = FinishReason.TURNS
        reward = sum(rewards[-1:] if options.reward == "last" else rewards)
        metrics |= {
            "turns": float(turns),
            "unparsable": float(unparsable),
            "solved": float(reward >= options.solved_reward),
        }
        return Score(reward=reward, metrics=metrics, truncated=is_cut)

    async def close(self) -> None:
        """Stop the processes of the environments."""
        await self._pool.close()

    def _messages(self, observation: Observation) -> Sequence[Message]:
        if not isinstance(observation, str):
            return observation
        content = self._options.observation.replace("{observation}", observation)
        return [{"role": "user", "content": content}]


def seed_of(prompt: Prompt) -> int:
    """Return the seed of a row, the same for every rollout of it: its own, or made of its id.

    Raises:
        AstraflowError: INVALID_FIELD when the row's own is no whole number from 0 on.
    """
    seed: Any = prompt.fields.get("seed")
    if seed is None:
        digest = hashlib.blake2b(prompt.prompt_id.encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") >> 1
    if not isinstance(seed, int | float) or not 0 <= seed < inf or seed != int(seed):
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"prompt {prompt.prompt_id}: the seed {seed!r} is no whole number from 0 on",
        )
    return int(seed)


def action_finder(how: str) -> FindAction:
    """Return what finds the action in an answer, as the option `action` says.

    Raises:
        ValueError: It says nothing of the kind.
    """
    kind, _, detail = how.partition(":")
    match kind:
        case "text" if not detail:
            return lambda text: text.strip() or None
        case "last_line" if not detail:
            return lambda text: next(
                (line.strip() for line in reversed(text.splitlines()) if line.strip()), None
            )
        case "tag" if detail:
            name = re.escape(detail)
            # One that was opened in passing, and not closed, is none.
            find = _last_match(re.compile(rf"<{name}>((?:(?!<{name}>).)*?)</{name}>", re.DOTALL))
            return lambda text: (find(text) or "").strip() or None
        case "regex" if detail:
            try:
                return _last_match(re.compile(detail))
            except re.error as error:
                raise ValueError(f"no regular expression: {detail}: {error}") from error
        case _:
            raise ValueError(f"'{how}' is none of text, last_line, tag:NAME, regex:PATTERN")


def _last_match(pattern: re.Pattern[str]) -> FindAction:
    def find(text: str) -> str | None:
        found = None
        for found in pattern.finditer(text):  # noqa: B007 - the last one is wanted
            pass
        if found is None:
            return None
        return (found.group(1) if pattern.groups else found.group()) or None

    return find


def _how(action: str) -> str:
    kind, _, detail = action.partition(":")
    if kind == "tag":
        return f"There was no action. Write it between <{detail}> and </{detail}>."
    return "There was no action."
