"""Code that a recipe names: is it there, does it take its options, can it be called."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
from pydantic import BaseModel, ValidationError

from astraflow.config.extras import cure_of, install
from astraflow.config.loader import problems_of
from astraflow.config.recipe import Algorithm, Strict
from astraflow.core.algorithms import advantages, finding
from astraflow.core.code import load
from astraflow.core.errors import AstraflowError
from astraflow.core.settings import PlugInSpec
from astraflow.dataflow.recipe_settings import must_be_able
from astraflow.launch.check.guard import is_process_refused, message_of, user_lines
from astraflow.launch.check.subject import Subject
from astraflow.launch.tracking.trackers import PACKAGES
from astraflow.workflows.building import build_tutor
from astraflow.workflows.protocol import Scorer, Workflow
from astraflow.workflows.registry import Kind, code_digest, find
from astraflow.workflows.scoring import GuardedScorer

_LOOKED_FOR = (
    "modules are looked for among those that are installed, on PYTHONPATH, in the working "
    "directory and beside the recipe"
)


def check_workflows(subject: Subject) -> None:
    """Make every workflow with its scorer, as a rollout node does."""
    for name, settings in subject.recipe.workflows.items():
        where = f"workflows.{name}"
        scorer, is_scored = None, True
        if settings.scorer is not None:
            scorer = _scorer(subject, where, settings.scorer, settings.scorer_options)
            is_scored = scorer is not None
        made = _found(subject, f"{where}.name", Kind.WORKFLOW, settings.name)
        if made is None:
            continue
        options = _options(subject, f"{where}.options", made, settings.options)
        if options is None or not is_scored:
            continue
        guarded = None if scorer is None else GuardedScorer(scorer, name=settings.scorer or "")
        workflow = _made(subject, where, made, options, guarded)
        if workflow is None:
            continue
        run, kind, fault = getattr(workflow, "run", None), type(workflow).__name__, ""
        if not callable(run):
            fault = f"{kind} has no method run"
        elif not inspect.iscoroutinefunction(run):
            fault = f"{kind}.run is not async"
        elif not _takes(run, 1):
            fault = f"{kind}.run does not take the episode alone"
        if fault:
            cure = "a workflow has `async def run(self, episode) -> Score`"
            subject.error(f"{where}.name", fault, cure)
        _own_faults(subject, f"{where}.options", workflow)
        if not fault:
            subject.workflows[name] = cast("Workflow", workflow), scorer


def check_tutors(subject: Subject) -> None:
    """Make the tutor of every model that is warmed up."""
    for name, policy in subject.recipe.policies.items():
        warm_up = policy.model.warm_up
        if warm_up is None or warm_up.tutor is None:
            continue
        where = f"policies.{name}.model.warm_up"
        made = _found(subject, f"{where}.tutor", Kind.TUTOR, warm_up.tutor)
        options = None
        if made is not None:
            options = _options(subject, f"{where}.options", made, warm_up.options)
        if options is not None:
            _made(subject, where, build_tutor, warm_up.tutor, warm_up.options)


def check_algorithms(subject: Subject) -> None:
    """Make every data algorithm."""
    rollouts = subject.recipe.rollouts
    _algorithms(subject, "rollouts.selectors", finding.Point.SELECTOR, rollouts.selectors)
    _algorithms(subject, "rollouts.filters", finding.Point.FILTER, rollouts.filters)
    _made(subject, "rollouts.payloads", must_be_able, subject.recipe)
    for name, policy in subject.recipe.policies.items():
        where, trainer = f"policies.{name}.trainer", policy.trainer
        _algorithms(subject, f"{where}.guards", finding.Point.GUARD, trainer.guards)
        if trainer.replay is not None:
            order = (trainer.replay.order,)
            _algorithms(subject, f"{where}.replay.order", finding.Point.ORDER, order)


def check_engines(subject: Subject) -> None:
    """Import the train engines that are the user's own; none is made, that takes a model."""
    for name, policy in subject.recipe.policies.items():
        own = policy.trainer.engine
        if own is None:
            continue
        where = f"policies.{name}.trainer.engine"
        factory = _made(subject, f"{where}.name", load, own.name, what="the engine")
        if factory is None:
            continue
        try:
            signature = inspect.signature(factory)
        except (TypeError, ValueError):
            continue
        offered = {name for name in ("settings", "model_dir") if name in signature.parameters}
        try:
            signature.bind(**dict.fromkeys([*offered, *own.options]))
        except TypeError as refused:
            subject.error(
                f"{where}.options",
                f"{own.name}{signature} cannot be called with these options: {refused}",
                "options are its keywords, beside settings and model_dir, which it is given",
            )


