"""Writes the pages of keys, commands and metrics: `make_reference.py [--check]`.

Each is made from where the things themselves are declared.
"""

import asyncio
import dataclasses
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from enum import StrEnum
from inspect import cleandoc, signature
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import typer
from pydantic import TypeAdapter, create_model

from astraflow.cli.main import app
from astraflow.config.keys import KeyTable, key_tables
from astraflow.config.loader import json_schema
from astraflow.core.algorithms import finding
from astraflow.core.code import load
from astraflow.core.ids import PolicyId
from astraflow.dataflow.metrics import HubView, LoopProbe
from astraflow.raas.metrics import NodeCounters, node_families
from astraflow.telemetry.metrics import Family
from astraflow.testing.recipes import small_recipe
from astraflow.testing.run import start_run
from astraflow.trainers.loop import TrainerMetrics
from astraflow.workflows import registry

PAGES: Final = Path(__file__).resolve().parent.parent / "docs" / "reference"
_MADE: Final = "Made by `scripts/make_reference.py` from"
_ARGS: Final = re.compile(r"^(\w+): (.*(?:\n {4,}.*)*)$", re.MULTILINE)
_PAGE: Final = re.compile(r"(?:docs/)?\b([\w-]+\.md)\b")
_MARKUP: Final = re.compile(r"\[(?:/|bold)\]")
_TYPES: Final = {str: "TEXT", Path: "PATH", int: "INTEGER", float: "NUMBER"}
_KINDS: Final = {
    registry.Kind.WORKFLOW: ("Workflows", "`workflows.NAME.name`", "options"),
    registry.Kind.SCORER: ("Scorers", "`workflows.NAME.scorer`", "scorer_options"),
    registry.Kind.SANDBOX: ("Sandboxes", "option `sandbox` of what runs code", "sandbox_options"),
    registry.Kind.ENVIRONMENT: (
        "Environments",
        "option `environment` of the workflow `environment`",
        "environment_options",
    ),
}
_POINTS: Final = {
    finding.Point.SELECTOR: ("Prompt selectors", "`rollouts.selectors`"),
    finding.Point.FILTER: ("Rollout filters", "`rollouts.filters`"),
    finding.Point.ORDER: ("Replay orders", "`policies.NAME.trainer.replay.order`"),
    finding.Point.GUARD: ("Batch guards", "`policies.NAME.trainer.guards`"),
}


def recipe_page() -> str:
    """Return every key of a recipe, and every option of what is built in."""
    parts = [
        f"# Keys of a recipe\n{_MADE} the schema. `NAME` is a name that you choose; `0` stands for "
        "any item of a list. `astraflow config schema [KEY]` prints the same, and with `--json` the"
        " JSON schema, for editors. [Recipes](../recipes.md) says how to begin."
    ]
    parts += [_section(table, "##") for table in key_tables(json_schema())]
    for kind, (title, place, options) in _KINDS.items():
        parts.append(f"## {title}\nNamed by {place}, with `{options}`.")
        parts += [_plug_in(kind, name) for name in _ours(registry.names(kind))]
    for point, (title, place) in _POINTS.items():
        parts.append(f"## {title}\nNamed by {place}, with `options`.")
        parts += [_algorithm(point, name) for name in finding.names(point)]
    return "\n\n".join(parts) + "\n"


def _ours(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if ":" not in name)


def _plug_in(kind: registry.Kind, name: str) -> str:
    found = load(registry.target_of(kind, name), what=name)
    head = f"### {name}\n{_summary(found)}"
    if kind is registry.Kind.ENVIRONMENT:
        return _with_rows(head, _arguments(found))
    tables = key_tables(found.Options.model_json_schema())
    return _with_rows(head, [row for table in tables for row in _rows(table, prefix=True)])


def _algorithm(point: finding.Point, name: str) -> str:
    found = finding.find(point, name)
    init = {each.name for each in dataclasses.fields(found) if each.init}
    _, _, said = cleandoc(found.__doc__).partition("Attributes:\n")
    told = _told(said)
    rows = [
        f"| `{row.key}` | {row.value} | {_default(row.default)} | {_cell(told[row.key])} |"
        for table in key_tables(TypeAdapter[Any](found).json_schema())
        for row in table.rows
        if not table.path and row.key in init
    ]
    return _with_rows(f"### {name}\n{_summary(found)}", rows)


def _arguments(found: Any) -> list[str]:
    """Return the arguments of an environment, with what its docstring says of each."""
    _, _, said = cleandoc(found.__init__.__doc__ or "").partition("Args:\n")
    told = _told(said)
    taken = signature(found).parameters.values()
    fields: dict[str, Any] = {
        each.name: (each.annotation, ... if each.default is each.empty else each.default)
        for each in taken
        if each.kind is not each.VAR_KEYWORD
    }
    (table,) = key_tables(create_model("Arguments", **fields).model_json_schema())
    rows = tuple(row._replace(words=told[row.key]) for row in table.rows)
    others = [each.name for each in taken if each.kind is each.VAR_KEYWORD]
    return [
        *_rows(table._replace(rows=rows)),
        *(f"| any other key | | | {_cell(told[name])} |" for name in others),
    ]


def _told(section: str) -> dict[str, str]:
    return {name: " ".join(words.split()) for name, words in _ARGS.findall(cleandoc(section))}


def _summary(found: Any) -> str:
    text = cleandoc(found.__doc__ or "").partition("Attributes:")[0].strip()
    return _paragraphs(text)


def _paragraphs(text: str) -> str:
    """Return each paragraph as one line."""
    return "\n\n".join(_plain(" ".join(part.split())) for part in text.split("\n\n"))


