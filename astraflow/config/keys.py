"""What a schema says of its keys: value, default and words, one table per mapping."""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from astraflow.core.errors import AstraflowError, Reason

_NAMES: Final = {"integer": "integer", "number": "number", "string": "text", "boolean": "yes or no"}
_BOUNDS: Final = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
# What is below it is a limit that somebody may meet.
_ENDLESS: Final = 1e9
_Schema = Mapping[str, Any]


class KeyRow(NamedTuple):
    """One key.

    Attributes:
        key: Its name.
        value: What it may be.
        default: As JSON; empty: none, or that of what is below it.
        is_required: Whether there has to be one.
        words: What it does.
    """

    key: str
    value: str
    default: str
    is_required: bool
    words: str


class KeyTable(NamedTuple):
    """The keys of one mapping.

    Attributes:
        path: Its place, such as policies.NAME.model; empty: the root.
        words: What it is.
        rows: Its keys, in their order.
    """

    path: str
    words: str
    rows: tuple[KeyRow, ...]


def key_tables(schema: _Schema, path: str = "") -> Iterator[KeyTable]:
    """Yield the tables of a JSON schema, each before those below it.

    In a path NAME is a name that the user chooses; 0 stands for any item of a list.
    """
    return _tables(path, schema, schema.get("$defs", {}))


def _tables(path: str, schema: _Schema, known: Mapping[str, _Schema]) -> Iterator[KeyTable]:
    fields: Mapping[str, _Schema] = schema.get("properties", {})
    required = schema.get("required", ())
    below = {
        f"{path}.{key}".lstrip(".") + suffix: known[name]
        for key, field in fields.items()
        for suffix, name in _parts(field)
    }
    rows = (_row(key, field, known, is_required=key in required) for key, field in fields.items())
    yield KeyTable(path, str(schema.get("description", "")), tuple(rows))
    for place, part in below.items():
        yield from _tables(place, part, known)


def _row(key: str, field: _Schema, known: Mapping[str, _Schema], *, is_required: bool) -> KeyRow:
    parts = [known[name] for _, name in _parts(field)]
    words = str(field.get("description", ""))
    if not words and parts:
        words = str(parts[0].get("description", "")).partition("\n\n")[0]
    has_default = not (is_required or parts or field.get("default") in (None, {}, []))
    default = json.dumps(field["default"], ensure_ascii=False) if has_default else ""
    return KeyRow(key, _value(field), default, is_required, " ".join(words.split()))


def _parts(field: _Schema) -> Iterator[tuple[str, str]]:
    """Yield what a key holds, as (what follows the key in a path, name of the schema)."""
    for each in field.get("anyOf", [field]):
        if "$ref" in each:
            yield "", _name(each)
        elif "$ref" in each.get("items", {}):
            yield ".0", _name(each["items"])
        for values in (
            each.get("additionalProperties"),
            *each.get("patternProperties", {}).values(),
        ):
            if isinstance(values, Mapping) and "$ref" in values:
                yield ".NAME", _name(cast("_Schema", values))


def _name(reference: _Schema) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


def _value(field: _Schema) -> str:
    """Say what a key may be."""
    options = [each for each in field.get("anyOf", [field]) if each.get("type") != "null"]
    return " or ".join(dict.fromkeys(map(_kind, options)))


def _kind(field: _Schema) -> str:
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if "$ref" in field:
        return "mapping"
    match field.get("type"):
        case "array":
            items = field.get("prefixItems") or [field["items"]]
            return f"list of {', '.join(map(_kind, items))}"
        case "object":
            return "mapping by name" if next(_parts(field), None) else "mapping"
        case None:
            return "anything"
        case kind:
            bounds = [
                f"{sign} {field[key]:g}"
                for key, sign in _BOUNDS.items()
                if field.get(key, _ENDLESS) < _ENDLESS
            ]
            name = "path" if field.get("format") == "path" else _NAMES[str(kind)]
            return " ".join([name, ", ".join(bounds)]).strip()


def find_keys(tables: Iterable[KeyTable], place: str) -> KeyTable:
    """Return the keys of a mapping, or one key alone.

    Args:
        tables: Of the schema.
        place: Such as policies.solver.trainer, or a key below it; empty: the root.

    Raises:
        AstraflowError: INVALID_FIELD when there is no such key.
    """
    known: dict[str, KeyTable] = {}
    for table in tables:
        known[table.path] = table
        for row in table.rows:
            known.setdefault(f"{table.path}.{row.key}".lstrip("."), table._replace(rows=(row,)))
    for path, table in known.items():
        if _fits(path.split("."), place.split(".")):
            return table
    near = difflib.get_close_matches(place, known, 1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "`astraflow config schema` lists the first ones"
    raise AstraflowError(Reason.INVALID_FIELD, f"a recipe has no key {place}; {hint}")


def _fits(path: Sequence[str], place: Sequence[str]) -> bool:
    return len(path) == len(place) and all(
        key in ("NAME", said) or (key == "0" and said.isdigit())
        for key, said in zip(path, place, strict=True)
    )