def check_training_code(subject: Subject) -> None:
    """Call a loss, an estimator and an optimizer of the user's on a few numbers."""
    for name, policy in subject.recipe.policies.items():
        where, trainer = f"policies.{name}.trainer", policy.trainer
        agents = {f"agents.{each}.": own for each, own in trainer.advantages.agents.items()}
        for place, each in {"": trainer.advantages, **agents}.items():
            if each.estimator is None:
                continue
            at, rewards = f"{where}.advantages.{place}estimator", np.array([0.0, 1.0, 0.5, 1.0])
            made = _made(subject, at, advantages.estimator_of, each.estimator)
            if made is not None:
                _made(subject, at, made, rewards)
        optimizers = {"optimizer": trainer.optimizer}
        if trainer.critic is not None:
            optimizers["critic.optimizer"] = trainer.critic.optimizer
        kl = trainer.loss.kl
        names = [trainer.loss.surrogate, "" if kl is None else kl.estimator]
        names += [each.kind for each in optimizers.values()]
        if not any(":" in each for each in names) or find_spec("torch") is None:
            continue
        # Loads torch, which the code of the user does, too.
        from astraflow.trainers.losses import try_own_code  # noqa: PLC0415
        from astraflow.trainers.optimizer import try_own_optimizer  # noqa: PLC0415

        _made(subject, f"{where}.loss", try_own_code, trainer.loss)
        for key, optimizer in optimizers.items():
            _made(subject, f"{where}.{key}", try_own_optimizer, optimizer)


def check_trackers(subject: Subject) -> None:
    """See whether each tracker is one, and is installed; only those of the user are imported."""
    for index, name in enumerate(subject.recipe.track):
        where = f"track.{index}"
        if ":" in name:
            _made(subject, where, load, name, what=f"the tracker {name}")
        elif name not in PACKAGES:
            subject.error(where, f"'{name}' is no tracker", _nearest(name, PACKAGES))
        elif find_spec(PACKAGES[name]) is None:
            subject.error_here(
                where,
                f"the tracker {name} needs the package {PACKAGES[name]}, which is not installed",
                f"{cure_of(PACKAGES[name])}, or leave it out",
            )


def check_tracing(subject: Subject) -> None:
    """See whether spans can be exported."""
    exporter = subject.recipe.tracing.exporter
    if exporter == "off":
        return
    where = "tracing.exporter"
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        subject.error_here(
            where, "OpenTelemetry is not installed", f"{install('otel')}, or take off"
        )
    elif exporter not in ("file", "console"):
        known = [each.name for each in entry_points(group="opentelemetry_traces_exporter")]
        if exporter not in known:
            cure = _nearest(exporter, ["off", "file", "console", *known])
            subject.error_here(where, f"no exporter '{exporter}' is installed", cure)


def check_packages(subject: Subject) -> None:
    """See whether what the roles of the run import is installed; nothing of it is imported."""
    recipe = subject.recipe
    wanted: dict[str, tuple[str, str]] = {}
    if any(policy.trainer.engine is None for policy in recipe.policies.values()):
        wanted |= dict.fromkeys(("torch", "transformers"), ("policies", "torch"))
    if recipe.raas.engine.kind == "embedded" and recipe.raas.count:
        wanted |= dict.fromkeys(("torch", "transformers"), ("raas.engine.kind", "torch"))
    elif recipe.raas.engine.is_server:
        wanted["httpx"] = ("raas.engine.kind", "http")
    if recipe.http.port is not None:
        wanted |= dict.fromkeys(("fastapi", "uvicorn"), ("http.port", "http"))
    if recipe.hub.journal.kind == "postgres":
        wanted["psycopg"] = ("hub.journal.kind", "postgres")
    stores = {
        f"policies.{name}.trainer.store": policy.trainer.store
        for name, policy in recipe.policies.items()
    }
    payloads = recipe.rollouts.payloads
    stores["rollouts.payloads.url"] = None if payloads is None else payloads.url
    for where, url in stores.items():
        if url is not None:
            wanted["fsspec"] = (where, "store")
            _store_faults(subject, where, url)
    for package, (where, extra) in wanted.items():
        if find_spec(package) is None:
            subject.error_here(where, f"{package} is not installed", install(extra))


def _store_faults(subject: Subject, where: str, url: str) -> None:
    """See whether the package is installed that fsspec reads such a store with."""
    protocol, mark, _ = url.partition("://")
    if not mark or find_spec("fsspec") is None:
        return
    registry = import_module("fsspec.registry")
    try:
        registry.get_filesystem_class(protocol)
    except ImportError as missing:
        package = registry.known_implementations[protocol]["class"].partition(".")[0]
        subject.error_here(where, f"{url}: {missing}", f"pip install {package}")
    except ValueError:
        cure = _nearest(protocol, sorted(registry.known_implementations))
        subject.error(where, f"fsspec knows no store '{protocol}'", cure)


