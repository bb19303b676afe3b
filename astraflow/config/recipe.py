"""The schema of a recipe. Every field has a default that runs or no default at all.

A recipe is read by `astraflow.config.loader`; an unknown key is an error that names the
nearest known one. Its parts are in the modules beside this one, and all imported from here.
"""

from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from astraflow.config.lora import Lora
from astraflow.config.losses import (
    Advantages,
    AgentAdvantages,
    Correction,
    CriticConfig,
    Kl,
    Loss,
    Optimizer,
    Overlong,
    Sapo,
)
from astraflow.config.policies import (
    Broadcast,
    Buffer,
    Keep,
    ModelConfig,
    PolicyConfig,
    ReplayConfig,
    Sampling,
    SaveConfig,
    Sync,
    Tiny,
    TrainerConfig,
    WarmUp,
)
from astraflow.config.pool import (
    Agents,
    AutoscaleConfig,
    EngineSettings,
    ExecutorConfig,
    Gpus,
    Http,
    HubConfig,
    JournalConfig,
    Metrics,
    Raas,
    RelayConfig,
    Restarts,
    TlsConfig,
    Tracing,
)
from astraflow.config.strict import Algorithm, LaneChoice, Name, Options, OwnEngine, Strict
from astraflow.config.work import (
    DataSet,
    EvalSet,
    EvalSuiteConfig,
    MixPhaseConfig,
    PayloadsConfig,
    Relation,
    RolloutsConfig,
    WorkflowConfig,
)

__all__ = [
    "Advantages",
    "AgentAdvantages",
    "Agents",
    "Algorithm",
    "AutoscaleConfig",
    "Broadcast",
    "Buffer",
    "Correction",
    "CriticConfig",
    "DataSet",
    "EngineSettings",
    "EvalSet",
    "EvalSuiteConfig",
    "ExecutorConfig",
    "Gpus",
    "Http",
    "HubConfig",
    "JournalConfig",
    "Keep",
    "Kl",
    "LaneChoice",
    "Lora",
    "Loss",
    "Metrics",
    "MixPhaseConfig",
    "ModelConfig",
    "Name",
    "Optimizer",
    "Options",
    "Overlong",
    "OwnEngine",
    "PayloadsConfig",
    "PolicyConfig",
    "Raas",
    "Recipe",
    "Relation",
    "RelayConfig",
    "ReplayConfig",
    "Restarts",
    "RolloutsConfig",
    "Sampling",
    "Sapo",
    "SaveConfig",
    "Strict",
    "Sync",
    "Tiny",
    "TlsConfig",
    "Tracing",
    "TrainerConfig",
    "WarmUp",
    "WorkflowConfig",
]


class Recipe(Strict):
    """One run: what is trained, on what, by which processes."""

    name: Name
    """Of the run, and of its folder."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Every draw follows from it: order of the data, sampling, first weights."""
    code: Path = Path()
    """Folder of your own code, named as module:Class, beside the working directory and what is
    installed; unset: the recipe's own folder."""
    policies: dict[Name, PolicyConfig] = Field(min_length=1)
    data: dict[Name, DataSet] = Field(min_length=1)
    workflows: dict[Name, WorkflowConfig] = Field(min_length=1)
    rollouts: RolloutsConfig
    relation: Relation = Relation()
    evals: dict[Name, EvalSuiteConfig] = Field(default={})
    raas: Raas = Raas()
    executor: ExecutorConfig = ExecutorConfig()
    gpus: Gpus = Gpus()
    autoscale: AutoscaleConfig = AutoscaleConfig()
    hub: HubConfig = HubConfig()
    restarts: Restarts = Restarts()
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
        for role in self.hub.identities.values():
            if policy := role.partition(":")[2]:
                _must_name("hub", "identities", policy, self.policies)
        for policy in self.http.trainers:
            _must_name("http", "trainers", policy, self.policies)
        if self.http.trainers and self.http.port is None:
            raise ValueError("http.trainers come through a gateway: give http.port")
        return self

    @model_validator(mode="after")
    def _engines_do_what_policies_need(self) -> Self:
        scoring = [n for n, each in self.policies.items() if each.trainer.loss.makes_reward_model]
        if scoring and self.raas.engine.kind != "none":
            raise ValueError(
                f"{scoring[0]} becomes a reward model, which no engine samples from; take "
                "raas.engine.kind none"
            )
        if self.raas.engine.kind == "none":
            for name, each in self.policies.items():
                if each.trainer.broadcast is not None:
                    raise ValueError(
                        f"raas.engine.kind none takes no weights: leave {name}'s broadcast out"
                    )
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
