"""The commands of a page, read as a shell does and held against what there is."""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import typer
import yaml
from packaging.requirements import InvalidRequirement, Requirement

from astraflow.cli.main import app
from astraflow.config.keys import KeyTable, find_keys, key_tables
from astraflow.config.loader import json_schema, load_recipe
from astraflow.core.errors import AstraflowError
from astraflow.simulate.scenario import load_scenario

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
OF_THE_SYSTEM = {
    *(".", "bash", "buf", "cargo", "cd", "cp", "export", "go", "mkdir", "node", "npm", "npx"),
    *("openssl", "printf", "sky", "tail", "alfworld-download"),
}
"""Programs of others: of what they are given only our own files are looked up."""
MODULES = {"tinker_cookbook.recipes.rl_loop": "tinker-cookbook", "venv": "the standard library"}

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_OURS = re.compile(
    r"(?:\"?\$?\{?ASTRAFLOW\}?\"?/|^)"
    r"((?:benchmarks|clients|docs|protos|recipes|requirements|scripts|tests)/[^\"*]*|protos)$"
)


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the commands of the command line by their names, such as `raas join`."""
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands())


def options_of(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts if "-" in option}


def words_of(code: str) -> Iterator[list[str]]:
    """Yield the words of every simple command; what is redirected is left out."""
    for line in code.replace("\\\n", " ").splitlines():
        reader = shlex.shlex(line, posix=True, punctuation_chars=True)
        reader.whitespace_split = True
        words: list[str] = []
        tokens = iter(reader)
        for token in tokens:
            if token[0] in "<>":
                next(tokens)
                words = words[:-1] if words and words[-1] in ("1", "2") else words
            elif token[0] in "();|&":
                yield words
                words = []
            else:
                words.append(token)
        yield words


def faults_of(code: str, shown: Mapping[str, str]) -> Iterator[str]:
    """Say what is not so about commands; `shown` are the files of the page, by name."""
    checked = subprocess.run(
        ["bash", "-n"], input=code, text=True, capture_output=True, check=False
    )
    if checked.returncode:
        yield checked.stderr
    for words in words_of(code):
        command = [*words]
        while command and (_ASSIGNMENT.fullmatch(command[0]) or command[0] == "sudo"):
            command.pop(0)
        if command:
            for fault in _faults(command, shown):
                yield f"{' '.join(words)}: {fault}"


def _faults(command: Sequence[str], shown: Mapping[str, str]) -> Iterator[str]:
    for word in command:
        if (found := _OURS.search(word)) and not (ROOT / found[1]).exists():
            yield f"there is no {found[1]}"
        if word.startswith("astraflow "):
            yield from _astraflow(shlex.split(word)[1:], shown)
    program = Path(command[0]).name or command[0]
    if program in CHECKS:
        yield from CHECKS[program](command[1:], shown)
    elif program not in OF_THE_SYSTEM and not command[0].startswith("scripts/"):
        yield f"nobody knows how to check {program}"


def _astraflow(words: Sequence[str], shown: Mapping[str, str]) -> Iterator[str]:
    name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in COMMANDS), None)
    if name is None:
        yield "no such command"
        return
    given = [*words[len(name.split()) :]]
    if "--token" in options_of(COMMANDS[name]) and "--token" not in given:
        given += ["--token", "t"]
    try:
        with COMMANDS[name].make_context(name, given) as context:
            overrides = context.params.get("overrides") or ()
            recipe = context.params.get("recipe") or context.params.get("scenario")
            yield from _overrides(name, recipe or _of_run(context.params.get("resume")), overrides)
    except click.ClickException as error:
        yield error.format_message()
    except AstraflowError as error:
        yield error.message


def _of_run(folder: Path | None) -> Path | None:
    return None if folder is None else Path("recipes", f"{folder.name}.yaml")


def _overrides(name: str, recipe: Path | None, overrides: Sequence[str]) -> Iterator[str]:
    """Check what --set is given: with the recipe where there is one, else key by key."""
    if name == "simulate":
        load_scenario(None, [*overrides])
    elif recipe is not None and (ROOT / recipe).is_file():
        load_recipe(ROOT / recipe, [*overrides])
    else:
        for each in overrides:
            find_keys(_tables(), each.partition("=")[0])
    if False:  # pragma: no cover - a generator, like the others
        yield ""


@cache
def _tables() -> tuple[KeyTable, ...]:
    return tuple(key_tables(json_schema()))


def _python(words: Sequence[str], shown: Mapping[str, str]) -> Iterator[str]:
    if words[0] == "-m":
        if words[1] == "astraflow":
            yield from _astraflow(words[2:], shown)
        elif words[1] not in MODULES and find_spec(words[1]) is None:
            yield f"there is no module {words[1]}"
        return
    script = ROOT / words[0]
    if words[0] not in shown and not script.is_file():
        yield f"there is no {words[0]}"
    elif script.is_file():
        told = script.read_text()
        options = [word for word in words if word.startswith("--")]
        yield from (f"no option {each}" for each in options if f'"{each}"' not in told)


def _torchrun(words: Sequence[str], shown: Mapping[str, str]) -> Iterator[str]:
    yield from _python(words[words.index("-m") :], shown)


def _pip(words: Sequence[str], shown: Mapping[str, str]) -> Iterator[str]:
    del shown
    for word in words:
        extras = re.search(r"(?:^\.|astraflow[^\[]*|\.whl)\[([\w,-]+)\]$", word)
        missing = set(extras[1].split(",")) - EXTRAS.keys() if extras else ()
        yield from (f"there is no extra {each}" for each in missing)
        if not (extras or word.startswith("-") or word[0] in ".$" or "/" in word):
            try:
                if word != "install" and Requirement(word).name == "astraflow":
                    yield "an index may have another project of that name"
            except InvalidRequirement as error:
                yield str(error)


def _make(words: Sequence[str], shown: Mapping[str, str]) -> Iterator[str]:
    del shown
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    yield from (f"make has no {word}" for word in words if "=" not in word and word not in targets)


def _docker(words: Sequence[str], shown: Mapping[str, str]) -> Iterator[str]:
    image = next(n for n, word in enumerate(words) if word.startswith("astraflow:"))
    if words[0] == "run":
        yield from _astraflow(words[image + 1 :], shown)
    elif "--target" in words:
        target = words[words.index("--target") + 1]
        file = (ROOT / words[words.index("-f") + 1]).read_text()
        if not re.search(rf" AS {target}$", file, re.MULTILINE | re.IGNORECASE):
            yield f"the image has no target {target}"


def _helm(words: Sequence[str], shown: Mapping[str, str]) -> Iterator[str]:
    del shown
    chart = next(word for word in words if (ROOT / word / "values.yaml").is_file())
    given = [words[n + 1] for n, word in enumerate(words) if word == "--set"]
    for key in [each.partition("=")[0] for part in given for each in part.split(",")]:
        values = yaml.safe_load((ROOT / chart / "values.yaml").read_text())
        for part in key.split("."):
            if part not in values:
                yield f"the chart has no value {key}"
                break
            values = values[part]


def _pytest(words: Sequence[str], shown: Mapping[str, str]) -> Iterator[str]:
    del shown
    known = [each.partition(":")[0] for each in PROJECT["tool"]["pytest"]["ini_options"]["markers"]]
    for flag, value in pairwise(words):
        if flag == "-m" and not {*value.split()} - {"not", "and", "or"} <= {*known}:
            yield f"there is no marker {value}"


CHECKS: Mapping[str, Callable[[Sequence[str], Mapping[str, str]], Iterator[str]]] = {
    "astraflow": _astraflow,
    "docker": _docker,
    "helm": _helm,
    "make": _make,
    "pip": _pip,
    "pytest": _pytest,
    "python": _python,
    "python3": _python,
    "torchrun": _torchrun,
}
