"""Faults that a tap can be told to make, each of them once unless it says otherwise."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from astraflow.conformance.tap import Call, Fault
from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.auth import SESSION_KEY


def cut(_: Any) -> NoReturn:
    """End a call in place of its response: what was asked for is done, the answer lost."""
    raise AstraflowError(Reason.NOT_READY, "the connection was cut", retryable=True)


class FirstResponse(Fault):
    """Puts others in the place of the first response that is wanted, or cuts the call there.

    Attributes:
        message: The response as it came; None: it has not come.
        call: Whose it is.
    """

    def __init__(
        self,
        name: str,
        wants: Callable[[Any], object] = bool,
        *,
        change: Callable[[Any], Sequence[Any]] = cut,
    ) -> None:
        self.message: Any = None
        self.call: Call | None = None
        self._name = name
        self._wants = wants
        self._change = change

    def response(self, call: Call, message: Any) -> Sequence[Any]:
        if self.message is not None or call.name != self._name or not self._wants(message):
            return [message]
        self.message, self.call = message, call
        return self._change(message)


class EveryResponse(Fault):
    """Changes all responses of a call in place, or raises what the call ends with."""

    def __init__(self, name: str, change: Callable[[Any], object]) -> None:
        self._name = name
        self._change = change

    def response(self, call: Call, message: Any) -> Sequence[Any]:
        if call.name == self._name:
            self._change(message)
        return [message]


class EndSession(Fault):
    """Has every call of a session answer SESSION_ENDED until its member joined again."""

    def __init__(self, token: bytes, *, join: str) -> None:
        self.rejoined: Call | None = None
        self._is_joined = False
        self._token = token
        self._join = join

    def request(self, call: Call, message: Any) -> Sequence[Any]:
        """Refuse what carries the token."""
        self._refuse(call)
        if call.name == self._join:
            self.rejoined = call
        return [message]

    def response(self, call: Call, message: Any) -> Sequence[Any]:
        self._refuse(call)
        self._is_joined = self._is_joined or call is self.rejoined
        return [message]

    def _refuse(self, call: Call) -> None:
        if not self._is_joined and call.metadata.get(SESSION_KEY) == self._token:
            raise AstraflowError(Reason.SESSION_ENDED, "the session has ended; join again")
