"""Inbox: says where the body of each frame goes, and what it then means."""

import time
from collections.abc import AsyncGenerator, Callable
from typing import Final

from astraflow.core.errors import AstraflowError, Reason
from astraflow.transport.arenas import Arena
from astraflow.transport.assembly import Assembly
from astraflow.transport.frames import (
    MAX_PLAN_NBYTES,
    Frame,
    FrameKind,
    bad_frame,
    read_failure,
    read_plan,
)
from astraflow.wire.transfers import SentItem, TransferPlan

_MAX_FAILURE_NBYTES: Final = 1 << 16


class Inbox:
    """Receives the frames of one transfer for any lane.

    Attributes:
        since_s: When the first bytes came, by the monotonic clock; None: none have.
    """

    def __init__(
        self,
        *,
        stall_timeout_s: float,
        on_pressure: Callable[[bool], None] = lambda _: None,
        on_plan: Callable[[TransferPlan], Arena | None] = lambda _: None,
    ) -> None:
        """Start empty.

        Args:
            stall_timeout_s: A source that sends nothing for so long is given up.
            on_pressure: See Assembly.
            on_plan: Called with the plan; returns where payloads will lie, None: in frames.
        """
        self._assembly = Assembly(stall_timeout_s=stall_timeout_s, on_pressure=on_pressure)
        self._on_plan = on_plan
        self._arena: Arena | None = None
        self.since_s: float | None = None
        self._plan_body = memoryview(b"")
        self._plan_missing = 0

    @property
    def is_over(self) -> bool:
        """Whether all that was planned has arrived."""
        return self._assembly.is_over

    def take_plan(self, plan: TransferPlan) -> None:
        """Take the plan.

        Raises:
            AstraflowError: CHUNK_INVALID.
        """
        self._assembly.take_plan(plan)
        self._arena = self._on_plan(plan)

    def place(self, frame: Frame) -> memoryview:
        """Return where the body of a frame goes.

        Raises:
            AstraflowError: CHUNK_INVALID.
        """
        match frame.kind:
            case FrameKind.CHUNK if self._arena is not None:
                return _empty(frame)
            case FrameKind.CHUNK:
                return self._assembly.place(frame)
            case FrameKind.PLAN:
                return self._place_plan(frame)
            case FrameKind.WAITING:
                return _empty(frame)
            case FrameKind.FAILURE if frame.body_nbytes <= _MAX_FAILURE_NBYTES:
                return memoryview(bytearray(frame.body_nbytes))
            case _:
                raise bad_frame(f"a {frame.kind.name} is not for a puller")

    def filled(self, frame: Frame, body: memoryview) -> None:
        """Take a frame whose body has arrived in its place.

        Raises:
            AstraflowError: CHUNK_INVALID.
        """
        match frame.kind:
            case FrameKind.CHUNK if self._arena is not None:
                payload = self._arena.payload(frame.body_offset, frame.payload_nbytes)
                self._assembly.take_whole(frame, payload)
            case FrameKind.CHUNK:
                self._assembly.filled(frame)
            case FrameKind.PLAN:
                self._filled_plan(frame)
            case FrameKind.WAITING:
                self._assembly.wait_longer()
            case _:
                self.fail(read_failure(bytes(body)))

    def touch(self) -> None:
        """Note that bytes arrived."""
        if self.since_s is None:
            self.since_s = time.monotonic()
        self._assembly.touch()

    def fail(self, error: AstraflowError) -> None:
        """End the transfer."""
        self._assembly.fail(error)

    async def planned(self) -> None:
        """Return once the plan is known, or the source waits for it; see Assembly."""
        await self._assembly.planned()

    def items(self) -> AsyncGenerator[SentItem]:
        """Yield the plan, then its chunks, Waiting between them; see Assembly."""
        return self._assembly.items()

    def _place_plan(self, frame: Frame) -> memoryview:
        if not self._plan_body and 0 < frame.payload_nbytes <= MAX_PLAN_NBYTES:
            self._plan_body = memoryview(bytearray(frame.payload_nbytes))
            self._plan_missing = frame.payload_nbytes
        end = frame.body_offset + frame.body_nbytes
        if end > len(self._plan_body) or not 0 < frame.body_nbytes <= self._plan_missing:
            raise bad_frame("a plan has other sizes than it said")
        return self._plan_body[frame.body_offset : end]

    def _filled_plan(self, frame: Frame) -> None:
        self._plan_missing -= frame.body_nbytes
        if not self._plan_missing:
            self.take_plan(read_plan(bytes(self._plan_body)))


def _empty(frame: Frame) -> memoryview:
    if frame.body_nbytes:
        raise bad_frame("there is nothing behind its header")
    return memoryview(b"")


def source_lost(why: str) -> AstraflowError:
    """Return the error of a source that is gone in mid-transfer."""
    return AstraflowError(Reason.SOURCE_UNREACHABLE, why, retryable=True)
