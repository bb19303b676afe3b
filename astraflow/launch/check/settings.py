"""Settings that go together, or do not: what can never be trained, measured or reached."""

import difflib
from collections.abc import Iterator
from contextlib import suppress

from astraflow.config.recipe import Recipe
from astraflow.core.errors import AstraflowError
from astraflow.launch.check.subject import Subject
from astraflow.rpc.address import split_address
from astraflow.telemetry.metrics import OFF

# A Llama of 0.2 M parameters learns with 5e-4 to 3e-3; models of some size lose what they know.
_HIGH_RATE = 1e-3
_HIGH_RATE_OF_ALL = 1e-2
_LOW_RATE = 1e-9
_LARGE = 50_000_000


def check_groups(subject: Subject) -> None:
    """Look whether groups can be whole, and whether their rewards teach anything."""
    recipe = subject.recipe
    rollouts = recipe.rollouts
    sampled = recipe.policies_of(rollouts.workflow)
    for name, policy in recipe.policies.items():
        if name not in sampled:
            subject.error(
                f"workflows.{rollouts.workflow}.policies",
                f"nothing is sampled from {name}, so its trainer waits for ever",
                f"add {name} to them, or take it out of policies",
            )
        own = policy.trainer.advantages
        # Whether what is learnt comes of a comparison within groups.
        needs_groups = (
            all(
                each.baseline == "group" and each.estimator is None
                for each in (own, *own.agents.values())
            )
            and policy.trainer.critic is None
            and policy.trainer.engine is None
            and not policy.trainer.loss.moves_every_row
        )
        if rollouts.group_size == 1 and needs_groups:
            subject.error(
                "rollouts.group_size",
                f"in groups of 1 every advantage of {name} is 0 under baseline group",
                f"raise it, set policies.{name}.trainer.advantages.baseline to none, or take a "
                "critic",
            )
        most = policy.trainer.buffer.max_groups
        if most is not None and most < policy.trainer.groups_per_batch:
            subject.warning(
                f"policies.{name}.trainer.buffer.max_groups",
                f"{most} is less than a batch: it counts as groups_per_batch, "
                f"{policy.trainer.groups_per_batch}",
                "raise it, or leave it out",
            )
    if rollouts.keep_together and recipe.raas.count and recipe.raas.capacity < rollouts.group_size:
        subject.warning(
            "raas.capacity",
            f"no node of {recipe.raas.capacity} rollouts can keep a group of {rollouts.group_size} "
            "together: groups are spread",
            "raise it to rollouts.group_size, or set rollouts.keep_together to false",
        )
    if not recipe.raas.count:
        subject.note("raas.count", "no rollout node is started: the run waits until some join")


def check_length(subject: Subject) -> None:
    """Look whether the run ends, and whether its data lasts for a batch."""
    recipe = subject.recipe
    rollouts = recipe.rollouts
    sizes = [subject.data[name] for name in rollouts.data_sets if name in subject.data]
    rows = sum(len(data.reader) for data in sizes)
    is_known = len(sizes) == len(rollouts.data_sets)
    for name, policy in recipe.policies.items():
        where, trainer = f"policies.{name}.trainer", policy.trainer
        if trainer.step_count is None and rollouts.epochs is None:
            subject.warning(
                f"{where}.step_count", "the run never ends", "set it, or rollouts.epochs"
            )
        if rollouts.epochs is None or not is_known:
            continue
        groups = rows * rollouts.epochs
        if groups < trainer.groups_per_batch:
            subject.error(
                "rollouts.epochs",
                f"{rollouts.epochs} x {rows} rows are {groups} groups, and a batch of {name} has "
                f"{trainer.groups_per_batch}",
                f"raise it, or lower {where}.groups_per_batch",
            )
        elif trainer.step_count is not None and trainer.replay is None:
            steps = groups // trainer.groups_per_batch
            if steps < trainer.step_count:
                subject.warning(
                    "rollouts.epochs",
                    f"the rows last for {steps} of {trainer.step_count} steps of {name}",
                    "raise it, or lower step_count",
                )


def check_steps(subject: Subject) -> None:
    """Look at learning rates and at what happens at which step."""
    for name, policy in subject.recipe.policies.items():
        where, trainer = f"policies.{name}.trainer", policy.trainer
        rate = trainer.optimizer.learning_rate
        model = subject.models.get(name)
        is_large = model is not None and model.parameter_count > _LARGE
        high = _HIGH_RATE if is_large and policy.model.lora is None else _HIGH_RATE_OF_ALL
        if rate > high or rate < _LOW_RATE:
            subject.warning(
                f"{where}.optimizer.learning_rate",
                f"{rate:g} is unusually {'high' if rate > high else 'low'}",
                "1e-6 is common for whole models of billions of parameters, 1e-5 to 1e-4 for "
                "adapters, 5e-4 for those of the demos",
            )
        if trainer.step_count is not None and trainer.optimizer.warm_up_steps >= trainer.step_count:
            subject.warning(
                f"{where}.optimizer.warm_up_steps",
                f"the rate still rises at the last of {trainer.step_count} steps",
                "lower it",
            )
        if trainer.max_staleness == 0 and trainer.prefetch > 1:
            subject.warning(
                f"{where}.prefetch",
                f"{trainer.prefetch} batches are held at once, and with max_staleness 0 only the "
                "first can be fresh",
                "set it to 1, or allow for staleness",
            )
        if (
            trainer.broadcast is not None
            and trainer.broadcast.node_count > subject.recipe.raas.count
        ):
            subject.warning(
                f"{where}.broadcast.node_count",
                f"it meets once {trainer.broadcast.node_count} nodes are there, and the run starts "
                f"{subject.recipe.raas.count}",
                "lower it, or raise raas.count",
            )


