"""What the commands that are processes do, each before its own part."""

import os
import resource
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from astraflow.config.extras import install
from astraflow.config.loader import load_recipe
from astraflow.config.recipe import Recipe, Tracing
from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.processes import hold_lifeline
from astraflow.rpc.tls import Tls
from astraflow.storage.cache import cache_dir
from astraflow.telemetry.garbage import expect_imports
from astraflow.telemetry.traces import configure_tracing, use_recorder

# Programs that a node starts have the same limit, and some close every number up to it.
_FILE_COUNT = 1 << 16


def tls_of(certificate: Path | None, key: Path | None, ca: Path | None) -> Tls | None:
    """Return what the options say; None: plain text.

    Raises:
        AstraflowError: INVALID_FIELD for a certificate without its key.
    """
    tls = Tls(certificate=certificate, key=key, ca=ca)
    return None if tls.is_plain else tls


def begin(recipe: Path, overrides: Sequence[str] | None) -> Recipe:
    """Read the recipe of a process that ends with the one that started it."""
    expect_imports()
    hold_lifeline()
    raise_file_limit()
    return load_recipe(recipe, overrides or ())


def raise_file_limit() -> None:
    """Let this process have more open files, where it may.

    Shells begin with 1,024: a hub has two connections to each member, a node pipes to each program.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILE_COUNT if most == resource.RLIM_INFINITY else min(most, _FILE_COUNT)
    # macOS says that there is no limit, and may refuse it.
    with suppress(OSError, ValueError):
        if 0 <= now < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def must_have_policy(recipe: Recipe, policy: str) -> None:
    """Refuse a policy that the recipe does not have.

    Raises:
        AstraflowError: POLICY_UNKNOWN.
    """
    if policy not in recipe.policies:
        known = ", ".join(recipe.policies)
        raise AstraflowError(Reason.POLICY_UNKNOWN, f"--policy {policy}: the recipe has {known}")


@contextmanager
def http_extra() -> Generator[None]:
    """Say what to install where an import of the gateway fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise AstraflowError(
            Reason.CAPABILITY_MISSING,
            f"the gateway needs {error.name}: {install('http')}",
        ) from error


def make_warm_up(recipe: Path, overrides: Sequence[str] | None, *, policy: str) -> Path:
    """Return the directory of a policy's first weights; make it when it is not there yet.

    What is done is printed, one line each.
    """
    settings = begin(recipe, overrides)
    must_have_policy(settings, policy)
    use_threads(settings.policies[policy].trainer.thread_count)
    # Threads that wait for each other would spin, and take the cores from those they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from astraflow.trainers.warm_up import ensure_model  # noqa: PLC0415

    model = settings.policies[policy].model
    report = partial(print, flush=True)
    return ensure_model(model, seed=settings.seed, cache_dir=cache_dir(), report=report)


@contextmanager
def traced(role: str, tracing: Tracing, run_dir: Path | None) -> Generator[None]:
    """Record the spans of this process as the recipe says; at the end all are written."""
    folder = tracing.path or (run_dir and run_dir / "traces")
    configure_tracing(role, exporter=tracing.exporter, folder=folder, share=tracing.share)
    try:
        yield
    finally:
        use_recorder(None)


def use_threads(count: int) -> None:
    """Bound torch's threads, which it reads from the environment when it is loaded."""
    os.environ.setdefault("OMP_NUM_THREADS", str(count))
