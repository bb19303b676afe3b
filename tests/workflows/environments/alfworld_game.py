"""Writes a game of ALFWorld, for the interpreter that has it: `alfworld_game.py FOLDER`.

A kitchen of four receptacles and three things; the task is to put an apple into the fridge.
"""

import json
import sys
from pathlib import Path

import alfworld

DATA = Path(alfworld.__file__).parent / "data"
PLACES = ["Cabinet", "CounterTop", "Fridge", "GarbageCan"]
THINGS = {"Apple": "CounterTop", "Mug": "Cabinet", "Knife": "GarbageCan"}


def place_id(name):
    return f"{name}_bar__plus_0{PLACES.index(name)}_dot_0_bar__plus_00_dot_0_bar__plus_00_dot_0"


def thing_id(name):
    return (
        f"{name}_bar__plus_0{list(THINGS).index(name)}_dot_0_bar__plus_01_dot_0_bar__plus_00_dot_0"
    )


def location(number):
    return f"loc_bar_{number}_bar_1_bar_0_bar_30"


def problem():
    objects = ["agent1 - agent"]
    objects += [f"{name}Type - otype" for name in THINGS]
    objects += [f"{name}Type - rtype" for name in PLACES]
    objects += [f"{thing_id(name)} - object" for name in THINGS]
    objects += [f"{place_id(name)} - receptacle" for name in PLACES]
    objects += [f"{location(number)} - location" for number in range(len(PLACES) + 1)]
    facts = []
    for number, place in enumerate(PLACES):
        facts += [
            f"(receptacleAtLocation {place_id(place)} {location(number)})",
            f"(receptacleType {place_id(place)} {place}Type)",
        ]
        if place in ("Cabinet", "Fridge"):
            facts.append(f"(openable {place_id(place)})")
        facts += [f"(canContain {place}Type {thing}Type)" for thing in THINGS]
    for thing, place in THINGS.items():
        facts += [
            f"(objectType {thing_id(thing)} {thing}Type)",
            f"(pickupable {thing_id(thing)})",
            f"(inReceptacle {thing_id(thing)} {place_id(place)})",
            f"(wasInReceptacle {thing_id(thing)} {place_id(place)})",
            f"(objectAtLocation {thing_id(thing)} {location(PLACES.index(place))})",
        ]
    facts += [f"(atLocation agent1 {location(len(PLACES))})", "(= (total-cost) 0)"]
    goal = (
        "(exists (?r - receptacle) (exists (?o - object) (and (inReceptacle ?o ?r) "
        "(objectType ?o AppleType) (receptacleType ?r FridgeType))))"
    )
    return (
        "(define (problem plan_trial)\n(:domain alfred)\n(:objects\n{}\n)\n"
        "(:init\n{}\n)\n(:goal (and {}))\n)\n"
    ).format("\n".join(objects), "\n".join(facts), goal)


def main():
    grammar = (DATA / "alfred.twl2").read_text()
    game = {
        "pddl_domain": (DATA / "alfred.pddl").read_text(),
        "grammar": grammar.replace("UNKNOWN GOAL", "put a apple in fridge"),
        "pddl_problem": problem(),
        "solvable": True,
        "walkthrough": None,
    }
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    (folder / "game.tw-pddl").write_text(json.dumps(game))


main()
