"""Where the processes of a recipe are to be, and the executor that starts them there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from astraflow.config.loader import invalid_fields
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.code import installed, load
from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.devices import Machine
from astraflow.launch.executors.base import RemoteExecutor, RunPlace, WatchedProcess
from astraflow.launch.gpus import GpuPlan, machines_of, plan_recipe
from astraflow.launch.processes import LocalExecutor, RoleProcess, Roles
from astraflow.rpc.access import HubTokens
from astraflow.rpc.address import is_loopback, split_address

LOCAL: Final = "local"

Executor = RemoteExecutor[Any] | LocalExecutor

StartedProcess = WatchedProcess | RoleProcess

_BUILT_IN: Final = {
    "kubernetes": "astraflow.launch.executors.kubernetes:KubernetesExecutor",
    "ray": "astraflow.launch.executors.ray:RayExecutor",
    "skypilot": "astraflow.launch.executors.skypilot:SkyPilotExecutor",
    "ssh": "astraflow.launch.executors.ssh:SshExecutor",
    "slurm": "astraflow.launch.executors.slurm:SlurmExecutor",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the processes of a run are.

    Attributes:
        recipe: Resolved.
        executor: Starts trainers and nodes on other machines; None: they are on this one.
        gpus: Which process computes where; None: nothing is planned.
    """

    recipe: Recipe
    executor: RemoteExecutor[Any] | None
    gpus: GpuPlan | None

    @classmethod
    def of(cls, recipe: Recipe, run_dir: RunDir, *, note: Callable[[str], None]) -> "Placement":
        """Return the places of a recipe, whose executor has what it needs here.

        Args:
            recipe: Resolved.
            run_dir: Of the run.
            note: Told of progress.

        Raises:
            AstraflowError: CODE_UNKNOWN for an executor that is none, INVALID_FIELD for options
                that it does not take, CAPABILITY_MISSING for what is not installed, and what
                `plan_recipe` raises.
        """
        executor = _make(recipe, run_dir, note)
        if executor is None:
            return cls(recipe=recipe, executor=None, gpus=plan_recipe(recipe, Machine.here()))
        found = cls(recipe=recipe, executor=executor, gpus=None)
        if not executor.machine_count:
            return found
        there = recipe.gpus.model_copy(update={"machines": executor.machine_count})
        spread = recipe.model_copy(update={"gpus": there})
        plan = plan_recipe(spread, Machine(), ranks_per_node=found.ranks_per_node)
        return replace(found, gpus=plan)

    def roles(
        self,
        run_dir: RunDir,
        *,
        tokens: HubTokens,
        models: Mapping[str, Path],
        rendezvous: str = "",
    ) -> Roles:
        """Return what makes the commands of the processes.

        Args:
            run_dir: Of the run.
            tokens: Of the run.
            models: Model directory of each policy.
            rendezvous: host:port at which the machines of one trainer meet.
        """
        if self.executor is not None:
            # The working directory may be another one there.
            run_dir = RunDir(run_dir.root.absolute())
        return Roles(
            recipe=self.recipe,
            run_dir=run_dir,
            tokens=tokens,
            models=models,
            gpus=self.gpus,
            is_elsewhere=self.executor is not None,
            ranks_per_node=self.ranks_per_node,
            rendezvous=rendezvous,
        )

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks of a trainer on each machine; None: all of them."""
        if self.executor is None:
            return None
        return self.executor.options.ranks_per_node or self.recipe.gpus.count or None

    @property
    def has_trainers_of_many(self) -> bool:
        """Whether a trainer is on several machines."""
        policies = self.recipe.policies.values()
        return any(machines_of(each, self.ranks_per_node) > 1 for each in policies)

    def preview(self, run_dir: RunDir) -> Mapping[str, str]:
        """Return what trainers and nodes would be started with, by their names."""
        if self.executor is None:
            return {}
        roles = self.roles(
            run_dir,
            tokens=HubTokens.generate(),
            models={
                name: policy.model.path or Path(f"MODEL-OF-{name}")
                for name, policy in self.recipe.policies.items()
            },
            rendezvous="LAUNCHER:PORT",
        )
        mine = [each for each in self.recipe.policies if each not in self.recipe.http.trainers]
        commands = [roles.trainer(policy, "HUB:PORT") for policy in mine]
        commands += [roles.raas(i, "HUB:PORT") for i in range(self.recipe.raas.count)]
        return {each.name: self.executor.preview(each) for each in commands}


def _make(
    recipe: Recipe, run_dir: RunDir, note: Callable[[str], None]
) -> RemoteExecutor[Any] | None:
    settings = recipe.executor
    if settings.name == LOCAL:
        if settings.options:
            raise AstraflowError(Reason.INVALID_FIELD, "executor: local takes no options")
        return None
    known = {**installed("astraflow.executors"), **_BUILT_IN}
    if settings.name not in known:
        raise AstraflowError(
            Reason.CODE_UNKNOWN,
            f"executor.name: '{settings.name}' is none of {', '.join(sorted({LOCAL, *known}))}",
        )
    kind: type[RemoteExecutor[Any]] = load(known[settings.name], what=f"executor {settings.name}")
    try:
        options = kind.options_type.model_validate(settings.options)
    except ValidationError as error:
        raise invalid_fields(error, kind.options_type, where="executor.options") from error
    executor = kind(
        RunPlace(run_dir=run_dir, name=recipe.name, code=recipe.code, note=note), options
    )
    executor.require()
    return executor


def reachable(recipe: Recipe) -> Recipe:
    """Return a recipe whose hub listens where members of other machines can dial it."""
    hub = recipe.hub
    host, port = split_address(hub.listen)
    if recipe.executor.name == LOCAL or hub.advertise is not None or not is_loopback(host):
        return recipe
    listening = hub.model_copy(update={"listen": f"0.0.0.0:{port}"})
    return recipe.model_copy(update={"hub": listening})
