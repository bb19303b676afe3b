"""Harnesses: what known agents read to find the policy, and to call nobody else."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astraflow.workflows.agents.session import SessionEndpoint

# Fills from Entrance, beside {model}, the first policy's name, and {folder}, the episode's own.
_CODEX = """
model = "{model}"
model_provider = "astraflow"
check_for_update_on_startup = false
web_search = "disabled"

[analytics]
enabled = false

[model_providers.astraflow]
name = "astraflow"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
_OPENCODE: Mapping[str, Any] = {
    "autoupdate": False,
    "share": "disabled",
    "model": "astraflow/{model}",
    "small_model": "astraflow/{model}",
    "provider": {
        "astraflow": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{base_url}", "apiKey": "{key}"},
            "models": {"{model}": {}},
        }
    },
}
# litellm reads this one first, langchain reads no other: one of the node's would lead elsewhere.
_BASE = {"OPENAI_API_BASE": "{base_url}"}
_LITELLM = {**_BASE, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """What one reads, beside OPENAI_* and ANTHROPIC_*, which every command gets.

    Attributes:
        env: Variables.
        files: By their path below the episode's folder, for what no variable can say.
    """

    env: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, str] = field(default_factory=dict[str, str])

    def prepare(self, entrance: SessionEndpoint, *, model: str, folder: Path) -> dict[str, str]:
        """Write its files and return its variables.

        Args:
            entrance: Of the episode.
            model: Name of the policy that it asks for, where it can be told.
            folder: Of the episode; settings, sessions and the like go below it.
        """
        fills = {
            "{base_url}": entrance.base_url,
            "{session_url}": entrance.session_url,
            "{key}": entrance.key,
            "{model}": model,
            "{folder}": str(folder),
        }
        for name, text in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_filled(text, fills), encoding="utf-8")
        return {name: _filled(text, fills) for name, text in self.env.items()}


HARNESSES: Mapping[str, Harness] = {
    "claude-code": Harness(
        env={
            "ANTHROPIC_AUTH_TOKEN": "{key}",
            "ANTHROPIC_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_OPUS_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_SONNET_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
            "CLAUDE_CODE_SUBAGENT_MODEL": "{model}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CONFIG_DIR": "{folder}/claude",
        }
    ),
    "codex": Harness(
        env={"CODEX_HOME": "{folder}/codex"}, files={"codex/config.toml": _CODEX.lstrip()}
    ),
    "langgraph": Harness(
        env={**_BASE, "LANGSMITH_TRACING": "false", "LANGCHAIN_TRACING_V2": "false"}
    ),
    "litellm": Harness(env=_LITELLM),
    "mini-swe-agent": Harness(
        env={
            **_LITELLM,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": "{folder}/mini-swe-agent",
            "MSWEA_MODEL_NAME": "openai/{model}",
            "MSWEA_SILENT_STARTUP": "1",
        }
    ),
    "openai-agents": Harness(
        env={"OPENAI_AGENTS_DISABLE_TRACING": "1", "OPENAI_DEFAULT_MODEL": "{model}"}
    ),
    "opencode": Harness(
        env={
            "OPENCODE_CONFIG_CONTENT": json.dumps(_OPENCODE),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "XDG_CONFIG_HOME": "{folder}/config",
            "XDG_DATA_HOME": "{folder}/data",
            "XDG_STATE_HOME": "{folder}/state",
        }
    ),
    "smolagents": Harness(env={**_BASE, "HF_HUB_DISABLE_TELEMETRY": "1"}),
    "terminus": Harness(env={**_LITELLM, "HARBOR_TELEMETRY": "off"}),
}
"""By name."""


def harness_named(name: str) -> Harness:
    """Return a known harness.

    Raises:
        ValueError: There is none of that name; with the nearest one.
    """
    if name in HARNESSES:
        return HARNESSES[name]
    near = difflib.get_close_matches(name, HARNESSES, 1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(HARNESSES)}"
    raise ValueError(f"there is no harness '{name}'; {hint} Others need none: leave it out")


def _filled(text: str, fills: Mapping[str, str]) -> str:
    for place, value in fills.items():
        text = text.replace(place, value)
    return text