def _plain(text: str) -> str:
    """Return text whose signs stand for themselves; what is between backticks stays."""
    parts = text.split("`")
    for index in range(0, len(parts), 2):
        signs = parts[index].replace("*", "\\*").replace("<", "&lt;")
        parts[index] = _PAGE.sub(_linked, signs)
    return "`".join(parts)


def _linked(name: re.Match[str]) -> str:
    is_page = (PAGES.parent / name[1]).exists()
    return f"[{name[1]}](../{name[1]})" if is_page else name[0]


def _section(table: KeyTable, level: str) -> str:
    title = f"`{table.path}`" if table.path else "The recipe"
    return _with_rows(f"{level} {title}\n{_paragraphs(table.words)}", _rows(table))


def _rows(table: KeyTable, *, prefix: bool = False) -> list[str]:
    before = f"{table.path}." if prefix and table.path else ""
    return [
        f"| `{before}{row.key}` | {row.value} |"
        f" {'**required**' if row.is_required else _default(row.default)} | {_cell(row.words)} |"
        for row in table.rows
    ]


def _with_rows(head: str, rows: list[str]) -> str:
    if not rows:
        return head
    return "\n".join([head, "", "| key | value | default | |", "|---|---|---|---|", *rows])


def _default(json: str) -> str:
    return f"`{json}`" if json else ""


def _cell(words: str) -> str:
    return _plain(words).replace("|", "\\|")


def cli_page() -> str:
    """Return every command with its arguments and options."""
    parts = [f"# Commands\n{_MADE} the command line. [Examples](../cli.md) by what they are for."]
    parts += [_command(name, command) for name, command in commands()]
    return "\n\n".join(parts) + "\n"


def commands(
    group: Any = None, path: tuple[str, ...] = ("astraflow",)
) -> Iterator[tuple[str, Any]]:
    """Yield every command by its full name."""
    whole: Any = group or typer.main.get_command(app)
    for name, command in whole.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def _command(name: str, command: Any) -> str:
    rows = [_parameter(each) for each in command.params if each.name != "help"]
    head = f"## {name}\n{_marked(command.help)}"
    return "\n".join([head, "", "| | default | |", "|---|---|---|", *rows]) if rows else head


def _parameter(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar or parameter.name.upper()}`"
    else:
        value = "" if parameter.is_flag else f" {parameter.metavar or _type_of(parameter)}"
        names = ", ".join(f"`{name}{value}`" for name in parameter.opts)
    default = "**required**" if parameter.required else _said(parameter.default)
    words = _marked(parameter.help)
    if parameter.envvar:
        words += f" Or `{parameter.envvar}`."
    return f"| {names} | {default} | {_cell(words)} |"


def _marked(words: str | None) -> str:
    """Return words of the command line with the marks of these pages."""
    return _MARKUP.sub("`", words or "").replace("\\[", "[")


def _type_of(parameter: Any) -> str:
    declared = parameter.type_descriptor.annotation
    if get_origin(declared) is Literal:
        return "/".join(get_args(declared))
    one = next(iter(get_args(declared)), declared)
    return "/".join(one) if issubclass(one, StrEnum) else _TYPES[one]


def _said(default: Any) -> str:
    match default:
        case None | False | "":
            return ""
        case list():
            return f"`{' '.join(map(str, default))}`"  # pyright: ignore[reportUnknownArgumentType]
        case float():
            return f"`{default:g}`"
        case _:
            return f"`{default}`"


def metrics_page() -> str:
    """Return every metric of every process."""
    trainer = TrainerMetrics(PolicyId("model")).families()
    node = node_families({}, NodeCounters(), running_count=0, queued_count=0, capacity=0)
    tables = {"The hub": asyncio.run(_hub_families()), "A node": node, "A trainer": trainer}
    parts = [
        f"# Metrics\n{_MADE} what the processes tell. Every name begins with `astraflow_`; each "
        "process also has the `process_` metrics of the Prometheus client. "
        "[Metrics and traces](../metrics.md) says how they are scraped."
    ]
    for title, families in tables.items():
        rows = [_family(each) for each in families]
        parts.append("\n".join([f"## {title}", "", *_METRICS, *rows]))
    return "\n\n".join(parts) + "\n"


_METRICS: Final = ("| name | kind | labels | |", "|---|---|---|---|")


def _family(family: Family) -> str:
    name, labels = family.name.removeprefix("astraflow_"), ", ".join(family.labels)
    return f"| `{name}` | {family.kind} | {labels} | {_cell(family.help)} |"


async def _hub_families() -> list[Family]:
    """Return what the hub of a run tells, with a payload store."""
    with tempfile.TemporaryDirectory() as folder:
        payloads = {"url": Path(folder, "payloads").as_uri()}
        recipe = small_recipe(Path(folder), changes={"rollouts.payloads": payloads})
        async with start_run(recipe, run_dir=Path(folder, "run")) as run:
            with LoopProbe() as probe:
                view = HubView.of(run.hub, probe)
            return list(view.families())


def main() -> int:
    """Write the pages, or with --check say whether they are as they would be written."""
    fresh: Mapping[str, str] = {
        "recipe.md": recipe_page(),
        "cli.md": cli_page(),
        "metrics.md": metrics_page(),
    }
    if "--check" in sys.argv:
        stale = [name for name, text in fresh.items() if (PAGES / name).read_text() != text]
        sys.stderr.writelines(f"{name} is stale\n" for name in stale)
        return int(bool(stale))
    for name, text in fresh.items():
        (PAGES / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
