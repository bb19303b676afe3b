"""Reads recipes: YAML, then `a.b=c` overrides, then the strict schema."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from astraflow.config.recipe import Recipe
from astraflow.core.code import add_code_folder
from astraflow.core.errors import AstraflowError, Reason

_Place = tuple[int | str, ...]
_FORM = re.compile(r"\[key\]|constrained-\w+|[\w-]+\[.*\]")
"""What pydantic adds to a place: which form of several was tried."""
ModelT = TypeVar("ModelT", bound=BaseModel)


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Relative paths in it, and in overrides, start at the recipe's folder and come out
    absolute, so that the result means the same when it is saved elsewhere. From then on code of
    its folder (key `code`) can be named as `module:Class`.

    Args:
        path: A YAML file.
        overrides: Each `a.b=value`, the value in YAML; it replaces what is there. Items of
            a list are named by number, as in `evals.held_out.data_sets.0.repeats=4`.

    Raises:
        AstraflowError: INVALID_FIELD; lists every problem with its place.
    """
    folder = Path(path).parent.absolute()
    recipe = cast("Recipe", _resolved(load_model(Recipe, path, overrides), folder))
    add_code_folder(recipe.code)
    return recipe


def load_model(
    model: type[ModelT], path: Path | str | None, overrides: Sequence[str] = ()
) -> ModelT:
    """Read a YAML file by a strict schema, with overrides as in `load_recipe`.

    Args:
        model: The schema.
        path: A YAML file; None: every key has its default.
        overrides: Each `a.b=value`.

    Raises:
        AstraflowError: INVALID_FIELD; lists every problem with its place.
    """
    tree = {} if path is None else _read(Path(path))
    for override in overrides:
        _override(tree, override)
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise invalid_fields(error, model, where=str(path or model.__name__)) from error


def dump_recipe(recipe: Recipe) -> str:
    """Return a recipe as YAML, defaults filled in; reading it again gives the same."""
    tree = recipe.model_dump(mode="json")
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of recipes, for editors."""
    return Recipe.model_json_schema()


def invalid_fields(error: ValidationError, model: type[BaseModel], *, where: str) -> AstraflowError:
    """Return an error that names every field at fault, and the nearest key for an unknown one."""
    problems = problems_of(error, model)
    lines = [f"{place}: {said}" if place else said for place, said in problems]
    return AstraflowError(
        Reason.INVALID_FIELD,
        "\n  ".join([f"{where}:", *lines]) if len(lines) > 1 else f"{where}: {lines[0]}",
        metadata={"field": ",".join(place for place, _ in problems)},
    )


def problems_of(error: ValidationError, model: type[BaseModel]) -> Sequence[tuple[str, str]]:
    """Return the dotted place of every problem and what is said of it."""
    problems = [(tuple(problem["loc"]), problem) for problem in error.errors()]
    found: dict[str, str] = {}
    for place, problem in problems:
        # Of a list that is at fault only because an item is, pydantic leaves the item out.
        below = [each for each, _ in problems if each != place and each[: len(place)] == place]
        if problem["type"] == "too_short" and below:
            continue
        match problem["type"]:
            case "extra_forbidden":
                said = _unknown_key(model, place)
            case "tuple_type":
                said = "Input should be a list, such as [a, b]"
            case "model_type":
                known = ", ".join(sorted(_keys_at(model, place)))
                said = f"Input should be a mapping; its keys are {known}"
            case _:
                said = problem["msg"].removeprefix("Value error, ")
        shown = ".".join(str(part) for part in place if not _FORM.fullmatch(str(part)))
        found[shown] = f"{found[shown]}, or: {said}" if shown in found else said
    return [*found.items()]


class _Yaml(yaml.SafeLoader):
    """YAML that refuses a key given twice, reads 5e-4 as a number, and off as a word."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        # Here and not where values are made: what `<<` takes in may be given otherwise.
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # refused when values are made, with its place
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"'{key_node.value}' is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes words that `_Yaml` would read as numbers."""


# YAML 1.1 wants a dot in a float; people, and YAML 1.2, do not.
for _each in (_Yaml, _Dumper):
    _each.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType] - untyped in its stubs
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )

# In YAML 1.1 on, off, yes and no are truth values; in YAML 1.2, and in recipes, words.
_Yaml.yaml_implicit_resolvers = {
    first: [(tag, words) for tag, words in known if tag != "tag:yaml.org,2002:bool"]
    for first, known in _Yaml.yaml_implicit_resolvers.items()
}
_Yaml.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType] - untyped in its stubs
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def _parse(text: str, *, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Yaml)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        # A ValueError is of a date that there is not.
        raise AstraflowError(Reason.INVALID_FIELD, f"{where}: not YAML: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise AstraflowError(
            Reason.INVALID_FIELD, f"recipe {path} cannot be read: {error.strerror or error}"
        ) from error
    except UnicodeDecodeError as error:
        raise AstraflowError(Reason.INVALID_FIELD, f"{path} is no text in UTF-8") from error
    tree = _parse(text, where=str(path))
    if not isinstance(tree, dict):
        raise AstraflowError(Reason.INVALID_FIELD, f"{path}: a recipe is a mapping of keys")
    return cast("dict[str, Any]", tree)


