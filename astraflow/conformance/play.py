"""One play: a run is set up, the member comes, and every check is judged."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from astraflow.config.recipe import Recipe
from astraflow.conformance import raas, trainer
from astraflow.conformance.checks import Check, CheckList
from astraflow.conformance.raas_laws import laws_of
from astraflow.conformance.stage import DIGITS, Law, Settled, Stage, executed
from astraflow.conformance.tap import Tap
from astraflow.testing.recipes import small_recipe
from astraflow.testing.run import start_run

_TTL_S: Final = 3.0
_STEPS: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A kind of member that can be looked at.

    Attributes:
        checks: In their order.
        laws: What must hold all the time.
        set_up: Brings the other members.
        play: The script.
    """

    checks: Sequence[Check]
    laws: Callable[[], dict[str, Law]]
    set_up: Callable[[Stage], Coroutine[Any, Any, None]]
    play: Callable[[Stage], Coroutine[Any, Any, None]]


TRAINER: Final = Role(
    checks=trainer.CHECKS, laws=trainer.laws, set_up=trainer.set_up, play=trainer.play
)
RAAS: Final = Role(
    checks=raas.CHECKS, laws=partial(laws_of, raas.JOIN), set_up=raas.set_up, play=raas.play
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a member is looked at.

    Attributes:
        command: Starts it; see `executed`. None: it is started by somebody else.
        listen: host:port that it dials; port 0 takes a free one.
        patience_s: How long one thing is waited for.
        model: Directory of safetensors whose weights the run has, for a RaaS; None: a small tensor.
        prompts: Texts of characters that its model knows.
    """

    command: str | None = None
    listen: str = "127.0.0.1:0"
    patience_s: float = 30.0
    model: Path | None = None
    prompts: Sequence[str] = tuple(DIGITS)


async def examine(
    role: Role, terms: Terms, *, on_ready: Callable[[Stage], None] | None = None
) -> CheckList:
    """Look at a member, from its first call to its last.

    Args:
        role: What it is.
        terms: How it is looked at.
        on_ready: Called once it may dial; None: nobody is.
    """
    checks = CheckList(role.checks)
    async with _stage(role, terms, checks) as stage:
        await role.set_up(stage)
        if on_ready is not None:
            on_ready(stage)
        with suppress(Settled):
            async with executed(stage, terms.command):
                await role.play(stage)
                stage.keep_laws()
    return checks


@asynccontextmanager
async def _stage(role: Role, terms: Terms, checks: CheckList) -> AsyncGenerator[Stage]:
    with TemporaryDirectory(prefix="astraflow-conformance-") as name:
        folder = Path(name)
        recipe = _recipe(folder, terms.prompts)
        async with _tap(terms.listen) as tap, start_run(recipe, run_dir=folder / "run") as run:
            tap.hub = run.address
            try:
                yield Stage(
                    run=run,
                    tap=tap,
                    checks=checks,
                    laws=role.laws(),
                    patience_s=terms.patience_s,
                    model=terms.model,
                )
            finally:
                await tap.close()


@asynccontextmanager
async def _tap(listen: str) -> AsyncGenerator[Tap]:
    tap = Tap()
    await tap.serve(listen)
    try:
        yield tap
    finally:
        await tap.close()


def _recipe(folder: Path, prompts: Sequence[str]) -> Recipe:
    """Return a recipe that does not end by itself."""
    rows = [{"prompt": text, "answer": text} for text in prompts]
    return small_recipe(
        folder,
        scorer="exact",
        prompts=rows,
        changes={
            "hub.session_ttl_s": _TTL_S,
            "policies.solver.trainer.step_count": _STEPS,
        },
    )