def check_routes(subject: Subject) -> None:
    """Look whether nodes tell the experts that a trainer has to know."""
    engine = subject.recipe.raas.engine
    for name, policy in subject.recipe.policies.items():
        if policy.trainer.router_replay != "required":
            continue
        if engine.kind != "embedded" and not engine.routed_experts:
            subject.error(
                "raas.engine.routed_experts",
                f"policies.{name}.trainer.router_replay is required, and servers tell no experts",
                "set it to true",
            )
        model = subject.models.get(name)
        if model is not None and not any("experts" in key for key in model.config):
            subject.error(
                f"policies.{name}.trainer.router_replay",
                "it is required, and the model has no experts",
                "leave it out, or take a mixture of experts",
            )


def check_evals(subject: Subject) -> None:
    """Look whether every suite is run, and whether what is kept by one can be told."""
    recipe = subject.recipe
    for suite, settings in recipe.evals.items():
        if not (settings.at_start or settings.at_end or settings.every):
            subject.warning(
                f"evals.{suite}", "is never run", "set at_start, at_end or every, or leave it out"
            )
    for name, policy in recipe.policies.items():
        keep = policy.trainer.save.keep
        if keep is None or keep.best is None or not keep.best.startswith("eval/"):
            continue
        suite = keep.best.removeprefix("eval/")
        where = f"policies.{name}.trainer.save.keep.best"
        if suite not in recipe.evals:
            near = difflib.get_close_matches(suite, recipe.evals, 1)
            known = ", ".join(recipe.evals) or "none"
            cure = f"did you mean eval/{near[0]}?" if near else f"evals has {known}"
            subject.error(where, f"there is no evaluation '{suite}'", cure)


def check_times(subject: Subject) -> None:
    """Look whether a workflow may take longer than its rollout."""
    recipe = subject.recipe
    time_s = recipe.workflows[recipe.rollouts.workflow].options.get("time_s")
    limit_s = recipe.rollouts.timeout_s
    if isinstance(time_s, int | float) and time_s > limit_s:
        subject.warning(
            "rollouts.timeout_s",
            f"a rollout ends after {limit_s:g} s, before the {time_s:g} s of "
            f"workflows.{recipe.rollouts.workflow}.options.time_s",
            "raise it, or lower time_s",
        )


def _listens(recipe: Recipe) -> Iterator[tuple[str, str, int]]:
    """Yield key, address and number of processes that listen on it, or on those after it."""
    processes = 1 + len(recipe.policies) + recipe.raas.count
    yield "hub.listen", recipe.hub.listen, 1
    if recipe.metrics.listen != OFF:
        yield "metrics.listen", recipe.metrics.listen, processes
    yield "raas.agents.listen", recipe.raas.agents.listen, recipe.raas.count
    if recipe.raas.relay.listen is not None:
        yield "raas.relay.listen", recipe.raas.relay.listen, recipe.raas.count


def ports_of(recipe: Recipe) -> Iterator[tuple[str, str, int, int]]:
    """Yield key, host, first port and count of what a run listens on; port 0 takes a free one."""
    for key, listen, count in _listens(recipe):
        with suppress(AstraflowError):
            host, port = split_address(listen, key)
            if port:
                yield key, host, port, count
    if recipe.http.port:
        yield "http.port", recipe.http.host, recipe.http.port, 1
    for name, policy in recipe.policies.items():
        if policy.trainer.broadcast is not None:
            key = f"policies.{name}.trainer.broadcast.port"
            yield key, "127.0.0.1", policy.trainer.broadcast.port, 1


def check_ports(subject: Subject) -> None:
    """Look whether what is listened on is an address, and no port that of two processes."""
    for key, listen, _ in _listens(subject.recipe):
        try:
            split_address(listen, key)
        except AstraflowError as refused:
            subject.error(key, refused.message, "port 0 takes a free one")
    taken: dict[int, str] = {}
    for key, _, first, count in ports_of(subject.recipe):
        is_per_node = key in ("raas.agents.listen", "raas.relay.listen")
        if is_per_node and count > 1:
            subject.error(
                key,
                f"{count} nodes of this machine would listen on port {first}",
                "take port 0, which is a free one for each, or raas.count 1",
            )
            count = 1  # noqa: PLW2901 - the port itself is compared below
        for port in range(first, first + count):
            if port > 65535:
                subject.error(key, f"port {port} is none", "lower the first one")
                break
            if port in taken:
                subject.error(
                    key, f"port {port} is that of {taken[port]}, too", "give each its own, or 0"
                )
                break
            taken[port] = key
