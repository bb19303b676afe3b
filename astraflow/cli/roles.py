"""What the commands of each role do once their arguments are read."""

import os
import signal
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from astraflow.config.loader import load_recipe
from astraflow.config.recipe import Recipe, Tracing
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.processes import hold_lifeline
from astraflow.rpc.tls import Tls
from astraflow.storage.cache import cache_dir
from astraflow.telemetry.logging import configure_logging
from astraflow.telemetry.traces import configure_tracing, use_recorder
from astraflow.workflows.agents.template import read_identity


def tls_of(certificate: Path | None, key: Path | None, ca: Path | None) -> Tls | None:
    """Return what the options say; None: plain text.

    Raises:
        AstraflowError: INVALID_FIELD for a certificate without its key.
    """
    tls = Tls(certificate=certificate, key=key, ca=ca)
    return None if tls.is_plain else tls


def serve_hub(
    recipe: Path, *, overrides: Sequence[str], run_dir: Path | None, reopens: bool
) -> int:
    """Serve a hub; return its exit code."""
    from astraflow.dataflow.main import main_serve  # noqa: PLC0415 - each role loads its own

    configure_logging("hub")
    settings = load_recipe(recipe, overrides)
    # SIGTERM would end the run; with a journal, `astraflow run --resume` goes on with it.
    is_kept = settings.hub.journal.kind != "none"
    hold_lifeline(first=signal.SIGKILL if is_kept else signal.SIGTERM)
    folder = run_dir or Path("runs") / settings.name
    with _traced("hub", settings.tracing, folder):
        return main_serve(settings, run_dir=folder, reopens=reopens)


def join_pool(
    recipe: Path,
    *,
    overrides: Sequence[str],
    hub: str,
    token: str,
    name: str | None,
    region: str,
    models: Mapping[str, Path],
    tls: Tls | None,
) -> int:
    """Run a rollout node; return its exit code."""
    hold_lifeline()
    settings = load_recipe(recipe, overrides)
    _use_threads(settings.raas.engine.thread_count)
    from astraflow.raas.main import main_join  # noqa: PLC0415

    with _traced(name or "raas", settings.tracing, None):
        return main_join(
            settings,
            hub=hub,
            token=token,
            name=name,
            region=region,
            models=models,
            tls=tls,
        )


def serve_gateway(
    recipe: Path,
    *,
    overrides: Sequence[str],
    hub: str,
    token: str,
    operator_token: str | None,
    http_token: str,
    models: Mapping[str, Path],
    tls: Tls | None,
    as_json: bool,
) -> int:
    """Serve the HTTP gateway; return its exit code.

    Raises:
        AstraflowError: CAPABILITY_MISSING where `astraflow[http]` is not installed.
    """
    hold_lifeline()
    settings = load_recipe(recipe, overrides)
    with _http_extra():
        from astraflow.gateway.serve import main_gateway  # noqa: PLC0415
        from astraflow.gateway.settings import (  # noqa: PLC0415
            GatewaySettings,
            dial_of,
            first_models,
            rules_of,
        )
    gateway = GatewaySettings(
        recipe=settings,
        hub=hub,
        token=token,
        operator_token=operator_token,
        models=first_models(settings, models),
        rules=rules_of(settings.http),
        dial=dial_of(settings.http, tls),
        http_token=http_token,
        tls=tls,
    )
    return main_gateway(gateway, as_json=as_json)


def serve_raas(
    recipe: Path,
    *,
    overrides: Sequence[str],
    dataflow: str | None,
    uid: str | None,
    models: Mapping[str, Path],
    http_token: str,
    as_json: bool,
) -> int:
    """Serve a node of ours to an existing Dataflow; return the exit code.

    Raises:
        AstraflowError: CAPABILITY_MISSING where `astraflow[http]` is not installed.
    """
    hold_lifeline()
    settings = load_recipe(recipe, overrides)
    _use_threads(settings.raas.engine.thread_count)
    with _http_extra():
        from astraflow.gateway.raas.node import RaasSettings  # noqa: PLC0415
        from astraflow.gateway.raas.serve import main_raas  # noqa: PLC0415
        from astraflow.gateway.settings import dial_of, rules_of  # noqa: PLC0415
    from astraflow.raas.main import model_directories  # noqa: PLC0415

    node = RaasSettings(
        recipe=settings,
        models=model_directories(settings, models),
        rules=rules_of(settings.http),
        dial=dial_of(settings.http),
        http_token=http_token,
        **({} if uid is None else {"uid": uid}),
    )
    return main_raas(node, dataflow=dataflow, as_json=as_json)


