"""What the event loop asks of the engine's thread."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from astraflow.core.errors import AstraflowError
from astraflow.core.tensors import SwapReport
from astraflow.engines.embedded.requests import Request
from astraflow.engines.embedded.staging import Staged


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Generate for requests that came together."""

    requests: Sequence[Request]


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """Nobody waits for a request any more."""

    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Make weights live; the answer is None when they have to be staged again."""

    staged: Staged
    reply: asyncio.Future[SwapReport | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Keep a version of a policy."""

    version: int
    adapter: int
    reply: asyncio.Future[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpin:
    """Take one pin of a version back."""

    version: int
    adapter: int
    reply: asyncio.Future[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """End the thread, and all requests with an error."""

    error: AstraflowError


Message = Submit | Withdraw | Commit | Pin | Unpin | Halt
