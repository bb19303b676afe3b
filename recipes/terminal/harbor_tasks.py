"""Harbor's task folders as rows: a row holds all files of a task, so that any node can run it.

    python recipes/terminal/harbor_tasks.py TASKS --out tasks.jsonl

TASKS is a folder of task folders, each with task.toml, instruction.md, environment/Dockerfile and
tests/test.sh, which writes a number to /logs/verifier/reward.txt.
"""

import argparse
import base64
import json
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

NEEDED = ("task.toml", "instruction.md", "tests/test.sh")
MAX_TASK_NBYTES = 4 * 2**20
_IGNORED = {"FROM", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "USER", "SHELL", "MAINTAINER"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task.

    Attributes:
        name: Of its folder.
        instruction: What the agent is asked to do.
        files: Content by path below the folder.
        agent_s: Seconds that the agent may take; None: the task does not say.
        verifier_s: Seconds that its tests may take.
    """

    name: str
    instruction: str
    files: Mapping[str, bytes]
    agent_s: float | None
    verifier_s: float

    def below(self, folder: str) -> dict[str, bytes]:
        """Return the files of one of its folders, by their paths in that."""
        start = f"{folder}/"
        return {
            path.removeprefix(start): data
            for path, data in self.files.items()
            if path.startswith(start)
        }


@dataclass(slots=True, kw_only=True)
class Build:
    """What a Dockerfile does, after its base image.

    Attributes:
        workdir: Where commands run in the end.
        env: Variables.
        steps: What is copied, (path, content), and commands with their folders.
    """

    workdir: str = "/app"
    env: dict[str, str] = field(default_factory=dict)
    steps: list[tuple[str, bytes] | tuple[str, str]] = field(default_factory=list)


def read_task(folder: Path) -> Task:
    """Read a task folder.

    Raises:
        ValueError: It is none; says what is missing or wrong.
    """
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} is no Harbor task: there is no {', '.join(missing)}")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    size = sum(path.stat().st_size for path in paths)
    if size > MAX_TASK_NBYTES:
        raise ValueError(f"{folder} has {size:,} bytes, more than {MAX_TASK_NBYTES:,}")
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    return task_of(folder.name, files)


def task_of(name: str, files: Mapping[str, bytes]) -> Task:
    """Return a task from its files.

    Raises:
        ValueError: task.toml is wrong.
    """
    try:
        told = tomllib.loads(files["task.toml"].decode())
        agent_s = told.get("agent", {}).get("timeout_sec")
        verifier_s = told.get("verifier", {}).get("timeout_sec", 600.0)
        return Task(
            name=name,
            instruction=files["instruction.md"].decode().strip(),
            files=files,
            agent_s=None if agent_s is None else float(agent_s),
            verifier_s=float(verifier_s),
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"task {name}: {error!r}") from error


def row_of(task: Task) -> dict[str, Any]:
    """Return a task as a row; files that are no text are in base64."""
    files: dict[str, Any] = {}
    for path, data in task.files.items():
        try:
            files[path] = data.decode()
        except UnicodeDecodeError:
            files[path] = {"base64": base64.b64encode(data).decode()}
    return {"id": task.name, "instruction": task.instruction, "files": files}


def task_of_row(row: Mapping[str, Any]) -> Task:
    """Return the task that a row holds.

    Raises:
        ValueError: It holds none.
    """
    said = row.get("files")
    if not isinstance(said, Mapping):
        raise ValueError("the row has no files; see harbor_tasks.py")  # noqa: TRY004 - of data
    files = {
        path: each.encode() if isinstance(each, str) else base64.b64decode(each["base64"])
        for path, each in said.items()
    }
    return task_of(str(row.get("id", "")), files)


def build_of(task: Task) -> Build:
    """Read what of a Dockerfile a sandbox can do: WORKDIR, ENV, COPY, ADD and RUN.

    Raises:
        ValueError: It does something else; says what.
    """
    build, context = Build(), task.below("environment")
    for line in _lines(context.get("Dockerfile", b"").decode()):
        word, _, rest = line.partition(" ")
        match word.upper():
            case "WORKDIR":
                build.workdir = str(PurePosixPath(build.workdir) / rest.strip())
            case "ENV":
                pairs = shlex.split(rest)
                if "=" not in pairs[0]:
                    pairs = [f"{pairs[0]}={' '.join(pairs[1:])}"]
                build.env.update(pair.split("=", 1) for pair in pairs)
            case "COPY" | "ADD":
                build.steps.extend(_copied(rest, context, build.workdir))
            case "RUN":
                build.steps.append((build.workdir, rest))
            case other if other in _IGNORED:
                pass
            case other:
                raise ValueError(f"task {task.name}: a sandbox knows no {other} of a Dockerfile")
    return build


def _lines(text: str) -> Iterator[str]:
    joined = text.replace("\\\n", " ")
    lines = (line.strip() for line in joined.splitlines())
    return (line for line in lines if line and not line.startswith("#"))


def _copied(rest: str, context: Mapping[str, bytes], workdir: str) -> Iterator[tuple[str, bytes]]:
    *sources, target = (word for word in shlex.split(rest) if not word.startswith("--"))
    place = PurePosixPath(workdir) / target
    for source in sources:
        name = str(PurePosixPath(source)).strip("/")
        if name in context:
            is_folder = target.endswith(("/", ".")) or len(sources) > 1
            yield str(place / PurePosixPath(name).name if is_folder else place), context[name]
            continue
        start = "" if name in ("", ".") else f"{name}/"
        found = {path: data for path, data in context.items() if path.startswith(start)}
        found.pop("Dockerfile", None)
        if not found:
            raise ValueError(f"COPY {source}: there is no such file below environment/")
        yield from ((str(place / path.removeprefix(start)), each) for path, each in found.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="Write Harbor's task folders as rows.")
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    folders = sorted(path.parent for path in given.tasks.glob("*/task.toml"))
    if not folders:
        parser.error(f"there is no folder with a task.toml in {given.tasks}")
    rows = [json.dumps(row_of(read_task(folder))) for folder in folders]
    given.out.write_text("\n".join(rows) + "\n", "utf-8")
    print(f"{len(rows)} tasks in {given.out}")


if __name__ == "__main__":
    main()