@contextmanager
def _http_extra() -> Generator[None]:
    """Say what to install where an import of the gateway fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise AstraflowError(
            Reason.CAPABILITY_MISSING,
            f"the gateway needs {error.name}: pip install 'astraflow[http]'",
        ) from error


def train(
    recipe: Path,
    *,
    overrides: Sequence[str],
    policy: str,
    hub: str,
    token: str,
    engine: str | None = None,
    model: Path | None,
    run_dir: Path | None,
    listen: str,
    advertise: str | None,
    tls: Tls | None,
    resume: bool = False,
    checkpoint_id: str = "",
) -> int:
    """Run a trainer; return its exit code."""
    hold_lifeline()
    settings = _trainer_recipe(recipe, overrides, policy=policy, engine=engine)
    _use_threads(settings.policies[policy].trainer.thread_count)
    from astraflow.trainers.joining import TrainerPlace  # noqa: PLC0415
    from astraflow.trainers.main import is_rank, main_run, rank_mark  # noqa: PLC0415

    folder = run_dir or Path("runs") / settings.name
    model_dir = model or make_warm_up(recipe, overrides=overrides, policy=policy)
    rank_count = settings.policies[policy].trainer.ranks
    if rank_count > 1 and not is_rank():
        from astraflow.launch.processes import run_ranks  # noqa: PLC0415 - loads torch

        configure_logging(f"trainer-{policy}")
        return run_ranks(sys.argv[1:], count=rank_count)
    with _traced(f"trainer-{policy}{rank_mark()}", settings.tracing, folder):
        place = TrainerPlace(
            hub=hub,
            token=token,
            run_dir=RunDir(folder),
            identity=read_identity(model_dir),
            is_resuming=resume,
            checkpoint_id=checkpoint_id,
            listen=listen,
            advertise=advertise,
            tls=tls,
            metrics=settings.metrics.listen,
            patience_s=settings.hub.patience_s,
        )
        return main_run(settings, policy_id=policy, model_dir=model_dir, place=place)


def _trainer_recipe(
    recipe: Path, overrides: Sequence[str], *, policy: str, engine: str | None
) -> Recipe:
    settings = load_recipe(recipe, overrides)
    if policy not in settings.policies:
        known = ", ".join(settings.policies)
        raise AstraflowError(Reason.POLICY_UNKNOWN, f"--policy {policy}: the recipe has {known}")
    if engine is None:
        return settings
    return load_recipe(recipe, [*overrides, f"policies.{policy}.trainer.engine={engine}"])


def make_warm_up(recipe: Path, *, overrides: Sequence[str], policy: str) -> Path:
    """Return the directory of a policy's first weights; make it when it is not there yet.

    What is done is printed, one line each.
    """
    hold_lifeline()
    settings = load_recipe(recipe, overrides)
    _use_threads(settings.policies[policy].trainer.thread_count)
    # Threads that wait for each other would spin, and take the cores from those they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from astraflow.trainers.warm_up import ensure_model  # noqa: PLC0415

    model = settings.policies[policy].model
    report = partial(print, flush=True)
    return ensure_model(model, seed=settings.seed, cache_dir=cache_dir(), report=report)


@contextmanager
def _traced(role: str, tracing: Tracing, run_dir: Path | None) -> Generator[None]:
    """Record the spans of this process as the recipe says; at the end all are written."""
    folder = tracing.path or (run_dir and run_dir / "traces")
    configure_tracing(role, exporter=tracing.exporter, folder=folder, share=tracing.share)
    try:
        yield
    finally:
        use_recorder(None)


def _use_threads(count: int) -> None:
    """Bound torch's threads, which it reads from the environment when it is loaded."""
    os.environ.setdefault("OMP_NUM_THREADS", str(count))
