"""A run of real processes that are killed, one after the other, until nobody is left to be."""

import asyncio
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Final

from astraflow.dataflow.main import JOIN_TOKEN, OPERATOR_TOKEN, main_serve
from astraflow.storage.fault_points import VARIABLE, FaultPoint
from astraflow.telemetry.logging import configure_logging
from crash_ends.kills import BESIDE, Kill, Victim
from crash_ends.members import CountingTrainer, Node
from crash_ends.scene import JOIN, OPERATOR, Scene, allow, set_scene
from crash_ends.verdict import Verdict, judge

_CONTEXT: Final[ForkServerContext] = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["crash_ends.run"])

_LOOK_S: Final = 0.01
_STEPS_PER_KILL: Final = 6
_PLACE_S: Final = 20.0
_END_S: Final = 60.0
# Steps that a trainer may do while one kill is on its way.
_STEP_EVERY_S: Final = 0.02


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


def crash_run(
    root: Path, kills: Sequence[Kill], *, chance: Random, compact_nbytes: int = 1 << 28
) -> Report:
    """Play a run with its kills, and judge it.

    Args:
        root: Gets everything; made.
        kills: In order.
        chance: Chooses the node that is killed.
        compact_nbytes: Of the journal.

    Raises:
        TimeoutError: It does not get on; the message says who is left.
    """
    step_count = _STEPS_PER_KILL * len(kills) + 6
    scene = set_scene(root, step_count=step_count, compact_nbytes=compact_nbytes)
    company = Company(scene, chance=chance, step_count=step_count)
    started = time.monotonic()
    try:
        company.play(kills)
    finally:
        company.end()
    return Report(
        kills=company.kills,
        missed=company.missed,
        verdict=judge(scene, step_count=step_count),
        seconds=time.monotonic() - started,
    )


class Company:
    """The processes of one run: a hub, two nodes, a trainer."""

    def __init__(self, scene: Scene, *, chance: Random, step_count: int) -> None:
        self.kills = Counter[str]()
        self.missed = Counter[str]()
        self._scene = scene
        self._chance = chance
        self._step_count = step_count
        self._processes: dict[str, BaseProcess] = {}
        self._hub_number = 0
        self._node_count = 0
        self._allowed = 0
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
        allow(self._scene, self._step_count)
        everybody = self._processes.values()
        self._wait(lambda: not any(p.is_alive() for p in everybody), "the run ends", limit_s=_END_S)
        self._must_be_well(is_over=True)

    def _begin(self) -> None:
        """Kill a hub as it begins the run, and let the next one get to work."""
        first = Kill(victim=Victim.HUB, point=FaultPoint.JOURNAL_COMMITTED)
        self._start_hub(_fault([first]))
        self._kill(first, "")
        self._wait(self._scene.run_dir.endpoint.exists, "the hub serves")

    def end(self) -> None:
        """Leave no process behind."""
        for process in self._processes.values():
            process.kill()
            process.join()

    def _kill(self, kill: Kill, fault: str) -> None:
        """Kill one and start its successor; a hub's successor is armed with the next fault."""
        if kill.victim is Victim.HUB:
            self._end_hub(kill)
            self._start_hub(fault)
        elif kill.victim is Victim.TRAINER:
            self._lapse(kill.delay_s)
            self._strike("trainer")
            self._start_trainer()
        else:
            self._lapse(kill.delay_s)
            self._strike(self._chance.choice([n for n in self._processes if n.startswith("node")]))
            self._start_node()
        self.kills[kill.name] += 1

    def _end_hub(self, kill: Kill) -> None:
        hub = self._processes["hub"]
        if kill.point is None:
            self._lapse(kill.delay_s)
        else:
            is_there = self._snapshot_failed if kill.point in BESIDE else lambda: not hub.is_alive()
            try:
                self._wait(is_there, str(kill.point))
            except TimeoutError:
                self.missed[kill.name] += 1
        self._strike("hub")

    def _snapshot_failed(self) -> bool:
        """Whether the hub says that the process beside it died."""
        return "no snapshot" in self._scene.log(self._hub_log).read_text()

    def _strike(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.join()

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
                alive = [name for name, each in self._processes.items() if each.is_alive()]
                raise TimeoutError(f"{what}: not after {limit_s:g} s; alive: {alive}")
            self._must_be_well()
            self._let_go_on()
            time.sleep(_LOOK_S)

    def _let_go_on(self) -> None:
        now = time.monotonic()
        if now - self._moved_s >= _STEP_EVERY_S and self._allowed < self._step_count - 1:
            self._moved_s = now
            self._allowed += 1
            allow(self._scene, self._allowed)

    def _start_hub(self, fault: str) -> None:
        self._hub_number += 1
        self._start("hub", _hub, fault, log=self._hub_log)

    @property
    def _hub_log(self) -> str:
        return f"hub-{self._hub_number}"

    def _start_node(self) -> None:
        self._node_count += 1
        name = f"node-{self._node_count}"
        self._start(name, _node, name)

    def _start_trainer(self) -> None:
        self._start("trainer", _trainer)

    def _start(self, name: str, target: Callable[..., None], *arguments: str, log: str = "") -> None:
        process = _CONTEXT.Process(
            target=_logged, args=(self._scene, log or name, target, *arguments), daemon=True
        )
        process.start()
        self._processes[name] = process

    def _must_be_well(self, *, is_over: bool = False) -> None:
        """Refuse an end that was not asked for; an armed hub may end at any time."""
        codes = {
            name: each.exitcode
            for name, each in self._processes.items()
            if each.exitcode and (is_over or name != "hub" or each.exitcode > 0)
        }
        if codes:
            raise RuntimeError(f"ended badly: {codes}; logs lie in {self._scene.root}")


def _fault(left: Sequence[Kill]) -> str:
    """Return what the next hub is armed with."""
    kill = next((kill for kill in left if kill.victim is Victim.HUB), None)
    return "" if kill is None or kill.point is None else f"{kill.point}:{kill.count}"


def _logged(scene: Scene, name: str, target: Callable[..., None], *arguments: str) -> None:
    configure_logging(name, log_file=scene.log(name), level="warning")
    logging.captureWarnings(capture=True)
    target(scene, *arguments)


def _hub(scene: Scene, fault: str) -> None:
    settings: Mapping[str, str] = {JOIN_TOKEN: JOIN, OPERATOR_TOKEN: OPERATOR, VARIABLE: fault}
    os.environ.update(settings)
    raise SystemExit(main_serve(scene.read_recipe(), run_dir=scene.run_dir.root))


def _node(scene: Scene, name: str) -> None:
    asyncio.run(Node(scene, name).run())


def _trainer(scene: Scene) -> None:
    CountingTrainer(scene).run()
