"""What the command line calls: a run is set up, the member comes, and every check is judged."""

import asyncio
import logging
import shlex
import shutil
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from google.protobuf.json_format import Parse, ParseError

from astraflow.conformance import raas, trainer
from astraflow.conformance.checks import CheckList, ContractCheck, show
from astraflow.conformance.stage import DIGITS, POLICY, Law, ScriptEnded, Stage, executed
from astraflow.conformance.tap import Tap
from astraflow.conformance.weights import CHECKS, CheckedSource, check_source
from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.concurrency import first_error
from astraflow.telemetry.logging import configure_logging
from astraflow.testing.recipes import small_recipe
from astraflow.testing.run import start_run
from astraflow.wire.versions import decode_version_info
from astraflow_proto.weights.v1 import version_pb2

# Also a machine with more to do than it can lets a member keep this.
_TTL_S: Final = 6.0
_STEPS: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRole:
    """A kind of member that can be looked at."""

    checks: Sequence[ContractCheck]
    laws: Callable[[], dict[str, Law]]
    set_up: Callable[[Stage], Coroutine[Any, Any, None]]
    play: Callable[[Stage], Coroutine[Any, Any, None]]


TRAINER: Final = CheckedRole(
    checks=trainer.CHECKS, laws=trainer.laws, set_up=trainer.set_up, play=trainer.play
)

RAAS: Final = CheckedRole(checks=raas.CHECKS, laws=raas.laws, set_up=raas.set_up, play=raas.play)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckTerms:
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
    role: CheckedRole, terms: CheckTerms, *, on_ready: Callable[[Stage], None] | None = None
) -> CheckList:
    """Look at a member, from its first call to its last; `on_ready` is called once it may dial."""
    checks = CheckList(role.checks)
    async with _stage(role, terms, checks) as stage:
        await role.set_up(stage)
        if on_ready is not None:
            on_ready(stage)
        with suppress(ScriptEnded):
            async with executed(stage, terms.command):
                await role.play(stage)
                stage.keep_laws()
    return checks


@asynccontextmanager
async def _stage(role: CheckedRole, terms: CheckTerms, checks: CheckList) -> AsyncGenerator[Stage]:
    with TemporaryDirectory(prefix="astraflow-conformance-") as name:
        folder, tap = Path(name), Tap()
        recipe = small_recipe(
            folder,
            scorer="exact",
            prompts=[{"prompt": text, "answer": text} for text in terms.prompts],
            # It does not end by itself.
            changes={
                "hub.session_ttl_s": _TTL_S,
                "policies.solver.trainer.step_count": _STEPS,
            },
        )
        async with start_run(recipe, run_dir=folder / "run") as run:
            await tap.serve(terms.listen)
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


def check_member(role: CheckedRole, terms: CheckTerms, *, as_json: bool) -> bool:
    """Look at a member, show what was found, and return whether it keeps the contract.

    Raises:
        AstraflowError: INVALID_FIELD for a command that cannot be started, or a model without
            weights.
    """
    if terms.command is not None:
        _require_program(terms.command)
    _quiet()

    def say_where(stage: Stage) -> None:
        where = f"hub {stage.tap.address}  token {stage.run.join_token}  policy {POLICY}"
        print(where, file=sys.stderr, flush=True)  # noqa: T201 - for who starts the member

    with first_error():
        checks = asyncio.run(examine(role, terms, on_ready=say_where))
    show(checks, as_json=as_json)
    return checks.are_kept


def check_transfer_service(target: str, *, token: str, version: Path, as_json: bool) -> bool:
    """Look at a TransferService; as `check_member`, which raises INVALID_FIELD, too."""
    _quiet()
    try:
        secret = bytes.fromhex(token)
    except ValueError as error:
        raise AstraflowError(
            Reason.INVALID_FIELD, "--transfer-token is not hexadecimal; give Session.transfer_token"
        ) from error
    try:
        info = decode_version_info(Parse(version.read_text("utf-8"), version_pb2.VersionInfo()))
    except (OSError, ParseError) as error:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{version} cannot be read as a VersionInfo in JSON ({error}); give the one of"
            " PublishVersionRequest",
        ) from error
    source = CheckedSource(address=target, token=secret, registered=lambda: info)
    checks = CheckList(CHECKS)
    asyncio.run(check_source(checks, source))
    show(checks, as_json=as_json)
    return checks.are_kept


def _quiet() -> None:
    configure_logging("conformance", level="error")
    # It logs bytes that do not parse, and who is gone, with a traceback; here they are findings.
    logging.getLogger("grpc").setLevel(logging.CRITICAL)


def _require_program(command: str) -> None:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise AstraflowError(
            Reason.INVALID_FIELD, f"--exec '{command}' cannot be split into words: {error}"
        ) from error
    if not words or shutil.which(words[0]) is None:
        raise AstraflowError(
            Reason.INVALID_FIELD, f"--exec '{command}' names no program that can be started here"
        )
