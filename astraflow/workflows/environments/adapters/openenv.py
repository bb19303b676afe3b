"""OpenEnv: environments behind a server, over the session of its own client."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from astraflow.workflows.environments.protocol import Step


class OpenEnv:
    """A session with a server that the user runs; it says what an episode pays."""

    def __init__(
        self,
        url: str,
        action: str = "message",
        observation: str = "message",
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        """Connect.

        Args:
            url: Of the server, such as http://localhost:8000.
            action: The field of an action that is what the policy says.
            observation: The field of an observation that the policy sees.
            fields: Of every action, besides.
        """
        module: Any = import_module("openenv.core.generic_client")
        self._client: Any = module.GenericEnvClient(base_url=url).sync()
        self._client.connect()
        self._action = action
        self._observation = observation
        self._fields = dict(fields or {})

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Begin an episode; a row's `options` are handed to the server's reset."""
        return self._text(self._client.reset(seed=seed, **task.get("options", {})))

    def step(self, action: str) -> Step:
        """Send an action."""
        result = self._client.step({**self._fields, self._action: action})
        return Step(self._text(result), float(result.reward or 0), bool(result.done))

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def _text(self, result: Any) -> str:
        found = result.observation.get(self._observation)
        if not isinstance(found, str):
            raise TypeError(
                f"an observation has no text '{self._observation}' (observation), only "
                f"{', '.join(result.observation)}"
            )
        return found
