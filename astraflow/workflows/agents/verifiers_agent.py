"""The agent of a verifiers environment: asks a node for episodes, lets the environment run them.

A script of its own, `python verifiers_agent.py ENVIRONMENT ARGUMENTS [--rows SPLIT]`, for the
interpreter that has verifiers: nothing of astraflow is imported, and verifiers only by the release
that is there. With --rows it writes the rows of the data set as lines of JSON, and ends.
"""

import asyncio
import http.client
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_KEY_VARIABLE = "VERIFIERS_AGENT_KEY"
_SHOWN_CHARS = 400


class VoidEpisodeError(Exception):
    """Nothing is to be trained on of an episode; it says why."""


class Taskset:
    """An environment of verifiers 0.2 or later: a taskset, and the program that plays it."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        v1: Any = import_module("verifiers.v1")
        taskset = {"id": name, **arguments.get("taskset", {})}
        config = v1.utils.loaders.resolve_env_config({**arguments, "taskset": taskset})
        self._env: Any = v1.load_environment(_here(config))
        self._coming = iter(self._env.taskset)
        self._seen: list[Any] = []

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield what describes each task; there are no splits."""
        del split
        if not self._env.taskset.bounded:
            raise SystemExit("the taskset is infinite; bound it by its arguments")
        for task in self._env.taskset:
            data = task.data.model_dump(mode="json", exclude_defaults=True)
            yield {**data, "id": task.key, "prompt": task.data.prompt_text}

    async def play(self, row: dict[str, Any], session: dict[str, Any]) -> dict[str, Any]:
        """Play one task; return what is reported of it: reward, parts, metrics.

        Raises:
            VoidEpisodeError: It went wrong, or has no one reward.
        """
        v1: Any = import_module("verifiers.v1")
        os.environ[_KEY_VARIABLE] = session["api_key"]
        client = v1.EvalClientConfig(base_url=session["base_url"], api_key_var=_KEY_VARIABLE)
        context = v1.ModelContext(model=session["models"][0], client=client)
        # Anew for each episode: it keeps a client for every address that it ever called.
        async with self._env.serving():
            episode = await self._env.run_episode(self._task(row), context)
        if not episode.ok:
            errors = [*episode.errors, *(error for one in episode.traces for error in one.errors)]
            raise VoidEpisodeError("; ".join(error.message for error in errors) or "it is not ok")
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        if len(trained) != 1:
            raise VoidEpisodeError(f"{len(trained)} agents are trainable; one reward is served")
        (trace,) = trained
        parts = {name: each.value for name, each in trace.rewards.items() if each is not None}
        return {"reward": trace.reward, "parts": parts, "metrics": _numbers(trace.metrics)}

    def _task(self, row: dict[str, Any]) -> Any:
        while len(self._seen) <= row["idx"]:
            self._seen.append(next(self._coming))
        task = self._seen[row["idx"]]
        if task.key != row["id"]:
            raise ValueError(f"task {row['idx']} is not that of the row; export the rows again")
        return task


def _here(config: Any) -> Any:
    """Let agents whose runtime nobody chose run on this machine: they live under a supervisor."""
    v1: Any = import_module("verifiers.v1")
    local = {
        name: agent.model_copy(update={"runtime": v1.SubprocessConfig()})
        for name, agent in v1.configs.agent.agent_config_fields(config).items()
        if "runtime" not in agent.model_fields_set
    }
    return config.model_copy(update=local)


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if value is not None}


class RowEnvironment:
    """An environment of verifiers 0.1: rows of a data set, a protocol and a rubric."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        verifiers: Any = import_module("verifiers")
        self._env: Any = verifiers.load_environment(name, **arguments)

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of a split, train or eval."""
        env = self._env
        for row in env.get_eval_dataset() if split == "eval" else env.get_dataset():
            yield {**row, "id": str(row["example_id"])}

    async def play(self, row: dict[str, Any], session: dict[str, Any]) -> dict[str, Any]:
        """Play one row; as `Taskset.play`."""
        verifiers: Any = import_module("verifiers")
        openai: Any = import_module("openai")
        url, key, model = session["base_url"], session["api_key"], session["models"][0]
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
            given = {name: value for name, value in row.items() if name != "id"}
            policy = verifiers.OpenAIChatCompletionsClient(client)
            done = await self._env.run_rollout(given, policy, model, {})
        if done.get("error"):
            raise VoidEpisodeError(json.dumps(done["error"], default=str))
        return {"reward": float(done["reward"]), "metrics": _numbers(done["metrics"] or {})}


def load(name: str, arguments: dict[str, Any]) -> Taskset | RowEnvironment:
    """Load an environment with the release that is here."""
    verifiers: Any = import_module("verifiers")
    return (
        RowEnvironment(name, arguments)
        if hasattr(verifiers, "load_environment")
        else Taskset(name, arguments)
    )


class RefusedError(Exception):
    """The node answered with an error; it says which."""


def post(url: str, body: dict[str, Any], key: str) -> Any:
    """Send JSON, and return what is answered; None: nothing is.

    Each over a connection of its own: an episode lasts longer than the node keeps an idle one.

    Raises:
        RefusedError: The node does not take it.
    """
    parts = urlsplit(url)
    path = f"{parts.path}?{parts.query}" if parts.query else parts.path
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    with closing(kinds[parts.scheme](parts.netloc)) as connection:
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        said = answer.read()
    if answer.status >= http.client.BAD_REQUEST:
        raise RefusedError(f"{path}: {answer.status} {said.decode('utf-8', 'replace')}")
    return json.loads(said) if said else None


def serve(environment: Taskset | RowEnvironment, session: dict[str, Any]) -> None:
    """Play one episode, and report what came of it."""
    key, url = session["api_key"], session["session_url"]
    failure = ""
    try:
        told = asyncio.get_event_loop().run_until_complete(
            environment.play(session["task"], session)
        )
        post(f"{url}/reward", told, key)
    except (VoidEpisodeError, RefusedError) as void:
        failure = str(void)
    except Exception as error:  # noqa: BLE001 - an environment raises anything
        failure = f"{type(error).__name__}: {error}"
    # One that is over already needs no end.
    with suppress(RefusedError):
        post(f"{url}/end", {"failure": failure[-_SHOWN_CHARS:]}, key)


def serve_all(environment: Taskset | RowEnvironment) -> None:
    """Serve the episode that the process was started for, or one after the other for ever."""
    url = os.environ.get("ASTRAFLOW_TAKE_URL")
    if url is None:
        session_url = os.environ["ASTRAFLOW_SESSION_URL"]
        session = json.loads(Path(os.environ["ASTRAFLOW_TASK_FILE"]).read_text("utf-8"))
        whole = {**session, "session_url": session_url, "base_url": f"{session_url}/v1"}
        serve(environment, whole)
        return
    while True:
        session = post(url, {}, os.environ["ASTRAFLOW_TAKE_TOKEN"])
        if session is not None:
            serve(environment, session)


def main() -> None:
    """Load the environment once, then do as it was asked."""
    rows_to = os.dup(1)
    # What an environment prints is no row.
    os.dup2(2, 1)
    asyncio.set_event_loop(asyncio.new_event_loop())
    # In place of this folder, which has modules of the names of packages.
    sys.path[0] = str(Path.cwd())
    environment = load(sys.argv[1], json.loads(sys.argv[2]))
    if sys.argv[3:4] != ["--rows"]:
        serve_all(environment)
        return
    with os.fdopen(rows_to, "w", encoding="utf-8") as file:
        for row in environment.rows(sys.argv[4]):
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


if __name__ == "__main__":
    main()
