"""Pools: agents that stay, and serve one episode after the other."""

import asyncio
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.agents.door import AgentDoor
from astraflow.workflows.agents.served import agent_failed
from astraflow.workflows.agents.session import AgentSession, Ending
from astraflow.workflows.kept.program import Limits, Program


@dataclass(slots=True, kw_only=True, eq=False)
class _Seat:
    """A place for one process of the pool.

    Attributes:
        lane: On which it asks for episodes.
        folder: Gets what it prints.
        program: That runs; None: it is started with the next episode.
    """

    folder: tempfile.TemporaryDirectory[str] | None = None
    lane: str = field(default_factory=lambda: secrets.token_hex(8))
    program: Program | None = None


class AgentPool:
    """Some processes of one program; each has one episode at a time."""

    def __init__(
        self, command: Sequence[str], *, count: int, env: Mapping[str, str], limits: Limits
    ) -> None:
        """Prepare; a process is started when an episode needs it, and stays.

        Args:
            command: The program and its arguments.
            count: Processes at most.
            env: Of each.
            limits: Of each.
        """
        self._command = tuple(command)
        self._count = count
        self._env = env
        self._limits = limits
        self._free: asyncio.LifoQueue[_Seat] | None = None

    async def serve(self, session: AgentSession, *, time_s: float) -> Ending:
        """Hand an open session to a free process and wait until it is ended.

        A process that takes longer, dies, or whose episode is withdrawn is replaced.

        Raises:
            AstraflowError: ENVIRONMENT_FAILED when the process died, ROLLOUT_TIMEOUT.
        """
        free = self._seats()
        seat = await free.get()
        try:
            return await self._served(seat, session, time_s)
        except BaseException:
            await self._clear(seat)
            raise
        finally:
            free.put_nowait(seat)

    def _seats(self) -> "asyncio.LifoQueue[_Seat]":
        if self._free is None:
            self._free = asyncio.LifoQueue()
            for _ in range(self._count):
                self._free.put_nowait(_Seat())
        return self._free

    async def _served(self, seat: _Seat, session: AgentSession, time_s: float) -> Ending:
        door = session.episode.door
        program = seat.program or await self._start(seat, door)
        door.offer(session, seat.lane)
        dying = asyncio.ensure_future(program.fate())
        ending = asyncio.ensure_future(session.ended())
        try:
            await asyncio.wait({dying, ending}, timeout=time_s, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return ending.result()
            if dying.done():
                raise agent_failed(f"the agent died: {dying.result()}")
            raise AstraflowError(
                Reason.ROLLOUT_TIMEOUT,
                f"the agent took longer than {time_s:g} s (options.time_s)",
                retryable=True,
            )
        finally:
            dying.cancel()
            ending.cancel()

    async def _start(self, seat: _Seat, door: AgentDoor) -> Program:
        queue = await door.queue(seat.lane)
        seat.folder = tempfile.TemporaryDirectory(prefix="astraflow-agent-")
        told = {"ASTRAFLOW_TAKE_URL": queue.url, "ASTRAFLOW_TAKE_TOKEN": queue.token}
        seat.program = await Program.start(
            self._command,
            limits=self._limits,
            folder=Path(seat.folder.name),
            env={**self._env, **told},
        )
        door.at_close(partial(self._clear, seat))
        return seat.program

    async def _clear(self, seat: _Seat) -> None:
        program, seat.program = seat.program, None
        seat.lane = secrets.token_hex(8)
        folder, seat.folder = seat.folder, None
        if program is not None:
            await program.stop()
        if folder is not None:
            folder.cleanup()
