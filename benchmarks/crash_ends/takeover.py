"""A run whose hub is lost with its host: another hub, on this host, goes on with it.

The journal is in PostgreSQL. The first hub's host is a network namespace, whose cable is cut while
the hub in it goes on; where none can be made, the hub is killed.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from astraflow.config.loader import dump_recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.rollouts import Disposition
from astraflow.dataflow.main import JOIN_TOKEN, OPERATOR_TOKEN
from astraflow.storage.postgres import Place, PostgresReader
from crash_ends.archive import Archive
from crash_ends.nursery import Nursery, lent_nursery
from crash_ends.postgres import free_port, postgres_server
from crash_ends.scene import JOIN, OPERATOR, Scene, allow, notes, set_scene
from crash_ends.verdict import Verdict, judge
from link.hosts import Host, bring_up, make_host, remove_host
from link.needs import LinkUnavailableError, ip

# Another net for each process: several may run at once.
_NET: Final = f"10.{200 + os.getpid() // 250 % 50}.{1 + os.getpid() % 250}"
_HERE: Final = f"{_NET}.1"
_THERE: Final = f"{_NET}.2"
_CABLE: Final = f"afto{os.getpid()}"[:15]
_SCHEMA: Final = "run"
_LIMIT_S: Final = 200.0
# So many steps are done when the host is lost.
_BEFORE: Final = 20
_STEP_COUNT: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    """What came of one run; times count from the loss.

    Attributes:
        serving_s: Seconds until the second hub listened.
        served_s: Seconds until a member had an answer of it.
        first_code: Exit code of the first hub; None: it was killed.
        untrained: Rollouts that were accepted before the loss and neither trained on nor dropped
            as too old, by the journal.
        verdict: Of members and journal.
    """

    serving_s: float
    served_s: float
    first_code: int | None
    untrained: tuple[str, ...]
    verdict: Verdict


@contextmanager
def host_behind_cable() -> Generator[Host]:
    """Make a host that is joined to this one by one cable.

    Raises:
        LinkUnavailableError: The system refuses.
    """
    host = make_host(number=0, end="far", address=_THERE)
    try:
        ip(
            *("link", "add", _CABLE, "type", "veth"),
            *("peer", "name", "wan0", "netns", host.namespace),
        )
        ip("addr", "add", f"{_HERE}/24", "dev", _CABLE)
        ip("link", "set", _CABLE, "up")
        # Without the cable there is no other way, such as one to a proxy that answers for anybody.
        ip("route", "add", "unreachable", f"{_NET}.0/24", "metric", "9000")
        bring_up(host, mtu=1500)
        yield host
    finally:
        # With its namespace it would go some time later.
        with suppress(LinkUnavailableError):
            ip("route", "del", "unreachable", f"{_NET}.0/24", "metric", "9000")
        with suppress(LinkUnavailableError):
            ip("link", "del", _CABLE)
        remove_host(host.namespace)


def take_over(root: Path, *, cuts: bool, lease_s: float = 5.0) -> Takeover:
    """Play a run, lose its hub, and judge the run in the end.

    Args:
        root: Gets everything; made.
        cuts: Cut the cable of the hub's host, which needs root; else the hub is killed.
        lease_s: Of the journal.

    Raises:
        FileNotFoundError: PostgreSQL is missing.
        LinkUnavailableError: The system refuses a namespace.
        TimeoutError: The run does not get on.
    """
    with ExitStack() as exits:
        host = exits.enter_context(host_behind_cable()) if cuts else None
        here, there = (_HERE, _THERE) if host else ("127.0.0.1", "127.0.0.1")
        url = exits.enter_context(postgres_server(here))
        addresses = f"{there}:{free_port()}", f"{here}:{free_port()}"
        journal = {"kind": "postgres", "url": url, "schema_name": _SCHEMA, "lease_s": lease_s}
        settings: dict[str, object] = {
            **{f"hub.journal.{key}": value for key, value in journal.items()},
            "hub.advertise": ",".join(addresses),
        }
        scene = set_scene(
            root,
            step_count=_STEP_COUNT,
            compact_nbytes=1 << 28,
            more=settings,
        )
        nursery = exits.enter_context(lent_nursery("crash_ends.roles"))
        return _Play(scene, nursery, exits, host=host).run(
            addresses, Place(url=url, schema=_SCHEMA)
        )


class _Play:
    def __init__(
        self, scene: Scene, nursery: Nursery, exits: ExitStack, *, host: Host | None
    ) -> None:
        self._scene = scene
        self._nursery = nursery
        self._exits = exits
        self._host = host
        self._members: dict[str, int] = {}

    def run(self, addresses: tuple[str, str], place: Place) -> Takeover:
        """Play it."""
        second_dir = RunDir(self._scene.root / "second")
        first = self._hub("first", self._scene.run_dir, addresses[0], self._host)
        _wait(self._scene.run_dir.endpoint.exists, "the first hub serves")
        second = self._hub("second", second_dir, addresses[1], None, "--standby")
        _wait(lambda: "waiting" in self._words("second"), "the second hub waits")
        allow(self._scene, _BEFORE)
        for name, role in (("trainer", "trainer"), ("node-1", "node"), ("node-2", "node")):
            self._members[name] = self._nursery.start(role, str(self._scene.root), name)
        _wait(lambda: len(notes(self._scene.trained)) >= _BEFORE, "steps are done")
        lost_s = time.monotonic()
        if self._host is None:
            first.kill()
        else:
            ip("link", "set", _CABLE, "down")
        # What was on its way when the host was lost has arrived or never will.
        before = notes(self._scene.acked)
        allow(self._scene, _STEP_COUNT)
        _wait(second_dir.endpoint.exists, "the second hub serves")
        serving_s = time.monotonic() - lost_s
        _wait(lambda: len(notes(self._scene.acked)) > len(before), "a member is answered")
        served_s = time.monotonic() - lost_s
        _wait(lambda: second.poll() is not None, "the run ends")
        if second.returncode:
            raise RuntimeError(f"the second hub failed: {self._words('second')}")
        trainer = self._members["trainer"]
        _wait(lambda: self._nursery.exit_code(trainer) is not None, "the trainer ends")
        if self._host is not None:
            _wait(lambda: first.poll() is not None, "the first hub gives up")
        trained = {name for row in notes(self._scene.trained) for name in row.get("rollouts", ())}
        accepted = {
            row["id"]
            for row in before
            if "/" in row["id"] and row["disposition"] == Disposition.ACCEPTED
        }
        archive = Archive(self._scene.run_dir.journal)
        archive.records += asyncio.run(_records(place))
        verdict = judge(self._scene, archive, step_count=_STEP_COUNT)
        return Takeover(
            serving_s=round(serving_s, 2),
            served_s=round(served_s, 2),
            first_code=None if self._host is None else first.poll(),
            untrained=tuple(sorted(accepted - trained - {*verdict.stale})),
            verdict=verdict,
        )

    def _hub(
        self, name: str, run_dir: RunDir, listen: str, host: Host | None, *options: str
    ) -> subprocess.Popen[bytes]:
        recipe = self._scene.root / "recipe.yaml"
        recipe.write_text(dump_recipe(self._scene.read_recipe()))
        words: Sequence[str] = [
            *(sys.executable, "-m", "astraflow", "dataflow", "serve", str(recipe)),
            *("--listen", listen, "--run-dir", str(run_dir.root), *options),
        ]
        environment = os.environ | {JOIN_TOKEN: JOIN, OPERATOR_TOKEN: OPERATOR}
        path = self._scene.log(name)
        path.parent.mkdir(exist_ok=True)
        with path.open("w") as log:
            command = words if host is None else host.command(words)
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self._exits.callback(_end, process)
        return process

    def _words(self, name: str) -> str:
        return self._scene.log(name).read_text()


async def _records(place: Place) -> list[bytes]:
    reader = PostgresReader(place)
    try:
        return list(await reader.read(0, limit=reader.end))
    finally:
        reader.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _wait(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not after {_LIMIT_S:g} s")
        time.sleep(0.01)
