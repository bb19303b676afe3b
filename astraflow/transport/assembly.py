"""Assembly: where the body of each frame goes, and chunks put together as the plan allows."""

import asyncio
import time
from bisect import bisect
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Final

import numpy as np

from astraflow.codec.chunks import Chunk, ChunkHeader
from astraflow.core.errors import AstraflowError, Reason
from astraflow.transport.frames import (
    MAX_PLAN_NBYTES,
    Frame,
    FrameKind,
    bad_frame,
    plan_nbytes,
    read_failure,
    read_plan,
    source_late,
)
from astraflow.wire.transfers import SentItem, TransferBound, TransferPlan, Waiting
from astraflow.wire.weights import SentChunk

UNPLANNED_NBYTES: Final = 64 << 20
"""What may arrive before the plan does, which takes its own connection."""

UNPLANNED_COUNT: Final = 1 << 16
"""How many chunks may."""

_HIGH_NBYTES: Final = 32 << 20
_NO_LIMIT: Final = 1 << 62
_MAX_FAILURE_NBYTES: Final = 1 << 16

# Of a part that does not end its chunk: noting it takes less than it brings.
_MIN_PART_NBYTES: Final = 4 << 10

_Key = tuple[int, int]

TakePayload = Callable[[int, int], memoryview]
"""Copies a payload out of memory that was lent: by its place there and its size."""

Lend = Callable[[TransferPlan], TakePayload | None]
"""Lends memory for the payloads of a plan; None: they are in the frames."""


class _Staged:
    """A chunk of which some bytes are here.

    Every byte is claimed once, by the connection that announces it. So when none is missing, nobody
    is left who may write.
    """

    __slots__ = ("_buffer", "_claimed", "header", "missing")

    def __init__(self, header: ChunkHeader) -> None:
        self.header = header
        # Not zeroed: a chunk is handed out when all its bytes came, and then verified.
        self._buffer = np.empty(header.payload_nbytes, np.uint8)
        # First and end of what was announced, rising.
        self._claimed: list[tuple[int, int]] = []
        self.missing = header.payload_nbytes

    def claim(self, first: int, nbytes: int) -> memoryview:
        """Return where bytes go, for who brings them alone."""
        end, size = first + nbytes, len(self._buffer)
        least = min(_MIN_PART_NBYTES, max(size - first, min(size, 1)))
        if end > size or nbytes < least:
            raise bad_frame("a part is too short, or longer than what its chunk has")
        at = bisect(self._claimed, (first, end))
        neighbours = self._claimed[max(at - 1, 0) : at + 1]
        if any(other_first < end and first < other_end for other_first, other_end in neighbours):
            raise bad_frame("two frames bring the same bytes of a chunk")
        self._claimed.insert(at, (first, end))
        return self._buffer.data[first:end]

    def frozen(self) -> memoryview:
        """Return the payload, which nobody can write to from now on."""
        self._buffer.flags.writeable = False
        return self._buffer.data


