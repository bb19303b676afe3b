"""The page of commands against the commands themselves."""

import re
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from astraflow.cli.main import app

from .commands import COMMANDS, options_of

Page = Callable[[str], str]
Blocks = Callable[[str], list[tuple[str, str, str]]]
_OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


@pytest.fixture
def sections(page: Page) -> dict[str, str]:
    parts = re.split(r"^## (.+)$", page("reference/cli.md"), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_command_has_a_section_and_no_other(sections: dict[str, str]) -> None:
    assert sections.keys() == {f"astraflow {name}" for name in COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_told_and_no_other(sections: dict[str, str], name: str) -> None:
    rows = [line for line in sections[f"astraflow {name}"].splitlines() if line.startswith("| `")]
    names = [cell for row in rows for cell in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    told = {option for name in names for option in _OPTION.findall(name.split()[0])}
    assert told == options_of(COMMANDS[name]) - {"--help"}
    assert all(not row.endswith("|  |") for row in rows), "an option or argument without words"


def test_every_command_has_an_example(blocks: Blocks) -> None:
    shown = [line for _, _, code in blocks("cli.md") for line in code.splitlines()]
    lines = [re.sub(r"^(\w+=\S+ )+", "", line) for line in shown]
    missing = {
        name
        for name in COMMANDS
        if not any(f"{line} ".startswith(f"astraflow {name} ") for line in lines)
    }
    assert missing == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_wraps_where_the_terminal_ends(name: str) -> None:
    assert all("\n" not in paragraph for paragraph in COMMANDS[name].help.split("\n\n"))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_what_the_page_names(sections: dict[str, str], name: str) -> None:
    shown = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    for option in options_of(COMMANDS[name]):
        assert option in shown.stdout
