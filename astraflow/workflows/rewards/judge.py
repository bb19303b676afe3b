"""A judge: a model behind any OpenAI-compatible endpoint says what an answer is worth."""

import asyncio
import os
import re
from functools import partial
from typing import Any

from pydantic import Field

from astraflow.config.strict import Strict
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.workflows.prompts import fill
from astraflow.workflows.protocol import Score

_NUMBER = r"([-+]?\d+(?:\.\d+)?)"
_QUESTION = (
    "Task:\n{prompt}\n\nAnswer:\n{text}\n\nHow good is the answer? "
    "End with one line: Score: N, where N is from 0 to 10."
)


# Of who has too much to do, or a limit of requests; it is asked again after these pauses.
_BUSY = (429, 502, 503, 504)
_PAUSES_S = (1.0, 2.0, 4.0, 8.0)


class Judge:
    """The number that a model gives, divided by `best`."""

    class Options(Strict):
        """Who judges, and how it is asked."""

        base_url: str
        """Of the endpoint, such as http://127.0.0.1:8000/v1."""
        model: str
        """As the endpoint calls it."""
        api_key_env: str = "OPENAI_API_KEY"
        """Environment variable with the key; it need not be set."""
        question: str = _QUESTION
        """The text for the judge: the row's fields in braces, and the answer as {text}."""
        pattern: str = rf"[Ss]core:\s*{_NUMBER}"
        """Its last match in what the judge says has the number as its group."""
        best: float = Field(default=10.0, gt=0)
        """The number of a perfect answer; what lies outside 0 .. best is cut."""
        temperature: float = Field(default=0.0, ge=0)
        """Of the judge's sampling."""
        max_tokens: int = Field(default=512, ge=1)
        """Of the judge's answer, at most."""
        time_s: float = Field(default=60.0, gt=0)
        """Seconds for one answer."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._pattern = re.compile(options.pattern)

    async def __call__(self, prompt: Prompt, text: str) -> Score:
        """Ask.

        Raises:
            AstraflowError: SCORER_FAILED when the judge does not answer with a number,
                SCORER_TIMEOUT when it does not answer in time.
        """
        said = await self._completion(fill(self._options.question, prompt, text=text))
        found = self._pattern.findall(said)
        if not found:
            raise AstraflowError(
                Reason.SCORER_FAILED,
                f"the judge gave prompt {prompt.prompt_id} no score: {said[-200:]!r} has no match "
                "of scorer_options.pattern",
            )
        best = self._options.best
        return Score(reward=min(max(float(found[-1]), 0.0), best) / best)

    def gold(self, prompt: Prompt) -> None:
        """Return that no answer is known to be right: the judge alone can say."""

    async def _completion(self, question: str) -> str:
        import httpx  # noqa: PLC0415 - an extra

        options = self._options
        key = os.environ.get(options.api_key_env, "none")
        asked: dict[str, Any] = {
            "model": options.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
        }
        try:
            async with httpx.AsyncClient(timeout=options.time_s, trust_env=False) as client:
                ask = partial(
                    client.post,
                    f"{options.base_url.rstrip('/')}/chat/completions",
                    json=asked,
                    headers={"Authorization": f"Bearer {key}"},
                )
                answer = await ask()
                for pause_s in _PAUSES_S:
                    if answer.status_code not in _BUSY:
                        break
                    await asyncio.sleep(pause_s)
                    answer = await ask()
            answer.raise_for_status()
            return str(answer.json()["choices"][0]["message"]["content"] or "")
        except httpx.TimeoutException as error:
            raise AstraflowError(
                Reason.SCORER_TIMEOUT, f"the judge took longer than {options.time_s:g} s"
            ) from error
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise AstraflowError(
                Reason.SCORER_FAILED, f"the judge at {options.base_url} failed: {error!r}"
            ) from error
