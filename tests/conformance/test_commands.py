"""What the command says of a member, and how it ends."""

import json
import socket
import sys

import pytest
from typer.testing import CliRunner

from astraflow.cli.main import app
from astraflow.core.errors import AstraflowError


def said(*arguments):
    return CliRunner().invoke(app, ["conformance", *arguments])


def test_a_member_that_ends_at_once_fails_the_first_check_and_reaches_no_other():
    found = said("trainer", "--json", "--exec", f"{sys.executable} -c 'raise SystemExit(7)'")

    assert found.exit_code == 1
    report = json.loads(found.stdout)
    first, *others = report["checks"]
    assert report["passed"] is False
    assert (first["name"], first["verdict"]) == ("trainer.registered", "failed")
    assert "exit code 7" in first["seen"]
    assert "trainer_service.proto" in first["source"]
    assert {check["verdict"] for check in others} <= {"not_reached"}


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import sys; sys.stderr.write('x' * 200_000)", "x" * 100),
        ("import os; os.write(2, bytes(range(128, 256)))", "exit code 0"),
        ("import subprocess; subprocess.Popen(['sleep', '600'])", "exit code 0"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
    ],
)
def test_whatever_a_member_says_and_leaves_behind_is_a_finding(code, told):
    found = said("trainer", "--json", "--exec", f'{sys.executable} -c "{code}"')

    assert found.exit_code == 1
    assert told in json.loads(found.stdout)["checks"][0]["seen"]


@pytest.mark.parametrize("command", ["no-such-program --hub {hub}", "'", ""])
def test_a_command_that_cannot_be_started_is_refused(command):
    found = said("raas", "--exec", command)

    assert isinstance(found.exception, AstraflowError)
    assert f"--exec '{command}'" in found.exception.message


def test_a_model_without_weights_is_refused(tmp_path):
    found = said("raas", "--model", str(tmp_path), "--exec", sys.executable)

    assert isinstance(found.exception, AstraflowError)
    assert "has no *.safetensors" in found.exception.message


def test_a_file_that_is_no_program_is_a_finding(tmp_path):
    script = tmp_path / "peer"
    script.write_bytes(b"\x7fno program")
    script.chmod(0o700)
    found = said("raas", "--exec", str(script))

    assert found.exit_code == 1
    assert "cannot be started" in found.stdout


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = said("trainer", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")

    assert isinstance(found.exception, AstraflowError)
    assert "choose another port" in found.exception.message


@pytest.mark.parametrize("token", ["xyz", "0"])
def test_a_token_that_is_not_hexadecimal_is_refused(tmp_path, token):
    found = said(
        *("weights", "--target", "127.0.0.1:1", "--transfer-token", token),
        *("--version-info", str(tmp_path / "none.json")),
    )

    assert isinstance(found.exception, AstraflowError)
    assert "hexadecimal" in found.exception.message
