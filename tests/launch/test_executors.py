"""Shell commands that start nodes."""

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.autoscale import ShellStarter, fill


def shell(tmp_path, start, stop=None):
    values = {"hub": "h:1", "recipe": "a b.yaml", "run": str(tmp_path)}
    return ShellStarter(start=start, stop=stop, join_token="secret", values=values)


def test_placeholders_are_quoted():
    assert fill("go {name} {{x}}", {"name": "a; rm b"}) == "go 'a; rm b' {x}"


def test_an_unknown_placeholder_is_named():
    with pytest.raises(AstraflowError) as refused:
        fill("go {who}", {"name": "a"})
    assert refused.value.reason is Reason.INVALID_FIELD
    assert "{name}" in refused.value.message


async def test_a_start_command_gets_the_join_token(tmp_path):
    executor = shell(tmp_path, 'echo {name} "$ASTRAFLOW_JOIN_TOKEN" {recipe} > {run}/said')
    await executor.start("n-1")
    assert (tmp_path / "said").read_text() == "n-1 secret a b.yaml\n"


async def test_a_stop_command_cleans_up(tmp_path):
    executor = shell(tmp_path, "true", stop="touch {run}/{name}")
    await executor.stop("n-1")
    assert (tmp_path / "n-1").exists()


async def test_a_command_that_fails_says_what_it_said(tmp_path):
    with pytest.raises(AstraflowError) as failed:
        await shell(tmp_path, "echo no quota; exit 3").start("n-1")
    assert failed.value.reason is Reason.NOT_READY
    assert "no quota" in failed.value.message
