"""The schema of a recipe. Every field has a default that runs or no default at all.

A recipe is read by `astraflow.config.loader`; an unknown key is an error that names the
nearest known one. Its parts are in the modules beside this one, and all imported from here.
"""

from typing import Any, Self

from pydantic import Field, model_validator

from astraflow.config.http import Http
from astraflow.config.lora import Lora
from astraflow.config.loss import Correction, Kl, Loss, Sapo
from astraflow.config.policies import (
    Advantages,
    Broadcast,
    Buffer,
    Critic,
    Keep,
    Model,
    Optimizer,
    Overlong,
    Policy,
    Replay,
    Sampling,
    Save,
    Sync,
    Tiny,
    Trainer,
    WarmUp,
)
from astraflow.config.pool import Agents, Autoscale, Engine, Raas, Relay
from astraflow.config.services import Hub, Journal, Metrics, Tls, Tracing
from astraflow.config.strict import Algorithm, LaneChoice, Name, Options, OwnEngine, Strict
from astraflow.config.work import (
    DataSet,
    EvalSet,
    EvalSuite,
    MixPhase,
    Relation,
    Rollouts,
    Workflow,
)

__all__ = [
    "Advantages",
    "Agents",
    "Algorithm",
    "Autoscale",
    "Broadcast",
    "Buffer",
    "Correction",
    "Critic",
    "DataSet",
    "Engine",
    "EvalSet",
    "EvalSuite",
    "Http",
    "Hub",
    "Journal",
    "Keep",
    "Kl",
    "LaneChoice",
    "Lora",
    "Loss",
    "Metrics",
    "MixPhase",
    "Model",
    "Name",
    "Optimizer",
    "Options",
    "Overlong",
    "OwnEngine",
    "Policy",
    "Raas",
    "Recipe",
    "Relation",
    "Relay",
    "Replay",
    "Rollouts",
    "Sampling",
    "Sapo",
    "Save",
    "Strict",
    "Sync",
    "Tiny",
    "Tls",
    "Tracing",
    "Trainer",
    "WarmUp",
    "Workflow",
]


class Recipe(Strict):
    """One run: what is trained, on what, by which processes."""

    name: Name
    seed: int = 0
    policies: dict[Name, Policy] = Field(min_length=1)
    data: dict[Name, DataSet] = Field(min_length=1)
    workflows: dict[Name, Workflow] = Field(min_length=1)
    rollouts: Rollouts
    relation: Relation = Relation()
    evals: dict[Name, EvalSuite] = Field(default={})
    raas: Raas = Raas()
    autoscale: Autoscale = Autoscale()
    hub: Hub = Hub()
    metrics: Metrics = Metrics()
    tracing: Tracing = Tracing()
    track: tuple[str, ...] = ("tensorboard",)
    """Where `astraflow run` shows its numbers beside metrics.jsonl: tensorboard, wandb, mlflow,
    trackio, or module:Class."""
    http: Http = Http()

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        sets = [("rollouts", name, self.rollouts.workflow) for name in self.rollouts.data_sets]
        for suite, settings in self.evals.items():
            sets += [
                (f"evals.{suite}", part.data_set, part.workflow) for part in settings.data_sets
            ]
        for where, data_set, workflow in sets:
            _must_name(where, "data_set", data_set, self.data)
            _must_name(where, "workflow", workflow, self.workflows)
        for name, workflow in self.workflows.items():
            for policy in workflow.policies:
                _must_name(f"workflows.{name}", "policies", policy, self.policies)
        return self

    @model_validator(mode="after")
    def _trainers_over_http_exist(self) -> Self:
        for policy in self.http.trainers:
            _must_name("http", "trainers", policy, self.policies)
        if self.http.trainers and self.http.port is None:
            raise ValueError("http.trainers come through a gateway: give http.port")
        return self

    @model_validator(mode="after")
    def _policies_that_wait_publish_by_themselves(self) -> Self:
        asked = [name for name, each in self.policies.items() if each.trainer.sync.style == "asked"]
        if asked and self.relation.kind != "independent":
            raise ValueError(
                f"relation.kind {self.relation.kind} waits for versions of every policy, but "
                f"{', '.join(asked)} publishes only when asked; choose sync.style steps, or "
                "relation.kind independent"
            )
        return self

    @model_validator(mode="after")
    def _dead_trainer_is_noticed_in_time(self) -> Self:
        relation, ttl_s = self.relation, self.hub.session_ttl_s
        if relation.kind != "independent" and relation.timeout_s < ttl_s:
            raise ValueError(
                f"relation.timeout_s is {relation.timeout_s:g} s, but who is gone is known after "
                f"hub.session_ttl_s, {ttl_s:g} s; lower that, or wait longer"
            )
        return self

    def policies_of(self, workflow: str) -> tuple[str, ...]:
        """Return the policies that a workflow samples from."""
        return self.workflows[workflow].policies or tuple(self.policies)


def _must_name(where: str, key: str, name: str, known: dict[str, Any]) -> None:
    if name not in known:
        raise ValueError(f"{where}.{key}: '{name}' is none of {', '.join(known)}")
