"""The page of commands against the commands themselves."""

import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from astraflow.cli.main import app

Page = Callable[[str], str]
Blocks = Callable[[str], list[tuple[str, str, str]]]
_OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


def commands(
    group: Any = None, path: tuple[str, ...] = ("astraflow",)
) -> Iterator[tuple[str, Any]]:
    group = group or typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands())


def options_of(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts if "-" in option}


@pytest.fixture
def sections(page: Page) -> dict[str, str]:
    parts = re.split(r"^## (.+)$", page("reference/cli.md"), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_command_has_a_section_and_no_other(sections: dict[str, str]) -> None:
    assert sections.keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_told_and_no_other(sections: dict[str, str], name: str) -> None:
    rows = [line for line in sections[name].splitlines() if line.startswith("| `")]
    names = [cell for row in rows for cell in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    told = {option for name in names for option in _OPTION.findall(name.split()[0])}
    assert told == options_of(COMMANDS[name]) - {"--help"}
    assert all(not row.endswith("|  |") for row in rows), "an option or argument without words"


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_use_what_is_there(blocks: Blocks, name: str) -> None:
    lines = [
        line for kind, _, code in blocks("cli.md") if kind == "bash" for line in code.splitlines()
    ]
    examples = [line for line in lines if line.startswith(f"{name} ") or line == name]
    assert examples
    for example in examples:
        arguments = shlex.split(example)[len(name.split()) :]
        # Parsing, without doing it: a missing or unknown argument raises.
        with COMMANDS[name].make_context(
            name, [*arguments, *token_for(name)], resilient_parsing=False
        ):
            pass


def token_for(name: str) -> list[str]:
    return ["--token", "t"] if "--token" in options_of(COMMANDS[name]) else []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_wraps_where_the_terminal_ends(name: str) -> None:
    assert all("\n" not in paragraph for paragraph in COMMANDS[name].help.split("\n\n"))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_what_the_page_names(sections: dict[str, str], name: str) -> None:
    shown = CliRunner().invoke(app, [*name.split()[1:], "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    for option in options_of(COMMANDS[name]):
        assert option in shown.stdout
