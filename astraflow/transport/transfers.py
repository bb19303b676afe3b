"""Transfers: what sources have promised to send over lanes, until it was sent or has expired."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import count
from secrets import token_bytes
from typing import Final, Protocol

from astraflow.core.clock import Clock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.wire.transfers import LaneEndpoint, SentItem, TransferPlan, TransferSpec

TRANSFER_TTL: Final = timedelta(minutes=5)
_TOKEN_NBYTES: Final = 32


class Transfer(Protocol):
    """What one puller asked for; some of it may still be on its way here, or not be made yet.

    What it needs is kept until `close`.
    """

    @property
    def plan(self) -> TransferPlan:
        """What is sent; without patches that is not known yet, and its payload is a guess."""
        ...

    def items(self) -> AsyncGenerator[SentItem]:
        """Yield the plan and its chunks, each when it is there; chunks may come before the plan.

        Waiting says that there is nothing yet.
        """
        ...

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    transfer: Transfer
    token: bytes
    timer: asyncio.TimerHandle


class Transfers:
    """What one server promises to its lanes, by id and by token; for one event loop.

    Attributes:
        open: Opens a transfer for a puller whose connections stand.
        secrets: Of the run.
    """

    def __init__(
        self,
        open_transfer: Callable[[TransferSpec], Transfer],
        secrets: Callable[[], Sequence[bytes]],
        *,
        clock: Clock,
        ttl: timedelta = TRANSFER_TTL,
    ) -> None:
        self.open = open_transfer
        self.secrets = secrets
        self._clock = clock
        self._ttl = ttl
        self._waiting: dict[str, _Waiting] = {}
        self._numbers = count(1)

    def add(self, transfer: Transfer, endpoints: Sequence[LaneEndpoint]) -> TransferPlan:
        """Keep a transfer until a lane claims it; return its plan with token and endpoints."""
        transfer_id = f"lane-{next(self._numbers)}"
        token = token_bytes(_TOKEN_NBYTES)
        self._waiting[transfer_id] = _Waiting(
            transfer=transfer, token=token, timer=self._timer(transfer_id)
        )
        return replace(
            transfer.plan,
            transfer_id=transfer_id,
            endpoints=tuple(endpoints),
            token=token,
            expire_time=self._clock.now() + self._ttl,
        )

    def claim(self, is_proven: Callable[[bytes], bool]) -> tuple[bytes, Transfer | None]:
        """Return the secret that a puller has proven; with that of a transfer the lane owns it.

        Raises:
            AstraflowError: TOKEN_INVALID when it is neither the run's nor that of one that waits.
        """
        # No early exit: how long it takes tells nothing of the tokens.
        proven = [secret for secret in self.secrets() if is_proven(secret)]
        if proven:
            return proven[0], None
        found = [name for name, each in self._waiting.items() if is_proven(each.token)]
        if not found:
            raise AstraflowError(
                Reason.TOKEN_INVALID, "no transfer that waits here has this token; plan one"
            )
        return self._waiting[found[0]].token, self._take(found[0])

    def renew(self, transfer_id: str) -> datetime:
        """Move the expiry of an unclaimed transfer on.

        Raises:
            AstraflowError: TRANSFER_EXPIRED when there is none.
        """
        waiting = self._waiting.get(transfer_id)
        if waiting is None:
            raise AstraflowError(
                Reason.TRANSFER_EXPIRED, f"{transfer_id} is no longer kept here; plan another"
            )
        waiting.timer.cancel()
        waiting.timer = self._timer(transfer_id)
        return self._clock.now() + self._ttl

    def release(self, transfer_id: str) -> None:
        if transfer_id in self._waiting:
            self._take(transfer_id).close()

    def close(self) -> None:
        for transfer_id in list(self._waiting):
            self.release(transfer_id)

    def _take(self, transfer_id: str) -> Transfer:
        waiting = self._waiting.pop(transfer_id)
        waiting.timer.cancel()
        return waiting.transfer

    def _timer(self, transfer_id: str) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_later(self._ttl.total_seconds(), self.release, transfer_id)