def _override(tree: dict[str, Any], override: str) -> None:
    """Set one dotted key, making the mappings on the way to it."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise AstraflowError(
            Reason.INVALID_FIELD, f"override '{override}' is not of the form a.b=value"
        )
    value = _parse(text, where=f"override '{override}'")
    node: Any = tree
    for depth, part in enumerate(parts):
        at = _key_in(node, part, place=".".join(parts[:depth]))
        if depth == len(parts) - 1:
            node[at] = value
        elif isinstance(at, str) and node.get(at) is None:
            node[at] = {}
        elif isinstance(node[at], str) and parts[depth + 1] == "options":
            # Code may be named alone where it has none.
            node[at] = {"name": node[at]}
        elif isinstance(node[at], dict | list):
            # Of an anchor: what else is this mapping stays as it is.
            node[at] = copy(node[at])
        node = node[at]


def _key_in(node: Any, part: str, *, place: str) -> str | int:
    """Return by what a mapping, or a list, has a part of a key."""
    if isinstance(node, dict):
        return part
    if not isinstance(node, list):
        raise AstraflowError(Reason.INVALID_FIELD, f"{place}: has no keys to set '{part}' in")
    last = len(cast("list[Any]", node)) - 1
    if not part.isdecimal() or int(part) > last:
        raise AstraflowError(
            Reason.INVALID_FIELD, f"{place}.{part}: name an item by its number, 0 to {last}"
        )
    return int(part)


def _unknown_key(model: type[BaseModel], place: _Place) -> str:
    known, key = sorted(_keys_at(model, place[:-1])), str(place[-1])
    # A word of a key says more than letters in common: of stop, stop_strings and not top_p.
    near = [each for each in known if _has_words(each, key)]
    elsewhere = sorted(_places_of(key, model)) if not near else []
    if elsewhere:
        return f"unknown key here; there is {' and '.join(elsewhere)}"
    near = near or difflib.get_close_matches(key, known, 1, cutoff=0.65)
    if near:
        return f"unknown key; did you mean {' or '.join(map(repr, near))}?"
    return f"unknown key; known are {', '.join(known) or 'none'}"


def _has_words(known: str, key: str) -> bool:
    """Whether a key has the words of another, which may be cut short or of several: temp, steps."""
    parts = known.split("_")
    return all(
        any(part == word or (len(word) > 2 and part.startswith(word)) for part in parts)
        for word in (each.removesuffix("s") for each in key.split("_"))
    )


def _places_of(key: str, annotation: Any, place: str = "") -> Iterator[str]:
    """Yield where a model, or one inside it, has a key; NAME stands for names of the user's."""
    found = _model_in(annotation)
    if found is None:
        items = _items_of(annotation)
        if items is not None:
            yield from _places_of(key, items, f"{place}NAME.")
        return
    for name, each in found.model_fields.items():
        if name == key:
            yield place + name
        yield from _places_of(key, each.annotation, f"{place}{name}.")


def _keys_at(model: type[BaseModel], place: _Place) -> set[str]:
    """Return the keys of the model that lies at a place below another."""
    annotation: Any = model
    for part in place:
        inner = _model_in(annotation)
        if inner is not None:
            annotation = inner.model_fields[str(part)].annotation
        elif get_origin(annotation) in (Union, UnionType):
            # The problem names the form that was tried, such as tuple[Model, ...].
            form = str(part).partition("[")[0]
            forms = {
                getattr(get_origin(each), "__name__", ""): each for each in get_args(annotation)
            }
            annotation = forms.get(form)
        else:
            annotation = _items_of(annotation)
    found = _model_in(annotation)
    return set(found.model_fields) if found else set()


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model that an annotation is, or may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (dict, tuple, list):
        return None
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _items_of(annotation: Any) -> Any:
    """Return what a mapping or a sequence holds."""
    origin = get_origin(annotation)
    if origin is dict:
        return get_args(annotation)[1]
    if origin in (tuple, list, Annotated):
        return get_args(annotation)[0]
    return None


def _resolved(value: Any, folder: Path) -> Any:
    """Return the value with every path in its models made absolute; `~` is the home."""
    if isinstance(value, Path):
        try:
            return folder / value.expanduser()
        except RuntimeError as error:
            raise AstraflowError(
                Reason.INVALID_FIELD, f"{value}: there is no such home; give the whole path"
            ) from error
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        return value.model_copy(
            update={name: _resolved(getattr(value, name), folder) for name in fields}
        )
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        return {key: _resolved(item, folder) for key, item in items.items()}
    if isinstance(value, tuple):
        return tuple(_resolved(item, folder) for item in cast("tuple[Any, ...]", value))
    return value
