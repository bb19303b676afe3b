"""A run of real processes that are killed, one after the other, until nobody is left to be."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from astraflow.storage.fault_points import FaultPoint
from crash_ends.archive import Archive
from crash_ends.disk import small_disk
from crash_ends.kills import BESIDE, COMPACTING, Kill, Victim
from crash_ends.nursery import Nursery, lent_nursery
from crash_ends.scene import Scene, allow, replace_with, set_scene
from crash_ends.verdict import Verdict, judge

_LOOK_S: Final = 0.01
_DISK_STEPS: Final = 100
_PLACE_S: Final = 100.0
_END_S: Final = 200.0
# How fast the trainer gets on while one kill is on its way.
_STEP_EVERY_S: Final = 0.04


@dataclass(slots=True, kw_only=True)
class Report:
    """What came of one run.

    Attributes:
        kills: How many of which.
        missed: Places that were not reached in time; the process was killed where it was.
        verdict: Of members and journal.
        seconds: From the first process to the last.
    """

    kills: Counter[str] = field(default_factory=Counter[str])
    missed: Counter[str] = field(default_factory=Counter[str])
    verdict: Verdict
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FullDisk:
    """What came of a run on a disk that was full.

    Attributes:
        exit_codes: Of the hub, and of the one that was started before there was room.
        last_words: What both said.
        verdict: Of members and journal.
    """

    exit_codes: tuple[int, int]
    last_words: tuple[str, ...]
    verdict: Verdict


def crash_run(
    root: Path,
    kills: Sequence[Kill],
    *,
    chance: Random,
    compact_nbytes: int = 1 << 28,
    has_payloads: bool = False,
) -> Report:
    """Play a run with its kills, and judge it.

    Args:
        root: Gets everything; made.
        kills: In order.
        chance: Chooses the node that is killed.
        compact_nbytes: Of the journal.
        has_payloads: Whether rollouts go by way of a payload store.

    Raises:
        TimeoutError: It does not get on; the message says who is left.
    """
    step_count = sum(_steps_of(kill) for kill in kills) + 12
    scene = set_scene(
        root, step_count=step_count, compact_nbytes=compact_nbytes, has_payloads=has_payloads
    )
    started = time.monotonic()
    with lent_nursery("crash_ends.roles") as nursery:
        company = Company(scene, nursery, chance=chance, step_count=step_count)
        company.play(kills)
    return Report(
        kills=company.kills,
        missed=company.missed,
        verdict=judge(scene, company.archive, step_count=step_count),
        seconds=time.monotonic() - started,
    )


def full_disk_run(root: Path, *, nbytes: int = 1 << 20, room_nbytes: int = 1 << 26) -> FullDisk:
    """Play a run whose hub runs out of disk, make room, and see the run to its end.

    Args:
        root: Gets everything; made.
        nbytes: Of the disk at first.
        room_nbytes: Of the disk then.

    Raises:
        PermissionError: This process may not mount a disk.
    """
    scene = set_scene(root, step_count=_DISK_STEPS, compact_nbytes=1 << 28)
    with (
        small_disk(scene.run_dir.root, nbytes=nbytes) as disk,
        lent_nursery("crash_ends.roles") as nursery,
    ):
        company = Company(scene, nursery, chance=Random(0), step_count=_DISK_STEPS)
        codes = company.run_out(lambda: disk.resize(room_nbytes))
        verdict = judge(scene, company.archive, step_count=_DISK_STEPS)
        words = [scene.log(f"hub-{number}").read_text() for number in (1, 2)]
    return FullDisk(exit_codes=codes, last_words=tuple(words), verdict=verdict)


class Company:
    """The processes of one run: a hub, two nodes, a trainer."""

    def __init__(self, scene: Scene, nursery: Nursery, *, chance: Random, step_count: int) -> None:
        self.kills = Counter[str]()
        self.missed = Counter[str]()
        self.archive = Archive(scene.run_dir.journal)
        self._scene = scene
        self._nursery = nursery
        self._chance = chance
        self._step_count = step_count
        self._pids: dict[str, int] = {}
        self._hub_number = 0
        self._node_count = 0
        self._allowed = 0
        self._bound = 0
        self._is_hub_to_fail = False
        self._moved_s = 0.0

    def play(self, kills: Sequence[Kill]) -> None:
        """Start everybody, kill as told, let the run end."""
        left = list(kills)
        self._begin()
        self._start_trainer()
        for _ in range(2):
            self._start_node()
        self._kill(Kill(victim=Victim.HUB, delay_s=0.1), _fault(left))
        while left:
            kill = left.pop(0)
            self._kill(kill, _fault(left))
        self._let_end()

    def _let_end(self) -> None:
        """Let the trainer do all its steps; wait until hub and trainer have ended."""
        self._allowed = self._step_count
        allow(self._scene, self._allowed)
        self._wait(self._is_over, "the run ends", limit_s=_END_S)
        # One whose session had ended does not get to know that the run is over.
        for name in self._nodes():
            self._strike(name)
        self._must_be_well(is_over=True)
        self.archive.catch_up()

    def run_out(self, make_room: Callable[[], None]) -> tuple[int, int]:
        """Let the hub come to the end of its disk twice, make room, let the run end."""
        self._bound = self._step_count - 1
        self._is_hub_to_fail = True
        self._start_hub("")
        self._wait(self._scene.run_dir.endpoint.exists, "the hub serves")
        self._start_trainer()
        for _ in range(2):
            self._start_node()
        first = self._failed_hub()
        self._start_hub("")
        second = self._failed_hub()
        make_room()
        self._is_hub_to_fail = False
        self._start_hub("")
        self._let_end()
        return first, second

    def _failed_hub(self) -> int:
        self._wait(self._hub_is_gone, "the disk is full")
        code = self._nursery.exit_code(self._pids.pop("hub"))
        return 0 if code is None else code

    def _begin(self) -> None:
        """Kill a hub as it begins the run, and let the next one get to work."""
        first = Kill(victim=Victim.HUB, point=FaultPoint.JOURNAL_COMMITTED)
        self._start_hub(_fault([first]))
        self._kill(first, "")
        self._wait(self._scene.run_dir.endpoint.exists, "the hub serves")

    def _kill(self, kill: Kill, fault: str) -> None:
        """Kill one and start its successor; a hub's successor is armed with the next fault."""
        self._bound += _steps_of(kill)
        if kill.victim is Victim.HUB:
            self._end_hub(kill)
            self._start_hub(fault)
        elif kill.victim is Victim.TRAINER:
            self._lapse(kill.delay_s)
            self._strike("trainer")
            self._start_trainer()
        else:
            self._lapse(kill.delay_s)
            self._strike(self._chance.choice(self._nodes()))
            self._start_node()
        self.kills[kill.name] += 1

    def _end_hub(self, kill: Kill) -> None:
        if kill.point is None:
            self._lapse(kill.delay_s)
        else:
            is_there = self._snapshot_failed if kill.point in BESIDE else self._hub_is_gone
            try:
                self._wait(is_there, str(kill.point))
            except TimeoutError:
                self.missed[kill.name] += 1
        self._strike("hub")

    def _hub_is_gone(self) -> bool:
        return self._nursery.exit_code(self._pids["hub"]) is not None

    def _is_over(self) -> bool:
        return not {"hub", "trainer"} & set(self._living())

    def _nodes(self) -> list[str]:
        return [name for name in self._pids if name.startswith("node")]

    def _living(self) -> list[str]:
        return [n for n, pid in self._pids.items() if self._nursery.exit_code(pid) is None]

    def _snapshot_failed(self) -> bool:
        """Whether the hub says that the process beside it died."""
        log = self._scene.log(self._hub_name)
        return log.exists() and "no snapshot" in log.read_text()

    def _strike(self, name: str) -> None:
        self._nursery.kill(self._pids.pop(name))

    def _lapse(self, seconds: float) -> None:
        due = time.monotonic() + seconds
        self._wait(lambda: time.monotonic() > due, "some time passes")

    def _wait(
        self,
        is_so: Callable[[], bool],
        what: str,
        *,
        limit_s: float = _PLACE_S,
    ) -> None:
        """Wait until something is so, and let the trainer go on meanwhile."""
        deadline = time.monotonic() + limit_s
        while not is_so():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not after {limit_s:g} s; alive: {self._living()}")
            self._must_be_well()
            self._let_go_on()
            time.sleep(_LOOK_S)

    def _let_go_on(self) -> None:
        now = time.monotonic()
        if now - self._moved_s < _STEP_EVERY_S:
            return
        self._moved_s = now
        self.archive.catch_up()
        replace_with(self._scene.copied, str(self.archive.end))
        if self._allowed < self._bound:
            self._allowed += 1
            allow(self._scene, self._allowed)

    def _start_hub(self, fault: str) -> None:
        self._hub_number += 1
        self._start("hub", "hub", self._hub_name, fault)

    @property
    def _hub_name(self) -> str:
        return f"hub-{self._hub_number}"

    def _start_node(self) -> None:
        self._node_count += 1
        name = f"node-{self._node_count}"
        self._start(name, "node", name)

    def _start_trainer(self) -> None:
        self._start("trainer", "trainer", "trainer")

    def _start(self, name: str, role: str, *arguments: str) -> None:
        self._pids[name] = self._nursery.start(role, str(self._scene.root), *arguments)

    def _must_be_well(self, *, is_over: bool = False) -> None:
        """Refuse an end that was not asked for; an armed hub may end at any time."""
        codes = {name: self._nursery.exit_code(pid) for name, pid in self._pids.items()}
        codes = {
            name: code
            for name, code in codes.items()
            if code and (is_over or name != "hub" or (code > 0 and not self._is_hub_to_fail))
        }
        if codes:
            raise RuntimeError(f"ended badly: {codes}; logs lie in {self._scene.root}")


def _steps_of(kill: Kill) -> int:
    """Return how many steps a kill takes at most; a snapshot needs time."""
    return 60 if kill.point in COMPACTING else 6 + int(kill.delay_s / _STEP_EVERY_S)


def _fault(left: Sequence[Kill]) -> str:
    """Return what the next hub is armed with."""
    kill = next((kill for kill in left if kill.victim is Victim.HUB), None)
    return "" if kill is None or kill.point is None else f"{kill.point}:{kill.count}"
