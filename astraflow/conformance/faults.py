"""Faults that a tap can be told to make, each of them once unless it says otherwise."""

from collections.abc import Callable, Sequence
from typing import Any

from astraflow.conformance.tap import Call
from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.auth import SESSION_KEY


class PassThrough:
    """Lets everything pass."""

    def begin(self, call: Call) -> None:
        """Leave it."""

    def request(self, call: Call, message: Any) -> Sequence[Any]:
        del call
        return [message]

    def response(self, call: Call, message: Any) -> Sequence[Any]:
        del call
        return [message]


class CutResponse(PassThrough):
    """Ends a call in place of its response: what was asked for is done, the answer lost.

    Attributes:
        lost: What did not arrive; None before.
        call: Whose answer it was.
    """

    def __init__(self, name: str, wants: Callable[[Any], object] = bool) -> None:
        """Wait for a response.

        Args:
            name: Of the method.
            wants: Which response it is, by whether this is true of it.
        """
        self.lost: Any = None
        self.call: Call | None = None
        self._name = name
        self._wants = wants

    def response(self, call: Call, message: Any) -> Sequence[Any]:
        """Lose the first one that is wanted."""
        if self.lost is not None or call.name != self._name or not self._wants(message):
            return [message]
        self.lost, self.call = message, call
        raise AstraflowError(Reason.NOT_READY, "the connection was cut", retryable=True)


class ChangeResponse(PassThrough):
    """Puts other responses in the place of one.

    Attributes:
        changed: What it was before; None while it did not come.
        call: Whose response it was.
    """

    def __init__(self, name: str, change: Callable[[Any], Sequence[Any] | None]) -> None:
        """Wait for a response.

        Args:
            name: Of the method.
            change: Returns what goes on, None where the message is not the one.
        """
        self.changed: Any = None
        self.call: Call | None = None
        self._name = name
        self._change = change

    def response(self, call: Call, message: Any) -> Sequence[Any]:
        """Change the first one that is wanted."""
        if self.changed is not None or call.name != self._name:
            return [message]
        others = self._change(message)
        if others is None:
            return [message]
        self.changed, self.call = message, call
        return others


class EveryResponse(PassThrough):
    """Changes all responses of a call in place."""

    def __init__(self, name: str, change: Callable[[Any], object]) -> None:
        self._name = name
        self._change = change

    def response(self, call: Call, message: Any) -> Sequence[Any]:
        if call.name == self._name:
            self._change(message)
        return [message]


class Refuse(PassThrough):
    """Answers a call with an error, every time."""

    def __init__(self, name: str, error: AstraflowError) -> None:
        self._name = name
        self._error = error

    def request(self, call: Call, message: Any) -> Sequence[Any]:
        if call.name == self._name:
            raise self._error
        return [message]


class EndSession(PassThrough):
    """Has every call of a session answer SESSION_ENDED until its member joined again.

    Attributes:
        rejoined: The call by which it does; None before.
    """

    def __init__(self, token: bytes, *, join: str) -> None:
        """End a session.

        Args:
            token: Of the session.
            join: Name of the call that opens one.
        """
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
