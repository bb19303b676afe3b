"""What a session asks of the member that it belongs to."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from astraflow.core.ids import BatchId, TaskId
from astraflow.core.members import Directive, RaasLoad, Session, SessionResume, TrainerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the process still works on; named when the session is opened again."""

    task_ids: tuple[TaskId, ...] = ()
    batch_ids: tuple[BatchId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberHooks:
    """What a session asks of the member that it belongs to.

    Attributes:
        join: Opens a session; None: a fresh one.
        load: How busy the member is.
        held: What it works on.
        opened: Called when a session was opened again; it drops what is no longer its own.
        directed: Called when the run asks for something else than before.
        entrusted: Called with the transfer token whenever it is another one.
    """

    join: Callable[[SessionResume | None], Awaitable[Session]]
    load: Callable[[], RaasLoad | TrainerLoad]
    held: Callable[[], Held]
    opened: Callable[[Session], None]
    directed: Callable[[Directive], None]
    entrusted: Callable[[bytes], None] = lambda _: None
