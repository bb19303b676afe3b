"""What the command line calls: looks at a peer, and says what was found."""

import asyncio
import logging
import shlex
import shutil
import sys
from pathlib import Path

from google.protobuf.json_format import Parse, ParseError

from astraflow.conformance.checks import CheckList
from astraflow.conformance.play import Role, Terms, examine
from astraflow.conformance.report import show
from astraflow.conformance.stage import POLICY, Stage
from astraflow.conformance.weights import CHECKS, Source, check_source
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import VersionInfo
from astraflow.telemetry.logging import configure_logging
from astraflow.wire.versions import decode_version_info
from astraflow_proto.weights.v1 import version_pb2


def look_at_member(role: Role, terms: Terms, *, as_json: bool) -> bool:
    """Look at a member, show what was found, and return whether it keeps the contract.

    Raises:
        AstraflowError: INVALID_FIELD for a command that cannot be started.
    """
    _require_program(terms.command)
    _quiet()
    checks = asyncio.run(examine(role, terms, on_ready=_say_where))
    show(checks, as_json=as_json)
    return checks.are_kept


def look_at_source(target: str, *, token: str, version: Path, as_json: bool) -> bool:
    """Look at a TransferService; the same.

    Raises:
        AstraflowError: INVALID_FIELD for a token or a version that cannot be read.
    """
    _quiet()
    secret, info = _secret(token), _version(version)
    source = Source(address=target, token=secret, told=lambda: info)
    checks = CheckList(CHECKS)
    asyncio.run(check_source(checks, source))
    show(checks, as_json=as_json)
    return checks.are_kept


def _quiet() -> None:
    configure_logging("conformance", level="error")
    # It logs bytes that do not parse, and who is gone, with a traceback; here they are findings.
    logging.getLogger("grpc").setLevel(logging.CRITICAL)


def _require_program(command: str | None) -> None:
    if command is None:
        return
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


def _say_where(stage: Stage) -> None:
    where = f"hub {stage.tap.address}  token {stage.run.join_token}  policy {POLICY}"
    print(where, file=sys.stderr, flush=True)  # noqa: T201 - for who starts the member


def _secret(token: str) -> bytes:
    try:
        return bytes.fromhex(token)
    except ValueError as error:
        raise AstraflowError(
            Reason.INVALID_FIELD, "--transfer-token is not hexadecimal; give Session.transfer_token"
        ) from error


def _version(path: Path) -> VersionInfo:
    try:
        return decode_version_info(Parse(path.read_text("utf-8"), version_pb2.VersionInfo()))
    except (OSError, ParseError) as error:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{path} cannot be read as a VersionInfo in JSON ({error}); give the one of"
            " PublishVersionRequest",
        ) from error
