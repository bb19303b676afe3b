"""Plays games in ALFWorld's engine, for the interpreter that has it.

`alfworld_engine.py GAMES FOLDER`.

GAMES is a JSON list of {thing, target, contents, openable, played: [[command, _], ...]}; what the
engine says to the same commands is printed in the same form.
"""

import json
import sys
from pathlib import Path

import alfworld
import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from textworld.envs import PddlEnv

DATA = Path(alfworld.__file__).parent / "data"


def capital(kind):
    return {"countertop": "CounterTop", "armchair": "ArmChair"}.get(kind, kind.title())


def place(kind, number):
    return f"{capital(kind)}_bar__plus_0{number}_dot_0_bar__plus_00_dot_0_bar__plus_00_dot_0"


def thing(kind, number):
    return f"{capital(kind)}_bar__plus_0{number}_dot_0_bar__plus_01_dot_0_bar__plus_00_dot_0"


def location(number):
    return f"loc_bar_{number}_bar_1_bar_0_bar_30"


def problem(game):
    contents = {name.split()[0]: inside for name, inside in game["contents"].items()}
    places = {kind: place(kind, number) for number, kind in enumerate(contents)}
    inside = {each.split()[0]: kind for kind, some in contents.items() for each in some}
    things = {kind: thing(kind, number) for number, kind in enumerate(inside)}
    objects = ["agent1 - agent"]
    objects += [f"{capital(kind)}Type - otype" for kind in things]
    objects += [f"{capital(kind)}Type - rtype" for kind in places]
    objects += [f"{name} - object" for name in things.values()]
    objects += [f"{name} - receptacle" for name in places.values()]
    objects += [f"{location(number)} - location" for number in range(len(places) + 1)]
    facts = []
    for number, (kind, name) in enumerate(places.items()):
        facts += [
            f"(receptacleAtLocation {name} {location(number)})",
            f"(receptacleType {name} {capital(kind)}Type)",
        ]
        if kind in game["openable"]:
            facts.append(f"(openable {name})")
        facts += [f"(canContain {capital(kind)}Type {capital(each)}Type)" for each in things]
    for kind, name in things.items():
        at = list(places).index(inside[kind])
        facts += [
            f"(objectType {name} {capital(kind)}Type)",
            f"(pickupable {name})",
            f"(inReceptacle {name} {places[inside[kind]]})",
            f"(wasInReceptacle {name} {places[inside[kind]]})",
            f"(objectAtLocation {name} {location(at)})",
        ]
    facts += [f"(atLocation agent1 {location(len(places))})", "(= (total-cost) 0)"]
    goal = (
        "(exists (?r - receptacle) (exists (?o - object) (and (inReceptacle ?o ?r) "
        f"(objectType ?o {capital(game['thing'])}Type) "
        f"(receptacleType ?r {capital(game['target'])}Type))))"
    )
    return (
        "(define (problem plan_trial)\n(:domain alfred)\n(:objects\n{}\n)\n"
        "(:init\n{}\n)\n(:goal (and {}))\n)\n"
    ).format("\n".join(objects), "\n".join(facts), goal)


def told(state, text):
    can = sorted(each for each in state["admissible_commands"] if each != "help")
    return f"{text.strip()}\nYou can: {', '.join(can)}"


def played(game, path):
    task = f"put a {game['thing']} in {game['target']}"
    parts = {
        "pddl_domain": (DATA / "alfred.pddl").read_text(),
        "grammar": (DATA / "alfred.twl2").read_text().replace("UNKNOWN GOAL", task),
        "pddl_problem": problem(game),
        "solvable": True,
        "walkthrough": None,
    }
    path.write_text(json.dumps(parts))
    infos = textworld.EnvInfos(admissible_commands=True, won=True)
    engine = AlfredDemangler(PddlEnv(infos), shuffle=False)
    engine.load(str(path))
    state = engine.reset()
    scene = state.feedback.partition("=-\n")[2].replace("\n\n", "\n")
    yield ["", told(state, scene)]
    for command, _ in game["played"][1:]:
        state, _, _ = engine.step(command)
        yield [command, told(state, state.feedback)]


games, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
said = [list(played(game, folder / "game.tw-pddl")) for game in games]
sys.stdout.write(json.dumps(said))
