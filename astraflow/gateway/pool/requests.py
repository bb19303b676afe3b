"""What an existing Dataflow sends to a RaaS, field by field."""

from typing import Any

from pydantic import Field

from astraflow.gateway.requests import Endpoint, Fields, Version


class RegisterWorkflow(Fields):
    """A workflow is named, with its settings."""

    workflow_id: str = Field(min_length=1, max_length=200, description="Its name from now on.")
    workflow_cls: str = Field(min_length=1, description="Workflow of the recipe: its id or name.")
    reward_fn: str | None = Field(default=None, description="Its scorer, by name.")
    gconfig_overrides: dict[str, Any] | None = Field(
        default=None, description="n_samples, temperature, top_p, max_new_tokens ..."
    )
    workflow_kwargs: dict[str, Any] = Field(
        default={}, description="Options; where the recipe has one, its value has to be the same."
    )


class Submit(Fields):
    """A prompt."""

    data: dict[str, Any] = Field(description="What the workflow reads: plain data.")
    workflow_id: str = Field(default="default", description="As it was registered.")


class Pull(Fields):
    """What has finished is wanted."""

    max_items: int = Field(default=256, ge=1, le=4096, description="Results at most.")
    timeout: float = Field(default=0.0, ge=0, strict=False, description="Seconds to wait for one.")


class LoadVersion(Fields):
    """A trainer has new weights."""

    version: Version = Field(description="The trainer's own number.")
    sender_endpoint: Endpoint = Field(description="host:port of its weights.")
    model_id: str | None = Field(default=None, description="The policy; unset: the only one.")


class Reset(Fields):
    """Training rollouts are not wanted any more."""

    timeout: float = Field(default=5.0, ge=0, le=600, strict=False, description="Seconds to wait.")


class Nothing(Fields):
    """An empty body."""