class FrameInbox:
    """Takes the frames of one transfer, from any number of connections, in any order.

    What it holds is bounded: by what the run registered, and by the plan's payload_nbytes and
    chunk_count, before the plan by 64 MiB. Whoever exceeds that, contradicts himself or repeats a
    chunk has lied (CHUNK_INVALID).

    Attributes:
        since_s: When the first bytes came, by the monotonic clock; None: none have.
    """

    def __init__(
        self,
        *,
        stall_timeout_s: float,
        on_pressure: Callable[[bool], None] = lambda _: None,
        on_plan: Lend = lambda _: None,
        bound: TransferBound | None = None,
    ) -> None:
        """Start empty.

        Args:
            stall_timeout_s: A source that sends nothing for so long is given up.
            on_pressure: Called with True when the reader is behind by 32 MiB of what is planned;
                False: it caught up.
            on_plan: Called with the plan.
            bound: By what the run registered; None: nothing of it is.
        """
        self.since_s: float | None = None
        self._plan: TransferPlan | None = None
        self._plan_body = memoryview(b"")
        self._plan_missing = 0
        self._max_plan_nbytes = MAX_PLAN_NBYTES if bound is None else plan_nbytes(bound)
        self._on_plan = on_plan
        self._take_payload: TakePayload | None = None
        self._stall_timeout_s = stall_timeout_s
        self._bound = bound or TransferBound(
            patch_count=UNPLANNED_COUNT, chunk_count=_NO_LIMIT, payload_nbytes=_NO_LIMIT
        )
        self._on_pressure = on_pressure
        self._is_pressed = False
        self._staged: dict[_Key, _Staged] = {}
        self._begun: set[_Key] = set()
        self._ready: deque[SentChunk] = deque()
        self._ready_nbytes = self._claimed_nbytes = 0
        self._max_nbytes = min(UNPLANNED_NBYTES, self._bound.payload_nbytes)
        self._max_count = min(UNPLANNED_COUNT, self._bound.chunk_count)
        self._activity = 0
        self._is_waiting = False
        self._failure: AstraflowError | None = None
        self._news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        plan = self._plan
        return plan is not None and len(self._begun) == plan.chunk_count and not self._staged

    def take_plan(self, plan: TransferPlan) -> None:
        if self._plan is not None:
            raise bad_frame("a transfer has one plan, not two")
        infos, bound = [index.patch for index in plan.patches], self._bound
        if plan.payload_nbytes > sum(info.payload_nbytes for info in infos) or (
            plan.chunk_count > sum(info.chunk_count for info in infos)
        ):
            raise bad_frame("a plan has more than its patches have")
        if plan.payload_nbytes > bound.payload_nbytes or plan.chunk_count > bound.chunk_count:
            raise AstraflowError(
                Reason.PATCH_UNKNOWN, "the plan has more than what the run registered"
            )
        self._plan = plan
        self._max_nbytes, self._max_count = plan.payload_nbytes, plan.chunk_count
        for key in self._begun:
            self._check_place(*key)
        self._check_bounds()
        self._press()
        self._note()
        self._take_payload = self._on_plan(plan)

    def place(self, frame: Frame) -> memoryview:
        match frame.kind:
            case FrameKind.CHUNK if self._take_payload is None:
                key = _key(frame)
                staged = self._staged.get(key)
                if staged is None:
                    staged = self._staged[key] = _Staged(self._claim(frame))
                elif staged.header != frame.header:
                    raise bad_frame("two frames of a chunk differ in its header")
                return staged.claim(frame.body_offset, frame.body_nbytes)
            case FrameKind.CHUNK | FrameKind.WAITING:
                if frame.body_nbytes:
                    raise bad_frame("there is nothing behind its header")
                return memoryview(b"")
            case FrameKind.PLAN:
                nbytes, end = frame.payload_nbytes, frame.body_offset + frame.body_nbytes
                if not self._plan_body and 0 < nbytes <= self._max_plan_nbytes:
                    self._plan_body, self._plan_missing = memoryview(bytearray(nbytes)), nbytes
                if end > len(self._plan_body) or not 0 < frame.body_nbytes <= self._plan_missing:
                    raise bad_frame("a plan has other sizes than it said")
                return self._plan_body[frame.body_offset : end]
            case FrameKind.FAILURE if frame.body_nbytes <= _MAX_FAILURE_NBYTES:
                return memoryview(bytearray(frame.body_nbytes))
            case _:
                raise bad_frame(f"a {frame.kind.name} is not for a puller")

    def filled(self, frame: Frame, body: memoryview) -> None:
        """Take a frame whose body has arrived in its place."""
        match frame.kind:
            case FrameKind.CHUNK if self._take_payload is not None:
                payload = self._take_payload(frame.body_offset, frame.payload_nbytes)
                self._hand_out(frame, self._claim(frame), payload)
            case FrameKind.CHUNK:
                # Who brought the bytes can write to them no more.
                body.release()
                key = _key(frame)
                staged = self._staged.get(key)
                # Late parts of a failed transfer mean nothing.
                if staged is not None:
                    staged.missing -= frame.body_nbytes
                    if staged.missing == 0:
                        del self._staged[key]
                        self._hand_out(frame, staged.header, staged.frozen())
            case FrameKind.PLAN:
                self._plan_missing -= frame.body_nbytes
                if not self._plan_missing:
                    self.take_plan(read_plan(bytes(self._plan_body)))
            case FrameKind.WAITING:
                self._is_waiting = True
                self._note()
            case _:
                self.fail(read_failure(bytes(body)))

    def touch(self) -> None:
        if self.since_s is None:
            self.since_s = time.monotonic()
        self._activity += 1

    def fail(self, error: AstraflowError) -> None:
        """End the transfer; the first reason is kept."""
        self._failure = self._failure or error
        self._staged.clear()
        self._note()

    async def items(self) -> AsyncGenerator[SentItem]:
        """Yield the plan, then all its chunks; Waiting where the source says so.

        Raises:
            AstraflowError: SOURCE_TIMEOUT; what `fail` was called with.
        """
        plan, left = None, 1
        try:
            while left:
                if plan is None and self._plan is not None:
                    plan, left = self._plan, self._plan.chunk_count
                    yield plan
                elif plan is not None and self._ready:
                    left -= 1
                    sent = self._ready.popleft()
                    self._ready_nbytes -= len(sent.chunk.payload)
                    if self._is_pressed and self._ready_nbytes <= _HIGH_NBYTES // 2:
                        self._is_pressed = False
                        self._on_pressure(False)
                    yield sent
                elif self._is_waiting:
                    self._is_waiting = False
                    yield Waiting()
                else:
                    await self._wait()
        finally:
            # Whoever keeps the error that it ended with keeps nothing of what came.
            self._ready.clear()
            self._take_payload = None

    async def _wait(self) -> None:
        """Return after news; a source that sends bytes gets more time."""
        if self._failure is not None:
            raise self._failure
        self._news.clear()
        while True:
            before = self._activity
            try:
                async with asyncio.timeout(self._stall_timeout_s):
                    await self._news.wait()
            except TimeoutError:
                if self._activity == before:
                    why = f"the source has sent nothing for {self._stall_timeout_s:g} s"
                    raise source_late(why) from None
            else:
                return

    def _claim(self, frame: Frame) -> ChunkHeader:
        """Count a new chunk against the bounds before memory is given to it."""
        if frame.header is None:
            raise bad_frame("a chunk without a header")
        key = _key(frame)
        if key in self._begun:
            raise bad_frame(f"chunk {key[1]} came twice")
        self._check_place(*key)
        self._begun.add(key)
        self._claimed_nbytes += frame.payload_nbytes
        self._check_bounds()
        return frame.header

    def _check_place(self, patch_index: int, index: int) -> None:
        patches = self._plan.patches if self._plan else None
        if patches is None:
            return
        if patch_index >= len(patches) or index >= patches[patch_index].patch.chunk_count:
            raise bad_frame(f"the plan has no chunk {index} of patch {patch_index}")

    def _check_bounds(self) -> None:
        if self._claimed_nbytes > self._max_nbytes or len(self._begun) > self._max_count:
            raise bad_frame("there are more chunks or bytes than the plan says")

    def _hand_out(self, frame: Frame, header: ChunkHeader, payload: memoryview) -> None:
        chunk = Chunk(header=header, payload=payload)
        self._ready.append(SentChunk(patch_index=frame.patch_index, chunk=chunk))
        self._ready_nbytes += len(payload)
        self._press()
        self._note()

    def _press(self) -> None:
        """Hold the source up, but not before its plan: until then the reader can take nothing."""
        is_behind = self._plan is not None and self._ready_nbytes > _HIGH_NBYTES
        if is_behind and not self._is_pressed:
            self._is_pressed = True
            self._on_pressure(True)

    def _note(self) -> None:
        self._activity += 1
        self._news.set()


def _key(frame: Frame) -> _Key:
    return frame.patch_index, -1 if frame.header is None else frame.header.index
