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
from astraflow.testing.run import LiveRun, start_run

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


async def examine(
    role: Role,
    *,
    command: str | None = None,
    listen: str = "127.0.0.1:0",
    patience_s: float = 30.0,
    on_ready: Callable[[Stage], None] | None = None,
) -> CheckList:
    """Look at a member, from its first call to its last.

    Args:
        role: What it is.
        command: Starts it; see `executed`. None: it is started by somebody else.
        listen: host:port that it dials; port 0 takes a free one.
        patience_s: How long one thing is waited for.
        on_ready: Called once it may dial; None: nobody is.
    """
    checks = CheckList(role.checks)
    with TemporaryDirectory(prefix="astraflow-conformance-") as folder:
        recipe = _recipe(Path(folder))
        async with start_run(recipe, run_dir=Path(folder, "run")) as run, _tap(run, listen) as tap:
            stage = Stage(run=run, tap=tap, checks=checks, laws=role.laws(), patience_s=patience_s)
            await role.set_up(stage)
            if on_ready is not None:
                on_ready(stage)
            async with executed(stage, command):
                with suppress(Settled):
                    await role.play(stage)
                    stage.keep_laws()
    return checks


@asynccontextmanager
async def _tap(run: LiveRun, listen: str) -> AsyncGenerator[Tap]:
    tap = Tap(run.address)
    await tap.serve(listen)
    try:
        yield tap
    finally:
        await tap.close()


def _recipe(folder: Path) -> Recipe:
    """Return a recipe that does not end by itself."""
    rows = [{"prompt": digit, "answer": digit} for digit in DIGITS]
    return small_recipe(
        folder,
        scorer="exact",
        prompts=rows,
        changes={
            "hub.session_ttl_s": _TTL_S,
            "policies.solver.trainer.step_count": _STEPS,
        },
    )
