"""Writes the reference of docs/recipes.md from the schema: `make_recipe_docs.py [--check]`."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from astraflow.config.loader import json_schema

PAGE: Final = Path(__file__).parent.parent / "docs" / "recipes.md"
BEGIN: Final = "<!-- made by scripts/make_recipe_docs.py from astraflow/config/recipe.py -->\n"
END: Final = "<!-- end of what is made -->\n"

_NAMES: Final = {"integer": "integer", "number": "number", "string": "text", "boolean": "yes or no"}
_BOUNDS: Final = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
Schema = Mapping[str, Any]


def reference() -> str:
    """Return every key of a recipe, one table per mapping."""
    root = json_schema()
    return "\n".join(_sections("", root, root["$defs"]))


def _sections(path: str, schema: Schema, known: Mapping[str, Schema]) -> Iterator[str]:
    title = f"`{path}`" if path else "The recipe"
    yield f"### {title}\n{schema.get('description', '')}\n"
    yield "| key | value | default | |\n|---|---|---|---|"
    required = schema.get("required", ())
    below: list[tuple[str, Schema]] = []
    for key, field in schema["properties"].items():
        cells = [f"`{key}`", _value(field), _default(key, field, required), _words(field)]
        yield f"| {' | '.join(cells)} |"
        place = f"{path}.{key}" if path else key
        below += [(place + suffix, known[name]) for suffix, name in _parts(field)]
    yield ""
    for place, part in below:
        yield from _sections(place, part, known)


def _parts(field: Schema) -> Iterator[tuple[str, str]]:
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
                yield ".NAME", _name(cast("Schema", values))


def _name(reference: Schema) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


def _value(field: Schema) -> str:
    """Say what a key may be."""
    options = [each for each in field.get("anyOf", [field]) if each.get("type") != "null"]
    return " or ".join(dict.fromkeys(map(_kind, options)))


def _kind(field: Schema) -> str:
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
        case kind:
            bounds = [f"{sign} {field[key]:g}" for key, sign in _BOUNDS.items() if key in field]
            name = "path" if field.get("format") == "path" else _NAMES[str(kind)]
            return " ".join([name, ", ".join(bounds)]).strip()


def _default(key: str, field: Schema, required: Any) -> str:
    if key in required:
        return "**required**"
    if next(_parts(field), None) or field.get("default") in (None, {}, []):
        return ""
    return f"`{json.dumps(field['default'], ensure_ascii=False)}`"


def _words(field: Schema) -> str:
    return " ".join(str(field.get("description", "")).split()).replace("|", "\\|")


def main() -> int:
    """Write the page, or with --check say whether it is as it would be written."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    fresh = f"{head}{BEGIN}\n{reference()}\n{END}{tail}"
    if "--check" in sys.argv:
        return int(fresh != text)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
