"""Which processes a recipe needs, and how each is started."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir
from astraflow.launch.processes import RoleCommand

JOIN_TOKEN = "ASTRAFLOW_JOIN_TOKEN"  # noqa: S105 - the name of a variable, not a secret
OPERATOR_TOKEN = "ASTRAFLOW_OPERATOR_TOKEN"  # noqa: S105


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTokens:
    """Secrets of one run, new for each.

    Attributes:
        join: What a member shows to join.
        operator: What an operator shows to look and to steer.
    """

    join: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    operator: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def environment(self) -> Mapping[str, str]:
        """How the processes of the run get them."""
        return {JOIN_TOKEN: self.join, OPERATOR_TOKEN: self.operator}


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Makes the command of each role.

    Attributes:
        recipe: Resolved.
        run_dir: Where `recipe.yaml` lies and logs go.
        tokens: Of the run.
        models: Model directory of each policy.
    """

    recipe: Recipe
    run_dir: RunDir
    tokens: RunTokens
    models: Mapping[str, Path]

    def hub(self) -> RoleCommand:
        """Return the Dataflow process."""
        return self._command(
            "hub",
            *("dataflow", "serve", str(self.run_dir.recipe)),
            *("--run-dir", str(self.run_dir.root)),
        )

    def trainer(
        self, policy_id: str, hub: str, *, resume: bool = False, checkpoint_id: str = ""
    ) -> RoleCommand:
        """Return the trainer of one policy; one that resumes goes on from its last checkpoint.

        Args:
            policy_id: Which policy.
            hub: host:port.
            resume: Whether it goes on from a checkpoint.
            checkpoint_id: From which; empty: its last one.
        """
        return self._command(
            f"trainer-{policy_id}",
            *("trainer", "run", str(self.run_dir.recipe), "--policy", policy_id, "--hub", hub),
            *("--model", str(self.models[policy_id]), "--run-dir", str(self.run_dir.root)),
            *self._metrics(1 + list(self.recipe.policies).index(policy_id)),
            *(("--resume",) if resume else ()),
            *(("--checkpoint", checkpoint_id) if checkpoint_id else ()),
            threads=self.recipe.policies[policy_id].trainer.thread_count,
        )

    def gateway(self, hub: str) -> RoleCommand:
        """Return the HTTP gateway."""
        models = [f"{policy}={path}" for policy, path in self.models.items()]
        return self._command(
            "gateway",
            *("gateway", "serve", str(self.run_dir.recipe), "--hub", hub),
            *(part for model in models for part in ("--model", model)),
        )

    def raas(self, index: int, hub: str) -> RoleCommand:
        """Return one rollout node of those that the run starts with."""
        return self.node(f"raas-{index}", hub, index=index)

    def node(self, name: str, hub: str, *, index: int | None = None) -> RoleCommand:
        """Return a rollout node of a name; one without an index takes a free port for metrics."""
        models = [f"{policy}={path}" for policy, path in self.models.items()]
        return self._command(
            name,
            *("raas", "join", str(self.run_dir.recipe), "--hub", hub, "--name", name),
            *(part for model in models for part in ("--model", model)),
            *self._metrics(None if index is None else 1 + len(self.recipe.policies) + index),
            threads=self.recipe.raas.engine.thread_count,
        )

    def _metrics(self, place: int | None) -> tuple[str, ...]:
        """Give a process a port of its own for its metrics, after the hub's; None: a free one."""
        listen = self.recipe.metrics.listen
        host, _, port = listen.rpartition(":")
        if not host or not int(port):
            return ()
        return ("--set", f"metrics.listen={host}:{0 if place is None else int(port) + place}")

    def _command(self, name: str, *arguments: str, threads: int = 1) -> RoleCommand:
        return RoleCommand(
            name=name,
            arguments=arguments,
            environment={**self.tokens.environment, "OMP_NUM_THREADS": str(threads)},
            log=self.run_dir.log(name),
        )
