"""The contract is well formed, formatted, compiled, and says what the code does."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from astraflow.core.errors import Reason
from astraflow.rpc.errors import STATUS

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))
BUF = shutil.which("buf", path=f"{Path(sys.executable).parent}") or shutil.which("buf")

needs_buf = pytest.mark.skipif(BUF is None, reason="buf is not installed: pip install buf-bin")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@needs_buf
def test_protos_keep_the_rules_of_buf():
    done = run(str(BUF), "lint")

    assert done.returncode == 0, done.stdout + done.stderr


@needs_buf
def test_protos_are_formatted():
    done = run(str(BUF), "format", "--diff", "--exit-code")

    assert done.returncode == 0, done.stdout + done.stderr


def test_generated_code_is_what_the_protos_compile_to():
    done = run(sys.executable, "scripts/gen_protos.py", "--check")

    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


CODES = "|".join(code.name for code in grpc.StatusCode)
ERRORS = re.compile(rf"\b({CODES}) \(([A-Z_]+(?:, [A-Z_]+)*)\)")


def promised() -> list[tuple[str, str, str]]:
    """Return (file, status code, reason) of every error that a comment promises."""
    found: list[tuple[str, str, str]] = []
    for path in PROTOS:
        text = re.sub(r"\s*\n\s*//\s?", " ", path.read_text())
        for code, reasons in ERRORS.findall(text):
            found += [(path.name, code, reason) for reason in reasons.split(", ")]
    return found


def test_every_error_that_a_comment_promises_has_that_status():
    wrong = [
        (file, code, reason)
        for file, code, reason in promised()
        if reason not in Reason.__members__ or STATUS[Reason[reason]].name != code
    ]

    assert not wrong
    assert len(promised()) > 50


def test_every_rpc_says_when_it_may_be_repeated_or_is_a_stream():
    silent: list[str] = []
    for path in PROTOS:
        text = path.read_text()
        for comment, name, request, response in re.findall(
            r"((?:^ *//.*\n)+) *rpc (\w+)\((stream )?[^)]*\) returns \((stream )?",
            text,
            re.MULTILINE,
        ):
            is_stream = bool(request or response)
            if not is_stream and "dempotent" not in comment and "changes nothing" not in comment:
                silent.append(f"{path.name}: {name}")

    assert not silent
