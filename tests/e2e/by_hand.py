"""The processes of a run started one by one, so that a test can lose any of them."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from astraflow.client.control import ControlClient
from astraflow.config.loader import dump_recipe, load_recipe
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir, read_json_lines
from astraflow.core.status import RunStatus
from astraflow.launch.processes import RoleCommand, Roles
from astraflow.rpc.access import HubTokens
from crash_ends.nursery import Nursery

from .conftest import ROOT, astraflow, environment

_PATIENCE_S = 250
_MODELS: dict[str, Path] = {}


@dataclass
class HandRun:
    """A hub, trainers and nodes, each a process of its own that nobody starts again.

    Attributes:
        processes: Their ids, by name.
    """

    roles: Roles
    cache: Path
    nursery: Nursery
    processes: dict[str, int] = field(default_factory=dict)

    @property
    def run_dir(self) -> RunDir:
        return self.roles.run_dir

    @property
    def address(self) -> str:
        return self.run_dir.read_endpoint().address

    def start(self, role: RoleCommand) -> None:
        role.log.parent.mkdir(parents=True, exist_ok=True)
        variables = {**environment(self.cache), **role.environment, **role.secrets}
        self.processes[role.name] = self.nursery.start(
            "run_command", json.dumps(variables), *role.arguments, output=role.log
        )

    def start_trainer(self, policy: str) -> None:
        self.start(self.roles.trainer(policy, self.address))

    def start_node(self, index: int) -> None:
        self.start(self.roles.raas(index, self.address))

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.processes[name], number)

    def wait(self, name: str) -> int:
        """Return how a process ended, once it has."""
        return self.nursery.wait(self.processes[name])

    def metrics(self, policy: str) -> list[dict]:
        path = self.run_dir.metrics
        rows = read_json_lines(path) if path.exists() else []
        return [row for row in rows if row["policy"] == policy]

    def step(self, policy: str) -> int:
        return max((row["step"] for row in self.metrics(policy)), default=0)

    def until(self, claim: Callable[[], object]) -> float:
        """Wait until a claim is true; return the seconds that it took."""
        started = time.monotonic()
        hub = self.processes["hub"]
        while not claim():
            assert time.monotonic() - started < _PATIENCE_S, self.last_words()
            assert self.nursery.exit_code(hub) is None, self.last_words()
            time.sleep(0.02)
        return time.monotonic() - started

    def status(self) -> RunStatus:
        async def ask() -> RunStatus:
            endpoint = self.run_dir.read_endpoint()
            async with ControlClient(endpoint.address, token=endpoint.operator_token) as control:
                return await control.get_run()

        return asyncio.run(ask())

    def ledger(self) -> dict:
        done = astraflow("ledger", str(self.run_dir.root), "--json", cache=self.cache)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def last_words(self) -> str:
        logs = sorted(self.run_dir.log("hub").parent.glob("*"))
        return "\n\n".join(f"{log.name}\n{log.read_text()[-1500:]}" for log in logs)


def models_of(recipe: Path, resolved: Recipe, sets: tuple[str, ...], cache: Path) -> dict:
    """Make the warm-up model of each policy once for all tests."""
    models = {}
    for name, policy in resolved.policies.items():
        key = str((recipe.name, name, policy.model.warm_up))
        if key not in _MODELS:
            options = [part for each in sets for part in ("--set", each)]
            done = astraflow(
                *("trainer", "warm-up", str(recipe), "--policy", name, *options), cache=cache
            )
            assert done.returncode == 0, done.stderr
            _MODELS[key] = Path(done.stdout.strip().splitlines()[-1])
        models[name] = _MODELS[key]
    return models


@contextmanager
def by_hand(
    recipe: str, *overrides: str, run_dir: Path, cache: Path, nursery: Nursery
) -> Iterator[HandRun]:
    """Serve the hub of a recipe; nothing that was started outlives the block."""
    path = ROOT / "recipes" / recipe
    resolved = load_recipe(path, overrides=list(overrides))
    models = models_of(path, resolved, overrides, cache)
    folder = RunDir(run_dir)
    folder.root.mkdir(parents=True)
    folder.recipe.write_text(dump_recipe(resolved))
    roles = Roles(recipe=resolved, run_dir=folder, tokens=HubTokens.generate(), models=models)
    run = HandRun(roles=roles, cache=cache, nursery=nursery)
    try:
        run.start(roles.hub())
        run.until(folder.endpoint.exists)
        yield run
    finally:
        for process in run.processes.values():
            nursery.kill(process)
