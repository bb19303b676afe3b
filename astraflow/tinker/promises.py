"""Promises: requests that are answered at once by an id, and later by their results."""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, Coroutine, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

import structlog
from starlette.responses import Response

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.http import json_answer

# A client that lost an answer asks again within seconds; one that was suspended, within the hour.
_TOLD_S, _UNTOLD_S = 60.0, 3600.0
_MAX_NBYTES: Final = 1 << 30
_LOOK_S: Final = 5.0
# Clients send a request again for 300 s.
_GAP_S: Final = 360.0

# What the one who asked can mend.
_OF_USERS: Final = frozenset(
    {
        Reason.INVALID_FIELD,
        Reason.CAPABILITY_MISSING,
        Reason.CONTEXT_TOO_LONG,
        Reason.CHECKPOINT_UNKNOWN,
        Reason.MODEL_MISMATCH,
        Reason.NAME_TAKEN,
        Reason.POLICY_UNKNOWN,
    }
)

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


def protobuf_answer(message: bytes) -> Response:
    return Response(message, media_type="application/x-protobuf")


@dataclass(slots=True, kw_only=True, eq=False)
class Promise:
    """One request.

    Attributes:
        key: That its client gave it; the same again is the same request.
        task: Works on it, and returns its answer.
        drop_at: Seconds of the event loop; when it is forgotten. Not before it is answered.
    """

    request_id: str
    key: Hashable
    digest: bytes
    task: "asyncio.Task[Response]" = field(init=False)
    drop_at: float = inf


class Promises:
    """Requests by their ids, until some time after their results were told."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._promises: dict[str, Promise] = {}
        self._by_key: dict[Hashable, Promise] = {}
        self._nbytes = 0
        self._look_at = 0.0
        self._is_closed = False

    def close(self) -> None:
        """Stop what is being worked on, and take nothing new."""
        self._is_closed = True
        for promise in self._promises.values():
            promise.task.cancel()

    def find(self, key: Hashable, digest: bytes) -> Promise | None:
        """Return the request that came before by the same key; None: it is new."""
        found = self._by_key.get(key)
        if found is not None and found.digest != digest:
            raise AstraflowError(
                Reason.REQUEST_CONFLICT, f"request {key} came before with another body"
            )
        return found

    def make(self, key: Hashable, digest: bytes, work: Coroutine[Any, Any, Response]) -> Promise:
        """Begin to work on a new request; what the work raises is told to the client.

        Raises:
            AstraflowError: NOT_READY once the server ends.
        """
        if self._is_closed:
            work.close()
            raise _ending()
        self._forget()
        promise = Promise(request_id=secrets.token_hex(16), key=key, digest=digest)
        self._promises[promise.request_id] = self._by_key[key] = promise
        promise.task = self._tasks.create_task(self._answer(promise, work))
        return promise

    async def answer(self, request_id: str, *, hold_s: float) -> Response | None:
        """Wait for a result, for so many seconds at most; None: not yet.

        Raises:
            AstraflowError: TASK_EXPIRED for a request that is not known, or no more; NOT_READY once
                the server ends, for a result that is not there.
        """
        promise = self._promises.get(request_id)
        if promise is None:
            raise AstraflowError(
                Reason.TASK_EXPIRED,
                f"request {request_id[:64]} is not known here: it was answered long ago, or the "
                "server was started anew",
            )
        if not (await asyncio.wait([promise.task], timeout=hold_s))[0]:
            return None
        if promise.task.cancelled():
            raise _ending()
        promise.drop_at = min(promise.drop_at, loop_time() + _TOLD_S)
        return promise.task.result()

    async def _answer(self, promise: Promise, work: Coroutine[Any, Any, Response]) -> Response:
        """Work on a request; whatever becomes of it is its answer."""
        try:
            answer = await work
        except Exception as error:
            failure = error
            if not isinstance(failure, AstraflowError):
                log.exception("a request failed", key=str(promise.key))
                failure = AstraflowError(Reason.INTERNAL, f"the server failed: {error!r}"[:500])
            category = "user" if failure.reason in _OF_USERS else "server"
            told = f"{failure.message} [{failure.reason}]"
            answer = json_answer({"error": told, "category": category})
        promise.drop_at = loop_time() + _UNTOLD_S
        self._nbytes += len(answer.body)
        return answer

    def _forget(self) -> None:
        """Let go of what nobody will ask for, oldest first, and of more if memory ends."""
        now = loop_time()
        if now < self._look_at and self._nbytes <= _MAX_NBYTES:
            return
        self._look_at = now + _LOOK_S
        for promise in list(self._promises.values()):
            is_answered = promise.drop_at < inf
            if is_answered and (promise.drop_at <= now or self._nbytes > _MAX_NBYTES):
                self._nbytes -= len(promise.task.result().body)
                del self._promises[promise.request_id], self._by_key[promise.key]


def _ending() -> AstraflowError:
    return AstraflowError(Reason.NOT_READY, "the server ends", retryable=True)


class InOrder:
    """Lets the requests of one model run by their numbers, whatever order they come in."""

    def __init__(self, *, gap_s: float = _GAP_S) -> None:
        """Wait for number 1; a number that does not come is waited for `gap_s`."""
        self._gap_s = gap_s
        self._next = 1
        self._lost_before = 0
        self._waiting: dict[int, asyncio.Event] = {}
        self._is_running = False
        self._moved_at = loop_time()

    def is_over(self, number: int) -> bool:
        """Whether a request of this number ran, or can run no more."""
        return number < self._next

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncGenerator[None]:
        """Wait for a request's turn, which lasts as long as the block.

        Raises:
            AstraflowError: SOURCE_TIMEOUT when a request before it never came: what it was to do
                is not known, so nothing that waits for it is done.
        """
        await self._wait(number)
        self._is_running = True
        try:
            if number < self._lost_before:
                raise AstraflowError(
                    Reason.SOURCE_TIMEOUT,
                    f"a request before number {number} did not come in {self._gap_s:g} s, so this "
                    "one was not done; load the last checkpoint and go on from it",
                )
            yield
        finally:
            self._is_running = False
            self._move_to(number + 1)

    async def _wait(self, number: int) -> None:
        event = self._waiting[number] = asyncio.Event()
        try:
            while self._next != number:
                try:
                    async with asyncio.timeout(self._gap_s):
                        await event.wait()
                except TimeoutError:
                    self._check_gap()
        finally:
            del self._waiting[number]

    def _check_gap(self) -> None:
        """Give up on numbers that did not come while nothing else happened."""
        if self._is_running or loop_time() < self._moved_at + self._gap_s:
            return
        self._lost_before = max(self._waiting) + 1
        self._move_to(min(self._waiting))

    def _move_to(self, number: int) -> None:
        self._next = number
        self._moved_at = loop_time()
        if number in self._waiting:
            self._waiting[number].set()


def digest_of(body: bytes) -> bytes:
    """Return what tells two bodies apart, 16 bytes."""
    return hashlib.blake2b(body, digest_size=16).digest()


def loop_time() -> float:
    return asyncio.get_running_loop().time()
