"""Single turn: one prompt, one answer, one score."""

from dataclasses import replace

from astraflow.config.recipe import Strict
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.workflows.episode import Episode
from astraflow.workflows.protocol import Score
from astraflow.workflows.scoring import GuardedScorer, needs_scorer


class SingleTurn:
    """Shows the prompt, samples once, scores the answer."""

    class Options(Strict):
        """How a row becomes text."""

        template: str = "{prompt}"
        """The text, with the row's fields in braces; a chat model's own markers belong here."""

    def __init__(self, options: Options, scorer: GuardedScorer | None) -> None:
        self._template = options.template
        self._scorer = needs_scorer(scorer)

    async def run(self, episode: Episode) -> Score:
        """Run one episode."""
        talk = episode.trajectory()
        talk.observe(fill(self._template, episode.prompt))
        reply = await talk.sample()
        score = await self._scorer(episode.prompt, reply.text)
        return replace(score, truncated=score.truncated or reply.is_cut)


def fill(template: str, prompt: Prompt) -> str:
    """Return a template with the fields of a prompt in it.

    Raises:
        AstraflowError: INVALID_FIELD when the prompt lacks a field that the template names.
    """
    try:
        return template.format_map(prompt.fields)
    except (KeyError, IndexError, ValueError) as error:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"prompt {prompt.prompt_id} does not fit the template {template!r}: {error!r}; it has "
            f"{', '.join(prompt.fields)}",
        ) from error
