"""Stored answers: a row has them, and nothing is sampled."""

from collections.abc import Sequence
from typing import Any, cast

from pydantic import Field

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.workflows.agents.messages import Message, normal_messages
from astraflow.workflows.episode import Episode, Recorder
from astraflow.workflows.prompts import PromptOptions, show_prompt
from astraflow.workflows.scoring import GuardedScorer, refuse_scorer


class StoredOptions(PromptOptions):
    """Which fields of a row are answers, and what they are worth."""

    answers: dict[str, float | str] = Field(default={"chosen": 1.0, "rejected": 0.0}, min_length=1)
    """By the field that has the answer its reward, or the field that has that. An answer is a text,
    or messages, of which the last one is it and those before belong to the prompt."""


class Stored:
    """Makes a trajectory of each stored answer to a prompt; those of a row are compared."""

    Options = StoredOptions

    def __init__(self, options: StoredOptions, scorer: GuardedScorer | None) -> None:
        refuse_scorer(scorer, "stored answers have their rewards")
        self._options = options

    async def run(self, episode: Episode) -> float:
        """Lay the answers of a row down; the reward is their mean."""
        prompt = episode.prompt
        rewards: list[float] = []
        for name, reward in self._options.answers.items():
            rewards.append(float(_field(prompt, reward) if isinstance(reward, str) else reward))
            talk = episode.trajectory()
            talk.answer(_asked(talk, self._options, prompt, name))
            talk.reward = rewards[-1]
        return sum(rewards) / len(rewards)


def _asked(talk: Recorder, options: StoredOptions, prompt: Prompt, name: str) -> str:
    """Show what comes before an answer, and return its text."""
    answer = _field(prompt, name)
    if isinstance(answer, str):
        show_prompt(talk, options, prompt)
        return answer
    said = (
        normal_messages(cast("Any", answer)) if answer and isinstance(answer, list | tuple) else ()
    )
    last: Message = said[-1] if said else {}
    if last.get("role") != "assistant" or "tool_calls" in last:
        why = f"has in {name!r} neither a text nor messages that end with the assistant's"
        raise _unsound(prompt, name, f"{why}; leave its row out")
    given = prompt.fields.get("prompt")
    before = cast("Sequence[Message]", given) if isinstance(given, list | tuple) else ()
    chat = [*before, *said[:-1]]
    if chat:
        talk.chat(chat)
    else:
        show_prompt(talk, options, prompt)
    return last["content"]


def _field(prompt: Prompt, name: str) -> Any:
    if name not in prompt.fields:
        why = (
            f"has no field {name!r}, only {', '.join(prompt.fields)}; name the fields of stored "
            "answers in the workflow's options.answers"
        )
        raise _unsound(prompt, name, why)
    if prompt.fields[name] is None:
        raise _unsound(prompt, name, f"has null in its field {name!r}; leave its row out")
    return prompt.fields[name]


def _unsound(prompt: Prompt, name: str, why: str) -> AstraflowError:
    message = f"prompt {prompt.prompt_id} {why}"
    return AstraflowError(Reason.INVALID_FIELD, message, metadata={"field": name})