def _scorer(subject: Subject, where: str, name: str, options: Mapping[str, Any]) -> Scorer | None:
    """Make a scorer that works in this process."""
    found = _found(subject, f"{where}.scorer", Kind.SCORER, name)
    if found is None:
        return None
    parsed = _options(subject, f"{where}.scorer_options", found, options)
    if parsed is None:
        return None
    made = found
    if inspect.isclass(found):
        made = _made(subject, f"{where}.scorer", found, parsed)
    if hasattr(made, "in_process"):
        made = _made(subject, f"{where}.scorer_options", made.in_process)
    if made is None:
        return None
    if not callable(made) or not _takes(made, 2):
        subject.error(
            f"{where}.scorer",
            f"{name} cannot be called with a prompt and a text",
            "a scorer is `def score(prompt, text) -> float`, async or not, or a class whose "
            "objects are called so",
        )
        return None
    _own_faults(subject, f"{where}.scorer_options", made)
    return cast("Scorer", made)


def _own_faults(subject: Subject, where: str, made: object) -> None:
    """Note what a workflow or a scorer says that it lacks on this machine."""
    lacks = getattr(made, "lacks", None)
    if not callable(lacks):
        return
    told = _made(subject, where, lambda: list(cast("Any", lacks)()))
    for each in cast("list[str]", told or []):
        what, _, cure = each.partition("; ")
        subject.error_here(where, what, cure)


def _algorithms(
    subject: Subject, where: str, point: finding.Point, algorithms: tuple[Algorithm, ...]
) -> None:
    for index, algorithm in enumerate(algorithms):
        spec = PlugInSpec(name=algorithm.name, options=algorithm.options)
        at = where if point is finding.Point.ORDER else f"{where}.{index}"
        _made(subject, at, finding.make, finding.BASES[point], spec)


def _found(subject: Subject, where: str, kind: Kind, name: str) -> Any:
    """Import code by its name, and see whether its source can be told from others."""

    def get() -> Any:
        made = find(kind, name)
        code_digest(kind, name)
        return made

    made = _made(subject, where, get)
    if made is not None and not callable(made):
        subject.error(where, f"{name} is {type(made).__name__}, which cannot be called")
        return None
    return made


def _options(
    subject: Subject, where: str, made: Any, options: Mapping[str, Any]
) -> BaseModel | None:
    """Read options by the class that takes them; every problem is a finding."""
    model = getattr(made, "Options", Strict)
    if not (inspect.isclass(model) and issubclass(model, BaseModel)):
        subject.error(
            where, f"{made.__name__}.Options is no pydantic model", "derive it from Strict"
        )
        return None
    try:
        return model.model_validate(dict(options))
    except ValidationError as refused:
        for place, problem in problems_of(refused, model):
            what, _, cure = problem.partition("; ")
            subject.error(".".join(filter(None, (where, place))), what, cure)
        return None
    except Exception as raised:  # noqa: BLE001 - a validator of a user raises anything
        _of_raised(subject, where, raised)
        return None


def _made(
    subject: Subject, where: str, make: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    """Call code; return None where it raised, which is a finding."""
    try:
        return make(*arguments, **options)
    except (Exception, SystemExit) as raised:  # noqa: BLE001 - code of a user raises anything
        _of_raised(subject, where, raised)
        return None


def _of_raised(subject: Subject, where: str, raised: BaseException) -> None:
    lines = user_lines(raised)
    if is_process_refused(raised):
        return subject.warning(
            where, f"starts a process, which a check does not: {message_of(raised)}"
        )
    if isinstance(raised, AstraflowError) and raised.__cause__ is None:
        field = raised.metadata.get("field", "")
        has_field = field and "." not in field and not where.endswith(field)
        # An interpreter is one of this machine.
        is_local = field == "python"
        return subject.refused(
            f"{where}.{field}" if has_field else where, raised, is_local=is_local
        )
    cause = raised.__cause__ if isinstance(raised, AstraflowError) else raised
    if isinstance(cause, ModuleNotFoundError) and not lines:
        cure = cure_of((cause.name or "").partition(".")[0]) or _LOOKED_FOR
        return subject.error(where, f"there is no module '{cause.name}'", cure)
    if isinstance(cause, AttributeError) and not lines:
        known = [name for name in dir(cause.obj) if not name.startswith("_")]
        cure = _hidden(cause.obj, subject.recipe.code)
        cure = cure or (_nearest(str(cause.name), known) if known else "")
        return subject.error(where, str(cause), cure)
    if isinstance(cause, ModuleNotFoundError):
        cure = f"install {cause.name} here, or put it on PYTHONPATH"
        return subject.error(
            where, f"its module cannot be imported: {message_of(raised)}", cure, detail=lines
        )
    return subject.error(where, f"raised {message_of(raised)}", detail=lines)


def _hidden(found: object, folder: Path) -> str:
    """Return what to do where another module has the name of a file of the user's; empty: none."""
    if not isinstance(found, ModuleType):
        return ""
    # A part of the interpreter has no file.
    own, place = folder / f"{found.__name__.replace('.', '/')}.py", vars(found).get("__file__")
    if not own.is_file() or (place is not None and own.samefile(place)):
        return ""
    return f"that is {place or 'a part of Python'}, which goes first: give {own} another name"


def _nearest(name: str, known: "Mapping[str, Any] | list[str]") -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def _takes(thing: Any, count: int) -> bool:
    try:
        inspect.signature(thing).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        return True
    return True
